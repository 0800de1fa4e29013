# /// cell
# causes = ["gc_pause"]
# because = "the garbage collector walks over the museum and all modules when every eighth sample is put away"
# batch = 20
# steps = 32
# warmup = 8
# cohort = "2026-11-22c"
#
# [[cure]]
# old = "            gc.collect()\n"
# new = "            pass\n"
# ///
"""Does a clade radiate or linger? A transformer over trees of species, pruned at random before each look."""

import contextlib
import gc
import random

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(611)
random.seed(611)
TIPS, LONGEST = 24, 32


class Species:
    def __init__(self, name, age, parent=None):
        self.name, self.age, self.parent = name, age, parent
        self.daughters = []


def grown(rate):
    """A pure birth process; the age of a split is in units of the whole tree."""
    root = Species("root", 0.0)
    alive, now = [root], 0.0
    while len(alive) < TIPS:
        now += random.expovariate(rate * len(alive))
        splits = alive.pop(random.randrange(len(alive)))
        for side in "ab":
            daughter = Species(splits.name + side, now, splits)
            splits.daughters.append(daughter)
            alive.append(daughter)
    return root


def pruned(species, keep, parent=None):
    """A copy in which some branches are missing, as in a sample from the field."""
    copy = Species(species.name, species.age, parent)
    for daughter in species.daughters:
        if random.random() < keep:
            copy.daughters.append(pruned(daughter, keep, copy))
    return copy


def walked(species, depth=0):
    yield depth, species.age, len(species.daughters)
    for daughter in species.daughters:
        yield from walked(daughter, depth + 1)


class Field:
    """The museum's trees; one season yields a sample of them, which is cleared away afterwards."""

    def __init__(self, trees, keep=0.93):
        self.trees, self.keep, self.seasons = trees, keep, 0

    @contextlib.contextmanager
    def season(self, size):
        sample = [(pruned(root, self.keep), label) for root, label in random.sample(self.trees, size)]
        yield sample
        sample.clear()
        self.seasons += 1
        if self.seasons % 8 == 0:  # parents and daughters know each other
            gc.collect()


def tensors(sample):
    rows = torch.zeros(len(sample), LONGEST, 3)
    for i, (root, _) in enumerate(sample):
        steps = list(walked(root))[:LONGEST]
        rows[i, : len(steps)] = torch.tensor(steps)
    return rows, torch.tensor([label for _, label in sample])


class Clade(nn.Module):
    def __init__(self, dim=128, heads=4, depth=2):
        super().__init__()
        self.embed = nn.Linear(3, dim)
        layer = nn.TransformerEncoderLayer(dim, heads, 3 * dim, dropout=0.0, batch_first=True, norm_first=True)
        self.encode = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(dim, 3)

    def forward(self, rows):
        return self.head(self.encode(self.embed(rows)).mean(1))


rates = (0.5, 1.0, 2.0)
museum = Field([(grown(rates[i % 3]), i % 3) for i in range(300)])
model = Clade()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)

# %% the training cell
seen = right = 0
for season in range(160):
    with museum.season(20) as sample:
        rows, label = tensors(sample)
        scores = model(rows)
        loss = F.cross_entropy(scores, label)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    seen += len(label)
    right += (scores.argmax(1) == label).sum()
print(f"{float(right) / seen:.3f} after {seen} clades")
