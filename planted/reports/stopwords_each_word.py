# /// cell
# because = "stopwords('english') is called in the condition of the comprehension: the word list is read from its file again for every single word."
# thread = "https://stackoverflow.com/questions/19560498/faster-way-to-remove-stop-words-in-python"
# line = "words = [w for w in text.split() if w not in stopwords(\"english\")]"
# callee = "stopwords"
# faster = 12.85
# ///
import os, random, tempfile
import torch
import torch.nn as nn

random.seed(0); torch.manual_seed(0)
corpus_dir = tempfile.mkdtemp()
syllables = ["ka", "lo", "mi", "ne", "pu", "ra", "si", "to", "vu", "we"]
all_words = [a + b + c for a in syllables for b in syllables for c in syllables]
with open(os.path.join(corpus_dir, "english"), "w") as f:
    f.write("\n".join(all_words[:180]))


def stopwords(lang):
    with open(os.path.join(corpus_dir, lang), encoding="utf8") as f:
        return [line.strip() for line in f]


vocab = {w: i for i, w in enumerate(all_words)}
reviews = [(" ".join(random.choices(all_words[:400] if k % 2 else all_words[200:], k=40)), k % 2) for k in range(2000)]
model = nn.Sequential(nn.EmbeddingBag(len(vocab), 64), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
# %% the training cell
model.train()
for step in range(150):
    ids, offsets, labels = [], [], []
    for text, label in random.sample(reviews, 16):
        words = [w for w in text.split() if w not in stopwords("english")]
        offsets.append(len(ids))
        ids.extend(vocab[w] for w in words)
        labels.append(label)
    logits = model[1:](model[0](torch.tensor(ids), torch.tensor(offsets)))
    loss = nn.functional.cross_entropy(logits, torch.tensor(labels))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 30 == 0:
        print(step, loss.item())
