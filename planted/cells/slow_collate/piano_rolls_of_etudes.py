# /// cell
# causes = ["slow_collate"]
# because = "the collate function writes the piano roll frame by frame, some 13,000 single assignments for each batch"
# batch = 16
# cohort = "2026-11-23"
#
# [[cure]]
# old = '''
#             for frame in range(note.on, note.off):
#                 roll[i, frame, note.pitch - LOWEST] = note.velocity / 127
# '''
# new = '''
#             roll[i, note.on : note.off, note.pitch - LOWEST] = note.velocity / 127
# '''
# ///
"""composer-id: who wrote this etude? (weekend project)"""

from __future__ import annotations

import random
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

LOWEST, HIGHEST = 21, 108
FRAMES = 192
COMPOSERS = ("czerny", "burgmueller", "heller", "moszkowski")


class Note(NamedTuple):
    pitch: int
    on: int
    off: int
    velocity: int


Piece = tuple[list[Note], int]


def improvise(composer: int, rng: random.Random) -> list[Note]:
    """Stands in for the MIDI files: a random walk whose stride depends on the composer."""
    notes, pitch = [], 60
    for start in range(0, FRAMES - 16, 3):
        pitch = min(HIGHEST, max(LOWEST, pitch + rng.randint(-3 - composer, 3 + composer)))
        notes.append(Note(pitch, start, start + rng.randint(6, 16), rng.randint(40, 110)))
        if rng.random() < 0.3:
            notes.append(Note(max(LOWEST, pitch - 12), start, start + 12, rng.randint(40, 90)))
    return notes


def to_rolls(pieces: list[Piece]) -> tuple[Tensor, Tensor]:
    roll = torch.zeros(len(pieces), FRAMES, HIGHEST - LOWEST + 1)
    for i, (notes, _) in enumerate(pieces):
        for note in notes:
            for frame in range(note.on, note.off):
                roll[i, frame, note.pitch - LOWEST] = note.velocity / 127
    return roll, torch.tensor([composer for _, composer in pieces])


class WhoWroteIt(nn.Module):
    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.listen = nn.Conv1d(HIGHEST - LOWEST + 1, width, kernel_size=8, stride=4)
        self.listen_longer = nn.Conv1d(width, width, kernel_size=8, stride=4)
        self.guess = nn.Linear(width, len(COMPOSERS))

    def forward(self, roll: Tensor) -> Tensor:
        h = torch.relu(self.listen(roll.transpose(1, 2)))
        return self.guess(torch.relu(self.listen_longer(h)).amax(dim=2))


rng = random.Random(88)
torch.manual_seed(88)
etudes: list[Piece] = [(improvise(i % 4, rng), i % 4) for i in range(640)]

# %% the training cell
loader = DataLoader(etudes, batch_size=16, shuffle=True, collate_fn=to_rolls)
model = WhoWroteIt()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
for epoch in range(4):
    hits = 0
    for roll, composer in loader:
        logits = model(roll)
        loss = nn.functional.cross_entropy(logits, composer)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        hits += int((logits.argmax(1) == composer).sum())
    print(f"epoch {epoch}: {hits / len(etudes):.1%}")
