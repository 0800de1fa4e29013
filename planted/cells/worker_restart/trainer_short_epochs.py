# /// cell
# causes = ["worker_restart"]
# because = "an epoch of 6 steps, and each starts two processes anew"
# framework = "transformers"
# batch = 8
# steps = 48
# warmup = 6
# profiled = 100
# cohort = "2026-11-21b"
# looked_at = true
#
# [[cure]]
# old = "dataloader_persistent_workers=False"
# new = "dataloader_persistent_workers=True"
# ///
"""A handful of examples, many epochs, two data loading processes; the Hugging Face Trainer."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

ids = torch.randint(0, 100, (48, 32), generator=torch.Generator().manual_seed(0))
examples = [{"input_ids": row, "labels": row} for row in ids]
model = GPT2LMHeadModel(
    GPT2Config(vocab_size=100, n_positions=32, n_embd=64, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0)
)

# %% the training cell
arguments = TrainingArguments(
    output_dir="few_shot",
    num_train_epochs=100,
    per_device_train_batch_size=8,
    dataloader_num_workers=2,
    dataloader_persistent_workers=False,
    dataloader_pin_memory=False,
    logging_strategy="no",
    save_strategy="no",
    report_to="none",
    use_cpu=True,
    disable_tqdm=True,
)
Trainer(model=model, args=arguments, train_dataset=examples).train()
