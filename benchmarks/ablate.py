"""`make ablate STORE=folder`: what each special case of the rules serves, from stored runs of the planted cells.

Nothing is trained: `python -m benchmarks.planted --store FOLDER --no-cure` stores the runs first. Each stored run is
diagnosed with all special cases, and once more without each special case that has a say in it. The recorded traces
(GPULAB_TRACES) and the loops of the simulated GPU are diagnosed likewise, for what only a GPU shows.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from msgspec import Struct

from benchmarks.harness import RESULTS
from benchmarks.planted import file_of
from benchmarks.special_cases import SWITCHES, Switch
from planted import judge
from planted.catalogue import CELLS, TRACES, Planted, PlantedTrace
from planted.simulated.loops import LOOPS, SimulatedLoop

QUESTIONS = ("headline", "second cause", "interval", "trace", "simulated loop")
MOST_NAMES = 3  # in a line of the table


class Outcome(Struct, frozen=True):
    """One diagnosis of a case. `right` answers those of QUESTIONS that can be asked; `words` is all that it says."""

    right: Mapping[str, bool]
    words: str = ""


class Case(Struct, frozen=True):
    """A run, or the ranks of a job, whose truth is known. `right` judges what is said of it (`judge.said`)."""

    name: str
    run: Any
    right: Callable[[Mapping[str, Any]], Mapping[str, bool]]

    def outcome(self, figures: Any = None) -> Outcome:
        """With the usual thresholds, without earlier predictions; `figures`: of the run, where they are there."""
        diagnosis = _diagnosis_of(self.run, figures)
        return Outcome(self.right(judge.said(diagnosis)), repr(diagnosis))

    def figures(self) -> Any:
        """The facts of a run; None of a job."""
        from gpulab.analysis.facts import facts
        from gpulab.run import Run

        return facts(self.run) if isinstance(self.run, Run) else None


def _diagnosis_of(run: Any, figures: Any) -> Any:
    from gpulab.analysis.facts import facts
    from gpulab.api.diagnose import diagnose_job
    from gpulab.diagnosis.diagnose import diagnose
    from gpulab.run import Run
    from gpulab.thresholds import DEFAULT

    if not isinstance(run, Run):
        return diagnose_job(run, DEFAULT).diagnosis
    return diagnose(facts(run) if figures is None else figures)


class Change(Struct, frozen=True):
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


def ablated(cases: Iterable[Case], switches: Sequence[Switch] = SWITCHES) -> tuple[dict[str, Outcome], list[Change]]:
    """The outcomes with all special cases, and what changes without each."""
    on: dict[str, Outcome] = {}
    off: list[dict[str, Outcome]] = [{} for _ in switches]
    for case in cases:
        with_all, having_a_say = _outcome(case, switches)
        figures = case.figures()
        on[case.name] = with_all
        for switch, without in zip(switches, off, strict=True):
            if switch not in having_a_say:
                without[case.name] = with_all
                continue
            with switch.turned_off():
                without[case.name] = _or_nothing(case, None if switch.changes_figures else figures)
    return on, [change_of(switch, on, without) for switch, without in zip(switches, off, strict=True)]


def _or_nothing(case: Case, figures: Any) -> Outcome:
    """Where no diagnosis is left without a special case, nothing is right."""
    try:
        return case.outcome(figures)
    except Exception as e:
        return Outcome({}, repr(e))


def _outcome(case: Case, switches: Sequence[Switch]) -> tuple[Outcome, list[Switch]]:
    """The outcome with all special cases, and those without which it may be another."""
    having_a_say: list[Switch] = []
    with ExitStack() as stack:
        for switch in switches:
            stack.enter_context(switch.observe(partial(having_a_say.append, switch)))
        return case.outcome(), having_a_say


def all_cases(store: Path) -> Iterator[Case]:
    """The stored cells, the recorded traces that are there, and the loops of the simulated GPU."""
    yield from cells(store)
    yield from recorded()
    yield from simulated()


def cells(store: Path) -> Iterator[Case]:
    """The planted cells that have a stored run."""
    runs, measured = stored_runs(store), measured_cures()
    for planted in CELLS:
        if planted.name in runs:
            right = partial(right_of_cell, planted, measured.get(planted.name))
            yield Case(planted.name, _read(runs[planted.name]), right)


def right_of_cell(planted: Planted, measured: Mapping[str, Any] | None, said: Mapping[str, Any]) -> dict[str, bool]:
    """Headline, second cause where one was planted, interval where the cure was measured."""
    judgement = judge.judgement(planted, said)
    right = {"headline": bool(judgement["right"])}
    if len(planted.causes) > 1:
        right["second cause"] = judgement["ranks"][planted.causes[1]] is not None
    holds = judge.prediction_of(judge.true_finding(planted, said), measured)["holds"]
    return right if holds is None else right | {"interval": bool(holds)}


def recorded() -> Iterator[Case]:
    """The recorded traces that are there (GPULAB_TRACES)."""
    from gpulab.api.reading import open_run

    for case in TRACES:
        path = file_of(case)
        if path is not None:
            yield Case(case.name, open_run(path), partial(_right_of_trace, case))


def _right_of_trace(case: PlantedTrace, said: Mapping[str, Any]) -> dict[str, bool]:
    return {"trace": bool(judge.trace_judgement(case, said)["right"])}


def simulated() -> Iterator[Case]:
    """The loops of the simulated GPU."""
    from planted.simulated.record import record

    for loop in LOOPS:
        run = record(loop.loop, loop.gpu, peak_memory_fraction=loop.peak_memory_fraction).run
        yield Case(f"simulated {loop.name}", run, partial(_right_of_loop, loop))


def _right_of_loop(loop: SimulatedLoop, said: Mapping[str, Any]) -> dict[str, bool]:
    return {"simulated loop": bool(judge.judgement(loop, said)["right"])}


def stored_runs(store: Path) -> dict[str, Path]:
    """The newest stored run of each cell, by the cell's name."""
    from gpulab.store.folders import Store

    names = {planted.name for planted in CELLS}
    entries = (entry for entry in Store(store).list() if entry.problem is None and entry.name in names)
    return {entry.name: entry.path for entry in entries if entry.path is not None}


