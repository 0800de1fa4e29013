# /// cell
# causes = ["unfused_optimizer"]
# because = "AdamW goes a dozen times through five million weights, their gradients and their averages"
# batch = 256
# steps = 24
# warmup = 4
# cohort = "2026-11-23"
#
# [[cure]]
# old = "weight_decay=1e-5)"
# new = "weight_decay=1e-5, fused=True)"
# ///
"""Wide & Deep on (fake) ad clicks. Hash buckets, crosses, the usual."""

from __future__ import annotations

import time
import zlib

import torch
from torch import Tensor, nn

BUCKETS = 300_000
COLUMNS = ["site", "app", "device", "hour", "banner", "user", "site_x_banner", "user_x_hour"]


def bucket(column: str, value: object) -> int:
    return zlib.crc32(f"{column}={value}".encode()) % BUCKETS


def impressions(n: int, seed: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    raw = (torch.rand(n, 6, generator=g) ** 3 * torch.tensor([400, 300, 60, 24, 80, 5000])).long().tolist()
    hashed = [[bucket(c, v) for c, v in zip(COLUMNS, [*r, (r[0], r[4]), (r[5], r[3])], strict=True)] for r in raw]
    clicked = [float((r[0] * 7 + r[4] * 3 + r[3]) % 5 == 0) for r in raw]
    return torch.tensor(hashed), torch.tensor(clicked)


class WideAndDeep(nn.Module):
    def __init__(self, dim: int = 16) -> None:
        super().__init__()
        self.wide = nn.EmbeddingBag(BUCKETS, 1, mode="sum")
        self.table = nn.Embedding(BUCKETS, dim)
        self.deep = nn.Sequential(
            nn.Linear(dim * len(COLUMNS), 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 1)
        )
        nn.init.zeros_(self.wide.weight)
        nn.init.normal_(self.table.weight, std=0.01)

    def forward(self, ids: Tensor) -> Tensor:
        return (self.wide(ids) + self.deep(self.table(ids).flatten(1))).squeeze(1)


ids, clicks = impressions(12_800, seed=77)
torch.manual_seed(77)

# %% the training cell
model = WideAndDeep()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=1e-5)
tic = time.time()
for epoch in range(2):
    shuffled = torch.randperm(len(ids))
    for i in range(0, len(ids), 256):
        rows = shuffled[i : i + 256]
        loss = nn.functional.binary_cross_entropy_with_logits(model(ids[rows]), clicks[rows])
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch}: logloss {loss.item():.4f}, {time.time() - tic:.0f} s")
