# /// cell
# because = "transformers' tokenizer pads and truncates each batch of texts in the loop"
# callee = "PreTrainedTokenizer"
# ///
"""Questions sorted by their subject; a tokenizer made from the words themselves, called in the loop."""

import random

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import PreTrainedTokenizerFast

torch.manual_seed(9)
random.seed(9)
words = [f"word{i}" for i in range(3000)]
raw = Tokenizer(models.WordLevel({"[PAD]": 0, "[UNK]": 1} | {w: i + 2 for i, w in enumerate(words)}, unk_token="[UNK]"))
raw.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="[PAD]", unk_token="[UNK]")
texts = [" ".join(random.choices(words, k=90)) for _ in range(512)]
subjects = torch.randint(12, (512,))
net = nn.Sequential(nn.EmbeddingBag(3002, 256), nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 512), nn.Linear(512, 12))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
# %% the training cell
for step in range(300):
    chosen = random.sample(range(512), 48)
    ids = tokenizer([texts[i] for i in chosen], padding=True, truncation=True, max_length=80, return_tensors="pt")  # HOT
    loss = nn.functional.cross_entropy(net(ids["input_ids"]), subjects[chosen])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
