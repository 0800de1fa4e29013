# /// cell
# causes = ["small_batch"]
# because = "three pairs of questions per step, read word by word by a GRU cell"
# framework = "accelerate"
# batch = 3
# cured_batch = 48
# steps = 24
# warmup = 4
# cohort = "2026-11-23"
#
# [[cure]]
# old = "batch_size=3,"
# new = "batch_size=48,"
# ///
"""Are two questions in the forum duplicates?  Siamese GRU with attention over words, Accelerate for the cluster later.

Usage in the repo:  accelerate launch train_dups.py.   Here interactively.
"""

from collections.abc import Iterator

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

MAX_WORDS = 20
VOCAB = 3000


class QuestionPairs(Dataset[tuple[Tensor, Tensor, Tensor]]):
    def __init__(self, n: int) -> None:
        topic = torch.randint(0, 60, (n, 2))
        topic[::2, 1] = topic[::2, 0]
        words = torch.randint(0, 50, (2, n, MAX_WORDS))
        self.first = words[0] + 50 * topic[:, :1]
        self.second = words[1] + 50 * topic[:, 1:]
        self.same = (topic[:, 0] == topic[:, 1]).float()

    def __len__(self) -> int:
        return len(self.same)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor, Tensor]:
        return self.first[i], self.second[i], self.same[i]


class Siamese(nn.Module):
    def __init__(self, dim: int = 48) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCAB, dim)
        self.cell = nn.GRUCell(dim, dim)
        self.weigh = nn.Linear(dim, 1)
        self.decide = nn.Linear(2 * dim, 1)

    def states(self, question: Tensor) -> Iterator[Tensor]:
        state = self.words.weight.new_zeros(len(question), self.cell.hidden_size)
        for word in self.words(question).unbind(1):
            state = self.cell(word, state)
            yield state

    def encode(self, question: Tensor) -> Tensor:
        states = torch.stack(list(self.states(question)), 1)
        return (states * self.weigh(states).softmax(1)).sum(1)

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        a, b = self.encode(first), self.encode(second)
        return self.decide(torch.cat([(a - b).abs(), a * b], 1)).squeeze(1)


set_seed(33)
pairs = QuestionPairs(6000)

# %% the training cell
accelerator = Accelerator(cpu=True)
model = Siamese()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
loader = DataLoader(pairs, batch_size=3, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
bce = nn.BCEWithLogitsLoss()
for epoch in range(2):
    for step, (first, second, same) in enumerate(loader):
        optimizer.zero_grad()
        loss = bce(model(first, second), same)
        accelerator.backward(loss)
        optimizer.step()
        if step == 120:
            break
    accelerator.print(f"epoch {epoch}: {loss.item():.4f}")
