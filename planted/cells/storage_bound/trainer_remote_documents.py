# /// cell
# causes = ["storage_bound"]
# because = "each of 8 documents waits 6 ms for the server, one after the other"
# also = ["data_starved"]
# framework = "transformers"
# batch = 8
# steps = 20
# warmup = 12
# cohort = "2026-11-21a"
# looked_at = true
#
# [[cure]]
# old = "dataloader_num_workers=0"
# new = "dataloader_num_workers=4, dataloader_persistent_workers=True"
# ///
"""Documents behind a slow connection, for a small GPT-2; the Hugging Face Trainer trains."""

import time

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments


class Documents(Dataset):
    def __init__(self, count, length):
        make = torch.Generator().manual_seed(0)
        self.tokens = torch.randint(0, 200, (count, length), generator=make)

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, i):
        time.sleep(0.006)  # stands for a request to the document server
        return {"input_ids": self.tokens[i], "labels": self.tokens[i]}


config = GPT2Config(vocab_size=200, n_positions=64, n_embd=64, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0)
model = GPT2LMHeadModel(config)

# %% the training cell
arguments = TrainingArguments(
    output_dir="out",
    num_train_epochs=4,
    per_device_train_batch_size=8,
    dataloader_num_workers=0,
    dataloader_pin_memory=False,
    save_strategy="no",
    logging_strategy="no",
    report_to="none",
    use_cpu=True,
    disable_tqdm=True,
)
Trainer(model=model, args=arguments, train_dataset=Documents(640, 64)).train()
