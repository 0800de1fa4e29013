# /// cell
# causes = ["logging_or_eval"]
# because = "300 characters are sampled one after the other after every tenth step"
# framework = "accelerate"
# batch = 16
# steps = 40
# warmup = 10
# cohort = "2026-11-21a"
# looked_at = true
#
# [[cure]]
# old = "SAMPLE_EVERY = 10"
# new = "SAMPLE_EVERY = 10_000"
# ///
"""A character model that writes a sample of its text after every tenth step; Accelerate."""

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

text = torch.randint(0, 60, (800, 33), generator=torch.Generator().manual_seed(0))


class CharacterModel(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.embed = nn.Embedding(60, width)
        self.lstm = nn.LSTM(width, width, batch_first=True)
        self.head = nn.Linear(width, 60)

    def forward(self, ids, state=None):
        h, state = self.lstm(self.embed(ids), state)
        return self.head(h), state


@torch.no_grad()
def sample(model, length=300):
    ids, state = torch.zeros(1, 1, dtype=torch.long), None
    written = []
    for _ in range(length):
        logits, state = model(ids, state)
        ids = torch.multinomial(torch.softmax(logits[:, -1], -1), 1)
        written.append(chr(33 + int(ids)))
    return "".join(written)


SAMPLE_EVERY = 10

# %% the training cell
accelerator = Accelerator(cpu=True)
model = CharacterModel()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
loader = DataLoader(TensorDataset(text[:, :-1], text[:, 1:]), batch_size=16, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
step = 0
for epoch in range(6):
    for x, y in loader:
        optimizer.zero_grad()
        logits, _ = model(x)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten())
        accelerator.backward(loss)
        optimizer.step()
        step += 1
        if step % SAMPLE_EVERY == 0:
            accelerator.print(step, sample(model))
