"""Two sides by the steps of one full run of each: they ran one after the other, which is weaker evidence."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from msgspec.structs import replace

from gpulab.analysis.facts import Facts, facts
from gpulab.errors import UsageError
from gpulab.run import Float64, Int64, Run
from gpulab.tuning.compare.parts import typical_steps
from gpulab.tuning.compare.statistics import Estimate, unpaired
from gpulab.tuning.compare.verdicts import Findings, Unit, chosen_unit, us, usable, with_times
from gpulab.tuning.record import Block, Comparison, Experiment, Side

MOST_STEPS = 10  # of a block; definitions.md, "Honest comparison" 3: 5 to 10
FEWEST_BLOCKS = 6  # what a bootstrap needs; a run of fewer steps than this makes of 5 has shorter blocks
UNPROFILED, PROFILED = "without the profiler", "with the profiler"


def compare_sequential(
    a: Side,
    b: Side,
    *,
    restored: str = "",
    same_start: bool = False,
    changes_training: str = "",
    notes: Sequence[str] = (),
) -> Comparison:
    """B against A from the steps of their full runs, whose consecutive steps make blocks; nothing is paired.

    Both are judged by their unprofiled steps, or both by their profiled ones where a side has only those. Each side's
    time is the typical step of its own report, and the ratio is that of these; the blocks tell how sure it is. The
    noise floor is the larger drift within a run: its second half against its first.
    """
    how = judged_by(a.facts, b.facts)
    a, b = _with_blocks(a, 0, how), _with_blocks(b, 1, how)
    unit, unfair = chosen_unit(a, b)
    in_a, in_b = _times(a, unit), _times(b, unit)
    drifts = [d for d in (_drift(in_a), _drift(in_b)) if d is not None]
    findings = Findings(a, b, unit, unfair, same_start, changes_training)
    return findings.comparison(
        _of_typical_steps(a, b, unit, unpaired(in_a, in_b)),
        max(drifts, default=None),
        "sequential",
        0,
        restored,
        [*notes, *_notes(a, b, how)],
    )


def _of_typical_steps(a: Side, b: Side, unit: Unit, of_blocks: Estimate | None) -> Estimate | None:
    """The ratio of both typical steps. Its interval is as wide as that of the blocks, and holds both where the blocks
    have another ratio.
    """
    of_a, of_b = (side.us_per_sample if unit == "sample" else side.us_per_step for side in (a, b))
    if of_blocks is None or not of_a or not of_b:
        return of_blocks
    ratio = of_b / of_a
    if of_blocks.interval is None:
        return Estimate(ratio, None, of_blocks.count)
    low, high = of_blocks.interval
    moved = ratio / of_blocks.ratio
    return Estimate(ratio, (min(low, low * moved), max(high, high * moved)), of_blocks.count)


def judged_by(a: Facts | None, b: Facts | None) -> str:
    """By which steps: a profiled step is slower than an unprofiled one, so the two are never mixed."""
    both = [side for side in (a, b) if side is not None]
    return UNPROFILED if all(len(side.selection.rows) for side in both) else PROFILED


def _with_blocks(side: Side, arm: int, how: str) -> Side:
    if side.facts is None:
        return side
    figures, rows = side.facts, _rows(side.facts, how)
    side = with_times(replace(side, blocks=tuple(_blocks(figures, rows, arm))))
    step = figures.step_us if how == UNPROFILED else figures.traced_step_us
    if step is None or side.us_per_step is None or not step.median:
        return side
    samples = figures.run.steps.sample_count[rows]
    us_per_sample = step.median / float(np.median(samples)) if side.us_per_sample is not None else None
    return replace(side, us_per_step=step.median, us_per_sample=us_per_sample)


def _rows(figures: Facts, how: str) -> Int64:
    if how == UNPROFILED:
        return figures.selection.rows
    numbers: Sequence[int] = figures.run.traced_numbers
    if figures.breakdown is not None and not figures.breakdown.whole_window:
        numbers = [step.number for step in typical_steps(figures.run, figures.breakdown)]
    rows: Int64 = np.flatnonzero(np.isin(figures.run.steps.number, numbers))
    return rows


def block_steps(count: int) -> int:
    """Steps per block: ten where that makes enough blocks, else fewer, below thirty steps fewer than five."""
    return max(1, min(MOST_STEPS, count // FEWEST_BLOCKS))


def _blocks(figures: Facts, rows: Int64, arm: int) -> list[Block]:
    size, time_ns = block_steps(len(rows)), figures.step_times_ns
    chunks = [rows[i : i + size] for i in range(0, len(rows) - size + 1, size)]
    return [_block(figures.run, chunk, int(time_ns[chunk].sum()), arm, i) for i, chunk in enumerate(chunks)]


def _block(run: Run, rows: Int64, time_ns: int, arm: int, index: int) -> Block:
    samples = run.steps.sample_count[rows]
    return Block(
        arm=arm,
        turn=index,
        order=index,
        step_count=len(rows),
        dropped=0,
        sample_count=int(samples.sum()) if (samples >= 0).all() else None,
        time_ns=time_ns,
    )


def _times(side: Side, unit: Unit) -> Float64:
    return np.array([us(block, unit) for block in usable(side)], np.float64)


def _drift(times: Float64) -> float | None:
    """How far the second half of a run is from its first, as a fraction; None with fewer than two blocks."""
    if len(times) < 2:
        return None
    half = len(times) // 2
    return math.expm1(abs(math.log(np.median(times[-half:]) / np.median(times[:half]))))


def _notes(a: Side, b: Side, how: str) -> list[str]:
    notes = [
        f"{side.label}: no training step was found that could be compared."
        for side in (a, b)
        if side.facts is not None and not usable(side)
    ]
    if how == PROFILED and not notes:
        notes.append(
            "Compared by their traced steps, which are slower than untraced ones; the first and the last are left "
            "out where enough others remain."
        )
    return notes


def compare_runs(runs: Sequence[Run], *, notes: Sequence[str] = ()) -> Comparison | Experiment:
    """The runs after the first against the first. Raises UsageError for fewer than two.

    Two runs give a Comparison, more an Experiment. `notes` are told with each.
    """
    if len(runs) < 2:
        raise UsageError("A comparison needs two runs: name the one to compare with first, then the other.")
    for run in runs:
        if run.origin is not None and run.origin.is_cut_short:
            raise UsageError(
                f"{run.name} cannot be compared: its file is cut short. Copy the whole file again, or record it again."
            )
    sides = [_side(run, _label(run, i, runs)) for i, run in enumerate(runs)]
    compared = [compare_sequential(sides[0], side, notes=notes) for side in sides[1:]]
    if len(compared) == 1:
        return compared[0]
    return Experiment(
        sides=(compared[0].a, *(c.b for c in compared)),
        comparisons=tuple(compared),
        seconds=sum(run.code_wall_ns for run in runs) / 1e9,
    )


def _side(run: Run, label: str) -> Side:
    return Side(label, dict(run.settings.knobs), facts(run), checks=run.changes)


def _label(run: Run, index: int, runs: Sequence[Run]) -> str:
    """The run's name, told apart from another run of the same name by its id."""
    if sum(other.name == run.name for other in runs) == 1:
        return run.name
    alike = sum(other.id == run.id for other in runs[:index])
    return f"{run.id} ({alike + 1})" if sum(other.id == run.id for other in runs) > 1 else run.id
