# /// cell
# causes = ["logging_or_eval"]
# because = "1024 clips are predicted after every second step of 64"
# batch = 64
# steps = 36
# warmup = 6
# cohort = "2026-11-21d"
#
# [[cure]]
# old = "TESTS_PER_EPOCH = 18"
# new = "TESTS_PER_EPOCH = 1"
# ///
"""Keyword spotting on filterbanks; with early stopping on the test set, which is gone through 18 times an epoch."""

import math

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(11)
BANDS, FRAMES, WORDS = 40, 32, 12


def make_split(count, seed):
    g = torch.Generator().manual_seed(seed)
    words = torch.randint(0, WORDS, (count,), generator=g)
    pitch = 0.2 + words.float() / WORDS
    t = torch.arange(FRAMES).float()
    band = torch.arange(BANDS).float().unsqueeze(1)
    clips = torch.sin(pitch.view(-1, 1, 1) * t + band / 5) + 0.7 * torch.randn(count, BANDS, FRAMES, generator=g)
    return TensorDataset(clips, words)


class Separable(nn.Module):
    """A depthwise convolution over time, then a mix of the channels."""

    def __init__(self, cin, cout, kernel=9):
        super().__init__()
        self.mix = nn.Conv1d(cin, cout, 1)
        self.time = nn.Conv1d(cout, cout, kernel, padding=kernel // 2, groups=cout)
        self.norm = nn.BatchNorm1d(cout)

    def forward(self, x):
        return torch.relu(self.norm(self.time(self.mix(x))))


class Spotter(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.body = nn.Sequential(Separable(BANDS, width), Separable(width, width), Separable(width, width))
        self.head = nn.Linear(width, WORDS)

    def forward(self, clips):
        return self.head(self.body(clips).amax(-1))


class EarlyStopping:
    def __init__(self, patience):
        self.best, self.patience, self.bad = math.inf, patience, 0

    def should_stop(self, value):
        if value < self.best:
            self.best, self.bad = value, 0
        else:
            self.bad += 1
        return self.bad > self.patience


@torch.inference_mode()
def test(model, loader):
    model.eval()
    wrong, loss = 0, 0.0
    for clips, words in loader:
        logits = model(clips)
        loss += nn.functional.cross_entropy(logits, words, reduction="sum")
        wrong += (logits.argmax(1) != words).sum()
    model.train()
    return (loss / len(loader.dataset)).item(), (wrong / len(loader.dataset)).item()


train_loader = DataLoader(make_split(2304, 0), batch_size=64, shuffle=True)
test_loader = DataLoader(make_split(1024, 1), batch_size=128)

# %% the training cell
TESTS_PER_EPOCH = 18
model = Spotter()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=4 * len(train_loader))
stopping = EarlyStopping(patience=200)
test_every = len(train_loader) // TESTS_PER_EPOCH
history = []
for epoch in range(4):
    for batch, (clips, words) in enumerate(train_loader, start=1):
        loss = nn.functional.cross_entropy(model(clips), words, label_smoothing=0.1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        if batch % test_every == 0:
            history.append(test(model, test_loader))
    if history and stopping.should_stop(history[-1][0]):
        break
