# /// cell
# cohort = "second"
# because = "tokenizer.get_vocab() builds a new dictionary of the whole vocabulary at every call, and it is called for each word; call it once and keep the dictionary (or use token_to_id)."
# thread = "https://github.com/huggingface/tokenizers/issues/483"
# line = "ids = [tokenizer.get_vocab().get(w, unk) for w in text.split()]"
# callee = "tokenizers.Tokenizer.get_vocab"
# faster = 6.47
# ///
import random
import torch
import torch.nn as nn
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

random.seed(1)
torch.manual_seed(1)
syllables = [a + b for a in "bdfgklmnprstvz" for b in "aeiou"]
words = [random.choice(syllables) + random.choice(syllables) + random.choice(syllables) for _ in range(1600)]
vocab = {"[UNK]": 0, "[PAD]": 1}
for w in words:
    vocab.setdefault(w, len(vocab))
tokenizer = Tokenizer(WordLevel(vocab, unk_token="[UNK]"))
tokenizer.pre_tokenizer = Whitespace()
good, bad = words[:60], words[60:120]


def make_review():
    y = random.randint(0, 1)
    ws = random.choices(words, k=random.randint(8, 14)) + random.choices(good if y else bad, k=3)
    random.shuffle(ws)
    return " ".join(ws), y


reviews = [make_review() for _ in range(2000)]
unk = tokenizer.token_to_id("[UNK]")


def encode(batch):
    rows = []
    for text, _ in batch:
        ids = [tokenizer.get_vocab().get(w, unk) for w in text.split()]
        rows.append(torch.tensor(ids))
    x = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=1)
    return x, torch.tensor([y for _, y in batch])


class Classifier(nn.Module):
    def __init__(self, n, d=96):
        super().__init__()
        self.emb = nn.Embedding(n, d, padding_idx=1)
        self.gru = nn.GRU(d, 128, batch_first=True, bidirectional=True)
        self.out = nn.Linear(256, 2)

    def forward(self, x):
        h, _ = self.gru(self.emb(x))
        return self.out(h.max(1).values)


model = Classifier(tokenizer.get_vocab_size())
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
# %% the training cell
running = 0.0
for step in range(1, 61):
    x, y = encode(random.sample(reviews, 16))
    loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    running += loss.item()
    if step % 20 == 0:
        print(step, running / 20)
        running = 0.0
