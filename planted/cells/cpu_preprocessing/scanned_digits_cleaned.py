# /// cell
# causes = ["cpu_preprocessing"]
# because = "one worker cleans each scan with Pillow on every access, which takes longer than the network's step"
# also = ["data_starved"]
# batch = 32
# steps = 40
# warmup = 10
# cohort = "2026-11-23"
#
# [[cure]]
# old = '''
#     def __init__(self, images, targets):
#         self.images, self.targets = images, targets
# '''
# new = '''
#     def __init__(self, images, targets):
#         self.images, self.targets = [clean(im) for im in images], targets
# '''
#
# [[cure]]
# old = "im = clean(self.images[k])"
# new = "im = self.images[k]"
# ///
"""digits from paper forms -> label.

The forms were scanned at 8x8 (don't ask), so before the net sees a digit it is blown up,
sharpened, straightened, cropped to the ink and scaled to 28x28. Uses sklearn's digits while legal
is looking at the real scans.
"""

import numpy as np
import torch
from PIL import Image, ImageFilter, ImageOps
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, Dataset

torch.manual_seed(0)


def clean(im: Image.Image) -> Image.Image:
    big = im.resize((96, 96), Image.Resampling.LANCZOS)
    big = ImageOps.autocontrast(big.filter(ImageFilter.UnsharpMask(radius=3, percent=180)), cutoff=2)
    big = big.filter(ImageFilter.MedianFilter(3))
    # try a few shears, keep the one whose columns are most "peaky"
    best, score = big, -1.0
    for shear in (-0.15, 0.0, 0.15):
        s = big.transform(big.size, Image.Transform.AFFINE, (1, shear, -48 * shear, 0, 1, 0), Image.Resampling.BILINEAR)
        peaky = float(np.asarray(s, dtype=np.float32).sum(0).std())
        if peaky > score:
            best, score = s, peaky
    box = best.point(lambda v: 255 if v > 60 else 0).getbbox() or (0, 0, 96, 96)
    return ImageOps.pad(best.crop(box), (28, 28), Image.Resampling.LANCZOS)


class Scans(Dataset):
    def __init__(self, images, targets):
        self.images, self.targets = images, targets

    def __len__(self):
        return len(self.targets)

    def __getitem__(self, k):
        im = clean(self.images[k])
        x = torch.from_numpy(np.asarray(im, dtype=np.float32) / 127.5 - 1).unsqueeze(0)
        return x, self.targets[k]


bunch = load_digits()
pil = [Image.fromarray((a * 15.9).astype(np.uint8)) for a in bunch.images]
scans = Scans(pil, bunch.target)

# %% the training cell
train = DataLoader(scans, batch_size=32, shuffle=True, num_workers=1, persistent_workers=True, drop_last=True)

net = nn.Sequential(
    nn.Conv2d(1, 24, 5), nn.ReLU(), nn.Conv2d(24, 48, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
    nn.Linear(48 * 121, 10),
)  # fmt: skip
opt = torch.optim.Adam(net.parameters(), lr=2e-3, fused=True)
for ep in range(4):
    for x, t in train:
        opt.zero_grad(set_to_none=True)
        loss = nn.functional.cross_entropy(net(x), t)
        loss.backward()
        opt.step()
    print(ep, round(loss.item(), 4))
