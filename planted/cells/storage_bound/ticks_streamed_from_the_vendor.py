# /// cell
# causes = ["storage_bound"]
# because = "a generator asks the vendor for one page of ticks at a time and waits 18 ms for each"
# batch = 50
# steps = 40
# warmup = 8
# cohort = "2026-11-23"
# looked_at = true
#
# [[cure]]
# old = "for page in iter_pages(api, PAGES):"
# new = "for page in prefetch(api, PAGES):"
# ///
# %% [markdown]
# ### Mid-price moves from the order book (DeepLOB-ish)
# Vendor gives max. 50 snapshots per request. Took the pagination code from their docs.

# %%
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import nn

LEVELS, PAGES = 10, 260


class VendorApi:
    """offline mock of the REST client (rate and latency as measured on a Tuesday)"""

    def get_snapshots(self, page, limit=50):
        rs = np.random.default_rng(page)
        book = rs.normal(size=(limit, 100, 4 * LEVELS)).astype("f4")
        time.sleep(0.018)
        return {"page": page, "book": book, "move": rs.integers(0, 3, limit)}


def iter_pages(api, n):
    for page in range(n):
        yield api.get_snapshots(page)


def prefetch(api, n, ahead=6):
    """same, but asks for the next pages while this one is used"""
    with ThreadPoolExecutor(ahead) as pool:
        pending = [pool.submit(api.get_snapshots, p) for p in range(min(ahead, n))]
        for page in range(n):
            if page + ahead < n:
                pending.append(pool.submit(api.get_snapshots, page + ahead))
            yield pending.pop(0).result()


class LobNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.spread = nn.Conv2d(1, 8, (1, 2), stride=(1, 2))
        self.levels = nn.Conv2d(8, 16, (1, 2 * LEVELS), stride=1)
        self.time = nn.Conv1d(16, 32, 8, stride=4)
        self.out = nn.Linear(32, 3)

    def forward(self, x):
        x = nn.functional.leaky_relu(self.spread(x[:, None]), 0.01)
        x = nn.functional.leaky_relu(self.levels(x), 0.01).squeeze(3)
        return self.out(nn.functional.leaky_relu(self.time(x), 0.01).mean(2))


torch.manual_seed(17)
api = VendorApi()
lobnet = LobNet()

# %% the training cell
optimizer = torch.optim.Adam(lobnet.parameters(), lr=1e-3, eps=1.0, fused=True)
seen = right = 0
for page in iter_pages(api, PAGES):
    book, move = torch.from_numpy(page["book"]), torch.from_numpy(page["move"])
    scores = lobnet(book)
    loss = nn.functional.cross_entropy(scores, move)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    seen += len(move)
    right += (scores.argmax(-1) == move).sum().item()
    if page["page"] % 80 == 0:
        print(page["page"], f"acc={right / seen:.3f}")
