"""The comparison of two sides, by blocks or by full runs: its unit, verdict, parts and losses."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from msgspec.structs import replace

from gpulab.formatting import durations
from gpulab.knobs.catalogue import changes_steps
from gpulab.knobs.observation import StepInputs
from gpulab.run import Int64, StepFlag
from gpulab.tuning.compare.cost import setup_s
from gpulab.tuning.compare.differences import compare_losses, differences
from gpulab.tuning.compare.parts import (
    ONE_RUN_EACH,
    comparable_accounts,
    part_changes,
    profiled_runs_agree,
    profiled_us,
    run_agrees,
    run_us,
)
from gpulab.tuning.compare.statistics import Estimate
from gpulab.tuning.record import Block, Comparison, Evidence, Side, Unit
from gpulab.verdict import TOO_FEW, Verdict, contradicts, verdict

BATCH_DIFFERS = 0.01  # of the samples per step: the shorter last batch of an epoch is no other batch size


def comparison_of(
    a: Side,
    b: Side,
    estimate: Estimate | None,
    floor: float | None,
    evidence: Evidence,
    *,
    pairs: int,
    restored: str,
    same_start: bool,
    changes_training: str,
    notes: Sequence[str],
    own_ratio: float | None = None,
) -> Comparison:
    """The comparison of two sides with this estimate of their ratio. A side that failed has no ratio.

    `own_ratio`: without the training thread's waits for a core; None: unknown.
    """
    (unit, unfair), failed = unit_of(a, b), a.failure or b.failure
    estimate = None if failed else estimate
    ratio, interval = (estimate.ratio, estimate.interval) if estimate else (None, None)
    contradicted = ratio is not None and contradicts(ratio, own_ratio)
    said: Verdict = "not comparable"
    if estimate is not None and not unfair:
        said = "undecided" if contradicted else verdict(estimate.ratio, interval, floor, estimate.count)
    more = []
    if said == "undecided" and estimate is not None and estimate.count < TOO_FEW:
        more.append(f"Too few blocks ({estimate.count}) to exclude a difference: at least {TOO_FEW} are needed.")
    if contradicted:
        more.append("Without its waits for a CPU core the ratio is the other way round: other programs decide it.")
    if a.facts is None or b.facts is None or not comparable_accounts(a.facts, b.facts):
        more.append("The step breakdowns cannot be compared: one side has no traced steps.")
    changed = [name for name in {*a.settings, *b.settings} if a.settings.get(name) != b.settings.get(name)]
    other_steps = unit == "sample" or any(map(changes_steps, changed))  # a step does different work on the two sides
    comparison = Comparison(
        a=a,
        b=b,
        verdict=said,
        evidence=evidence,
        unit=unit,
        ratio=ratio,
        interval=interval,
        noise_floor=floor,
        pairs=pairs,
        setup_s=setup_s(a, b),
        parts=part_changes(a, b, per_sample=unit == "sample"),
        loss=None
        if failed
        else compare_losses(a, b, same_start=same_start, changes_training=changes_training, other_steps=other_steps),
        differences=differences(a, b, sequential=evidence == "sequential"),
        notes=(*filter(None, [unfair]), *notes, *more),
        restored=restored,
    )
    if ratio is None or not comparison.parts:
        return comparison
    sides = (a, b) if evidence == "interleaved" else ()
    apart = [side for side in sides if not run_agrees(run_us(side.facts), side.blocks)]
    if not apart and profiled_runs_agree(comparison):
        return comparison
    of_a, of_b = durations(*profiled_us(comparison))
    why = f"in {ONE_RUN_EACH} a {unit} took {of_a} and {of_b}, which does not match their times"
    if apart:
        alone, in_blocks = durations(run_us(apart[0].facts) or 0.0, apart[0].us_per_step or 0.0)
        why = f"the traced run of {apart[0].label} took {alone} per step, its blocks {in_blocks}"
    return replace(comparison, parts=(), no_parts_reason=why)


def with_times(side: Side) -> Side:
    """The side with the medians over its blocks; unchanged if it has none."""
    blocks = usable(side)
    if not blocks:
        return side
    has_samples = all(block.sample_count for block in blocks)
    return replace(
        side,
        us_per_step=_median([us(block, "step") for block in blocks]),
        us_per_sample=_median([us(block, "sample") for block in blocks]) if has_samples else None,
    )


def as_the_pairs_say(a: Side, b: Side, unit: Unit, ratio: float) -> Side:
    """B with its times scaled so that its time is A's time × the ratio: then times and ratio agree.

    B's own medians include disturbances of the machine, which pairs cancel: on a busy machine medians and pairs may
    contradict each other.
    """
    of_a, of_b = (side.us_per_sample if unit == "sample" else side.us_per_step for side in (a, b))
    if not of_a or not of_b:
        return b
    scale = of_a * ratio / of_b
    return replace(
        b,
        us_per_step=None if b.us_per_step is None else b.us_per_step * scale,
        us_per_sample=None if b.us_per_sample is None else b.us_per_sample * scale,
    )


def usable(side: Side) -> tuple[Block, ...]:
    """The blocks with at least one counted step."""
    return tuple(b for b in side.blocks if b.step_count > 0 and b.time_ns > 0)


def us(block: Block, unit: Unit) -> float:
    """Microseconds of a block per step or per sample."""
    count = block.step_count if unit == "step" else block.sample_count
    assert count, "the unit is samples only where all are known"
    return block.time_ns / count / 1e3


def unit_of(a: Side, b: Side) -> tuple[Unit, str]:
    """ "sample" if the batch differs and all samples are known, else "step"; and why steps would be unfair."""
    in_a, in_b = _samples_per_step(a), _samples_per_step(b)
    if in_a is not None and in_b is not None:
        return ("sample" if abs(in_a / in_b - 1) > BATCH_DIFFERS else "step"), ""
    batch_a, batch_b = _batch_size(a), _batch_size(b)
    if batch_a is not None and batch_b is not None and batch_a != batch_b:
        return "step", f"The batch differs ({batch_a} and {batch_b}) and the samples of a step are not known."
    return "step", unknown_work(a, b)


def _samples_per_step(side: Side) -> float | None:
    blocks = usable(side)
    if not blocks or not all(b.sample_count for b in blocks):
        return None
    return _median([(b.sample_count or 0) / b.step_count for b in blocks])


def _batch_size(side: Side) -> int | None:
    loader = side.facts.run.loader if side.facts is not None else None
    return loader.batch_size if loader is not None else None


def _median(values: Sequence[float]) -> float | None:
    return float(np.median(values)) if values else None


def with_sample_counts(a: Side, b: Side) -> tuple[Side, Side, str]:
    """Both sides with samples counted from the inputs of their models, if a variable changed the inputs; and a note.

    Rows of the inputs are certainly samples only if nothing but their number differs between the two sides.
    """
    if not changed_variables(a, b) or not (_lacks_samples(a) and _lacks_samples(b)):
        return a, b, ""
    rows_a, rows_b = _rows(a.step_inputs), _rows(b.step_inputs)
    if not rows_a or not rows_b or rows_a == rows_b or _tails(a.step_inputs) != _tails(b.step_inputs):
        return a, b, ""
    note = f"The samples of a step are the rows of what the model is given in it: {rows_a:,} and {rows_b:,}."
    return _with_rows(a, rows_a), _with_rows(b, rows_b), note


def unknown_work(a: Side, b: Side) -> str:
    """Why a step of one side may hold another number of samples; empty if there is no sign of that."""
    names = changed_variables(a, b)
    if not names or (a.step_inputs is not None and a.step_inputs == b.step_inputs):
        return ""
    variables = ", ".join(f"`{name}`" for name in names)
    return f"Changing {variables} may have changed how many samples a step has, and that is not known."


def changed_variables(a: Side, b: Side) -> tuple[str, ...]:
    """Variables of the cell whose values differ between the sides on purpose."""
    of_a, of_b = _variables(a), _variables(b)
    return tuple(name for name in {**of_a, **of_b} if of_a.get(name) != of_b.get(name))


def _variables(side: Side) -> dict[str, str]:
    return {c.name: c.value for c in side.checks if c.kind.startswith("variable") and c.state != "no effect"}


def _lacks_samples(side: Side) -> bool:
    in_blocks = any(block.sample_count for block in side.blocks)
    return not in_blocks and (side.facts is None or not (side.facts.run.steps.sample_count >= 0).any())


def _rows(inputs: StepInputs | None) -> int | None:
    """Rows of all backward passes of a step; None if the inputs of one pass differ in their number of rows."""
    if inputs is None:
        return None
    counts = [{shape[0] if len(shape) > 1 else None for shape in shapes} for shapes in inputs]
    rows = [next(iter(lengths)) for lengths in counts if len(lengths) == 1]
    return sum(r for r in rows if r) if len(rows) == len(inputs) and all(rows) else None


def _tails(inputs: StepInputs | None) -> set[tuple[tuple[int, ...], ...]]:
    """The inputs of each backward pass without their number of rows."""
    return {tuple(shape[1:] for shape in shapes) for shapes in inputs or ()}


def _with_rows(side: Side, rows: int) -> Side:
    figures, run = side.facts, None
    if figures is not None:
        steps = figures.run.steps
        samples: Int64 = np.where((steps.flags & StepFlag.PARTIAL) == 0, rows, -1).astype(np.int64)
        run = replace(figures.run, steps=replace(steps, sample_count=samples))
    return replace(
        side,
        blocks=tuple(replace(block, sample_count=rows * block.step_count) for block in side.blocks),
        facts=None if figures is None else replace(figures, run=run),
    )
