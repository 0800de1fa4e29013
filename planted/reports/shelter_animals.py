# /// cell
# cohort = "third"
# because = "Each picture goes from Pillow to numpy through getdata(), a Python list of one tuple per pixel; np.asarray(picture) reads the buffer at once."
# thread = "https://github.com/tensorflow/models/issues/5356"
# line = "array = np.array(list(picture.getdata())).reshape(height, width, 3).astype(np.uint8)"
# callee = "numpy.array"
# faster = 1.91
# ///
import io

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from PIL import Image

torch.manual_seed(0)
rng = np.random.default_rng(0)


def photograph(kind):
    small = rng.integers(0, 120, (6, 6, 3))
    small[1:5, 1:5, kind] += 100
    picture = Image.fromarray(small.astype(np.uint8)).resize((80, 80), Image.Resampling.BICUBIC)
    file = io.BytesIO()
    picture.save(file, "JPEG", quality=85)
    return file.getvalue()


kinds = torch.arange(240) % 3
files = [photograph(k) for k in kinds.tolist()]


def load(data):
    picture = Image.open(io.BytesIO(data)).convert("RGB")
    left, top = rng.integers(0, 17, 2).tolist()
    picture = picture.crop((left, top, left + 64, top + 64))
    if rng.random() < 0.5:
        picture = picture.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    width, height = picture.size
    array = np.array(list(picture.getdata())).reshape(height, width, 3).astype(np.uint8)
    return torch.from_numpy(array).permute(2, 0, 1)


def block(i, o):
    return nn.Sequential(nn.Conv2d(i, o, 3, 2, 1), nn.BatchNorm2d(o), nn.ReLU())


model = nn.Sequential(block(3, 24), block(24, 48), block(48, 96), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
                      nn.Linear(96, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9)

# %% the training cell
for step in range(80):
    rows = torch.randint(len(files), (24,))
    x = torch.stack([load(files[r]) for r in rows.tolist()]).float() / 255
    loss = F.cross_entropy(model(x), kinds[rows])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 20 == 0:
        print(f"step {step} loss {loss.item():.4f}")
print("last", loss.item())
