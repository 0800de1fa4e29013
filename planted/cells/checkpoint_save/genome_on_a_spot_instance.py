# /// cell
# causes = ["checkpoint_save"]
# because = "8 MB are written, copied, and read twice for their checksums after each step"
# batch = 32
# steps = 20
# warmup = 3
# cohort = "2026-11-21d"
# looked_at = true
#
# [[cure]]
# old = "persist_every_steps = 1 "
# new = "persist_every_steps = 1000 "
# ///
"""A language model of DNA on a machine that may go away any moment: state is written, verified and mirrored."""

import hashlib
import shutil
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(40)
genome = torch.randint(0, 4, (200_000,))
genome[::7] = genome[0]
WINDOW, BATCH = 16, 32


class GenomeModel(nn.Module):
    """A GRU over bases."""

    def __init__(self, hidden=256):
        super().__init__()
        self.embed = nn.Embedding(4, 32)
        self.gru = nn.GRU(32, hidden, num_layers=2, batch_first=True)
        self.head = nn.Linear(hidden, 4)

    def forward(self, bases):
        return self.head(self.gru(self.embed(bases))[0])


class Preemptible:
    """Writes what is needed to go on; two copies, each with the same checksum."""

    def __init__(self, model, optimizer, main, mirror):
        self.model, self.optimizer = model, optimizer
        self.main, self.mirror = Path(main), Path(mirror)

    @staticmethod
    def checksum(path):
        return hashlib.sha256(path.read_bytes()).hexdigest()

    def persist(self, step):
        state = {
            "step": step,
            "weights": self.model.state_dict(),
            "moments": self.optimizer.state_dict(),
            "generator": torch.get_rng_state(),
        }
        here, there = self.main / "state.pt", self.mirror / "state.pt"
        torch.save(state, here)
        shutil.copyfile(here, there)
        if self.checksum(here) != self.checksum(there):
            raise OSError("the mirror is broken")


def windows(step):
    starts = torch.randint(0, len(genome) - WINDOW - 1, (BATCH, 1))
    found = genome[starts + torch.arange(WINDOW + 1)]
    return found[:, :-1], found[:, 1:]


main, mirror = tempfile.mkdtemp(), tempfile.mkdtemp()
persist_every_steps = 1  # an instance is told 30 s before

# %% the training cell
model = GenomeModel()
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, fused=True)
keeper = Preemptible(model, optimizer, main, mirror)
for step in range(1, 121):
    bases, following = windows(step)
    loss = F.cross_entropy(model(bases).transpose(1, 2), following)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    if step % persist_every_steps == 0:
        keeper.persist(step)
