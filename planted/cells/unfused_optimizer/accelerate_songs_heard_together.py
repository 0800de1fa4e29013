# /// cell
# causes = ["unfused_optimizer"]
# because = "AdamW goes a dozen times through 2.5 million weights, their gradients and averages"
# framework = "accelerate"
# batch = 256
# profiled = 100
# cohort = "2026-11-21d"
#
# [[cure]]
# old = "foreach=True"
# new = "fused=True"
# ///
"""Songs that are heard together get vectors near each other (item2vec, 80,000 rows in two tables); Accelerate."""

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, Dataset

torch.manual_seed(25)
SONGS, DIM, PAIRS, NEGATIVES = 40_000, 32, 30_000, 6


class Heard(Dataset):
    """Pairs of songs out of the same session; a whole batch is looked up at once."""

    def __init__(self):
        self.song = torch.randint(0, SONGS, (PAIRS,))
        self.other = (self.song + torch.randint(-20, 21, (PAIRS,))) % SONGS

    def __len__(self):
        return PAIRS

    def __getitems__(self, indices):
        i = torch.tensor(indices)
        return {"song": self.song[i], "other": self.other[i]}


class Item2Vec(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Embedding(SONGS, DIM), nn.Embedding(SONGS, DIM)
        nn.init.normal_(self.inner.weight, std=0.05)
        nn.init.zeros_(self.outer.weight)

    def forward(self, song, other):
        wrong = torch.randint(0, SONGS, (len(song), NEGATIVES))
        candidates = self.outer(torch.cat([other.unsqueeze(1), wrong], 1))
        scores = (candidates * self.inner(song).unsqueeze(1)).sum(-1)
        return nn.functional.cross_entropy(scores, torch.zeros(len(song), dtype=torch.long))


def optimizer_for(model, weight_decay=0.01):
    return torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=weight_decay, foreach=True)


# %% the training cell
accelerator = Accelerator(cpu=True)
model = Item2Vec()
optimizer = optimizer_for(model)
loader = DataLoader(Heard(), batch_size=256, shuffle=True, collate_fn=lambda batch: batch)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for epoch in range(2):
    for batch in loader:
        optimizer.zero_grad()
        loss = model(**batch)
        accelerator.backward(loss)
        optimizer.step()
    accelerator.print(f"epoch {epoch} loss {loss.item():.3f}")
