# /// cell
# causes = ["gc_pause"]
# because = "gc.collect() walks over the parsed dump and all modules in each step"
# batch = 256
# cohort = "2026-11-21d"
# looked_at = true
#
# [[cure]]
# old = '''
#     finally:
#         gc.collect()
# '''
# new = '''
#     finally:
#         pass
# '''
# ///
"""Embeddings of a knowledge graph, gradients from two micro-batches; a context manager cleans up after each update."""

import contextlib
import gc

import torch
from torch import nn

torch.manual_seed(60)
ENTITIES, RELATIONS, WIDTH = 1500, 40, 96


class Entity:
    """As parsed from the dump."""

    def __init__(self, number):
        self.names = [f"entity {number}", f"Q{number}"]
        self.facts = [[number, k % RELATIONS, (number * 7 + k) % ENTITIES] for k in range(8)]


class Scorer(nn.Module):
    """A head and a relation, mixed, should point at the tail."""

    def __init__(self):
        super().__init__()
        self.entities = nn.Embedding(ENTITIES, WIDTH)
        self.relations = nn.Embedding(RELATIONS, WIDTH)
        self.mix = nn.Sequential(nn.Linear(2 * WIDTH, 192), nn.ReLU(), nn.Linear(192, WIDTH))

    def forward(self, head, relation, candidates):
        query = self.mix(torch.cat([self.entities(head), self.relations(relation)], -1))
        return torch.einsum("bw,bcw->bc", query, self.entities(candidates))


@contextlib.contextmanager
def tidy():
    """Nothing of the block is left in memory."""
    try:
        yield
    finally:
        gc.collect()


def micro_batches(facts, size, parts):
    chosen = facts[torch.randint(len(facts), (size * parts,))]
    for part in chosen.chunk(parts):
        wrong = torch.randint(0, ENTITIES, (size, 15))
        yield part[:, 0], part[:, 1], torch.cat([part[:, 2:], wrong], 1)


parsed = [Entity(i) for i in range(ENTITIES)]
facts = torch.tensor([fact for entity in parsed for fact in entity.facts])

# %% the training cell
PARTS = 2
scorer = Scorer()
optimizer = torch.optim.Adagrad(scorer.parameters(), lr=0.05, fused=True)
warm = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=50)
for step in range(150):
    optimizer.zero_grad()
    with tidy():
        for head, relation, candidates in micro_batches(facts, 128, PARTS):
            scores = scorer(head, relation, candidates)
            loss = nn.functional.cross_entropy(scores, torch.zeros(len(head), dtype=torch.long))
            (loss / PARTS).backward()
    optimizer.step()
    warm.step()
