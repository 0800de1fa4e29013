"""`%%gpuprofile --sweep ranks=1,2,4`: the cell in so many ranks, one number after the other in several rounds."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence

from msgspec import Struct
from msgspec.structs import replace

from gpulab.analysis.facts import facts
from gpulab.api.cell_ranks import RankedCell
from gpulab.devices.machine import usable_cores
from gpulab.errors import UsageError
from gpulab.options import DEFAULT_BUDGET_S, FURTHER_BUDGET_S
from gpulab.run import Ranks
from gpulab.tuning.cell_code import Interrupted
from gpulab.tuning.compare.scaling import scaling
from gpulab.tuning.plan import Progress
from gpulab.views.running.progress import Progressing
from gpulab.views.scaling import ScalingView

ROUNDS = 3
NAME = "ranks"  # in --sweep


class RanksSweep(Struct, frozen=True):
    """A cell, and in how many ranks it is to run. `rounds` and `budget_s`: None where gpulab chooses."""

    cell: RankedCell
    counts: tuple[int, ...]
    rounds: int | None = None
    budget_s: float | None = None
    full: bool = False

    @property
    def limit_s(self) -> float:
        """After which no further round begins."""
        return DEFAULT_BUDGET_S + FURTHER_BUDGET_S * len(self.counts) if self.budget_s is None else self.budget_s

    def run(self) -> ScalingView:
        """Run and show it. Raises UsageError where a number of ranks cannot run, Interrupted after one who stopped."""
        times: dict[int, list[float]] = {count: [] for count in self.counts}
        rounds, began_s, stopped = self.rounds or ROUNDS, time.monotonic(), False
        numbers = random.Random()  # of its own: the user's numbers stay where they are
        with Progressing(None) as progressing:
            for number in range(rounds):
                order = numbers.sample(self.counts, len(self.counts))
                for place, count in enumerate(order):
                    done, elapsed_s = number * len(order) + place, time.monotonic() - began_s
                    about_s = elapsed_s / done * rounds * len(order) if done else None
                    what = f"round {number + 1} of {rounds}: {count} rank{'s' if count > 1 else ''}"
                    progressing.tell(
                        Progress(what, done, rounds * len(order), None, elapsed_s=elapsed_s, about_s=about_s)
                    )
                    try:
                        ranks = replace(self.cell, ranks=count).recorded(quiet=number > 0)
                    except Interrupted:
                        stopped = True
                        break
                    times[count].append(_step_us(ranks))
                spent_s = time.monotonic() - began_s
                if stopped or spent_s + spent_s / (number + 1) > self.limit_s:
                    break
            view = ScalingView(
                scaling({count: t for count, t in times.items() if t}),
                min((len(t) for t in times.values() if t), default=0),
                int(usable_cores()),
                stopped,
            )
            if len(view.points) > 1:
                progressing.put(view, full=self.full)
            else:
                progressing.clear()
        if stopped:
            raise Interrupted(
                "Interrupted: what was measured so far is above." if len(view.points) > 1 else "Interrupted."
            )
        return view


def _step_us(ranks: Ranks) -> float:
    """Of the slowest rank, the median. Raises UsageError where no step was counted."""
    steps = [figures.step_us for figures in map(facts, ranks.runs.values()) if figures.step_us is not None]
    if not steps:
        raise UsageError(f"No step counts in {len(ranks.runs)} ranks: run more steps, or mark them with gpulab.step().")
    return max(step.median for step in steps)


def counts_of(words: Sequence[str]) -> tuple[int, ...] | None:
    """The numbers of ranks, of `--sweep ranks=1,2,4`; None where no such sweep is asked for. Raises UsageError."""
    asked = [word.partition("=")[2] for word in words if word.partition("=")[0].strip() == NAME]
    if not asked:
        return None
    if len(words) > 1:
        raise UsageError("--sweep ranks=… cannot be combined with other sweeps: sweep those with --ranks N.")
    numbers = [text.strip() for text in asked[0].split(",")]
    if len(numbers) < 2 or not all(text.isdecimal() and int(text) > 0 for text in numbers):
        raise UsageError(f"--sweep ranks={asked[0]}: expected two or more integers, e.g. --sweep ranks=1,2,4.")
    if len(set(numbers)) < len(numbers):
        raise UsageError(f"--sweep ranks={asked[0]}: a number appears twice, name it once.")
    return tuple(sorted(map(int, numbers)))
