"""Trains a tiny GPT-2 from its configuration with Hugging Face's Trainer, as the library's documentation has it."""

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

BLOCK, VOCABULARY = 64, 256


class Blocks(Dataset):
    def __init__(self, count):
        generator = torch.Generator().manual_seed(0)
        self.tokens = torch.randint(0, VOCABULARY, (count, BLOCK), generator=generator)

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


config = GPT2Config(
    vocab_size=VOCABULARY,
    n_positions=BLOCK,
    n_embd=64,
    n_layer=3,
    n_head=4,
    use_cache=False,
    bos_token_id=0,
    eos_token_id=0,
)
model = GPT2LMHeadModel(config)
training_args = TrainingArguments(
    output_dir="out",
    per_device_train_batch_size=8,
    max_steps=400,
    learning_rate=5e-4,
    logging_steps=50,
    save_strategy="no",
    report_to="none",
)
trainer = Trainer(model=model, args=training_args, train_dataset=Blocks(800))
trainer.train()
