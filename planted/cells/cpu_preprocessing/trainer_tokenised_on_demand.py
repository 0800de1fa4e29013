# /// cell
# causes = ["cpu_preprocessing"]
# because = "900 words are split, counted and matched for each text, in each epoch"
# also = ["data_starved"]
# framework = "transformers"
# batch = 16
# steps = 24
# warmup = 12
# cohort = "2026-11-21b"
# looked_at = true
#
# [[cure]]
# old = "train_dataset=Texts(TEXTS)"
# new = "train_dataset=Encoded(TEXTS)"
# ///
"""Text is split into words and looked up each time an item is asked for; the Hugging Face Trainer trains."""

import random
import re

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

random.seed(0)
WORDS = ["".join(random.choices("abcdefgh", k=random.randint(2, 8))) for _ in range(150)]
VOCABULARY = {word: i for i, word in enumerate(sorted(set(WORDS)))}
TEXTS = [" ".join(random.choices(WORDS, k=900)) for _ in range(1024)]


def encoded(text, length=48):
    """Lower case, punctuation away, words to numbers, the rarest words dropped."""
    words = re.sub(r"[^a-z ]", "", text.lower()).split()
    counts = {}
    for word in words:
        counts[word] = counts.get(word, 0) + 1
    kept = [word for word in words if counts[word] > 1 and re.fullmatch(r"[a-h]+", word)]
    return torch.tensor([VOCABULARY[word] for word in kept[:length]])


class Texts(Dataset):
    def __init__(self, texts):
        self.texts = texts

    def __len__(self):
        return len(self.texts)

    def __getitem__(self, i):
        ids = encoded(self.texts[i])
        return {"input_ids": ids, "labels": ids}


class Encoded(Texts):
    def __init__(self, texts):
        self.texts = [{"input_ids": ids, "labels": ids} for ids in map(encoded, texts)]

    def __getitem__(self, i):
        return self.texts[i]


config = GPT2Config(vocab_size=160, n_positions=48, n_embd=48, n_layer=1, n_head=4, bos_token_id=0, eos_token_id=0)
model = GPT2LMHeadModel(config)

# %% the training cell
arguments = TrainingArguments(
    "out", num_train_epochs=8, per_device_train_batch_size=16, save_strategy="no", logging_strategy="no",
    report_to="none", use_cpu=True, disable_tqdm=True, dataloader_pin_memory=False,
)  # fmt: skip
trainer = Trainer(model=model, args=arguments, train_dataset=Texts(TEXTS))
trainer.train()
