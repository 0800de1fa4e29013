# /// cell
# causes = ["checkpoint_save"]
# because = "a callback writes weights and the optimizer's state after every third step"
# framework = "transformers"
# batch = 16
# warmup = 6
# cohort = "2026-11-22b"
#
# [[cure]]
# old = "every=3"
# new = "every=1000"
# ///
"""Postal addresses parted into street, number, town and so on by a small DistilBERT of its own vocabulary."""

import os
import tempfile
from pathlib import Path

import torch
from torch.utils.data import Dataset
from transformers import (
    DistilBertConfig,
    DistilBertForTokenClassification,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

set_seed(72)
PIECES, FIELDS, LENGTH = 16_000, 8, 24


class Addresses(Dataset):
    """Fields in the order of the country, each of a few word pieces that mostly are its own."""

    def __init__(self, count):
        edges = torch.sort(torch.randint(1, LENGTH, (count, FIELDS - 1))).values
        self.fields = (torch.arange(LENGTH)[None, :, None] >= edges[:, None, :]).sum(-1)
        own = PIECES // FIELDS
        self.pieces = self.fields * own + torch.randint(0, own, (count, LENGTH))
        foreign = torch.rand(count, LENGTH) < 0.1
        self.pieces[foreign] = torch.randint(0, PIECES, (int(foreign.sum()),))

    def __len__(self):
        return len(self.pieces)

    def __getitem__(self, i):
        return {"input_ids": self.pieces[i], "labels": self.fields[i]}


class LastState(TrainerCallback):
    """Keeps weights and optimizer, so that a run can go on in another session."""

    def __init__(self, folder, every):
        self.path = Path(folder) / "last.pt"
        self.every = every

    def on_step_end(self, args, state, control, model=None, optimizer=None, lr_scheduler=None, **kwargs):
        if state.global_step % self.every:
            return
        partial = self.path.with_suffix(".partial")
        torch.save(
            {
                "global_step": state.global_step,
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "lr_scheduler": lr_scheduler.state_dict(),
            },
            partial,
        )
        os.replace(partial, self.path)


addresses = Addresses(3200)
folder = tempfile.mkdtemp()

# %% the training cell
model = DistilBertForTokenClassification(
    DistilBertConfig(
        vocab_size=PIECES,
        max_position_embeddings=LENGTH,
        dim=192,
        n_layers=3,
        n_heads=4,
        hidden_dim=384,
        num_labels=FIELDS,
    )
)
args = TrainingArguments(
    output_dir=folder,
    num_train_epochs=2,
    per_device_train_batch_size=16,
    learning_rate=5e-4,
    optim="adamw_torch_fused",
    save_strategy="no",
    logging_strategy="no",
    report_to="none",
    disable_tqdm=True,
    use_cpu=True,
    dataloader_pin_memory=False,
)
trainer = Trainer(model=model, args=args, train_dataset=addresses, callbacks=[LastState(folder, every=3)])
trainer.train()
