# /// cell
# because = "self.archive is an NpzFile: each self.archive['images'] in __getitem__ reads and inflates the whole array of images again for one picture."
# line = "image = self.archive[\"images\"][i]"
# callee = "numpy.lib.npyio.NpzFile.__getitem__ (zlib)"
# faster = 4.73
# ///
import os, tempfile
import numpy as np
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, Dataset

rng = np.random.default_rng(0)
torch.manual_seed(0)
folder = tempfile.mkdtemp()
path = os.path.join(folder, "slides.npz")
labels = rng.integers(0, 4, 360)
yy, xx = np.mgrid[:32, :32]
images = np.stack([128 + 60 * np.sin(xx / (2 + c)) + 20 * rng.standard_normal((3, 32, 32)) for c in labels]).clip(0, 255).astype(np.uint8)
np.savez_compressed(path, images=images, labels=labels)


class Slides(Dataset):
    def __init__(self, path):
        self.archive = np.load(path)
        self.n = len(self.archive["labels"])

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        image = self.archive["images"][i]
        label = self.archive["labels"][i]
        return torch.from_numpy(image).float() / 255, int(label)


train_loader = DataLoader(Slides(path), batch_size=8, shuffle=True)
net = nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(),
                    nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(1024, 4))
opt = torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9)
# %% the training cell
for epoch in range(2):
    for step, (x, y) in enumerate(train_loader):
        opt.zero_grad()
        loss = nn.functional.cross_entropy(net(x), y)
        loss.backward()
        opt.step()
        if step % 15 == 0:
            print(epoch, step, round(loss.item(), 3))
