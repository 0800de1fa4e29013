# /// cell
# cohort = "third"
# because = "The elastic warp smooths its displacement field with one full 63x63 Gaussian convolution although the Gaussian is separable; a 1x63 and a 63x1 convolution give the same field for a small part of the time."
# thread = "https://github.com/kornia/kornia/pull/3817"
# line = "field = F.conv2d(noise.reshape(-1, 1, h, w), kernel, padding=kernel.shape[-1] // 2)"
# callee = "torch.nn.functional.conv2d"
# faster = 3.60
# ///
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
yy, xx = torch.meshgrid(torch.arange(64.0), torch.arange(64.0), indexing="ij")


def stained_cells(count):
    mask = torch.zeros(count, 64, 64)
    for i in range(count):
        for cx, cy, r in zip(torch.rand(5) * 64, torch.rand(5) * 64, torch.rand(5) * 6 + 4):
            mask[i][(xx - cx) ** 2 + (yy - cy) ** 2 < r * r] = 1
    picture = torch.stack([0.8 - 0.3 * mask, 0.6 - 0.4 * mask, 0.8 - 0.1 * mask], 1)
    return picture + 0.1 * torch.randn_like(picture), mask[:, None]


pictures, masks = stained_cells(200)
grid = torch.stack(torch.meshgrid(torch.linspace(-1, 1, 64), torch.linspace(-1, 1, 64), indexing="ij")[::-1], -1)


def gaussian(size, sigma):
    x = torch.arange(size) - size // 2
    g = torch.exp(-(x ** 2) / (2 * sigma ** 2))
    return g / g.sum()


def elastic(x, y, size=63, sigma=16.0, alpha=4.0):
    b, _, h, w = x.shape
    noise = torch.rand(b, 2, h, w) * 2 - 1
    g = gaussian(size, sigma)
    kernel = (g[:, None] * g[None, :])[None, None]
    field = F.conv2d(noise.reshape(-1, 1, h, w), kernel, padding=kernel.shape[-1] // 2)
    where = (grid + alpha * field.view(b, 2, h, w).permute(0, 2, 3, 1)).clamp(-1, 1)
    return (F.grid_sample(x, where, align_corners=False),
            F.grid_sample(y, where, mode="nearest", align_corners=False))


def block(i, o):
    return nn.Sequential(nn.Conv2d(i, o, 3, padding=1), nn.BatchNorm2d(o), nn.ReLU())


segmenter = nn.Sequential(block(3, 16), block(16, 24), nn.MaxPool2d(2), block(24, 32), block(32, 32),
                          nn.Upsample(scale_factor=2), block(32, 16), nn.Conv2d(16, 1, 1))
optimizer = torch.optim.Adam(segmenter.parameters(), lr=2e-3)

# %% the training cell
for step in range(60):
    rows = torch.randint(len(pictures), (8,))
    x, y = elastic(pictures[rows], masks[rows])
    loss = F.binary_cross_entropy_with_logits(segmenter(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 15 == 0:
        print(f"step {step} loss {loss.item():.4f}")
print("last", loss.item())
