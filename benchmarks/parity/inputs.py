"""The data that the trainings expect in their folder: made here, or text of Python's own manual. Nothing is loaded."""

from __future__ import annotations

import pickle
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np

CHARACTERS, WORDS = 200_000, 60_000
NODES, FEATURES, CLASSES, LINKS = 2700, 64, 7, 8000


def text() -> str:
    """Of Python's manual, as `help()` shows it; ASCII, as the trainings take it."""
    whole = "\n".join(topics[name] for name in sorted(topics))
    return whole.encode("ascii", "ignore").decode()[:CHARACTERS]


def one_text(folder: Path) -> None:
    """The text that minGPT's chargpt reads."""
    (folder / "input.txt").write_text(text(), encoding="ascii")


def shakespeare_char(folder: Path) -> None:
    """Characters as numbers, in the files that nanoGPT's `prepare.py` would write."""
    whole = text()
    letters = sorted(set(whole))
    numbers = {letter: i for i, letter in enumerate(letters)}
    ids = np.array([numbers[letter] for letter in whole], np.uint16)
    data = folder / "data" / "shakespeare_char"
    data.mkdir(parents=True, exist_ok=True)
    cut = int(0.9 * len(ids))
    ids[:cut].tofile(data / "train.bin")
    ids[cut:].tofile(data / "val.bin")
    (data / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": len(letters)}))


def words(folder: Path) -> None:
    """Three texts of words, of which the rare ones are replaced, as in wikitext."""
    whole = text().split()[:WORDS]
    counts: dict[str, int] = {}
    for word in whole:
        counts[word] = counts.get(word, 0) + 1
    whole = [word if counts[word] > 3 else "<unk>" for word in whole]
    lines = [" ".join(whole[i : i + 20]) for i in range(0, len(whole), 20)]
    (folder / "words").mkdir()
    cut = int(0.96 * len(lines))
    for name, part in (("train", lines[:cut]), ("valid", lines[cut:-20]), ("test", lines[-20:])):
        (folder / "words" / f"{name}.txt").write_text("\n".join(part) + "\n", encoding="ascii")


def sine_waves(folder: Path) -> None:
    """As the example's `generate_sine_wave.py` makes them, fewer and shorter."""
    import torch

    count, length, period = 11, 12, 20
    rng = np.random.default_rng(2)
    x = np.arange(length) + rng.integers(-4 * period, 4 * period, (count, 1))
    torch.save(np.sin(x / period), folder / "traindata.pt")


def citations(folder: Path) -> None:
    """A graph of papers in the files of Cora: words, a class, and who cites whom, mostly within a class."""
    rng = np.random.default_rng(7)
    classes = rng.integers(0, CLASSES, NODES)
    fits = np.arange(FEATURES)[None, :] % CLASSES == classes[:, None]
    has_word = (rng.random((NODES, FEATURES)) < np.where(fits, 0.3, 0.05)).astype(int)
    rows = [f"{i}\t" + "\t".join(map(str, has_word[i])) + f"\tclass{classes[i]}" for i in range(NODES)]
    pairs: set[tuple[int, int]] = set()
    while len(pairs) < LINKS:
        a, b = (int(n) for n in rng.integers(0, NODES, 2))
        if a != b and (classes[a] == classes[b] or rng.random() < 0.1):
            pairs.add((a, b))
    data = folder / "data" / "cora"
    data.mkdir(parents=True, exist_ok=True)
    (data / "cora.content").write_text("\n".join(rows) + "\n", encoding="ascii")
    (data / "cora.cites").write_text("\n".join(f"{a}\t{b}" for a, b in sorted(pairs)) + "\n")
