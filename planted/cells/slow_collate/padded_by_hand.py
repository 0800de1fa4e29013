# /// cell
# causes = ["slow_collate"]
# because = "the batch is padded number by number in Python"
# batch = 64
# warmup = 12
# cohort = "2026-11-21a"
# looked_at = true
#
# [[cure]]
# old = "collate_fn=collate_by_hand"
# new = "collate_fn=collate_padded"
# ///
"""Sentences of different lengths for an LSTM; the batches are padded number by number."""

import numpy as np
import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset


class Reviews(Dataset):
    def __init__(self, count, vocabulary=500):
        rng = np.random.default_rng(0)
        self.texts = [torch.from_numpy(rng.integers(1, vocabulary, rng.integers(20, 60))) for _ in range(count)]

    def __len__(self):
        return len(self.texts)

    def __getitem__(self, index):
        return self.texts[index], index % 2


def collate_by_hand(items):
    longest = max(len(text) for text, _ in items)
    rows = []
    for text, _ in items:
        row = []
        for position in range(longest):
            row.append(int(text[position]) if position < len(text) else 0)
        rows.append(row)
    return torch.tensor(rows), torch.tensor([label for _, label in items])


def collate_padded(items):
    return pad_sequence([text for text, _ in items], batch_first=True), torch.tensor([label for _, label in items])


class Sentiment(nn.Module):
    def __init__(self, vocabulary=500, width=32):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, width, batch_first=True)
        self.head = nn.Linear(width, 2)

    def forward(self, tokens):
        _, (hidden, _) = self.lstm(self.embed(tokens))
        return self.head(hidden[-1])


model = Sentiment()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

# %% the training cell
loader = DataLoader(Reviews(4096), batch_size=64, shuffle=True, collate_fn=collate_by_hand, drop_last=True)

for epoch in range(5):
    for tokens, labels in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(tokens), labels)
        loss.backward()
        optimizer.step()
