"""`make ablate STORE=folder`: which planted cells each special case of the rules serves, from stored runs.

Nothing is trained: `python -m benchmarks.planted --store FOLDER --no-cure` stores the runs first. Each stored run is
diagnosed with all special cases, and once more with each special case turned off.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

from benchmarks.harness import RESULTS
from benchmarks.planted import judging
from benchmarks.planted.catalogue import CELLS
from benchmarks.planted.planted import Planted

QUESTIONS = ("headline", "second cause", "interval")


@dataclass(frozen=True, slots=True)
class Outcome:
    """One diagnosis of a cell. `right` answers those of QUESTIONS that can be asked; `words` is all that it says."""

    right: Mapping[str, bool]
    words: str = ""


@dataclass(frozen=True, slots=True)
class Switch:
    """One special case. With `off` in place of the attribute `where`, diagnoses are as if it had not been written."""

    name: str
    where: str  # module:attribute
    off: Any

    @contextmanager
    def turned_off(self) -> Iterator[None]:
        """The special case is back at the end."""
        module, _, attribute = self.where.partition(":")
        *path, last = attribute.split(".")
        owner: Any = importlib.import_module(module)
        for part in path:
            owner = getattr(owner, part)
        with patch.object(owner, last, self.off):
            yield


def _nothing(*_: Any) -> None:
    """Stands for a function that finds no case of its own."""


def _zero(*_: Any) -> float:
    return 0.0


def _one(*_: Any) -> int:
    return 1


def _empty(*_: Any) -> list[Any]:
    return []


SWITCHES = (
    Switch(
        "the user's calls for single numbers are logging, not a small batch",
        "gpulab.diagnosis.rules.other_work:own_calls",
        _nothing,
    ),
    Switch(
        "a batch is small where a fused update of many parameters takes the step",
        "gpulab.diagnosis.rules.launches:_mostly_parameters",
        _nothing,
    ),
    Switch(
        "an optimizer written by hand saves the passes that a fused one does not need",
        "gpulab.diagnosis.rules.optimizer:_FUSED_PASSES",
        math.inf,
    ),
    Switch("steps that wait by turns count by rounds", "gpulab.analysis.facts:turns_of", _one),
    Switch(
        "workers of short epochs hand over in rounds",
        "gpulab.prediction.step:Plan._by_rounds_us",
        _zero,
    ),
    Switch(
        "pauses that matter once the first cause is cured",
        "gpulab.diagnosis.diagnose:_once_cured",
        _empty,
    ),
    Switch(
        "calls of PyTorch in a transform wait for Python's lock",
        "gpulab.prediction.unknowns:_waiting_calls",
        _zero,
    ),
    Switch(
        "more operators around a softmax than scale, mask, cast and dropout",
        "gpulab.analysis.gpu.chains:_BETWEEN",
        4,
    ),
    Switch(
        "spellings of a garbage collection other than gc.collect",
        "gpulab.diagnosis.rules.pauses:_COLLECTING",
        ("gc.collect(",),
    ),
    Switch(
        "library names in a trace other than torch and gpulab",
        "gpulab.user_code:LIBRARIES",
        frozenset({"torch", "gpulab"}),
    ),
)


def outcome_of(run: Any, planted: Planted, measured: Mapping[str, Any] | None) -> Outcome:
    """What is right about the diagnosis of a run, with the usual thresholds and without earlier predictions."""
    from gpulab.analysis.facts import facts
    from gpulab.diagnosis.diagnose import diagnose

    diagnosis = diagnose(facts(run))
    said = judging.said(diagnosis)
    judged = judging.judged(planted, said)
    right = {"headline": bool(judged["right"])}
    if len(planted.causes) > 1:
        right["second cause"] = judged["ranks"][planted.causes[1]] is not None
    holds = judging.prediction_of(judging.true_finding(planted, said), measured)["holds"]
    return Outcome(right if holds is None else right | {"interval": bool(holds)}, repr(diagnosis))


@dataclass(frozen=True, slots=True)
class Change:
    """What turning a special case off changes, by question: names of cells that are no longer right, and newly so.

    `differing`: the cells of which the diagnosis says anything else, if only a word of its advice.
    """

    switch: Switch
    lost: Mapping[str, Sequence[str]]
    gained: Mapping[str, Sequence[str]]
    differing: Sequence[str]

    @property
    def cells(self) -> set[str]:
        """The cells that the special case serves."""
        return {name for names in self.lost.values() for name in names}


def change_of(switch: Switch, on: Mapping[str, Outcome], off: Mapping[str, Outcome]) -> Change:
    """Compare the outcomes by cell. A question that has no answer any more is lost, too."""

    def right_in(these: Mapping[str, Outcome], but_not_in: Mapping[str, Outcome]) -> dict[str, list[str]]:
        return {
            question: [
                name
                for name in these
                if these[name].right.get(question, False) and not but_not_in[name].right.get(question, False)
            ]
            for question in QUESTIONS
        }

    differing = [name for name in on if on[name].words != off[name].words]
    return Change(switch, right_in(on, off), right_in(off, on), differing)


def ablated(store: Path, switches: Sequence[Switch] = SWITCHES) -> tuple[dict[str, Outcome], list[Change]]:
    """The outcomes with all special cases, and what changes without each. Raises StoreError without such a store."""
    runs = stored_runs(store)
    measured = measured_cures()
    cells = [planted for planted in CELLS if planted.name in runs]
    on: dict[str, Outcome] = {}
    off: list[dict[str, Outcome]] = [{} for _ in switches]
    for planted in cells:
        run, truth = _read(runs[planted.name]), measured.get(planted.name)
        on[planted.name] = outcome_of(run, planted, truth)
        for switch, without in zip(switches, off, strict=True):
            with switch.turned_off():
                without[planted.name] = outcome_of(run, planted, truth)
    return on, [change_of(switch, on, without) for switch, without in zip(switches, off, strict=True)]


def stored_runs(store: Path) -> dict[str, Path]:
    """The newest stored run of each cell, by the cell's name."""
    from gpulab.store.folders import Store

    names = {planted.name for planted in CELLS}
    return {entry.name: entry.path for entry in Store(store).list() if entry.problem is None and entry.name in names}


