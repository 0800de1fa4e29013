# /// cell
# causes = ["slow_collate"]
# because = "a batch grows by one picture at a time, and is copied whole for each of them"
# batch = 64
# steps = 20
# cohort = "2026-11-23"
# looked_at = true
#
# [[cure]]
# old = '''
#     images = torch.empty(0, 3, SIZE, SIZE)
#     for name in names:
#         images = torch.cat([images, photos[name].unsqueeze(0)], dim=0)
# '''
# new = '''
#     images = torch.stack([photos[name] for name in names])
# '''
# ///
#########################################
#  Herbarium project - leaf classifier  #
#########################################
import random

import torch
from torch import nn

SIZE = 80
SPECIES = ["acer", "betula", "fagus", "quercus", "tilia"]

random.seed(20)
torch.manual_seed(20)

# name of the photo -> picture. the real ones are on the herbarium's disk, here noise with a tint
photos = {}
labels = {}
for number in range(1280):
    species = random.randrange(len(SPECIES))
    name = f"{SPECIES[species]}_{number:05d}.jpg"
    picture = torch.rand(3, SIZE, SIZE)
    picture[species % 3] += 0.1 * species
    photos[name] = picture
    labels[name] = species


def make_batch(names):
    images = torch.empty(0, 3, SIZE, SIZE)
    for name in names:
        images = torch.cat([images, photos[name].unsqueeze(0)], dim=0)
    targets = torch.tensor([labels[name] for name in names])
    return images, targets


def chunks(lst, n):
    for i in range(0, len(lst), n):
        yield lst[i : i + n]


# %% the training cell
model = nn.Sequential(
    nn.AvgPool2d(4),
    nn.Flatten(),
    nn.Linear(1200, 200),
    nn.ReLU(),
    nn.Linear(200, len(SPECIES)),
)
loss_function = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

all_names = list(photos)
for epoch in range(8):
    random.shuffle(all_names)
    batches = list(chunks(all_names, 64))
    for batch in batches:
        images, targets = make_batch(batch)
        predictions = model(images)
        loss = loss_function(predictions, targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"Epoch {epoch + 1} - loss {loss.item():.3f}")
