# /// cell
# causes = []
# because = "matrix products take the step"
# framework = "transformers"
# batch = 20
# steps = 8
# warmup = 3
# tries = { workers = "2", batch_size = "40" }
# cohort = "2026-11-21c"
# looked_at = true
# ///
"""A BERT that sorts support tickets, tokenised beforehand; the Hugging Face Trainer."""

import torch
from torch.utils.data import TensorDataset, default_collate
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments, set_seed

set_seed(31)
config = BertConfig(
    vocab_size=800, hidden_size=256, num_hidden_layers=2, num_attention_heads=4, intermediate_size=1024,
    max_position_embeddings=64, hidden_act="relu", num_labels=5, hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
)  # fmt: skip
model = BertForSequenceClassification(config)
tickets = TensorDataset(torch.randint(5, 800, (2048, 48)), torch.randint(0, 5, (2048,)))


def collate(items):
    input_ids, labels = default_collate(items)
    return {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids), "labels": labels}


# %% the training cell
trainer = Trainer(
    model=model,
    args=TrainingArguments(
        output_dir="tickets",
        num_train_epochs=2,
        per_device_train_batch_size=20,
        learning_rate=3e-4,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=10,
        logging_steps=50,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        dataloader_pin_memory=False,
    ),
    train_dataset=tickets,
    data_collator=collate,
)
trainer.train()
