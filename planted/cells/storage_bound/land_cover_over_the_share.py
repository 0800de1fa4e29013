# /// cell
# causes = ["storage_bound", "logging_or_eval"]
# because = "each of 10 tiles waits 4 ms for the share, and 48 tiles are mapped and scored every sixth step"
# also = ["data_starved"]
# batch = 10
# steps = 24
# warmup = 12
# cohort = "2026-11-21d"
#
# [[cure]]
# old = "num_workers=0"
# new = "num_workers=6, persistent_workers=True"
#
# [[second_cure]]
# old = "SCORE_EVERY = 6"
# new = "SCORE_EVERY = 6000"
# ///
"""Land cover from satellite tiles on a slow share; every sixth step, tiles that are held out are mapped and scored."""

import time

import torch
from sklearn.metrics import cohen_kappa_score, confusion_matrix
from torch import nn
from torch.utils.data import DataLoader, Dataset

torch.manual_seed(90)
CLASSES, SIZE = 5, 32


class Share:
    """The tiles, mounted from somewhere else."""

    def __init__(self, count, delay):
        self.height = torch.nn.functional.avg_pool2d(torch.randn(count, 1, SIZE + 8, SIZE + 8), 9, 1) * 9
        self.delay = delay

    def open(self, i):
        time.sleep(self.delay)
        return self.height[i]


class Tiles(Dataset):
    def __init__(self, share):
        self.share = share

    def __len__(self):
        return len(self.share.height)

    def __getitem__(self, i):
        height = self.share.open(i)
        cover = ((height[0] + 1.5) / 3 * CLASSES).long().clamp(0, CLASSES - 1)
        bands = torch.cat([height, height.square(), -height, height.abs()]) + 0.1 * torch.randn(4, SIZE, SIZE)
        return bands, cover


def conv(cin, cout):
    return nn.Sequential(nn.Conv2d(cin, cout, 3, padding=1, bias=False), nn.BatchNorm2d(cout), nn.ReLU())


class Mapper(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.fine, self.coarse = conv(4, width), conv(width, 2 * width)
        self.head = nn.Conv2d(3 * width, CLASSES, 1)

    def forward(self, bands):
        fine = self.fine(bands)
        coarse = self.coarse(nn.functional.max_pool2d(fine, 2))
        coarse = nn.functional.interpolate(coarse, scale_factor=2.0)
        return self.head(torch.cat([fine, coarse], 1))


@torch.no_grad()
def scores(mapper, bands, cover):
    mapper.eval()
    mapped = torch.cat([mapper(b).argmax(1) for b in bands.split(16)])
    mapper.train()
    truth, found = cover.flatten().numpy(), mapped.flatten().numpy()
    return confusion_matrix(truth, found, labels=range(CLASSES)), cohen_kappa_score(truth, found)


held_out = next(iter(DataLoader(Tiles(Share(48, 0)), batch_size=48)))
SCORE_EVERY = 6

# %% the training cell
mapper = Mapper()
optimizer = torch.optim.SGD(mapper.parameters(), lr=0.1, momentum=0.9, nesterov=True)
tiles = DataLoader(Tiles(Share(240, 0.004)), batch_size=10, shuffle=True, num_workers=0)
table, step = [], 0
for epoch in range(6):
    for bands, cover in tiles:
        loss = nn.functional.cross_entropy(mapper(bands), cover)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        if step % SCORE_EVERY == 0:
            confusion, kappa = scores(mapper, *held_out)
            table.append((step, kappa, confusion))
