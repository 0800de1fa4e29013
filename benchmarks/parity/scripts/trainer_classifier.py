"""Trains a tiny BERT classifier with Hugging Face's Trainer; a tokenizer works on each text as it is asked for."""

import re
from pydoc_data.topics import topics

import torch
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

LENGTH, VOCABULARY = 64, 2000


class Paragraphs(Dataset):
    """Paragraphs of Python's manual: is it about statements or about expressions?"""

    def __init__(self):
        texts = [p for name in sorted(topics) for p in topics[name].split("\n\n") if len(p) > 200]
        self.texts = [(p, int("statement" in p)) for p in texts]

    def __len__(self):
        return len(self.texts)

    def __getitem__(self, index):
        text, label = self.texts[index]
        words = [sum(map(ord, w)) % VOCABULARY for w in re.findall(r"\w+|[^\w\s]", text.lower())][:LENGTH]
        ids = torch.zeros(LENGTH, dtype=torch.long)
        ids[: len(words)] = torch.tensor(words)
        return {"input_ids": ids, "attention_mask": (torch.arange(LENGTH) < len(words)).long(), "labels": label}


config = BertConfig(
    vocab_size=VOCABULARY,
    hidden_size=64,
    num_hidden_layers=3,
    num_attention_heads=4,
    intermediate_size=128,
    max_position_embeddings=LENGTH,
)
model = BertForSequenceClassification(config)
training_args = TrainingArguments(
    output_dir="out",
    per_device_train_batch_size=8,
    max_steps=400,
    logging_steps=50,
    save_strategy="no",
    report_to="none",
)
trainer = Trainer(model=model, args=training_args, train_dataset=Paragraphs())
trainer.train()
