# /// cell
# causes = ["storage_bound"]
# because = "every eighth sequence waits 12 ms for its shard, in the training process"
# also = ["data_starved"]
# batch = 16
# steps = 24
# warmup = 12
# cohort = "2026-11-21b"
# looked_at = true
#
# [[cure]]
# old = "DataLoader(Stream(), batch_size=16)"
# new = "DataLoader(Stream(), batch_size=16, num_workers=4)"
# ///
"""A small GPT that streams its tokens, shard by shard, from an object store."""

import time

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

VOCABULARY, LENGTH = 256, 64
tokens = np.memmap("tokens.bin", dtype=np.uint16, mode="w+", shape=(400_000,))
tokens[:] = np.random.default_rng(0).integers(0, VOCABULARY, 400_000)
tokens.flush()


def download(shard):
    """A range request; the store answers after a while."""
    time.sleep(0.012)
    begin = shard * LENGTH * 8
    return np.asarray(tokens[begin : begin + LENGTH * 8 + 1], dtype=np.int64)


class Stream(IterableDataset):
    def __iter__(self):
        worker = get_worker_info()
        first, every = (0, 1) if worker is None else (worker.id, worker.num_workers)
        for shard in range(first, 700, every):
            chunk = torch.from_numpy(download(shard))
            for i in range(8):
                yield chunk[i * LENGTH : (i + 1) * LENGTH], chunk[i * LENGTH + 1 : (i + 1) * LENGTH + 1]


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.ln1(x)).chunk(3, -1))
        h = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(h.transpose(1, 2).flatten(2))
        return x + self.mlp(self.ln2(x))


class GPT(nn.Module):
    def __init__(self, width=96, layers=2):
        super().__init__()
        self.tok, self.pos = nn.Embedding(VOCABULARY, width), nn.Embedding(LENGTH, width)
        self.blocks = nn.Sequential(*(Block(width, 4) for _ in range(layers)))
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, idx, targets):
        x = self.tok(idx) + self.pos(torch.arange(idx.shape[1]))
        logits = self.head(self.blocks(x))
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


torch.manual_seed(0)
gpt = GPT()
optimizer = torch.optim.AdamW(gpt.parameters(), lr=3e-4, fused=True)

# %% the training cell
loader = DataLoader(Stream(), batch_size=16)
for idx, targets in loader:
    loss = gpt(idx, targets)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    nn.utils.clip_grad_norm_(gpt.parameters(), 1.0)
    optimizer.step()
