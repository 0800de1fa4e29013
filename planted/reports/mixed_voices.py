# /// cell
# cohort = "third"
# because = "The permutation-invariant loss computes SI-SDR on the whole waveforms for each of the N! orders of the speakers; compute the N x N pairwise matrix once and let linear_sum_assignment choose the order."
# thread = "https://github.com/asteroid-team/asteroid/issues/640"
# line = "losses = torch.stack([-si_sdr(estimates[:, list(p)], sources).mean(1) for p in permutations(range(n))])"
# callee = "si_sdr"
# faster = 1.71
# ///
from itertools import permutations

import torch
import torch.nn as nn
from scipy.optimize import linear_sum_assignment

torch.manual_seed(0)
SPEAKERS, LENGTH = 4, 4000
time = torch.arange(LENGTH) / 8000


def voices(size):
    pitch = 90 * 1.5 ** torch.arange(SPEAKERS) * (1 + 0.1 * torch.rand(size, SPEAKERS))
    phase = 2 * torch.pi * torch.rand(size, SPEAKERS, 1)
    wave = sum(torch.sin(k * (2 * torch.pi * pitch[..., None] * time + phase)) / k for k in (1, 2, 3))
    loud = (torch.sin(2 * torch.pi * 3 * time + 6 * torch.rand(size, SPEAKERS, 1)) > -0.3).float()
    order = torch.rand(size, SPEAKERS).argsort(1)
    return (wave * loud + 0.01 * torch.randn(size, SPEAKERS, LENGTH))[torch.arange(size)[:, None], order]


sources_all = voices(160)


class Separator(nn.Module):
    def __init__(self, d=64):
        super().__init__()
        self.encoder = nn.Conv1d(1, d, 20, 10)
        self.body = nn.Sequential(*[nn.Sequential(
            nn.Conv1d(d, d, 3, padding=2 ** i, dilation=2 ** i), nn.PReLU(), nn.GroupNorm(1, d)) for i in range(5)])
        self.mask = nn.Conv1d(d, SPEAKERS * d, 1)
        self.decoder = nn.ConvTranspose1d(d, 1, 20, 10)

    def forward(self, x):
        e = self.encoder(x).relu()
        m = self.mask(self.body(e)).sigmoid().view(len(x), SPEAKERS, *e.shape[1:])
        return self.decoder((m * e[:, None]).flatten(0, 1)).view(len(x), SPEAKERS, -1)


def si_sdr(estimate, source):
    estimate = estimate - estimate.mean(-1, keepdim=True)
    source = source - source.mean(-1, keepdim=True)
    scale = (estimate * source).sum(-1, keepdim=True) / source.square().sum(-1, keepdim=True)
    target = scale * source
    noise = estimate - target
    return 10 * torch.log10(target.square().sum(-1) / (noise.square().sum(-1) + 1e-8) + 1e-8)


def permutation_invariant(estimates, sources):
    n = sources.shape[1]
    losses = torch.stack([-si_sdr(estimates[:, list(p)], sources).mean(1) for p in permutations(range(n))])
    return losses.min(0).values.mean()


model = Separator()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

# %% the training cell
for step in range(60):
    sources = sources_all[torch.randint(len(sources_all), (8,))]
    loss = permutation_invariant(model(sources.sum(1, keepdim=True)), sources)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 20 == 0:
        print(f"step {step} loss {loss.item():.3f} dB")
print("last", loss.item())
