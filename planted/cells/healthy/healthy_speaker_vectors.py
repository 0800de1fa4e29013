# /// cell
# causes = []
# because = "convolutions take the step, and two workers are ahead"
# batch = 16
# steps = 16
# warmup = 6
# tries = { workers = "4", fused_optimizer = "True", batch_size = "32" }
# cohort = "2026-11-21d"
# ///
"""Speaker vectors from filter banks by time-delay layers; two workers cut the pieces and mask bands meanwhile."""

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

torch.manual_seed(1010)
SPEAKERS, BANDS, FRAMES = 20, 40, 100


class Utterances(Dataset):
    def __init__(self, count=1600):
        self.voices = torch.randn(SPEAKERS, BANDS, 1)
        self.noise = torch.randn(16, BANDS, 400)
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, n):
        speaker = n % SPEAKERS
        start = int(torch.randint(400 - FRAMES, ()))
        piece = self.noise[n % 16, :, start : start + FRAMES] + self.voices[speaker]
        band = int(torch.randint(BANDS - 6, ()))
        piece[band : band + 6] = 0
        return piece, speaker


class XVector(nn.Module):
    def __init__(self, width=256):
        super().__init__()
        self.frames = nn.Sequential(
            nn.Conv1d(BANDS, width, 5), nn.ReLU(),
            nn.Conv1d(width, width, 3, dilation=2), nn.ReLU(),
            nn.Conv1d(width, width, 3, dilation=3), nn.ReLU(),
        )  # fmt: skip
        self.segment = nn.Linear(2 * width, 192)
        self.speakers = nn.Linear(192, SPEAKERS)

    def forward(self, x):
        h = self.frames(x)
        pooled = torch.cat([h.mean(-1), h.std(-1)], dim=1)
        return self.speakers(torch.relu(self.segment(pooled)))


model = XVector()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
criterion = nn.CrossEntropyLoss()

# %% the training cell
train = DataLoader(Utterances(), batch_size=16, shuffle=True, num_workers=2, persistent_workers=True, drop_last=True)
for epoch in range(2):
    running = torch.zeros(())
    for pieces, speaker in train:
        loss = criterion(model(pieces), speaker)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        running += loss.detach()
    print(f"epoch {epoch + 1}: {running / len(train):.3f}")
