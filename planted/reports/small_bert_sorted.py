# /// cell
# cohort = "second"
# because = "healthy"
# ///
import tempfile

import torch
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments, set_seed

set_seed(0)


class Lines(Dataset):
    def __init__(self, n):
        self.ids = torch.randint(5, 2000, (n, 48))
        self.labels = (self.ids[:, 1:6] > 1000).sum(1) // 2

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, i):
        return {"input_ids": self.ids[i], "labels": self.labels[i]}


model = BertForSequenceClassification(BertConfig(vocab_size=2000, hidden_size=128, num_hidden_layers=3, num_attention_heads=4,
                                                 intermediate_size=384, max_position_embeddings=64, num_labels=3))
args = TrainingArguments(output_dir=tempfile.mkdtemp(), max_steps=60, per_device_train_batch_size=16, learning_rate=3e-4,
                         lr_scheduler_type="cosine", warmup_steps=5, logging_steps=20, save_strategy="no", report_to=[],
                         use_cpu=True, disable_tqdm=True)
trainer = Trainer(model=model, args=args, train_dataset=Lines(2000))
# %% the training cell
result = trainer.train()
print(result.training_loss)
