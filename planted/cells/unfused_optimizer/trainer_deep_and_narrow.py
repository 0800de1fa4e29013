# /// cell
# causes = ["unfused_optimizer"]
# because = "292 small tensors, for each of which AdamW calls a dozen operations; twice the batch brings as much"
# also = ["small_batch"]
# framework = "transformers"
# batch = 16
# steps = 20
# cohort = "2026-11-21b"
# looked_at = true
#
# [[cure]]
# old = 'optim="adamw_torch"'
# new = 'optim="adamw_torch_fused"'
# ///
"""A GPT-2 of 24 narrow layers with the plain AdamW; the Hugging Face Trainer."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

config = GPT2Config(
    vocab_size=64, n_positions=16, n_embd=32, n_layer=24, n_head=2, bos_token_id=0, eos_token_id=0, resid_pdrop=0.0,
    embd_pdrop=0.0, attn_pdrop=0.0,
)  # fmt: skip
model = GPT2LMHeadModel(config)
ids = torch.randint(0, 64, (640, 16), generator=torch.Generator().manual_seed(0))
examples = [{"input_ids": row, "labels": row} for row in ids]

# %% the training cell
arguments = TrainingArguments(
    output_dir="deep",
    num_train_epochs=10,
    per_device_train_batch_size=16,
    optim="adamw_torch",
    max_grad_norm=0.0,
    save_strategy="no",
    logging_strategy="no",
    report_to="none",
    use_cpu=True,
    disable_tqdm=True,
    dataloader_pin_memory=False,
)
Trainer(model=model, args=arguments, train_dataset=examples).train()
