# /// cell
# cohort = "fourth"
# because = "All drug names added to the tokenizer land in its no-split list, and tokenize() splits each note on every one of them in turn, so its cost grows with the number of added words. Cure: keep the added words in the vocabulary but out of the no-split list (or split with one trie)."
# thread = "https://github.com/huggingface/transformers/issues/10739"
# line = "parts.extend(self.split_on(token, piece))"
# callee = "NoteTokenizer.split_on"
# faster = 2.8
# ///
import random

import torch
import torch.nn as nn
from torch.utils.data import DataLoader

torch.manual_seed(0)
random.seed(0)


class NoteTokenizer:
    def __init__(self, words):
        self.special = ["[PAD]", "[UNK]", "[CLS]"]
        self.vocab = {word: i for i, word in enumerate(self.special + list(words))}
        self.no_split = list(self.special)
        self.keep = set(self.special)

    def add_tokens(self, tokens):
        for token in tokens:
            if token not in self.vocab:
                self.vocab[token] = len(self.vocab)
                self.no_split.append(token)
                self.keep.add(token)

    def split_on(self, token, text):
        result = []
        pieces = text.split(token)
        for i, piece in enumerate(pieces):
            piece = piece.strip()
            if piece:
                result.append(piece)
            if i < len(pieces) - 1:
                result.append(token)
        return result

    def tokenize(self, text):
        pieces = [text]
        for token in self.no_split:
            parts = []
            for piece in pieces:
                if piece in self.keep:
                    parts.append(piece)
                else:
                    parts.extend(self.split_on(token, piece))
            pieces = parts
        words = []
        for piece in pieces:
            if piece in self.keep:
                words.append(piece)
            else:
                words.extend(piece.lower().split())
        return words

    def encode(self, text, length):
        ids = [self.vocab["[CLS]"]] + [self.vocab.get(w, 1) for w in self.tokenize(text)]
        return ids[:length]


def made_up(n, shortest, longest):
    names = set()
    while len(names) < n:
        size = random.randint(shortest, longest)
        names.add("".join(random.choice("aeioubcdlmnprstvx") for _ in range(size)))
    return sorted(names)


common = made_up(3000, 2, 6)
drugs = made_up(340, 9, 12)
wards = 6
favourites = [random.sample(drugs, 45) for _ in range(wards)]


def write_note(ward):
    words = random.choices(common, k=random.randint(40, 70))
    for _ in range(random.randint(2, 5)):
        words.insert(random.randrange(len(words)), random.choice(favourites[ward]))
    return " ".join(words)


notes = []
for _ in range(9600):
    ward = random.randrange(wards)
    notes.append((write_note(ward), ward))

tokenizer = NoteTokenizer(common)
tokenizer.add_tokens(drugs)


def collate(batch):
    encoded = [tokenizer.encode(text, 80) for text, _ in batch]
    width = max(len(ids) for ids in encoded)
    ids = torch.tensor([e + [0] * (width - len(e)) for e in encoded])
    return ids, torch.tensor([ward for _, ward in batch])


class NoteClassifier(nn.Module):
    def __init__(self, words, dim=64):
        super().__init__()
        self.embed = nn.Embedding(words, dim, padding_idx=0)
        layer = nn.TransformerEncoderLayer(dim, 4, 128, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.head = nn.Linear(dim, wards)

    def forward(self, ids):
        mask = ids == 0
        h = self.encoder(self.embed(ids), src_key_padding_mask=mask)
        keep = (~mask).unsqueeze(2)
        return self.head((h * keep).sum(1) / keep.sum(1))


model = NoteClassifier(len(tokenizer.vocab))
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
criterion = nn.CrossEntropyLoss()
loader = DataLoader(notes, batch_size=32, shuffle=True, collate_fn=collate)

# %% the training cell
for step, (ids, labels) in enumerate(loader):
    loss = criterion(model(ids), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 50 == 0:
        print(f"step {step} loss {loss.item():.4f}")
