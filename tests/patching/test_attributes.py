"""Replaced functions come back, in whatever order those who replaced them end."""

from __future__ import annotations

from contextlib import ExitStack
from itertools import permutations

import pytest

from gpulab.patching.attributes import replaced


class Owner:
    def name(self) -> str:
        return "original"


class Heir(Owner):
    """Its `name` is inherited."""


@pytest.mark.parametrize("owner", [Owner, Heir])
@pytest.mark.parametrize("order", [*permutations(range(3))], ids=str)
def test_the_last_to_end_puts_the_original_back(owner: type[Owner], order: tuple[int, ...]) -> None:
    before = dict(vars(owner))
    stacks = [ExitStack() for _ in order]
    for stack in stacks:
        stack.enter_context(replaced(owner, "name", lambda original: lambda self: f"our {original(self)}"))
    assert owner().name() == "our our our original"
    for number in order:
        stacks[number].close()
    assert dict(vars(owner)) == before


def test_what_somebody_else_put_on_top_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    with replaced(Owner, "name", lambda original: lambda self: "ours"):
        theirs = lambda self: "theirs"  # noqa: E731
        monkeypatch.setattr(Owner, "name", theirs)
    assert Owner.name is theirs
