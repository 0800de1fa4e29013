# /// cell
# causes = ["storage_bound"]
# because = "one worker asks the archive for each film and waits 4 ms, which for a batch is longer than the step"
# also = ["data_starved"]
# batch = 12
# steps = 40
# warmup = 12
# cohort = "2026-11-23"
#
# [[cure]]
# old = "num_workers: int = 1"
# new = "num_workers: int = 5"
# ///
import io
import time
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

# Pneumothorax yes/no. Films are in the PACS; DICOMweb is emulated because the notebook is public.


@dataclass
class TrainConfig:
    image_size: int = 64
    batch_size: int = 12
    num_workers: int = 1
    lr: float = 3e-4
    epochs: int = 2
    findings: tuple = ("none", "pneumothorax")
    widths: list = field(default_factory=lambda: [16, 32, 48])


class DicomWebClient:
    """Only `retrieve_instance`. The real archive needs 3-5 ms on the hospital's network."""

    def __init__(self, n_instances, size):
        self._n, self._size = n_instances, size

    def search_for_instances(self):
        return [f"1.2.826.0.1.3680043.{i}" for i in range(self._n)]

    def retrieve_instance(self, uid):
        sop = int(uid.rsplit(".", 1)[1])
        rng = np.random.default_rng(sop)
        pixels = rng.integers(0, 4096, (self._size, self._size), dtype=np.uint16)
        body = io.BytesIO(pixels.tobytes())
        time.sleep(0.004)
        return body


class ChestFilms(Dataset):
    def __init__(self, client: DicomWebClient, cfg: TrainConfig):
        self.client, self.cfg = client, cfg
        self.uids = client.search_for_instances()

    def __len__(self):
        return len(self.uids)

    def __getitem__(self, i):
        raw = self.client.retrieve_instance(self.uids[i]).read()
        pixels = np.frombuffer(raw, dtype=np.uint16).reshape(1, self.cfg.image_size, self.cfg.image_size)
        return torch.from_numpy(pixels.astype(np.float32) / 4095), i % len(self.cfg.findings)


def build_model(cfg: TrainConfig) -> nn.Module:
    layers, previous = [], 1
    for width in cfg.widths:
        layers += [nn.Conv2d(previous, width, 3, stride=2, padding=1), nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
        previous = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(previous, len(cfg.findings)))


cfg = TrainConfig()
films = ChestFilms(DicomWebClient(1200, cfg.image_size), cfg)

# %% the training cell
torch.manual_seed(1895)
model = build_model(cfg).train()
optimizer = torch.optim.AdamW(model.parameters(), lr=cfg.lr, fused=True)
train_loader = DataLoader(
    films, cfg.batch_size, shuffle=True, num_workers=cfg.num_workers, persistent_workers=True, drop_last=True
)
for epoch in range(cfg.epochs):
    meter = []
    for pixels, finding in train_loader:
        loss = nn.functional.cross_entropy(model(pixels), finding)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        meter.append(loss.detach())
    print(f"epoch {epoch + 1:>2}/{cfg.epochs}: {torch.stack(meter).mean():.4f}")
