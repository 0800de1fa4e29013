# /// cell
# causes = ["gc_pause"]
# because = "clear_device_cache has no device, but collects garbage among all the captions after each backward"
# framework = "accelerate"
# batch = 128
# cohort = "2026-11-21d"
#
# [[cure]]
# old = "        clear_device_cache(garbage_collection=True)\n"
# new = ""
# ///
"""Captions and picture features are matched; the device's cache is cleared after each backward; Accelerate."""

import torch
from accelerate import Accelerator
from accelerate.utils.memory import clear_device_cache
from torch import nn
from torch.utils.data import DataLoader, Dataset

torch.manual_seed(51)
WORDS, FEATURES = 500, 256


class Caption:
    def __init__(self, number):
        self.tokens = [(number * 31 + k * k) % WORDS for k in range(12)]
        self.source = {"picture": number, "boxes": [[k, k + 1] for k in range(4)]}


class Pairs(Dataset):
    """As read from the annotations; what is trained on lies in tensors."""

    def __init__(self, count):
        self.captions = [Caption(i) for i in range(count)]
        self.tokens = torch.tensor([c.tokens for c in self.captions])
        self.features = torch.randn(count, FEATURES)

    def __len__(self):
        return len(self.captions)

    def __getitem__(self, i):
        return self.features[i], self.tokens[i]


class Matcher(nn.Module):
    def __init__(self, shared=128):
        super().__init__()
        self.words = nn.EmbeddingBag(WORDS, 256, mode="mean")
        self.of_text = nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Linear(256, shared))
        self.of_picture = nn.Sequential(nn.Linear(FEATURES, 256), nn.GELU(), nn.Linear(256, shared))
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, features, tokens):
        text = nn.functional.normalize(self.of_text(self.words(tokens)), dim=-1)
        picture = nn.functional.normalize(self.of_picture(features), dim=-1)
        return self.scale.exp() * picture @ text.T


pairs = Pairs(4096)

# %% the training cell
accelerator = Accelerator(cpu=True)
matcher = Matcher()
optimizer = torch.optim.AdamW(matcher.parameters(), lr=1e-3, fused=True)
loader = DataLoader(pairs, batch_size=128, shuffle=True, drop_last=True)
matcher, optimizer, loader = accelerator.prepare(matcher, optimizer, loader)
for epoch in range(4):
    for features, tokens in loader:
        similarity = matcher(features, tokens)
        same = torch.arange(len(similarity))
        loss = nn.functional.cross_entropy(similarity, same) + nn.functional.cross_entropy(similarity.T, same)
        accelerator.backward(loss)
        clear_device_cache(garbage_collection=True)
        optimizer.step()
        optimizer.zero_grad()
