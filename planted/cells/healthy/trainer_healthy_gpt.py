# /// cell
# causes = []
# because = "matrix products take the step; the loss is logged every 50th"
# framework = "transformers"
# batch = 16
# steps = 6
# warmup = 2
# tries = { workers = "2", batch_size = "32" }
# cohort = "2026-11-21a"
# looked_at = true
# ///
"""A GPT-2 whose matrix products take the step; the Hugging Face Trainer."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

config = GPT2Config(
    vocab_size=256, n_positions=96, n_embd=256, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0,
    resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, activation_function="relu",
)  # fmt: skip
model = GPT2LMHeadModel(config)
ids = torch.randint(0, 256, (640, 96), generator=torch.Generator().manual_seed(0))
examples = [{"input_ids": row, "labels": row} for row in ids]

# %% the training cell
arguments = TrainingArguments(
    output_dir="fine",
    num_train_epochs=4,
    per_device_train_batch_size=16,
    save_strategy="no",
    logging_steps=50,
    report_to="none",
    use_cpu=True,
    disable_tqdm=True,
    dataloader_pin_memory=False,
)
Trainer(model=model, args=arguments, train_dataset=examples).train()
