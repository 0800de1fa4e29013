# /// cell
# causes = ["checkpoint_save", "unfused_optimizer"]
# because = "everything is written after each step, then 292 tensors are updated one by one"
# framework = "transformers"
# batch = 8
# steps = 12
# warmup = 3
# profiled = 40
# cohort = "2026-11-21b"
# looked_at = true
#
# [[cure]]
# old = "save_steps=1"
# new = "save_steps=1000"
#
# [[second_cure]]
# old = 'optim="adamw_torch"'
# new = 'optim="adamw_torch_fused"'
# ///
"""Saved after every other step, with AdamW's for-loop over 290 small tensors; the Hugging Face Trainer."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

model = GPT2LMHeadModel(
    GPT2Config(vocab_size=64, n_positions=12, n_embd=32, n_layer=24, n_head=2, bos_token_id=0, eos_token_id=0)
)
ids = torch.randint(0, 64, (400, 12), generator=torch.Generator().manual_seed(0))

# %% the training cell
arguments = TrainingArguments(
    output_dir="twice",
    num_train_epochs=10,
    per_device_train_batch_size=8,
    optim="adamw_torch",
    max_grad_norm=0.0,
    save_strategy="steps",
    save_steps=1,
    save_total_limit=2,
    logging_strategy="no",
    report_to="none",
    use_cpu=True,
    disable_tqdm=True,
    dataloader_pin_memory=False,
)
Trainer(model=model, args=arguments, train_dataset=[{"input_ids": row, "labels": row} for row in ids]).train()
