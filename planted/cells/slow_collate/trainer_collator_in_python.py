# /// cell
# causes = ["slow_collate"]
# because = "the collator sets each token and each label of the batch on its own"
# framework = "transformers"
# batch = 16
# steps = 24
# warmup = 12
# cohort = "2026-11-21a"
# looked_at = true
#
# [[cure]]
# old = "data_collator=masked)"
# new = "data_collator=masked_at_once)"
# ///
"""A collator that masks and pads in Python loops; the Hugging Face Trainer trains."""

import random

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

random.seed(0)
LINES = [[random.randrange(1, 150) for _ in range(random.randint(30, 64))] for _ in range(1024)]


class Lines(Dataset):
    def __len__(self):
        return len(LINES)

    def __getitem__(self, i):
        return {"input_ids": LINES[i]}


def masked(items):
    """Pads to the longest, and leaves one in ten out of the loss."""
    longest = max(len(item["input_ids"]) for item in items)
    inputs = torch.zeros(len(items), longest, dtype=torch.long)
    labels = torch.full((len(items), longest), -100)
    for row, item in enumerate(items):
        for column, token in enumerate(item["input_ids"]):
            inputs[row, column] = token
            if random.random() > 0.1:
                labels[row, column] = token
    return {"input_ids": inputs, "labels": labels}


def masked_at_once(items):
    inputs = torch.nn.utils.rnn.pad_sequence([torch.tensor(item["input_ids"]) for item in items], batch_first=True)
    labels = inputs.masked_fill((torch.rand(inputs.shape) < 0.1) | (inputs == 0), -100)
    return {"input_ids": inputs, "labels": labels}


config = GPT2Config(vocab_size=150, n_positions=64, n_embd=32, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
model = GPT2LMHeadModel(config)
arguments = TrainingArguments(
    output_dir="out", num_train_epochs=10, per_device_train_batch_size=16, save_strategy="no", report_to="none",
    logging_strategy="no", use_cpu=True, disable_tqdm=True, dataloader_pin_memory=False,
)  # fmt: skip

# %% the training cell
trainer = Trainer(model=model, args=arguments, train_dataset=Lines(), data_collator=masked)
trainer.train()
