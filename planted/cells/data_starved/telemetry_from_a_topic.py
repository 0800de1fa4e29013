# /// cell
# causes = ["data_starved"]
# because = "one reader waits 40 ms for each batch, while a step takes a few milliseconds"
# also = ["storage_bound"]
# batch = 64
# steps = 40
# warmup = 12
# cohort = "2026-11-21d"
#
# [[cure]]
# old = "readers=1), batch_size=None"
# new = "readers=6), batch_size=None"
# ///
"""Wear of turbine blades, trained online: batches come through a queue that one reader of the message topic fills."""

import queue
import threading
import time

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

torch.manual_seed(12)
SENSORS, BATCH = 96, 64


class Topic:
    """Messages of one turbine each; the broker hands out a poll's worth when it has it."""

    def __init__(self, wait=0.04):
        self.wait = wait

    def poll(self, offset):
        time.sleep(self.wait)
        readings = np.random.default_rng(offset).standard_normal((BATCH, SENSORS), dtype=np.float32)
        return readings, np.abs(readings[:, ::8]).mean(1, keepdims=True)


class TopicReader(IterableDataset):
    def __init__(self, topic, batches, readers=1):
        self.topic, self.batches, self.readers = topic, batches, readers

    def _read(self, reader, messages, closed):
        for offset in range(reader, self.batches, self.readers):
            if closed.is_set():
                return
            messages.put(self.topic.poll(offset))

    def __iter__(self):
        messages, closed = queue.Queue(maxsize=8), threading.Event()
        for reader in range(self.readers):
            threading.Thread(target=self._read, args=(reader, messages, closed), daemon=True).start()
        try:
            for _ in range(self.batches):
                yield messages.get()
        finally:
            closed.set()
            while not messages.empty():
                messages.get()


class Wear(nn.Module):
    def __init__(self, width=512):
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(SENSORS, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 2)
        )

    def forward(self, x):
        mean, log_var = self.body(x).chunk(2, dim=1)
        return mean, log_var.exp()


model = Wear()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
nll = nn.GaussianNLLLoss()

# %% the training cell
stream = DataLoader(TopicReader(Topic(), batches=240, readers=1), batch_size=None)
drift = torch.zeros(())
for readings, wear in stream:
    mean, variance = model(readings)
    loss = nll(mean, wear, variance)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    drift = 0.98 * drift + 0.02 * loss.detach()
print(f"{drift:.4f}")
