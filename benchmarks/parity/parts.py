"""The parts of the bench, each for a process of its own: the search, compiling aside; the climb; the judgement."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.parity import judging
from benchmarks.parity.catalogue import named
from benchmarks.parity.limits import Limits
from benchmarks.parity.search import Search
from benchmarks.parity.staging import Staged, staged


def compiling(key: str, limits: dict[str, Any]) -> dict[str, Any]:
    """What compiling brings by itself: in a process of its own, for nothing can end a compiler that takes for ever."""
    with _on_stage(key, Limits(**limits)) as (script, tell):
        return {"rows": Search(script, Limits(**limits), tell).compiling()}


def search(key: str, limits: dict[str, Any], compiling: dict[str, Any]) -> dict[str, Any]:
    """The best setting."""
    with _on_stage(key, Limits(**limits)) as (script, tell):
        return Search(script, Limits(**limits), tell, rows=compiling.get("rows", [])).run()


def climb(key: str, limits: dict[str, Any]) -> dict[str, Any]:
    """Unattended."""
    with _on_stage(key, Limits(**limits)) as (script, tell):
        ladder = judging.climbed(script, Limits(**limits))
        tell(f"{ladder['seconds']:.0f} s, {ladder['ended']}: {ladder['headline']['sentence']}")
        return ladder


def judgement(key: str, limits: dict[str, Any], best: dict[str, Any], kept: dict[str, str]) -> dict[str, Any]:
    """Of the climb's setting beside the best."""
    with _on_stage(key, Limits(**limits)) as (script, tell):
        result = judging.judgement(script, Limits(**limits), best, kept)
        tell(f"share of the best: {result['share']}")
        return result


@contextlib.contextmanager
def _on_stage(key: str, limits: Limits) -> Iterator[tuple[Staged, Callable[[str], None]]]:
    """The script, and a way to say something while its own words go nowhere."""
    shown = sys.stderr

    def tell(words: str) -> None:
        print(f"    {words}", file=shown, flush=True)

    with (
        staged(named(key), limits.threads) as script,
        open(os.devnull, "w", encoding="utf-8") as nowhere,
        contextlib.redirect_stdout(nowhere),
        contextlib.redirect_stderr(nowhere),
    ):
        yield script, tell
