# /// cell
# causes = ["small_batch"]
# because = "three gestures per step, whose 40 ticks are gone through one by one however many gestures there are"
# batch = 3
# cured_batch = 48
# cohort = "2026-11-22c"
#
# [[cure]]
# old = "per_step=3"
# new = "per_step=48"
#
# [[cure]]
# old = "step * 3 >= shown"
# new = "step * 48 >= 16 * shown"
# ///
"""Gestures in front of an event camera, by neurons that leak, integrate and fire; surrogate gradients."""

import math

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(839)
PIXELS, GESTURES, TICKS = 18 * 18, 8, 40


class Fire(torch.autograd.Function):
    """A step forward; backward as if it were a steep sigmoid."""

    @staticmethod
    def forward(ctx, above):
        ctx.save_for_backward(above)
        return (above > 0).to(above.dtype)

    @staticmethod
    def backward(ctx, grad):
        (above,) = ctx.saved_tensors
        return grad / (1 + 10 * above.abs()) ** 2


class Leaky(nn.Module):
    def __init__(self, inputs, neurons):
        super().__init__()
        self.synapses = nn.Linear(inputs, neurons)
        self.leak = nn.Parameter(torch.full((neurons,), 2.0))

    def forward(self, spikes, potential):
        potential = torch.sigmoid(self.leak) * potential + self.synapses(spikes)
        fired = Fire.apply(potential - 1)
        return fired, potential - fired.detach()


class Retina(nn.Module):
    def __init__(self, neurons=96):
        super().__init__()
        self.neurons = neurons
        self.layers = nn.ModuleList([Leaky(PIXELS, neurons), Leaky(neurons, neurons)])
        self.readout = nn.Linear(neurons, GESTURES)

    def forward(self, events):
        potentials = [events.new_zeros(events.shape[1], self.neurons) for _ in self.layers]
        rate = 0
        for spikes in events:
            for i, layer in enumerate(self.layers):
                spikes, potentials[i] = layer(spikes, potentials[i])
            rate = rate + spikes
        return self.readout(rate / len(events))


def gestures(how_many, generator):
    """A bar moves over the sensor in one of eight directions; its edge gives events, and so does noise."""
    kind = torch.randint(0, GESTURES, (how_many,), generator=generator)
    angle = kind * (2 * math.pi / GESTURES)
    axis = torch.linspace(-1, 1, 18)
    angle = angle[:, None, None]
    across = axis[:, None] * torch.cos(angle) + axis * torch.sin(angle)
    edge = torch.linspace(-1.2, 1.2, TICKS)[:, None, None, None]
    events = ((across - edge).abs() < 0.1) | (torch.rand(TICKS, how_many, 18, 18, generator=generator) < 0.02)
    return events.flatten(2).float(), kind


def stream(events, kind, per_step, generator):
    while True:
        for chosen in torch.randperm(len(kind), generator=generator).split(per_step):
            if len(chosen) == per_step:
                yield events[:, chosen], kind[chosen]


generator = torch.Generator().manual_seed(839)
events, kind = gestures(1200, generator)
retina = Retina()
optimizer = torch.optim.Adamax(retina.parameters(), lr=2e-3)
shown = 600

# %% the training cell
correct = 0
for step, (movie, label) in enumerate(stream(events, kind, per_step=3, generator=generator), start=1):
    scores = retina(movie)
    loss = F.cross_entropy(scores, label)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    correct += (scores.argmax(-1) == label).sum()
    if step * 3 >= shown:
        break
print(f"{int(correct)} of {step * len(label)} gestures")
