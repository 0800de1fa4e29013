# /// cell
# causes = ["storage_bound"]
# because = "four passages of each of 16 queries wait 1.2 ms for the server, one after the other"
# also = ["data_starved"]
# framework = "lightning"
# batch = 16
# warmup = 15
# cohort = "2026-11-21d"
# looked_at = true
#
# [[cure]]
# old = "num_workers=0"
# new = "num_workers=4, persistent_workers=True"
# ///
"""Two towers for passage retrieval in Lightning; each query's passages are asked from the document server in turn."""

import random
import time

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

L.seed_everything(300, verbose=False)
VOCABULARY, QUERIES, PASSAGES = 4000, 480, 900


class DocumentServer:
    """Answers after a moment."""

    def __init__(self, count, length=64):
        generator = torch.Generator().manual_seed(3)
        self._documents = torch.randint(1, VOCABULARY, (count, length), generator=generator)

    def fetch(self, passage_id):
        time.sleep(0.0012)
        return self._documents[passage_id]


class QueryDataset(Dataset):
    def __init__(self, server, negatives=3):
        rng = random.Random(300)
        self.server = server
        self.queries = torch.randint(1, VOCABULARY, (QUERIES, 12))
        self.relevant = [rng.randrange(PASSAGES) for _ in range(QUERIES)]
        self.mined = [rng.sample(range(PASSAGES), negatives) for _ in range(QUERIES)]

    def __len__(self):
        return len(self.queries)

    def __getitem__(self, q):
        positive = self.server.fetch(self.relevant[q])
        hard = [self.server.fetch(p) for p in self.mined[q]]
        return self.queries[q], torch.stack([positive, *hard])


class Tower(nn.Module):
    def __init__(self, width=96):
        super().__init__()
        self.words = nn.EmbeddingBag(VOCABULARY, width, mode="mean")
        self.mlp = nn.Sequential(nn.Linear(width, 256), nn.ReLU(), nn.Linear(256, 128))

    def forward(self, ids):
        return F.normalize(self.mlp(self.words(ids)), dim=-1)


class BiEncoder(L.LightningModule):
    def __init__(self, temperature=0.05):
        super().__init__()
        self.query_tower, self.passage_tower = Tower(), Tower()
        self.temperature = temperature

    def training_step(self, batch, batch_idx):
        queries, passages = batch
        q = self.query_tower(queries)
        p = self.passage_tower(passages.flatten(0, 1))
        scores = q @ p.T / self.temperature
        target = torch.arange(len(q)) * passages.shape[1]
        loss = F.cross_entropy(scores, target)
        self.log("train/loss", loss, on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=300)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


# %% the training cell
train_dl = DataLoader(QueryDataset(DocumentServer(PASSAGES)), batch_size=16, shuffle=True, num_workers=0)
trainer = L.Trainer(
    accelerator="cpu",
    max_epochs=10,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(BiEncoder(), train_dataloaders=train_dl)
