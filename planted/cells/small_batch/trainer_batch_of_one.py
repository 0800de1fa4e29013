# /// cell
# causes = ["small_batch"]
# because = "a step for one short sequence costs nearly as much as one for 16"
# framework = "transformers"
# cured_batch = 16
# steps = 60
# profiled = 100
# cohort = "2026-11-21a"
# looked_at = true
#
# [[cure]]
# old = "per_device_train_batch_size=1"
# new = "per_device_train_batch_size=16"
# ///
"""One short sequence at a time, as the memory of another machine had asked for; the Hugging Face Trainer."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

model = GPT2LMHeadModel(
    GPT2Config(vocab_size=90, n_positions=16, n_embd=48, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
)
ids = torch.randint(0, 90, (4000, 16), generator=torch.Generator().manual_seed(0))

# %% the training cell
arguments = TrainingArguments(
    output_dir="one",
    num_train_epochs=1,
    per_device_train_batch_size=1,
    save_strategy="no",
    logging_strategy="no",
    report_to="none",
    use_cpu=True,
    disable_tqdm=True,
    dataloader_pin_memory=False,
)
Trainer(model=model, args=arguments, train_dataset=[{"input_ids": row, "labels": row} for row in ids]).train()
