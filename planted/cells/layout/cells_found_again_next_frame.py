# /// cell
# causes = ["layout"]
# because = "the scores are copied to have their columns in rows, and back, in each of five rounds"
# batch = 8
# steps = 20
# cohort = "2026-11-22a"
#
# [[cure]]
# old = '''
#     turned = scores.transpose(-2, -1).contiguous()
#     return normalise_rows(turned).transpose(-2, -1).contiguous()
# '''
# new = "    return F.log_softmax(scores, dim=-2)\n"
# ///
"""Cells are found again in a film's next frame: Sinkhorn's rows are normalised, then, turned around, its columns."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(2718)
CELLS_PER_FRAME, MEASURES = 256, 12  # measures: place, area, brightness, texture …


def film(pairs):
    """Two frames each: in the second the cells are in another order, have moved, and look a little different."""
    first = torch.randn(pairs, CELLS_PER_FRAME, MEASURES)
    order = torch.rand(pairs, CELLS_PER_FRAME).argsort(1)
    second = first.gather(1, order.unsqueeze(2).expand_as(first)) + 0.2 * torch.randn_like(first)
    partner = order.argsort(1)  # of each cell of the first frame its number in the second
    return first, second, partner


def normalise_rows(scores):
    return F.log_softmax(scores, dim=-1)


def normalise_columns(scores):
    turned = scores.transpose(-2, -1).contiguous()
    return normalise_rows(turned).transpose(-2, -1).contiguous()


class Matcher(nn.Module):
    def __init__(self, width=24, rounds=5):
        super().__init__()
        self.describe = nn.Sequential(nn.Linear(MEASURES, 48), nn.ReLU(), nn.Linear(48, width))
        self.sharpness = nn.Parameter(torch.tensor(1.0))
        self.rounds = rounds

    def forward(self, before, after):
        a, b = self.describe(before), self.describe(after) * self.sharpness
        scores = torch.bmm(a, b.transpose(1, 2))
        for _ in range(self.rounds):
            scores = normalise_rows(scores)
            scores = normalise_columns(scores)
        return scores


first, second, partner = film(160)
matcher = Matcher()
optimizer = torch.optim.RMSprop(matcher.parameters(), lr=1e-3)
schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.9)
history = []

# %% the training cell
for epoch in range(8):
    total = 0.0
    batches = torch.randperm(len(first)).split(8)
    for pairs in batches:
        log_assignment = matcher(first[pairs], second[pairs])
        loss = F.nll_loss(log_assignment.flatten(0, 1), partner[pairs].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_value_(matcher.parameters(), 0.5)
        optimizer.step()
        total = total + loss.detach()
    schedule.step()
    history.append(float(total) / len(batches))
    print(f"epoch {epoch}: loss {history[-1]:.3f}")
