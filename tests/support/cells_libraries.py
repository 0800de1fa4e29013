"""Cells in the words of the libraries that people train with; models from configurations, nothing is downloaded."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset

from tests.support.cells_plain import Kept, data, model


def accelerated(keep: Kept) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    net = model(keep)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    loader = DataLoader(data(42), batch_size=4, shuffle=True)
    net, optimizer, loader = accelerator.prepare(net, optimizer, loader)
    for _epoch in range(2):
        for x, y in loader:
            optimizer.zero_grad()
            accelerator.backward(cross_entropy(net(x), y))
            optimizer.step()


def accelerated_accumulation(keep: Kept) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    net = model(keep)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    loader = DataLoader(data(64), batch_size=4, shuffle=True)
    net, optimizer, loader = accelerator.prepare(net, optimizer, loader)
    for _epoch in range(2):
        for x, y in loader:
            with accelerator.accumulate(net):
                accelerator.backward(cross_entropy(net(x), y))
                optimizer.step()
                optimizer.zero_grad()


def lightning_trainer(keep: Kept, folder: Path, *, checked: bool = True) -> None:
    import lightning.pytorch as pl

    class Classifier(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = model(keep)

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            x, y = batch
            return cross_entropy(self.net(x), y)

        def validation_step(self, batch: Any, _: int) -> None:
            x, y = batch
            self.log("val_loss", cross_entropy(self.net(x), y))

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = pl.Trainer(
            max_epochs=2,
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            num_sanity_val_steps=2 if checked else 0,
            default_root_dir=folder,
        )
        train, val = DataLoader(data(50), batch_size=5, shuffle=True), DataLoader(data(30), batch_size=10)
        trainer.fit(Classifier(), train, val if checked else None)


class Sentences(Dataset[Any]):
    """Token sequences with a pattern to learn."""

    def __init__(self, count: int) -> None:
        self.tokens = torch.arange(count * 8).reshape(count, 8) % 13

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[i], "labels": self.tokens[i]}


def hugging_face_trainer(keep: Kept, folder: Path, *, accumulation: int = 1, evaluate: bool = True) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    config = GPT2Config(vocab_size=13, n_positions=8, n_embd=8, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
    net: nn.Module = GPT2LMHeadModel(config)
    keep.append(net)
    arguments = TrainingArguments(
        output_dir=str(folder),
        num_train_epochs=2,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=accumulation,
        eval_strategy="epoch" if evaluate else "no",
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        logging_strategy="no",
        dataloader_pin_memory=False,
    )
    Trainer(model=net, args=arguments, train_dataset=Sentences(32), eval_dataset=Sentences(12)).train()
