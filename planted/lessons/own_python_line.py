# /// cell
# lesson = "02"
# because = "each row of each image is moved by a call of its own, in Python, between two batches"
# steps = 60
# small = { COUNT = "2048", BATCH = "16" }
#
# [[recording]]
# name = "own-python-line"
#
# [[recording]]
# name = "own-python-line-cured"
# because = "all images are moved by one call"
# edits = [['''
#     shifted = np.empty_like(images)
#     for i in range(len(images)):
#         for row in range(images.shape[1]):
#             shifted[i, row] = np.roll(images[i, row], offsets[i])
#     return shifted
# ''', '''
#     columns = (np.arange(images.shape[2]) - offsets[:, None]) % images.shape[2]
#     return np.take_along_axis(images, columns[:, None], axis=2)
# ''']]
# ///
"""A small network on images that are shifted sideways by chance."""

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

device = "cuda" if torch.cuda.is_available() else "cpu"
COUNT = 16_384
BATCH = 64
torch.manual_seed(0)
digits = TensorDataset(torch.randn(COUNT, 1, 32, 32), torch.randint(0, 10, (COUNT,)))
loader = DataLoader(digits, batch_size=BATCH, shuffle=True, drop_last=True)
model = nn.Sequential(
    nn.Conv2d(1, 8, 3, stride=2, padding=1), nn.ReLU(), nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.ReLU(),
    nn.Flatten(), nn.Linear(16 * 8 * 8, 10),
).to(device)  # fmt: skip
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)


def shift(images, offsets):
    shifted = np.empty_like(images)
    for i in range(len(images)):
        for row in range(images.shape[1]):
            shifted[i, row] = np.roll(images[i, row], offsets[i])
    return shifted


# %% the training cell
for _ in range(10):
    for images, labels in loader:
        moved = shift(images[:, 0].numpy(), np.random.randint(-3, 4, len(images)))
        inputs, labels = torch.from_numpy(moved)[:, None].to(device), labels.to(device)
        loss = nn.functional.cross_entropy(model(inputs), labels)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