def _read(folder: Path) -> Any:
    from gpulab.store.folders import read

    return read(folder)


def measured_cures() -> dict[str, Any]:
    """What the cures of the cells gained, from the kept results."""
    files = [RESULTS / f"planted_{part}.json" for part in ("tuned", "aside")]
    rows = [row for file in files for row in json.loads(file.read_text(encoding="utf-8"))["rows"]]
    return {row["name"]: row.get("measured") for row in rows}


def table(on: Mapping[str, Outcome], changes: Sequence[Change]) -> list[str]:
    """One line for each special case, then the names of the cells."""
    totals = {q: [o.right[q] for o in on.values() if q in o.right] for q in QUESTIONS}
    lines = [
        f"{len(on)} of {len(CELLS)} cells have a stored run. Right with all special cases: "
        + ", ".join(f"{q} {sum(answers)} of {len(answers)}" for q, answers in totals.items())
        + ".",
        "",
        "| special case turned off | " + " | ".join(f"{q}: lost, gained" for q in QUESTIONS) + " | any word | cells |",
        "|" + "---|" * (3 + len(QUESTIONS)),
    ]
    for change in changes:
        counts = [f"{len(change.lost[q])}, {len(change.gained[q])}" for q in QUESTIONS]
        lines.append(f"| {change.switch.name} | {' | '.join(counts)} | {len(change.differing)} | {_named(change)} |")
    return lines


def _named(change: Change) -> str:
    words = [f"−{name} ({q})" for q in QUESTIONS for name in change.lost[q]]
    return ", ".join(words + [f"+{name} ({q})" for q in QUESTIONS for name in change.gained[q]])


def main() -> None:
    """Print the table of the stored runs in a folder."""
    parser = argparse.ArgumentParser(prog="benchmarks.ablate", description=main.__doc__)
    parser.add_argument("store", type=Path, help="folder that `benchmarks.planted --store` wrote")
    store: Path = parser.parse_args().store
    if not stored_runs(store):
        parser.error(f"{str(store)!r} holds no run of a planted cell: python -m benchmarks.planted --store {store}")
    print("\n".join(table(*ablated(store))))


if __name__ == "__main__":
    main()
