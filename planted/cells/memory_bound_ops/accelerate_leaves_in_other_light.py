# /// cell
# causes = ["memory_bound_ops"]
# because = "some thirty operations on 800,000 numbers, each of which goes through memory"
# framework = "accelerate"
# batch = 16
# steps = 12
# warmup = 3
# profiled = 100
# cohort = "2026-11-21d"
#
# [[cure]]
# old = "augment = other_light"
# new = "augment = torch.compile(other_light)"
# ///
"""Diseases of leaves; each batch is put into another light, camera and weather first, tensor by tensor. Accelerate."""

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(32)
SIDE = 128
leaves = torch.rand(192, 3, SIDE, SIDE)
disease = torch.randint(0, 4, (192,))


@torch.no_grad()
def other_light(images, draw):
    """Exposure, white balance, contrast, saturation, haze, vignette and a film's curve; a draw per image and effect."""
    exposure, warmth, contrast, saturation, haze, corner = (d.view(-1, 1, 1, 1) for d in draw.unbind(1))
    images = images * torch.exp2(exposure - 0.5)
    images = images * (1 + (0.2 * warmth - 0.1) * torch.tensor([1.0, 0.0, -1.0]).view(1, 3, 1, 1))
    grey = images.mean(1, keepdim=True)
    images = grey + (images - grey) * (0.5 + saturation)
    images = (images - 0.5) * (0.7 + 0.6 * contrast) + 0.5
    axis = torch.linspace(-1, 1, images.shape[-1])
    edge = axis.view(1, 1, 1, -1) ** 2 + axis.view(1, 1, -1, 1) ** 2
    images = images * (1 - 0.4 * corner * edge)
    images = images * (1 - 0.3 * haze) + 0.3 * haze * 0.9
    images = images.clamp(0, 1)
    images = images * images * (3 - 2 * images)  # the film's curve
    images = torch.where(images < 0.01, 10 * images, 1.01 * images.clamp(min=1e-8).sqrt() - 0.001)
    shadows, lights = (0.3 - images).clamp(min=0), (images - 0.7).clamp(min=0)
    images = images + 0.2 * shadows * shadows - 0.3 * lights * lights
    return (images - 0.45) / 0.25


augment = other_light

# %% the training cell
accelerator = Accelerator(cpu=True)
net = nn.Sequential(
    nn.Conv2d(3, 32, 8, stride=8), nn.BatchNorm2d(32), nn.ReLU(),
    nn.Conv2d(32, 64, 3, stride=2, padding=1), nn.BatchNorm2d(64), nn.ReLU(),
    nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 4),
)  # fmt: skip
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, fused=True)
loader = DataLoader(TensorDataset(leaves, disease), batch_size=16, shuffle=True)
net, optimizer, loader = accelerator.prepare(net, optimizer, loader)
for epoch in range(12):
    for images, label in loader:
        seen = augment(images, torch.rand(len(images), 6))
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(net(seen), label)
        accelerator.backward(loss)
        optimizer.step()
