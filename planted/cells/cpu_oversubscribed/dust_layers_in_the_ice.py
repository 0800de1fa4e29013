# /// cell
# causes = ["cpu_oversubscribed"]
# because = "eight threads on two cores"
# batch = 6
# steps = 20
# fresh = true
# cohort = "2026-11-22c"
#
# [[cure]]
# old = "--threads=8"
# new = "--threads=2"
# ///
"""Annual layers in an ice core from its dust, acid and conductivity: a one-dimensional U-Net, run as a script."""

import argparse
from itertools import pairwise

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--window", type=int, default=512)
parser.add_argument("--batch", type=int, default=12)
parser.add_argument("--width", type=int, default=24)
parser.add_argument("--iters", type=int, default=200)
parser.add_argument("--lr", type=float, default=1e-3)
parser.add_argument("--threads", type=int, default=0, help="0: as torch likes")
opt = parser.parse_args(["--batch=6", "--iters=150", "--threads=8"])

torch.manual_seed(1009)
if opt.threads:
    torch.set_num_threads(opt.threads)


def core(samples):
    """Years get thinner with depth; where one begins there is a little more dust."""
    thickness = torch.linspace(26, 9, samples) * (1 + 0.2 * torch.randn(samples))
    phase = torch.cumsum(1 / thickness.clamp(min=4), 0)
    channels = [torch.sin(2 * torch.pi * (phase + shift)) + 0.5 * torch.randn(samples) for shift in (0.0, 0.2, 0.55)]
    return torch.stack(channels), (phase % 1 < 0.2).float()


def conv(c_in, c_out):
    return nn.Sequential(nn.Conv1d(c_in, c_out, 5, padding=2), nn.BatchNorm1d(c_out), nn.ReLU())


class UNet(nn.Module):
    def __init__(self, width, depth=2):
        super().__init__()
        widths = [width * 2**level for level in range(depth)]
        self.down = nn.ModuleList(conv(a, b) for a, b in zip([3, *widths], widths, strict=False))
        self.up = nn.ModuleList(conv(a + b, b) for b, a in pairwise(widths))
        self.head = nn.Conv1d(width, 1, 1)

    def forward(self, x):
        kept = []
        for i, block in enumerate(self.down):
            x = block(nn.functional.max_pool1d(x, 2) if i else x)
            kept.append(x)
        kept.pop()
        for block in reversed(self.up):
            x = block(torch.cat([nn.functional.interpolate(x, scale_factor=2), kept.pop()], 1))
        return self.head(x).squeeze(1)


signal, boundary = core(120_000)
net = UNet(opt.width)
criterion = nn.BCEWithLogitsLoss(pos_weight=torch.tensor(4.0))
optimizer = torch.optim.Adam(net.parameters(), lr=opt.lr, fused=True)

# %% the training cell
for it in range(opt.iters):
    at = torch.randint(0, signal.shape[1] - opt.window, (opt.batch,))
    where = at[:, None] + torch.arange(opt.window)
    found = net(signal[:, where].transpose(0, 1))
    loss = criterion(found, boundary[where])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if it % 50 == 0:
        print(f"[{it:4d}] loss {loss.item():.4f}")
