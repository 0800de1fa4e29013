# /// cell
# causes = ["checkpoint_save"]
# because = "model, optimizer and random states are written every second step"
# framework = "transformers"
# batch = 8
# steps = 20
# warmup = 4
# cohort = "2026-11-21a"
# looked_at = true
#
# [[cure]]
# old = "save_steps=2"
# new = "save_steps=2000"
# ///
"""A checkpoint every second step, left from a test; the Hugging Face Trainer."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

ids = torch.randint(0, 500, (512, 48), generator=torch.Generator().manual_seed(0))
examples = [{"input_ids": row, "labels": row} for row in ids]
model = GPT2LMHeadModel(
    GPT2Config(vocab_size=500, n_positions=48, n_embd=128, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0)
)

# %% the training cell
arguments = TrainingArguments(
    output_dir="saved",
    num_train_epochs=10,
    per_device_train_batch_size=8,
    save_strategy="steps",
    save_steps=2,
    save_total_limit=2,
    logging_strategy="no",
    report_to="none",
    use_cpu=True,
    disable_tqdm=True,
    dataloader_pin_memory=False,
)
trainer = Trainer(model=model, args=arguments, train_dataset=examples)
trainer.train()
