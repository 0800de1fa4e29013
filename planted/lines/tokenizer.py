"""A tokenizer in a file of its own, as projects have one."""

from __future__ import annotations


class Tokenizer:
    """Splits words into pairs of letters."""

    def __init__(self) -> None:
        self.ids: dict[str, int] = {}

    def encode(self, text: str) -> list[int]:
        """A number for each pair."""
        pieces = text.split()
        return [self.ids.setdefault(w[i : i + 2], len(self.ids)) for w in pieces for i in range(len(w))]  # HOT
