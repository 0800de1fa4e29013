# /// cell
# causes = []
# because = "convolutions take the step; ranges for the profiler's timeline are all that was added"
# batch = 32
# steps = 10
# warmup = 2
# tries = { workers = "2", batch_size = "64" }
# cohort = "2026-11-23"
# ///
# traffic signs, 12 classes. Annotated for the profiling session on Thursday (J.'s slides, "name your phases!")
import contextlib

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.profiler import record_function
from torch.utils.data import DataLoader, TensorDataset

NUM_CLASSES = 12


class SignNet(nn.Module):
    def __init__(self, base=32):
        super().__init__()
        self.stem = nn.Conv2d(3, base, 3, padding=1)
        self.down1 = nn.Conv2d(base, 2 * base, 3, stride=2, padding=1)
        self.mid = nn.Conv2d(2 * base, 2 * base, 3, padding=1)
        self.down2 = nn.Conv2d(2 * base, 4 * base, 3, stride=2, padding=1)
        self.fc = nn.Linear(4 * base, NUM_CLASSES)

    def forward(self, x):
        with record_function("signnet/stem"):
            x = F.relu(self.stem(x))
        with record_function("signnet/body"):
            x = F.relu(self.down1(x))
            x = F.relu(self.mid(x))
            x = F.relu(self.down2(x))
        with record_function("signnet/head"):
            return self.fc(x.mean((2, 3)))


@contextlib.contextmanager
def phase(name):
    with record_function(f"## {name} ##"):
        yield


torch.manual_seed(50)
y = torch.randint(0, NUM_CLASSES, (1920,))
x = torch.rand(1920, 3, 32, 32) + torch.linspace(-0.5, 0.5, NUM_CLASSES)[y].view(-1, 1, 1, 1)
train_data = TensorDataset(x, y)

# %% the training cell
model = SignNet().to(memory_format=torch.channels_last)
optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, fused=True)
loader = DataLoader(train_data, batch_size=32, shuffle=True)
for epoch in range(3):
    for image, sign in loader:
        with phase("copy"):
            image = image.to(memory_format=torch.channels_last)
        with phase("forward"):
            loss = F.cross_entropy(model(image), sign)
        with phase("backward"):
            optimizer.zero_grad()
            loss.backward()
        with phase("optimizer"):
            optimizer.step()
    print(f"epoch {epoch + 1}: {loss.item():.3f}")
