# /// cell
# causes = ["logging_or_eval"]
# because = "six evaluation batches after every third training batch"
# framework = "transformers"
# batch = 16
# steps = 24
# warmup = 3
# cohort = "2026-11-21b"
# looked_at = true
#
# [[cure]]
# old = "eval_steps=3"
# new = "eval_steps=3000"
# ///
"""An evaluation after every third step; the Hugging Face Trainer."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments


def examples(count):
    ids = torch.randint(0, 120, (count, 32), generator=torch.Generator().manual_seed(count))
    return [{"input_ids": row, "labels": row} for row in ids]


model = GPT2LMHeadModel(
    GPT2Config(vocab_size=120, n_positions=32, n_embd=96, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0)
)

# %% the training cell
arguments = TrainingArguments(
    output_dir="evaluated",
    num_train_epochs=20,
    per_device_train_batch_size=16,
    per_device_eval_batch_size=16,
    eval_strategy="steps",
    eval_steps=3,
    save_strategy="no",
    logging_strategy="no",
    report_to="none",
    use_cpu=True,
    disable_tqdm=True,
    dataloader_pin_memory=False,
)
Trainer(model=model, args=arguments, train_dataset=examples(480), eval_dataset=examples(96)).train()
