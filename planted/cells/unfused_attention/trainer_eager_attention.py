# /// cell
# causes = ["unfused_attention"]
# because = "1024 by 1024 weights of each head go through memory again and again"
# framework = "transformers"
# steps = 8
# warmup = 2
# profiled = 30
# cohort = "2026-11-21b"
# looked_at = true
#
# [[cure]]
# old = 'attn_implementation="eager")'
# new = 'attn_implementation="sdpa")'
# ///
"""A GPT-2 over 1024 tokens with attn_implementation="eager", for a look at the weights; Hugging Face Trainer."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

config = GPT2Config(
    vocab_size=128, n_positions=1024, n_embd=64, n_layer=2, n_head=8, bos_token_id=0, eos_token_id=0, attn_pdrop=0.0
)
model = GPT2LMHeadModel._from_config(config, attn_implementation="eager")
ids = torch.randint(0, 128, (64, 1024), generator=torch.Generator().manual_seed(0))

# %% the training cell
arguments = TrainingArguments(
    output_dir="long",
    num_train_epochs=4,
    per_device_train_batch_size=1,
    save_strategy="no",
    logging_strategy="no",
    report_to="none",
    use_cpu=True,
    disable_tqdm=True,
    dataloader_pin_memory=False,
)
Trainer(model=model, args=arguments, train_dataset=[{"input_ids": row, "labels": row} for row in ids]).train()
