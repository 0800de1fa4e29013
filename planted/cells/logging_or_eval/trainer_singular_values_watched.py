# /// cell
# causes = ["logging_or_eval"]
# because = "the singular values of twelve matrices after each step"
# framework = "transformers"
# batch = 8
# steps = 24
# cohort = "2026-11-21d"
# looked_at = true
#
# [[cure]]
# old = 'RankWatch(FOLDER / "ranks.csv")'
# new = 'RankWatch(FOLDER / "ranks.csv", look_every=1000)'
# ///
"""A tagger of names in sentences; a callback keeps an eye on the rank of each weight matrix; transformers' Trainer."""

import csv
import tempfile
from pathlib import Path

import torch
from transformers import (
    DistilBertConfig,
    DistilBertForTokenClassification,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

set_seed(8)
FOLDER = Path(tempfile.mkdtemp())
config = DistilBertConfig(
    vocab_size=400, max_position_embeddings=32, dim=128, hidden_dim=512, n_layers=2, n_heads=4, num_labels=5
)


def sentences(count, length=32):
    words = torch.randint(1, 400, (count, length))
    tags = words % 5
    tags[:, 0] = -100
    here = torch.ones(length, dtype=torch.long)
    return [{"input_ids": words[i], "attention_mask": here, "labels": tags[i]} for i in range(count)]


class RankWatch(TrainerCallback):
    """The effective rank of the matrices, as a table with a row per look."""

    def __init__(self, path, look_every=1):
        self.path, self.look_every = path, look_every

    def on_train_begin(self, args, state, control, **kwargs):
        self.rows = []

    @torch.no_grad()
    def on_step_end(self, args, state, control, model=None, **kwargs):
        if state.global_step % self.look_every:
            return
        row = [state.global_step]
        for name, weight in model.named_parameters():
            if weight.ndim == 2 and "layer" in name:
                share = torch.linalg.svdvals(weight)
                share = share / share.sum()
                row.append(torch.exp(-(share * share.clamp(min=1e-12).log()).sum()).item())
        self.rows.append(row)

    def on_train_end(self, args, state, control, **kwargs):
        with open(self.path, "w", newline="") as file:
            csv.writer(file).writerows(self.rows)


# %% the training cell
trainer = Trainer(
    model=DistilBertForTokenClassification(config),
    args=TrainingArguments(
        output_dir=str(FOLDER / "tagger"),
        max_steps=160,
        per_device_train_batch_size=8,
        learning_rate=5e-4,
        lr_scheduler_type="cosine",
        optim="adamw_torch_fused",
        logging_steps=40,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        dataloader_pin_memory=False,
    ),
    train_dataset=sentences(640),
    callbacks=[RankWatch(FOLDER / "ranks.csv")],
)
trainer.train()
