# /// cell
# causes = ["recompilation"]
# because = "dynamic=False: the model is compiled anew for each new length"
# batch = 16
# steps = 8
# warmup = 2
# profiled = 25
# fresh = true
# cohort = "2026-11-21a"
# looked_at = true
#
# [[cure]]
# old = "ids, tags = sentences(step)"
# new = "ids, tags = sentences_of_one_length(step)"
# ///
"""A compiled model whose batches have another length each time."""

import torch
from torch import nn

torch.manual_seed(0)


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(300, 64)
        self.inner = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))
        self.head = nn.Linear(64, 12)

    def forward(self, ids):
        h = self.embed(ids)
        return self.head(h + self.inner(h))


def sentences(step):
    """A batch, padded to its own longest sentence."""
    length = 20 + 3 * (step % 40)
    return torch.randint(0, 300, (16, length)), torch.randint(0, 12, (16, length))


def sentences_of_one_length(step):
    """Padded to the longest there is."""
    return torch.randint(0, 300, (16, 140)), torch.randint(0, 12, (16, 140))


tagger = Tagger()
optimizer = torch.optim.SGD(tagger.parameters(), lr=0.01)

# %% the training cell
torch._dynamo.config.recompile_limit = 64  # there was a warning about it
compiled = torch.compile(tagger, dynamic=False, backend="aot_eager")  # no C++ compiler on this machine
for step in range(200):
    ids, tags = sentences(step)
    loss = nn.functional.cross_entropy(compiled(ids).flatten(0, 1), tags.flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
