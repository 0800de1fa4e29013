# /// cell
# causes = []
# because = "convolutions take the step"
# batch = 16
# steps = 10
# warmup = 3
# tries = { workers = "2", fused_optimizer = "True", batch_size = "32" }
# cohort = "2026-11-21d"
# ///
"""Nuclei in stained tissue: a small encoder and decoder with a skip between them; tissue and masks are in memory."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(34)
tissue = torch.rand(320, 3, 32, 32)
nuclei = (nn.functional.avg_pool2d(tissue, 5, 1, 2).mean(1) > 0.5).long()


def double(c_in, c_out):
    return nn.Sequential(
        nn.Conv2d(c_in, c_out, 3, padding=1), nn.ReLU(inplace=True),
        nn.Conv2d(c_out, c_out, 3, padding=1), nn.ReLU(inplace=True),
    )  # fmt: skip


class SmallUNet(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.stem = nn.Conv2d(3, width, 4, stride=2, padding=1)
        self.down, self.bottom = double(width, width), double(width, 2 * width)
        self.up = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.merge = double(2 * width, width)
        self.head = nn.Sequential(nn.Conv2d(width, 8, 1), nn.PixelShuffle(2))

    def forward(self, x):
        fine = self.down(self.stem(x))
        coarse = self.bottom(nn.functional.max_pool2d(fine, 2))
        return self.head(self.merge(torch.cat([fine, self.up(coarse)], 1)))


net = SmallUNet().to(memory_format=torch.channels_last)
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, fused=True)

# %% the training cell
loader = DataLoader(TensorDataset(tissue, nuclei), batch_size=16, shuffle=True, drop_last=True)
for epoch in range(6):
    total = 0.0
    for images, masks in loader:
        logits = net(images.contiguous(memory_format=torch.channels_last))
        loss = nn.functional.cross_entropy(logits, masks)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.detach()
    print(f"epoch {epoch}: {total / len(loader):.3f}")
