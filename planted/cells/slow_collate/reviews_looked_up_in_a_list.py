# /// cell
# causes = ["slow_collate"]
# because = "the collate function looks each word up by list.index, which goes through thousands of words"
# batch = 16
# cohort = "2026-11-23"
#
# [[cure]]
# old = "vocab = sorted(words)"
# new = "vocab = {w: i for i, w in enumerate(sorted(words))}"
#
# [[cure]]
# old = "vocab.index(w) + 1"
# new = "vocab[w] + 1"
# ///
# Assignment 3 - Sentiment of film reviews with an RNN
# Name: ______   Matr.-Nr.: ______

import random
import string

import torch
import torch.nn as nn
from torch.utils.data import DataLoader

random.seed(3)
torch.manual_seed(3)

# --- Task 1: build the corpus (given) -------------------------------------------------
all_words = ["".join(random.choices(string.ascii_lowercase, k=random.randint(3, 9))) for _ in range(6000)]
good = set(all_words[:300])
bad = set(all_words[300:600])
reviews = []
for _ in range(1600):
    label = random.randint(0, 1)
    favourites = sorted(good if label else bad)
    text = random.choices(all_words, k=random.randint(14, 22)) + random.choices(favourites, k=3)
    random.shuffle(text)
    reviews.append((" ".join(text), label))

# --- Task 2: build the vocabulary ------------------------------------------------------
words = set()
for text, _ in reviews:
    words.update(text.split())
vocab = sorted(words)
print("vocabulary size:", len(vocab))


# --- Task 3: collate function ----------------------------------------------------------
def my_collate(batch):
    texts = []
    labels = []
    for text, label in batch:
        ids = [vocab.index(w) + 1 for w in text.split()]
        texts.append(torch.tensor(ids))
        labels.append(label)
    # 0 is the padding index
    return nn.utils.rnn.pad_sequence(texts, batch_first=True), torch.tensor(labels)


# --- Task 4: the model -----------------------------------------------------------------
class RNN(nn.Module):
    def __init__(self, vocab_size, emb_dim, hidden_dim):
        super().__init__()
        self.emb = nn.Embedding(vocab_size, emb_dim, padding_idx=0, sparse=True)
        self.rnn = nn.LSTM(emb_dim, hidden_dim, batch_first=True)
        self.linear = nn.Linear(hidden_dim, 2)

    def forward(self, x):
        e = self.emb(x)
        _out, (h, _c) = self.rnn(e)
        return self.linear(h[0])


# %% the training cell
# --- Task 5: training ------------------------------------------------------------------
loader = DataLoader(reviews, batch_size=16, shuffle=True, collate_fn=my_collate)
model = RNN(len(vocab) + 1, 50, 64)
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

for epoch in range(3):
    epoch_loss = 0
    for x, y in loader:
        optimizer.zero_grad()
        pred = model(x)
        loss = criterion(pred, y)
        loss.backward()
        optimizer.step()
        epoch_loss += loss.item()
    print("epoch:", epoch, "loss:", epoch_loss / len(loader))
