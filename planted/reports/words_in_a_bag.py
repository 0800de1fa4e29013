# /// cell
# cohort = "second"
# because = "The embedding of 400000 words has dense gradients (sparse=False): each step fills, and each update goes through, the whole table for the few hundred words of a batch."
# thread = "https://github.com/pytorch/pytorch/issues/5309"
# line = "self.words = nn.EmbeddingBag(vocabulary, 64, mode=\"mean\")"
# callee = "torch.optim.SGD.step"
# faster = 47.0
# ///
import torch
import torch.nn as nn

torch.manual_seed(0)


class Tagger(nn.Module):
    def __init__(self, vocabulary, classes):
        super().__init__()
        self.words = nn.EmbeddingBag(vocabulary, 64, mode="mean")
        self.out = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, classes))

    def forward(self, text, offsets):
        return self.out(self.words(text, offsets))


def collate(rows):
    lengths = torch.tensor([len(corpus[i]) for i in rows])
    offsets = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)[:-1]])
    return torch.cat([corpus[i] for i in rows]), offsets, topics[rows]


corpus = [torch.randint(400_000, (n,)) for n in torch.randint(20, 60, (2000,)).tolist()]
topics = torch.tensor([int(t[0]) % 8 for t in corpus])
model = Tagger(400_000, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
# %% the training cell
for step in range(80):
    text, offsets, y = collate(torch.randint(2000, (64,)).tolist())
    loss = nn.functional.cross_entropy(model(text, offsets), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 20 == 0:
        print(step, loss.item())
print("last", loss.item())
