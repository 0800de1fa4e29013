# /// cell
# causes = ["checkpoint_save"]
# because = "half a megabyte of weights is compressed after each step"
# steps = 20
# warmup = 3
# cohort = "2026-11-21d"
#
# [[cure]]
# old = "stride=1)"
# new = "stride=1000)"
# ///
"""A graph network on citations; its weights are kept after each step, for a film of how they move."""

import tempfile
from pathlib import Path

import numpy as np
import torch
from torch import nn

torch.manual_seed(30)
PAPERS, WORDS, TOPICS = 1400, 256, 7


def citations():
    """Papers of a topic cite each other more often; as a sparse matrix, normalised by both degrees."""
    topic = torch.randint(0, TOPICS, (PAPERS,))
    source = torch.randint(0, PAPERS, (16_000,))
    target = torch.randint(0, PAPERS, (16_000,))
    alike = (topic[source] == topic[target]) | (torch.rand(16_000) < 0.1)
    pairs = torch.stack([source[alike], target[alike]])
    loops = torch.arange(PAPERS).repeat(2, 1)
    pairs = torch.cat([pairs, pairs.flip(0), loops], 1)
    degree = torch.bincount(pairs[0], minlength=PAPERS).float()
    weight = (degree[pairs[0]] * degree[pairs[1]]).rsqrt()
    graph = torch.sparse_coo_tensor(pairs, weight, (PAPERS, PAPERS)).coalesce()
    words = (torch.randn(TOPICS, WORDS)[topic] + 2 * torch.randn(PAPERS, WORDS)).relu()
    return graph, words, topic


class GraphConvolution(nn.Module):
    def __init__(self, cin, cout):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(cin, cout))
        nn.init.xavier_uniform_(self.weight)

    def forward(self, graph, x):
        return torch.sparse.mm(graph, x @ self.weight)


class GCN(nn.Module):
    def __init__(self, hidden=256):
        super().__init__()
        self.first, self.second = GraphConvolution(WORDS, hidden), GraphConvolution(hidden, hidden)
        self.out = nn.Linear(hidden, TOPICS)

    def forward(self, graph, x):
        x = nn.functional.dropout(self.first(graph, x).relu(), 0.3, self.training)
        x = nn.functional.dropout(self.second(graph, x).relu(), 0.3, self.training)
        return self.out(x)


class Film:
    """A compressed frame for each `stride`-th step."""

    def __init__(self, folder, stride):
        self.folder, self.stride = Path(folder), stride

    def shoot(self, model, step):
        if step % self.stride == 0:
            weights = {name: value.numpy() for name, value in model.state_dict().items()}
            np.savez_compressed(self.folder / f"frame_{step:05}.npz", **weights)


graph, words, topic = citations()
known = torch.rand(PAPERS) < 0.3

# %% the training cell
film = Film(tempfile.mkdtemp(), stride=1)
gcn = GCN()
optimizer = torch.optim.Adam(gcn.parameters(), lr=5e-3, weight_decay=5e-4, fused=True)
for step in range(120):
    gcn.train()
    optimizer.zero_grad()
    logits = gcn(graph, words)
    loss = nn.functional.cross_entropy(logits[known], topic[known])
    loss.backward()
    optimizer.step()
    film.shoot(gcn, step)
    if step % 40 == 39:
        right = (logits.argmax(-1) == topic)[~known].float().mean()
        print(f"step {step + 1}: loss {loss:.3f}, right {right:.3f}")
