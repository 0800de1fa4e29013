# /// cell
# causes = ["small_batch"]
# because = "eight rounds of 2 texts before each update: one round of 16 costs little more than one of 2"
# framework = "transformers"
# batch = 16
# rounds = 8
# steps = 15
# warmup = 3
# cohort = "2026-11-21d"
# looked_at = true
#
# [[cure]]
# old = "per_device_train_batch_size=2,"
# new = "per_device_train_batch_size=16,"
#
# [[cure]]
# old = "gradient_accumulation_steps=8,"
# new = "gradient_accumulation_steps=1,"
# ///
"""Full stops are put back into speech: two short texts at a time, gathered over eight rounds; Trainer."""

import torch
from torch.utils.data import Dataset
from transformers import ElectraConfig, ElectraForTokenClassification, Trainer, TrainingArguments, set_seed

set_seed(22)
WORDS, LENGTH = 400, 20
texts = torch.randint(5, WORDS, (6400, LENGTH))
texts[:, 0] = 1
stops = (texts % 7 == 0).long() + 2 * (texts % 11 == 0).long().clamp(max=1)


class Speech(Dataset):
    def __len__(self):
        return len(texts)

    def __getitem__(self, i):
        return {"input_ids": texts[i], "labels": stops[i]}


config = ElectraConfig(
    vocab_size=WORDS, embedding_size=32, hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
    intermediate_size=128, max_position_embeddings=32, num_labels=4,
)  # fmt: skip

# %% the training cell
model = ElectraForTokenClassification(config)
arguments = TrainingArguments(
    output_dir="stops",
    num_train_epochs=1,
    per_device_train_batch_size=2,
    gradient_accumulation_steps=8,
    learning_rate=5e-4,
    weight_decay=0.01,
    warmup_steps=50,
    optim="adamw_torch_fused",
    save_strategy="no",
    logging_steps=200,
    report_to="none",
    use_cpu=True,
    disable_tqdm=True,
    dataloader_pin_memory=False,
)
trainer = Trainer(model=model, args=arguments, train_dataset=Speech())
trainer.train()
