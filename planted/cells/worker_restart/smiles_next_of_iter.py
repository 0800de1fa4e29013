# /// cell
# causes = ["worker_restart"]
# because = "next(iter(loader)) starts a worker process for each batch, which it uses for one batch"
# batch = 64
# steps = 16
# warmup = 4
# cohort = "2026-11-23"
# looked_at = true
#
# [[cure]]
# old = "loader = DataLoader(mols, batch_size=64, shuffle=True, num_workers=1)\n"
# new = "loader = DataLoader(mols, batch_size=64, shuffle=True, num_workers=1)\nbatches = endless(loader)\n"
#
# [[cure]]
# old = "tokens, mask = next(iter(loader))"
# new = "tokens, mask = next(batches)"
# ///
# generative model for small molecules, step 1: language model on SMILES, 100k updates in the paper, here a short run
# TODO sampling, validity with rdkit, RL fine-tuning

import random

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, Dataset

FRAGMENTS = ["C", "CC", "c1ccccc1", "N", "O", "C(=O)", "C(=O)N", "Cl", "F", "c1ccncc1", "S(=O)(=O)", "C#N", "OC"]
chars = sorted(set("".join(FRAGMENTS)))
stoi = {c: i + 1 for i, c in enumerate(chars)}
MAXLEN = 48


class Smiles(Dataset):
    def __init__(self, n):
        r = random.Random(n)
        self.strings = ["".join(r.choices(FRAGMENTS, k=r.randint(3, 8)))[: MAXLEN - 1] for _ in range(n)]

    def __len__(self):
        return len(self.strings)

    def __getitem__(self, i):
        s = self.strings[i]
        t = torch.zeros(MAXLEN, dtype=torch.long)
        t[: len(s)] = torch.tensor([stoi[c] for c in s])
        return t, torch.arange(MAXLEN) < len(s)


def endless(dl):
    while True:
        yield from dl


class Lm(nn.Module):
    def __init__(self, hid=128):
        super().__init__()
        self.emb = nn.Embedding(len(chars) + 1, 32)
        self.gru = nn.GRU(32, hid, batch_first=True)
        self.out = nn.Linear(hid, len(chars) + 1)

    def forward(self, t):
        return self.out(self.gru(self.emb(t))[0])


torch.manual_seed(2)
mols = Smiles(20000)
lm = Lm()

# %% the training cell
loader = DataLoader(mols, batch_size=64, shuffle=True, num_workers=1)
opt = torch.optim.Adam(lm.parameters(), lr=1e-3, fused=True)
for update in range(100):
    tokens, mask = next(iter(loader))
    logits = lm(tokens[:, :-1])
    nll = nn.functional.cross_entropy(logits.transpose(1, 2), tokens[:, 1:], reduction="none")
    loss = (nll * mask[:, 1:]).sum() / mask[:, 1:].sum()
    opt.zero_grad()
    loss.backward()
    opt.step()
    if update % 25 == 0:
        print(update, f"{loss.item():.3f} nats/char")