def _read(folder: Path) -> Any:
    from gpulab.store.folders import read

    return read(folder)


def measured_cures() -> dict[str, Any]:
    """What the cures of the cells gained, from the kept results."""
    files = [RESULTS / f"planted_{part}.json" for part in ("tuned", "aside")]
    rows = [row for file in files for row in json.loads(file.read_text(encoding="utf-8"))["rows"]]
    return {row["name"]: row.get("measured") for row in rows}


def table(on: Mapping[str, Outcome], changes: Sequence[Change]) -> list[str]:
    """The totals, then one line for each special case: figures, and the names of what it serves."""
    lines = [
        f"{sum('headline' in o.right for o in on.values())} of {len(CELLS)} cells have a stored run. "
        f"Right with all special cases: {totals(on)}.",
        "",
        "| turned off | "
        + " | ".join(f"{q}: lost, gained" for q in QUESTIONS)
        + " | any word | lost (−), gained (+) |",
        "|" + "---|" * (3 + len(QUESTIONS)),
    ]
    for change in changes:
        counts = [f"{len(change.lost[q])}, {len(change.gained[q])}" for q in QUESTIONS]
        if change.switch.needs_gpu:
            counts[:3] = ["not judged: needs a GPU", "", ""]
        lines.append(f"| {change.switch.name} | {' | '.join(counts)} | {len(change.differing)} | {_named(change)} |")
    return lines


def totals(on: Mapping[str, Outcome]) -> str:
    """How many of each question are answered rightly."""
    answers = {q: [o.right[q] for o in on.values() if q in o.right] for q in QUESTIONS}
    return ", ".join(f"{q} {sum(right)} of {len(right)}" for q, right in answers.items())


def _named(change: Change) -> str:
    signed = (("−", change.lost), ("+", change.gained))
    return ", ".join(f"{sign}{_some(names[q])} ({q})" for sign, names in signed for q in QUESTIONS if names[q])


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return ", ".join(names[:MOST_NAMES]) + more


def main() -> None:
    """Print the table of the stored runs in a folder."""
    parser = argparse.ArgumentParser(prog="benchmarks.ablate", description=main.__doc__)
    parser.add_argument("store", type=Path, help="folder that `benchmarks.planted --store` wrote")
    parser.add_argument("--totals", action="store_true", help="only how many are right with all special cases")
    arguments = parser.parse_args()
    if not stored_runs(arguments.store):
        folder = arguments.store
        parser.error(f"{str(folder)!r} holds no run of a planted cell: python -m benchmarks.planted --store {folder}")
    on, changes = ablated(all_cases(arguments.store), () if arguments.totals else SWITCHES)
    print("\n".join(table(on, changes)))


if __name__ == "__main__":
    main()
