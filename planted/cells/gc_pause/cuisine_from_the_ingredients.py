# /// cell
# causes = ["gc_pause"]
# because = "the garbage collector walks over all recipes after each step"
# batch = 256
# cohort = "2026-11-22b"
#
# [[cure]]
# old = "        gc.collect()\n"
# new = ""
# ///
"""The cuisine of a recipe from its ingredients: a bag of embeddings and a classifier on it."""

import gc
import random

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(75)
random.seed(75)
INGREDIENTS, CUISINES, NAMED = 3000, 24, 9


class Recipe:
    """As it comes out of the scraped cookbook."""

    def __init__(self, title, ingredients, cuisine):
        self.title = title
        self.ingredients = ingredients
        self.cuisine = cuisine


def scraped(count):
    numbers = np.random.default_rng(75)
    cuisines = numbers.integers(0, CUISINES, count)
    shared = numbers.integers(0, INGREDIENTS, (count, NAMED))
    own = INGREDIENTS // CUISINES
    local = cuisines[:, None] * own + numbers.integers(0, own, (count, NAMED))
    named = np.where(numbers.random((count, NAMED)) < 0.4, local, shared)
    rows = zip(named.tolist(), cuisines.tolist(), strict=True)
    return [Recipe(f"recipe {i}", row, cuisine) for i, (row, cuisine) in enumerate(rows)]


class CuisineNet(nn.Module):
    def __init__(self, dim=128, width=1280):
        super().__init__()
        self.bag = nn.EmbeddingBag(INGREDIENTS, dim, mode="mean")
        self.classify = nn.Sequential(
            nn.Linear(dim, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, CUISINES)
        )

    def forward(self, ingredients):
        return self.classify(self.bag(ingredients))


def draw(cookbook, size):
    recipes = random.sample(cookbook, size)
    return torch.tensor([r.ingredients for r in recipes]), torch.tensor([r.cuisine for r in recipes])


def train(cookbook, steps, batch=256):
    net = CuisineNet()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3, fused=True)
    right = torch.zeros(())
    for step in range(steps):
        ingredients, cuisine = draw(cookbook, batch)
        scores = net(ingredients)
        loss = F.cross_entropy(scores, cuisine, label_smoothing=0.05)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        right += (scores.detach().argmax(1) == cuisine).float().mean()
        del ingredients, cuisine, scores, loss
        gc.collect()
    return net, right / steps


cookbook = scraped(12_000)

# %% the training cell
net, accuracy = train(cookbook, steps=250)
print(f"{accuracy:.3f} of the recipes were put into the right cuisine")
