# /// cell
# causes = ["slow_collate"]
# because = "24,576 items of a batch are drawn one by one"
# framework = "transformers"
# batch = 32
# steps = 40
# warmup = 10
# cohort = "2026-11-21d"
#
# [[cure]]
# old = "data_collator=NegativeSamplingCollator"
# new = "data_collator=FastNegativeSamplingCollator"
# ///
"""Next item in a shopping session with the Trainer; the data collator draws what was not bought, one by one."""

import random
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments, set_seed

set_seed(99)
ITEMS, CLICKS, NEGATIVES = 3000, 24, 32


class Sessions(Dataset):
    def __init__(self, count):
        rng = random.Random(99)
        self.sessions = []
        for _ in range(count):
            taste = rng.randrange(1, ITEMS - 200)
            self.sessions.append([taste + rng.randrange(200) for _ in range(CLICKS + 1)])

    def __len__(self):
        return len(self.sessions)

    def __getitem__(self, i):
        return {"session": self.sessions[i]}


@dataclass
class NegativeSamplingCollator:
    """Inputs, next items, and for each of these items that the customer did not look at."""

    negatives: int

    def __call__(self, features):
        clicked, bought, others = [], [], []
        for feature in features:
            session = feature["session"]
            seen = set(session)
            clicked.append(session[:-1])
            bought.append(session[1:])
            rows = []
            for _ in session[1:]:
                row = []
                while len(row) < self.negatives:
                    item = random.randint(1, ITEMS - 1)
                    if item not in seen:
                        row.append(item)
                rows.append(row)
            others.append(rows)
        return {
            "clicked": torch.tensor(clicked),
            "bought": torch.tensor(bought),
            "others": torch.tensor(others),
        }


@dataclass
class FastNegativeSamplingCollator:
    negatives: int

    def __call__(self, features):
        sessions = torch.tensor([feature["session"] for feature in features])
        others = torch.randint(1, ITEMS, (len(sessions), CLICKS, self.negatives))
        hit = (others.flatten(1)[:, :, None] == sessions[:, None]).any(-1).view_as(others)
        others = torch.where(hit, others % (ITEMS - 1) + 1, others)
        return {"clicked": sessions[:, :-1], "bought": sessions[:, 1:], "others": others}


class SessionModel(nn.Module):
    """A GRU over the clicks; scores are products with the items' vectors."""

    def __init__(self, dim=24):
        super().__init__()
        self.items = nn.Embedding(ITEMS, dim)
        self.gru = nn.GRU(dim, dim, batch_first=True)

    def forward(self, clicked, bought, others):
        state, _ = self.gru(self.items(clicked))
        candidates = self.items(torch.cat([bought[..., None], others], dim=-1))
        scores = torch.einsum("bld,blcd->blc", state, candidates)
        loss = F.cross_entropy(scores.flatten(0, 1), scores.new_zeros(bought.numel(), dtype=torch.long))
        return {"loss": loss, "logits": scores}


# %% the training cell
trainer = Trainer(
    model=SessionModel(),
    args=TrainingArguments(
        output_dir="sessions",
        max_steps=240,
        per_device_train_batch_size=32,
        learning_rate=2e-3,
        optim="sgd",
        max_grad_norm=0.0,
        logging_steps=120,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        dataloader_pin_memory=False,
        remove_unused_columns=False,
    ),
    train_dataset=Sessions(640),
    data_collator=NegativeSamplingCollator(negatives=NEGATIVES),
)
trainer.train()
