# /// cell
# causes = ["layout"]
# because = "each part has its input copied to its own memory format, which the part after it undoes"
# framework = "lightning"
# batch = 8
# steps = 16
# warmup = 4
# cohort = "2026-11-22a"
#
# [[cure]]
# old = "drift_format=torch.contiguous_format"
# new = "drift_format=torch.channels_last"
# ///
"""Thermal pictures of a drone are made sharper; each part of the network asks for its own memory format; Lightning."""

import lightning.pytorch as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

L.seed_everything(7)


class Formatted(nn.Module):
    """Sees to it that a part gets its input in the format in which it was fastest by itself."""

    def __init__(self, part, memory_format):
        super().__init__()
        self.part = part.to(memory_format=memory_format)
        self.memory_format = memory_format

    def forward(self, x):
        return self.part(x.contiguous(memory_format=self.memory_format))


class Smooth(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.spatial = nn.Conv2d(width, width, 3, padding=1, groups=width)

    def forward(self, x):
        return F.relu(self.spatial(x), inplace=True)


class Drift(nn.Module):
    """A sensor without a shutter drifts: shifts each channel by what the means of all channels tell."""

    def __init__(self, width):
        super().__init__()
        self.shift = nn.Sequential(nn.Linear(width, width // 2), nn.Tanh(), nn.Linear(width // 2, width))

    def forward(self, x):
        return x + self.shift(x.mean((2, 3)))[:, :, None, None]


class Upscaler(L.LightningModule):
    def __init__(self, width=32, depth=5, smooth_format=torch.channels_last, drift_format=torch.contiguous_format):
        super().__init__()
        self.stem = nn.Conv2d(1, width, 3, padding=1)
        parts = []
        for _ in range(depth):
            parts.append(Formatted(Smooth(width), smooth_format))
            parts.append(Formatted(Drift(width), drift_format))
        self.body = nn.Sequential(*parts)
        self.to_pixels = nn.Sequential(nn.Conv2d(width, 4, 1), nn.PixelShuffle(2))

    def forward(self, small):
        return F.interpolate(small, scale_factor=2.0) + self.to_pixels(self.body(self.stem(small)))

    def training_step(self, batch, batch_idx):
        small, large = batch
        return F.l1_loss(self(small), large)

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=1e-3, fused=True)
        schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [4, 6], gamma=0.3)
        return [optimizer], [schedule]


class Fields(Dataset):
    """Warm animals on cold grass, large, and as a small sensor sees them."""

    def __init__(self, count, side=112):
        noise = torch.randn(count, 1, side // 8, side // 8)
        self.large = F.interpolate(noise, (side, side), mode="bicubic").clamp(-2, 2)
        self.small = F.avg_pool2d(self.large, 2)

    def __len__(self):
        return len(self.large)

    def __getitem__(self, index):
        return self.small[index], self.large[index]


flights = DataLoader(Fields(160), batch_size=8, shuffle=True, drop_last=True)

# %% the training cell
upscaler = Upscaler()
trainer = L.Trainer(
    max_epochs=8,
    accelerator="cpu",
    gradient_clip_val=1.0,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(upscaler, flights)
