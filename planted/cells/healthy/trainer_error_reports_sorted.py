# /// cell
# causes = []
# because = "a BERT on tokens prepared beforehand; its matrix products take the step"
# framework = "transformers"
# batch = 16
# steps = 8
# warmup = 2
# tries = { workers = "2", batch_size = "32" }
# cohort = "2026-11-23"
# ///
"""Sort crash reports by component. Own vocabulary (stack frames are the words)."""

import numpy as np
import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments, set_seed

COMPONENTS = ("layout", "network", "storage", "audio", "gpu process")
FRAMES, LENGTH, N = 1200, 64, 1600

set_seed(404)
component = torch.randint(0, len(COMPONENTS), (N,))
frames = torch.randint(3, 3 + FRAMES // 5, (N, LENGTH)) + (component * (FRAMES // 5))[:, None]
common = torch.rand(N, LENGTH) < 0.5
frames[common] = torch.randint(3, FRAMES, (int(common.sum()),))
frames[:, 0] = 2  # [CLS]


class Reports(torch.utils.data.Dataset):
    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return {"input_ids": frames[self.rows[i]], "labels": component[self.rows[i]]}


def compute_metrics(p):
    return {"accuracy": float((np.argmax(p.predictions, axis=1) == p.label_ids).mean())}


def make_model():
    config = BertConfig(
        vocab_size=FRAMES + 3, hidden_size=256, num_hidden_layers=2, num_attention_heads=4, intermediate_size=768,
        max_position_embeddings=LENGTH, num_labels=len(COMPONENTS), hidden_act="relu",
    )  # fmt: skip
    return BertForSequenceClassification(config)


# %% the training cell
training_args = TrainingArguments(
    output_dir="./crash-reports",
    num_train_epochs=1,
    per_device_train_batch_size=16,
    learning_rate=2e-4,
    lr_scheduler_type="linear",
    optim="adamw_torch_fused",
    logging_steps=30,
    eval_strategy="epoch",
    save_strategy="no",
    report_to="none",
    disable_tqdm=True,
    use_cpu=True,
)
trainer = Trainer(
    model_init=make_model,
    args=training_args,
    train_dataset=Reports(range(0, 1520)),
    eval_dataset=Reports(range(1520, 1600)),
    compute_metrics=compute_metrics,
)
trainer.train()
