# /// cell
# causes = ["checkpoint_save"]
# because = "model, optimizer and random states are written after each epoch, which has two steps"
# framework = "transformers"
# batch = 8
# steps = 24
# warmup = 4
# cohort = "2026-11-21c"
# looked_at = true
#
# [[cure]]
# old = 'save_strategy="epoch"'
# new = 'save_strategy="no"'
# ///
"""Names are tagged in a handful of sentences; each epoch of two steps ends with a checkpoint; Hugging Face Trainer."""

import torch
from transformers import BertConfig, BertForTokenClassification, Trainer, TrainingArguments

make = torch.Generator().manual_seed(9)
sentences = torch.randint(5, 6000, (16, 20), generator=make)
tags = (sentences % 7 == 0).long() + (sentences % 11 == 0).long()
annotated = [{"input_ids": s, "labels": t} for s, t in zip(sentences, tags, strict=True)]

config = BertConfig(
    vocab_size=6000,
    hidden_size=96,
    num_hidden_layers=1,
    num_attention_heads=4,
    intermediate_size=192,
    max_position_embeddings=32,
    num_labels=3,
)
tagger = BertForTokenClassification(config)

# %% the training cell
arguments = TrainingArguments(
    output_dir="tagger",
    num_train_epochs=40,
    per_device_train_batch_size=8,
    learning_rate=5e-4,
    warmup_steps=10,
    optim="adamw_torch_fused",
    save_strategy="epoch",
    save_total_limit=3,
    logging_strategy="no",
    report_to="none",
    use_cpu=True,
    disable_tqdm=True,
    dataloader_pin_memory=False,
)
trainer = Trainer(model=tagger, args=arguments, train_dataset=annotated)
trainer.train()
