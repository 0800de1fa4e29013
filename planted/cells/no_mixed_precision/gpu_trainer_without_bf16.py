# /// cell
# causes = ["no_mixed_precision"]
# because = "matrix products take the step, in TF32 where bf16 would be twice as fast"
# framework = "transformers"
# gpu = true
# batch = 16
# steps = 20
# cohort = "2026-11-21e"
# looked_at = true
#
# [[cure]]
# old = "bf16=False"
# new = "bf16=True"
# ///
"""A GPT-2 in 32 bits, with TF32 but without bf16; the Hugging Face Trainer."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

model = GPT2LMHeadModel(
    GPT2Config(vocab_size=8192, n_positions=512, n_embd=1024, n_layer=8, n_head=16, bos_token_id=0, eos_token_id=0)
)
ids = torch.randint(0, 8192, (2048, 512), generator=torch.Generator().manual_seed(0))

# %% the training cell
arguments = TrainingArguments(
    output_dir="wide",
    num_train_epochs=4,
    per_device_train_batch_size=16,
    tf32=True,
    bf16=False,
    dataloader_num_workers=2,
    save_strategy="no",
    logging_strategy="no",
    report_to="none",
    disable_tqdm=True,
)
Trainer(model=model, args=arguments, train_dataset=[{"input_ids": row, "labels": row} for row in ids]).train()
