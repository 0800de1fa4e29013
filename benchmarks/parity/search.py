"""The best setting of a training, by search over all knobs: each alone, what helped together, and what completes it.

All ratios are of gpulab's own experiment, blocks in turn: time of a step over that of the baseline. Only
settings count with which the training stays the same, by the rule of the climb: equal losses, or no further apart than
other seeds bring them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.parity.limits import LONGER, Limits
from benchmarks.parity.settings import COMPILE, Settings, alone, together, words
from benchmarks.parity.staging import Staged
from gpulab.devices.machine import usable_cores
from gpulab.knobs.catalogue import KNOBS
from gpulab.tuning.climb_policy import KEEPING
from gpulab.tuning.code import Code
from gpulab.tuning.execute import FullRun
from gpulab.tuning.record import Comparison, Experiment
from gpulab.tuning.runner import Runner
from gpulab.tuning.schedule import Arm, Plan
from gpulab.verdict import LEAST_EFFECT, TOO_FEW

SEEDS = 3  # as a climb has them
CONFIRMED, COMPLETIONS = 3, 2
NEUTRAL = 1.1  # what alone is at most so much slower may help beside others


@dataclass(slots=True)
class Search:
    """One search. `rows` is everything that was measured, in order; at first what compiling brought by itself."""

    staged: Staged
    limits: Limits
    tell: Callable[[str], None]
    rows: list[dict[str, Any]] = field(default_factory=list)
    written: FullRun | None = None
    block_s: float = 0.0  # what a block took so far

    def compiling(self) -> list[dict[str, Any]]:
        """Each way to compile by itself."""
        self.written = self._as_written()
        single = alone(self.written.observation, usable_cores() or 1)
        self._measure("alone", [s for s in single if COMPILE in s], self.limits.compiled_s)
        return self.rows

    def run(self) -> dict[str, Any]:
        """What came of it, as plain data. Raises what the script raises as written."""
        began = time.monotonic()
        written = self.written = self._as_written()
        observation = written.observation
        cores = usable_cores() or 1
        single = alone(observation, cores)
        self._measure("alone", [s for s in single if COMPILE not in s], self.limits.alone_s)
        self._look_again()
        helpful = self._helpful()
        combined = together(helpful, observation)
        self._measure("together", [s for s in combined if COMPILE not in s], self.limits.together_s)
        self._measure("together", [s for s in combined if COMPILE in s], self.limits.compiled_s)
        best = self._completed(self._ranked()[0]["settings"] if self._ranked() else {}, cores)
        contenders = _distinct([best, *(row["settings"] for row in self._ranked())])[:CONFIRMED]
        self._measure("confirmed", contenders, self.limits.confirming_s)
        confirmed = [row for row in self._ranked("confirmed") if row["verdict"] == "faster"]
        return {
            "best": confirmed[0]["settings"] if confirmed else {},
            "ratio": confirmed[0]["ratio"] if confirmed else 1.0,
            "interval": confirmed[0]["interval"] if confirmed else None,
            "step_ms": _step_ms(written),
            "thin": [words(row["settings"]) for row in self.rows if _is_thin(row)],
            "knobs": sorted({name for settings in single for name in settings}),
            "seconds": time.monotonic() - began,
            "rows": self.rows,
        }

    # -- its parts -----------------------------------------------------------------------------------------------

    def _as_written(self) -> FullRun:
        runner = Runner(self._code(), Plan(arms=(), interleaved=False, budget_s=self.limits.alone_s, save=False))
        runner.run()
        if runner.error is not None:
            raise runner.error
        return runner.full_runs[0]

    def _look_again(self) -> None:
        """At what had too few pairs to tell anything and is not clearly slower; the first look no longer counts."""
        hopeful = [row for row in self.rows if COMPILE not in row["settings"] and (row["ratio"] or 1.0) < NEUTRAL]
        thin = [row for row in hopeful if _is_thin(row)]
        for row in thin:
            row["stage"] = "glance"
        self._measure("alone", [row["settings"] for row in thin], self.limits.alone_s)

    def _helpful(self) -> dict[str, list[Any]]:
        """Knobs whose values brought something by themselves, the best value first."""
        helpful: dict[str, list[Any]] = {}
        for row in self._ranked("alone"):
            if row["ratio"] < 1 - LEAST_EFFECT:
                for name, value in row["settings"].items():
                    helpful.setdefault(name, []).append(value)
        return helpful

    def _completed(self, best: Settings, cores: float) -> Settings:
        """With every other knob on top that makes it faster still."""
        assert self.written is not None
        hopeless = {
            words(row["settings"])
            for row in self.rows
            if row["stage"] == "alone" and (row["failure"] or not row["same_loss"] or (row["ratio"] or 0) > NEUTRAL)
        }
        for number in range(1, COMPLETIONS + 1):
            more = [
                {**best, **single}
                for single in alone(self.written.observation, cores, best)
                if words(single) not in hopeless and COMPILE not in single
            ]
            if not best or not more:
                break
            stage = f"on top {number}"
            self._measure(stage, more, self.limits.completing_s, base=best)
            better = [row for row in self._ranked(stage) if row["verdict"] == "faster"]
            if not better:
                break
            best = better[0]["settings"]
        return best

    def _ranked(self, stage: str = "") -> list[dict[str, Any]]:
        """What was measured and leaves the training the same, the fastest first. What has another base: its stage."""
        return sorted(
            (
                row
                for row in self.rows
                if row["ratio"] is not None
                and row["same_loss"]
                and (row["stage"] == stage or not (stage or row["base"] or row["stage"] == "glance"))
            ),
            key=lambda row: row["ratio"],
        )

    def _measure(self, stage: str, many: Sequence[Settings], budget_s: float, base: Settings | None = None) -> None:
        """Blocks of all of these in turn."""
        assert self.written is not None
        if not many:
            return
        self.tell(f"{stage}: {len(many)} settings")
        needed_s = (TOO_FEW + 1) * (len(many) + 2) * self.block_s
        budget_s, began = max(budget_s, min(LONGER * budget_s, needed_s)), time.monotonic()
        plan = Plan(
            arms=tuple(Arm(dict(settings)) for settings in many),
            base=Arm(dict(base or {})),
            budget_s=budget_s,
            seeds=0 if base else SEEDS,
            save=False,
        )
        experiment = conducted(self._code(), plan, self.written)
        blocks = sum(len(side.blocks) for side in experiment.sides)
        self.block_s = (time.monotonic() - began) / blocks if blocks else self.block_s
        for settings, comparison in zip(many, experiment.comparisons, strict=False):
            row = {"stage": stage, "settings": settings, "base": base or {}, **measured(comparison, settings)}
            self.rows.append(row)
            self.tell(f"  {words(settings)}: {line_of(row)}")

    def _code(self) -> Code:
        """The same script among names of its own: nothing of an earlier experiment is there."""
        return Code.of_text(self.staged.text, dict(self.staged.namespace))


def conducted(code: Code, plan: Plan, written: FullRun) -> Experiment:
    """The plan, beside the baseline, which ran before. Raises what ended it."""
    runner = Runner(code, plan, done=[(Arm(), written)])
    experiment = runner.run()
    if runner.error is not None:
        raise runner.error
    return experiment


def measured(comparison: Comparison, settings: Mapping[str, Any]) -> dict[str, Any]:
    """One comparison as plain data."""
    in_turn = comparison.evidence == "interleaved"
    return {
        "ratio": comparison.ratio if in_turn else None,
        "interval": list(comparison.interval) if in_turn and comparison.interval else None,
        "pairs": comparison.pairs,
        "verdict": comparison.verdict if in_turn else "not measured",
        "loss": comparison.loss.verdict if comparison.loss else "not measurable",
        "loss_words": comparison.loss.words if comparison.loss else "",
        "same_loss": same_loss(comparison, settings),
        "failure": comparison.b.failure,
    }


def same_loss(comparison: Comparison, settings: Mapping[str, Any]) -> bool:
    """Where losses cannot be compared, only what changes nothing that is computed leaves the training the same."""
    if comparison.loss is None or comparison.loss.verdict == "not measurable":
        return all(KNOBS[name].same_training for name in settings)
    return comparison.loss.verdict in KEEPING


def line_of(row: Mapping[str, Any]) -> str:
    """One row in a line."""
    if row["failure"] or row["ratio"] is None:
        return str(row["failure"] or "not measured")
    low, high = row["interval"] or (float("nan"), float("nan"))
    return f"{row['ratio']:.3f} [{low:.3f}, {high:.3f}] {row['verdict']}, {row['pairs']} pairs, loss {row['loss']}"


def _is_thin(row: Mapping[str, Any]) -> bool:
    """A value by itself of which too few pairs tell anything: the time was too short, or the machine too busy."""
    return row["stage"] == "alone" and row["pairs"] < TOO_FEW and row["verdict"] != "slower" and not row["failure"]


def _distinct(many: Sequence[Settings]) -> list[Settings]:
    kept: list[Settings] = []
    for settings in many:
        if settings and settings not in kept:
            kept.append(settings)
    return kept


def _step_ms(full_run: FullRun) -> float | None:
    from gpulab.tuning.schedule import step_s

    return 1e3 * step_s(full_run.run) if len(full_run.run.steps) else None
