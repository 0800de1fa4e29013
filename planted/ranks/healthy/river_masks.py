# /// cell
# cause = "healthy"
# because = "a small U-Net in equal batches: 0.4 MB of gradients behind much compute; one checkpoint at the end"
# cohort = "2026-11-25b"
# written_ms = 168.0
# without_ms = 167.5
# clock = "exchange alone"
#
# [[without]]
# old = "        self.net = DistributedDataParallel(UNet())\n"
# new = "        self.net = DistributedDataParallel(UNet())\n        self.net.require_backward_grad_sync = False\n"
# ///
"""Rivers in pictures from above: a mask of the water."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Pictures(Dataset):
    """Four bands; the river is where a wave goes through."""

    def __init__(self, count: int, side: int = 64) -> None:
        generator = torch.Generator().manual_seed(0)
        across = torch.linspace(0, 6.28, side)
        phase = torch.rand(count, 1, generator=generator) * 6.28
        middle = side * (0.5 + 0.3 * torch.sin(across + phase))
        rows = torch.arange(side).view(1, side, 1)
        self.masks = ((rows - middle[:, None, :]).abs() < 5).float()[:, None]
        self.bands = torch.randn(count, 4, side, side, generator=generator) * 0.5 + self.masks

    def __len__(self) -> int:
        return len(self.masks)

    def __getitem__(self, index: int):
        return self.bands[index], self.masks[index]


def twice(channels_in: int, channels_out: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(channels_in, channels_out, 3, padding=1), nn.GroupNorm(4, channels_out), nn.ReLU(inplace=True),
        nn.Conv2d(channels_out, channels_out, 3, padding=1), nn.ReLU(inplace=True),
    )  # fmt: skip


class UNet(nn.Module):
    """Two levels down and up again."""

    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2, self.bottom = twice(4, 16), twice(16, 32), twice(32, 48)
        self.up2, self.up1 = twice(48 + 32, 32), twice(32 + 16, 16)
        self.mask = nn.Conv2d(16, 1, 1)

    def forward(self, x):
        one = self.down1(x)
        two = self.down2(F.max_pool2d(one, 2))
        x = self.bottom(F.max_pool2d(two, 2))
        x = self.up2(torch.cat([F.interpolate(x, scale_factor=2), two], 1))
        x = self.up1(torch.cat([F.interpolate(x, scale_factor=2), one], 1))
        return self.mask(x)


class Run:
    """A training run."""

    def __init__(self, options: argparse.Namespace) -> None:
        torch.manual_seed(options.seed)
        self.epochs = options.epochs
        pictures = Pictures(options.pictures)
        self.sampler = DistributedSampler(pictures, drop_last=True)
        self.loader = DataLoader(pictures, options.batch, sampler=self.sampler, drop_last=True)
        self.net = DistributedDataParallel(UNet())
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=3e-3)

    def epoch(self, number: int) -> float:
        self.sampler.set_epoch(number)
        losses = []
        for bands, mask in self.loader:
            loss = F.binary_cross_entropy_with_logits(self.net(bands), mask)
            self.optimizer.zero_grad(set_to_none=True)
            loss.backward()
            self.optimizer.step()
            losses.append(loss.detach())
        return torch.stack(losses).mean().item()

    def __call__(self) -> None:
        for number in range(self.epochs):
            loss = self.epoch(number)
            if dist.get_rank() == 0:
                print(f"epoch {number}: {loss:.4f}")
        if dist.get_rank() == 0:
            torch.save(self.net.module.state_dict(), "rivers.pt")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--pictures", type=int, default=192)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--epochs", type=int, default=7)
    parser.add_argument("--seed", type=int, default=5)
    dist.init_process_group("gloo")
    Run(parser.parse_known_args()[0])()
    dist.destroy_process_group()
