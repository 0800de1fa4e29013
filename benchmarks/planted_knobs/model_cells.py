"""Cells in which the truth about a knob of the model is certain: compile, channels_last, attention."""

from __future__ import annotations

from benchmarks.planted_knobs.planted import IMPORTS, Planted

SGD = """
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
"""

POINTWISE = """
class Waves(nn.Module):
    def __init__(self):
        super().__init__()
        self.frequency = nn.Parameter(torch.rand(64))
        self.shift = nn.Parameter(torch.rand(64))

    def forward(self, x):
        h = x.unsqueeze(-1) * self.frequency + self.shift
        for _ in range(4):
            h = (0.9 * h + 0.1).clamp(-3, 3)
        return h.mean(-1).mean(1, keepdim=True)

model = Waves()
loader = DataLoader(TensorDataset(torch.randn(1024, 256), torch.randn(1024, 1)), batch_size=32)
"""

TINY = """
model = nn.Linear(8, 1)
loader = DataLoader(TensorDataset(torch.randn(16384, 8), torch.randn(16384, 1)), batch_size=4)
"""

PRODUCTS = """
model = nn.Linear(1024, 1024, bias=False)
loader = DataLoader(TensorDataset(torch.randn(4096, 1024), torch.randn(4096, 1024)), batch_size=512)
"""

POOLED = """
model = nn.Sequential(
    nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(5, 1, 2), nn.MaxPool2d(5, 1, 2),
    nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 1),
)
loader = DataLoader(TensorDataset(torch.randn(256, 3, 32, 32), torch.randn(256, 1)), batch_size=8)
"""

FEW_CHANNELS = """
model = nn.Sequential(
    nn.Conv2d(3, 3, 1), nn.AvgPool2d(3, 1, 1), nn.MaxPool2d(3, 1, 1),
    nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 1),
)
loader = DataLoader(TensorDataset(torch.randn(128, 3, 96, 96), torch.randn(128, 1)), batch_size=8)
"""

HARDLY_CONVOLVED = """
model = nn.Sequential(
    nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Flatten(),
    nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(),
    nn.Linear(1024, 1),
)
loader = DataLoader(TensorDataset(torch.randn(2048, 3, 8, 8), torch.randn(2048, 1)), batch_size=128)
"""

ATTENTION = """
class Attend(nn.Module):
    def __init__(self):
        super().__init__()
        self.project = nn.Linear(128, 3 * 128)
        self.head = nn.Linear(128, 1)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (4, 32)).transpose(1, 2) for t in self.project(x).chunk(3, -1))
        h = F.scaled_dot_product_attention(q, k, v)
        return self.head(h.transpose(1, 2).flatten(2)).mean(1)

model = Attend()
loader = DataLoader(TensorDataset(torch.randn(64, 1024, 128), torch.randn(64, 1)), batch_size=1)
"""

FEW_TOKENS = """
class Attend(nn.Module):
    def __init__(self):
        super().__init__()
        self.project = nn.Linear(128, 3 * 128)
        self.head = nn.Sequential(
            nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(),
            nn.Linear(1024, 1),
        )

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (4, 32)).transpose(1, 2) for t in self.project(x).chunk(3, -1))
        h = F.scaled_dot_product_attention(q, k, v)
        return self.head(h.transpose(1, 2).flatten(1))

model = Attend()
loader = DataLoader(TensorDataset(torch.randn(1024, 8, 128), torch.randn(1024, 1)), batch_size=128)
"""

NO_FLASH = """
torch.backends.cuda.enable_flash_sdp(False)  # left from looking for a difference
"""

CELLS = (
    Planted(
        "compile", "default", "faster",
        "fourteen cheap operations on half a million numbers: compiled they go through memory once",
        IMPORTS + POINTWISE + SGD,
    ),
    Planted(
        "compile", "default", "slower",
        "one product of 8 by 4 numbers: checking whether the compiled code still fits takes longer",
        IMPORTS + TINY + SGD,
    ),
    Planted(
        "compile", "default", "no measurable difference",
        "a large matrix product and its gradient, by the same library with and without the compiler",
        IMPORTS + PRODUCTS + SGD,
    ),
    Planted(
        "channels_last", True, "faster",
        "pooling over 32 channels: only with the channels side by side can vector instructions be used",
        IMPORTS + POOLED + SGD,
    ),
    Planted(
        "channels_last", True, "slower",
        "pooling over 3 channels: side by side they are too few for a vector, and rows were long",
        IMPORTS + FEW_CHANNELS + SGD,
    ),
    Planted(
        "channels_last", True, "no measurable difference",
        "one small convolution of 8 by 8 pixels; linear layers take the step",
        IMPORTS + HARDLY_CONVOLVED + SGD,
        steps=8,
    ),
    Planted(
        "attention", "flash", "faster",
        "an earlier cell switched flash off: 1024 by 1024 weights of each head go through memory again and again",
        IMPORTS + NO_FLASH + ATTENTION + SGD,
        steps=5, pairs=8,
    ),
    Planted(
        "attention", "math", "slower",
        "the 1024 by 1024 weights of each head have to go through memory",
        IMPORTS + ATTENTION + SGD,
        steps=5, pairs=8,
    ),
    Planted(
        "attention", "math", "no measurable difference",
        "attention over 8 tokens; linear layers take the step",
        IMPORTS + FEW_TOKENS + SGD,
        steps=8,
    ),
)  # fmt: skip
