# /// cell
# causes = []
# because = "matrix products take the step, and two workers are ahead"
# batch = 24
# steps = 16
# warmup = 6
# tries = { workers = "4", fused_optimizer = "True", batch_size = "48" }
# cohort = "2026-11-21c"
# looked_at = true
# ///
"""An MLP-Mixer on crops of micrographs; two workers cut, flip and normalise the crops meanwhile."""

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

torch.manual_seed(17)


class Crops(Dataset):
    def __init__(self, sheets, count, size=48):
        self.sheets, self.count, self.size = sheets, count, size

    def __len__(self):
        return self.count

    def __getitem__(self, i):
        rng = np.random.default_rng(i)
        sheet = int(rng.integers(len(self.sheets)))
        y, x = rng.integers(0, 256 - self.size, 2)
        crop = self.sheets[sheet, :, y : y + self.size, x : x + self.size]
        if rng.random() < 0.5:
            crop = crop[:, :, ::-1]
        crop = crop.astype(np.float32) / 255
        return torch.from_numpy((crop - 0.5) / 0.29), sheet


class MixerBlock(nn.Module):
    def __init__(self, tokens, dim):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.across = nn.Sequential(nn.Linear(tokens, 192), nn.ReLU(), nn.Linear(192, tokens))
        self.within = nn.Sequential(nn.Linear(dim, 3 * dim), nn.ReLU(), nn.Linear(3 * dim, dim))

    def forward(self, x):
        x = x + self.across(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.within(self.norm2(x))


class Mixer(nn.Module):
    def __init__(self, classes, dim=256, depth=2):
        super().__init__()
        self.cut = nn.Unfold(kernel_size=8, stride=8)
        self.patch = nn.Linear(3 * 64, dim)
        self.blocks = nn.Sequential(*(MixerBlock(36, dim) for _ in range(depth)))
        self.head = nn.Linear(dim, classes)

    def forward(self, x):
        return self.head(self.blocks(self.patch(self.cut(x).transpose(1, 2))).mean(1))


sheets = np.random.default_rng(17).integers(0, 255, (8, 3, 256, 256), dtype=np.uint8)
mixer = Mixer(classes=8)
optimizer = torch.optim.SGD(mixer.parameters(), lr=0.02)
criterion = nn.CrossEntropyLoss(label_smoothing=0.1)

# %% the training cell
loader = DataLoader(
    Crops(sheets, 2400), batch_size=24, shuffle=True, num_workers=2, persistent_workers=True, drop_last=True
)
for epoch in range(2):
    seen, right = 0, torch.zeros((), dtype=torch.long)
    for x, y in loader:
        logits = mixer(x)
        loss = criterion(logits, y)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        right += (logits.detach().argmax(1) == y).sum()
        seen += len(y)
    print(f"epoch {epoch}: {right / seen:.1%}")
