"""Cells in which the truth about a DataLoader's knob is certain: workers, batch size, dataset cache."""

from __future__ import annotations

from benchmarks.planted_knobs.planted import IMPORTS, Planted

SMALL = """
model = nn.Linear(16, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
"""

SMALL_IMAGES = """
loader = DataLoader(
    TensorDataset(torch.randn(512, 3, 32, 32), torch.randn(512, 1)), batch_size=8, shuffle=True{workers}
)
model = nn.Sequential(
    nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(),
    nn.Conv2d(32, 32, 3, padding=1), nn.ReLU(),
    nn.Conv2d(32, 32, 3, padding=1), nn.ReLU(),
    nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 1),
)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
"""

STORED = """
from benchmarks.planted_knobs.datasets import Stored
loader = DataLoader(Stored(8192, wait_s=0.002), batch_size={batch_size}, shuffle=True)
"""

CONTRASTIVE = """
encoder = nn.Linear(32, 32)
optimizer = torch.optim.SGD(encoder.parameters(), lr=1e-3)
loader = DataLoader(TensorDataset(torch.randn(16384, 32)), batch_size=256, shuffle=True, drop_last=True)
"""

CONTRASTIVE_LOOP = """
for epoch in range(1000):
    for x, in loader:
        one = F.normalize(encoder(x + 0.1 * torch.randn_like(x)), dim=1)
        two = F.normalize(encoder(x + 0.1 * torch.randn_like(x)), dim=1)
        loss = F.cross_entropy(one @ two.T / 0.1, torch.arange(len(x)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""

OWN_COLLATE = """
def together(items):
    return torch.stack([x for x, _ in items]), torch.stack([y for _, y in items])

loader = DataLoader(TensorDataset(torch.randn(8192, 16), torch.randn(8192, 1)), batch_size=64, collate_fn=together)
"""

CELLS = (
    Planted(
        "workers", 2, "faster",
        "each item waits 2 ms for storage, and two processes wait at the same time",
        IMPORTS + STORED.format(batch_size=8) + SMALL,
    ),
    Planted(
        "workers", 2, "slower",
        "an epoch of four steps of less than a millisecond, and each epoch starts two processes",
        IMPORTS
        + "loader = DataLoader(TensorDataset(torch.randn(64, 16), torch.randn(64, 1)), batch_size=16, shuffle=True)"
        + SMALL,
        steps=20,
    ),
    Planted(
        "workers", 2, "no measurable difference",
        "one process already loads its eight small images long before the convolutions need them",
        IMPORTS + SMALL_IMAGES.format(workers=", num_workers=1"),
    ),
    Planted(
        "batch_size", 64, "faster",
        "a step for 4 samples costs nearly as much as one for 64: most of it is calling PyTorch",
        IMPORTS
        + "loader = DataLoader(TensorDataset(torch.randn(9999, 16), torch.randn(9999, 1)), batch_size=4, shuffle=True)"
        + SMALL,
        steps=50,
    ),
    Planted(
        "batch_size", 2048, "slower",
        "a contrastive loss compares each sample with all others: its work per sample grows with the batch",
        IMPORTS + CONTRASTIVE, CONTRASTIVE_LOOP,
        steps=5, pairs=8,
    ),
    Planted(
        "batch_size", 32, "no measurable difference",
        "each item waits 2 ms for storage, one after the other, however many make a batch",
        IMPORTS + STORED.format(batch_size=16) + SMALL,
        steps=8,
    ),
    Planted(
        "cache", True, "faster",
        "decompressing an item takes longer than everything else",
        IMPORTS
        + "from benchmarks.planted_knobs.datasets import Compressed\n"
        + "loader = DataLoader(Compressed(256), batch_size=16, shuffle=True)"
        + SMALL,
    ),
    Planted(
        "cache", True, "slower",
        "the items are in memory already; with a collate_fn of the cell's own the cache must copy each of them",
        IMPORTS + OWN_COLLATE + SMALL,
        steps=50,
    ),
    Planted(
        "cache", True, "no measurable difference",
        "convolutions take the whole step; eight small images are in memory already",
        IMPORTS + SMALL_IMAGES.format(workers=""),
    ),
)  # fmt: skip
