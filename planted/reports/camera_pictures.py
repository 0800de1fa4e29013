# /// cell
# cohort = "second"
# because = "Photographs of 1600 x 1200 are decoded in full at every access only to be shrunk to 64 x 64; draft() (or resizing them once beforehand) avoids most of the decoding."
# thread = "https://github.com/open-mmlab/mmcv/pull/214"
# line = "image = Image.open(self.files[i]).convert(\"RGB\")"
# callee = "PIL.Image.Image.convert"
# faster = 4.9
# ///
import os, tempfile
import numpy as np
import torch
import torch.nn as nn
from PIL import Image
from torch.utils.data import DataLoader, Dataset

rng = np.random.default_rng(19)
torch.manual_seed(19)
folder = tempfile.mkdtemp()
for k in range(48):
    small = rng.integers(0, 255, (30, 40, 3), dtype=np.uint8)
    small[..., k % 3] //= 2
    Image.fromarray(small).resize((1600, 1200), Image.BICUBIC).save(os.path.join(folder, f"{k:03d}_{k % 3}.jpg"), quality=92)


class Pictures(Dataset):
    def __init__(self, folder, size=64):
        self.files = sorted(os.path.join(folder, f) for f in os.listdir(folder))
        self.labels = [int(f[-5]) for f in self.files]
        self.size = size

    def __len__(self):
        return len(self.files)

    def __getitem__(self, i):
        image = Image.open(self.files[i]).convert("RGB")
        image = image.resize((self.size, self.size), Image.BILINEAR)
        x = torch.from_numpy(np.array(image)).permute(2, 0, 1).float().div(255)
        return (x - 0.45) / 0.25, self.labels[i]


train_loader = DataLoader(Pictures(folder), batch_size=4, shuffle=True)
net = nn.Sequential(nn.Conv2d(3, 32, 3, stride=2, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 64, 3, padding=1),
                    nn.BatchNorm2d(64), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 3))
criterion, optimizer = nn.CrossEntropyLoss(label_smoothing=0.1), torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
# %% the training cell
for epoch in range(5):
    correct = seen = 0
    for images, labels in train_loader:
        out = net(images)
        loss = criterion(out, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        correct += (out.argmax(1) == labels).sum().item()
        seen += len(labels)
    print(epoch, round(loss.item(), 3), correct / seen)
