# /// cell
# causes = ["logging_or_eval"]
# because = "1500 sections are embedded, and their neighbours and silhouette found, after every third step"
# batch = 192
# warmup = 6
# cohort = "2026-11-22c"
#
# [[cure]]
# old = "every=3)"
# new = "every=1000)"
# ///
"""Pottery sherds by their fabric, learnt from two looks at each thin section; hooks keep an eye on the embedding."""

from collections import defaultdict

import torch
import torch.nn.functional as F
from sklearn.metrics import silhouette_score
from sklearn.neighbors import KNeighborsClassifier
from torch import nn

torch.manual_seed(529)
FABRICS, GRAINS = 12, 160


def thin_sections(count):
    """Counts of grains by size and colour."""
    typical = torch.distributions.Dirichlet(torch.full((GRAINS,), 0.3)).sample((FABRICS,))
    fabric = torch.randint(0, FABRICS, (count,))
    return torch.poisson(300 * typical[fabric]), fabric


def looked_at(grains, share=0.6):
    """Another part of the section under the microscope."""
    return torch.log1p(grains * (torch.rand_like(grains) < share))


class Projector(nn.Module):
    def __init__(self, width=512, dim=64):
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(GRAINS, width), nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, width), nn.GELU()
        )
        self.head = nn.Linear(width, dim)

    def forward(self, x):
        return F.normalize(self.head(self.body(x)), dim=-1)


def info_nce(one, other, temperature=0.2):
    scores = one @ other.T / temperature
    same = torch.arange(len(one))
    return (F.cross_entropy(scores, same) + F.cross_entropy(scores.T, same)) / 2


class Loop:
    """A small training loop: whoever wants to look in says so with `on`."""

    def __init__(self, net, optimizer):
        self.net, self.optimizer = net, optimizer
        self.step, self.record, self.hooks = 0, defaultdict(list), []

    def on(self, every):
        def register(function):
            self.hooks.append((every, function))
            return function

        return register

    def run(self, grains, steps, batch):
        for self.step in range(1, steps + 1):
            rows = torch.randint(0, len(grains), (batch,))
            loss = info_nce(self.net(looked_at(grains[rows])), self.net(looked_at(grains[rows])))
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.record["loss"].append(loss.detach())
            for every, function in self.hooks:
                if self.step % every == 0:
                    function(self)
        return self.record


bank, bank_fabric = thin_sections(6000)
known, known_fabric = bank[:1500], bank_fabric[:1500].numpy()

# %% the training cell
net = Projector()
loop = Loop(net, torch.optim.AdamW(net.parameters(), lr=5e-4, fused=True))


@loop.on(every=3)
@torch.no_grad()
def neighbours(loop):
    z = loop.net(torch.log1p(known)).numpy()
    probe = KNeighborsClassifier(20, metric="cosine").fit(z[:1000], known_fabric[:1000])
    loop.record["knn"].append(probe.score(z[1000:], known_fabric[1000:]))
    loop.record["silhouette"].append(silhouette_score(z[:600], known_fabric[:600]))


@loop.on(every=50)
def line(loop):
    print(loop.step, *(f"{name} {float(values[-1]):.3f}" for name, values in loop.record.items()))


loop.run(bank, steps=220, batch=192)
