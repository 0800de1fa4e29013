"""Cells in which the truth about an optimizer's knob is certain: fused kernels, gradient accumulation."""

from __future__ import annotations

from benchmarks.planted_knobs.planted import IMPORTS, Planted

DEEP = """
model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(60)), nn.Linear(16, 1))
loader = DataLoader(TensorDataset(torch.randn(8192, 16), torch.randn(8192, 1)), batch_size=32, shuffle=True)
"""

IMAGES = """
model = nn.Sequential(
    nn.Conv2d(3, 32, 3, padding=1, bias=False), nn.ReLU(),
    nn.Conv2d(32, 32, 3, padding=1, bias=False), nn.ReLU(),
    nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 1),
)
loader = DataLoader(TensorDataset(torch.randn(512, 3, 32, 32), torch.randn(512, 1)), batch_size=32, shuffle=True)
"""

WORDS = """
class Bag(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(50_000, 64)
        self.head = nn.Linear(64, 1)

    def forward(self, x):
        return self.head(self.table(x).mean(1))

model = Bag()
words = torch.randint(50_000, (8192, 16))
loader = DataLoader(TensorDataset(words, torch.randn(8192, 1)), batch_size=32, shuffle=True)
"""

ADAMW = "optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)"
FUSED_ADAMW = "optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)"
SGD = "optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)"

CELLS = (
    Planted(
        "fused_optimizer", True, "faster",
        "122 small tensors, for each of which AdamW calls a dozen operations",
        IMPORTS + DEEP + ADAMW,
    ),
    Planted(
        "fused_optimizer", False, "slower",
        "the same, where the cell as written has fused=True: taking it out brings the calls back",
        IMPORTS + DEEP + FUSED_ADAMW,
    ),
    Planted(
        "fused_optimizer", True, "no measurable difference",
        "convolutions take the step; there are four small tensors to update",
        IMPORTS + IMAGES + ADAMW,
    ),
    Planted(
        "accumulate", 4, "faster",
        "AdamW goes through a table of 3.2 million weights a dozen times, and now every fourth step only",
        IMPORTS + WORDS + ADAMW,
        steps=12,
    ),
    Planted(
        "accumulate", 2, "slower",
        "plain SGD goes through the table once; putting its gradient aside goes through it more often",
        IMPORTS + WORDS + SGD,
        steps=60, pairs=20,
    ),
    Planted(
        "accumulate", 4, "no measurable difference",
        "convolutions take the step; there are four small tensors to update",
        IMPORTS + IMAGES + SGD,
        steps=12,
    ),
)  # fmt: skip
