# /// cell
# causes = ["slow_collate"]
# because = "two numbers of each of 2700 pairs of boxes of a batch are set one by one"
# framework = "transformers"
# batch = 8
# steps = 24
# warmup = 12
# cohort = "2026-11-21c"
# looked_at = true
#
# [[cure]]
# old = "data_collator=collate_with_relations,"
# new = "data_collator=collate_with_relations_fast,"
# ///
"""Labels for the words of a receipt, from their boxes: the collator works out how any two boxes lie. Trainer."""

import random

import torch
from torch import nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments, set_seed

set_seed(13)
WORDS, LABELS, LONGEST = 500, 6, 24


def receipt():
    n = random.randint(12, LONGEST)
    boxes = [
        (random.random(), random.random(), random.uniform(0.02, 0.2), random.uniform(0.01, 0.05)) for _ in range(n)
    ]
    return {
        "words": [random.randrange(1, WORDS) for _ in range(n)],
        "boxes": boxes,
        "tags": [int(6 * y) for _, y, _, _ in boxes],
    }


class Receipts(Dataset):
    def __init__(self, receipts):
        self.receipts = receipts

    def __len__(self):
        return len(self.receipts)

    def __getitem__(self, i):
        return self.receipts[i]


def padded(features):
    words, tags = torch.zeros(len(features), LONGEST, dtype=torch.long), torch.full((len(features), LONGEST), -100)
    for row, f in enumerate(features):
        words[row, : len(f["words"])] = torch.tensor(f["words"])
        tags[row, : len(f["tags"])] = torch.tensor(f["tags"])
    return words, tags


def collate_with_relations(features):
    words, tags = padded(features)
    relations = torch.zeros(len(features), LONGEST, LONGEST, 2)
    for row, f in enumerate(features):
        for i, (xi, yi, wi, hi) in enumerate(f["boxes"]):
            for j, (xj, yj, _, _) in enumerate(f["boxes"]):
                relations[row, i, j, 0] = (xj - xi) / wi
                relations[row, i, j, 1] = (yj - yi) / hi
    return {"words": words, "relations": relations.clamp(-10, 10), "labels": tags}


def collate_with_relations_fast(features):
    words, tags = padded(features)
    boxes = torch.ones(len(features), LONGEST, 4)
    for row, f in enumerate(features):
        boxes[row, : len(f["boxes"])] = torch.tensor(f["boxes"])
    at, size = boxes[..., :2], boxes[..., 2:]
    relations = (at[:, None] - at[:, :, None]) / size[:, :, None]
    return {"words": words, "relations": relations.clamp(-10, 10), "labels": tags}


class SpatialTagger(nn.Module):
    """Self-attention with a bias from where the words are to each other."""

    def __init__(self, dim=96, heads=4, layers=2):
        super().__init__()
        self.embed, self.bias = nn.Embedding(WORDS, dim), nn.Linear(2, heads)
        self.qkv = nn.ModuleList(nn.Linear(dim, 3 * dim) for _ in range(layers))
        self.mlp = nn.ModuleList(
            nn.Sequential(nn.Linear(dim, 3 * dim), nn.ReLU(), nn.Linear(3 * dim, dim)) for _ in range(layers)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(layers))
        self.heads, self.head = heads, nn.Linear(dim, LABELS)

    def forward(self, words, relations, labels):
        x, bias = self.embed(words), self.bias(relations).permute(0, 3, 1, 2)
        for qkv, mlp, norm in zip(self.qkv, self.mlp, self.norms, strict=True):
            q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in qkv(norm(x)).chunk(3, -1))
            x = x + nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias).transpose(1, 2).flatten(2)
            x = x + mlp(x)
        logits = self.head(x)
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


data = Receipts([receipt() for _ in range(320)])

# %% the training cell
args = TrainingArguments(
    output_dir="receipts", num_train_epochs=8, per_device_train_batch_size=8, learning_rate=1e-3, max_grad_norm=1.0,
    weight_decay=0.01, logging_steps=80, save_strategy="no", report_to="none", use_cpu=True, disable_tqdm=True,
    dataloader_pin_memory=False, remove_unused_columns=False,
)  # fmt: skip
trainer = Trainer(
    model=SpatialTagger(),
    args=args,
    train_dataset=data,
    data_collator=collate_with_relations,
)
trainer.train()
