# /// cell
# cohort = "third"
# because = "nn.Embedding has max_norm=1.0, so each forward renormalizes the looked-up rows one after the other in a serial loop; renormalize the weight by hand after the optimizer step."
# thread = "https://github.com/pytorch/pytorch/issues/1278"
# line = "self.words = nn.Embedding(n_words, width, max_norm=1.0)"
# callee = "torch.nn.functional.embedding"
# faster = 2.9
# ///
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
n_words, n_topics = 8000, 40
frequency = 1 / torch.arange(1.0, n_words + 1) ** 0.5
of_topic = frequency * torch.rand(n_topics, n_words).pow(4)
topics = torch.randint(n_topics, (6000,))
first = torch.multinomial(of_topic[topics], 30, replacement=True)
second = torch.multinomial(of_topic[topics], 30, replacement=True)


class SentenceEncoder(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.words = nn.Embedding(n_words, width, max_norm=1.0)
        self.weigh = nn.Linear(width, 1)
        self.out = nn.Sequential(nn.Linear(width, 128), nn.GELU(), nn.Linear(128, 64))

    def forward(self, tokens):
        vectors = self.words(tokens)
        attention = self.weigh(vectors).softmax(1)
        return F.normalize(self.out((attention * vectors).sum(1)), dim=-1)


model = SentenceEncoder()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

# %% the training cell
for step in range(200):
    rows = torch.randint(len(topics), (256,))
    a, b = model(first[rows]), model(second[rows])
    logits = a @ b.T / 0.1
    loss = F.cross_entropy(logits, torch.arange(len(rows)))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 50 == 0:
        print(step, round(loss.item(), 4))
print("last", loss.item())
