"""What is told of two sides whatever the evidence of their times is: the unit, the verdict, the parts, the losses."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from gpulab.formatting import durations, number, plural
from gpulab.knobs.catalogue import changes_steps
from gpulab.knobs.dataloader.loader_options import WORKERS
from gpulab.knobs.observe.observation import StepInputs
from gpulab.run import THROTTLE_NAMES, Int64, Loader, Run, StepFlag
from gpulab.tuning.compare.loss import compare_losses
from gpulab.tuning.compare.parts import (
    ONE_RUN_EACH,
    comparable_accounts,
    part_changes,
    profiled_runs_agree,
    profiled_us,
    run_agrees,
    run_us,
)
from gpulab.tuning.compare.setup_cost import setup_s
from gpulab.tuning.compare.statistics import Estimate
from gpulab.tuning.record import Block, Comparison, Evidence, Side
from gpulab.verdict import TOO_FEW, Verdict, contradicts, verdict

Unit = Literal["sample", "step"]
BATCH_DIFFERS = 0.01  # of the samples per step: an epoch's shorter last batch is no other batch size


class Findings(Struct, frozen=True):
    """What is told of two sides whatever the evidence of their times is."""

    a: Side
    b: Side
    unit: Unit
    unfair: str  # why a ratio of times would compare different work
    same_start: bool
    changes_training: str
    own_ratio: float | None = None  # without the training thread's waits for a core; None: unknown

    def comparison(
        self,
        estimate: Estimate | None,
        floor: float | None,
        evidence: Evidence,
        pairs: int,
        restored: str,
        notes: Sequence[str],
    ) -> Comparison:
        """The whole comparison. A side that failed has no ratio, whatever it did before."""
        if self.a.failure or self.b.failure:
            estimate = None
        judged = self._verdict(estimate, floor)
        more = []
        if judged == "undecided" and estimate is not None and estimate.count < TOO_FEW:
            more.append(f"Too few blocks ({estimate.count}) to exclude a difference: at least {TOO_FEW} are needed.")
        if estimate is not None and contradicts(estimate.ratio, self.own_ratio):
            more.append("Without its waits for a CPU core the ratio is the other way round: other programs decide it.")
        if not _accounted(self.a, self.b):
            more.append("The step breakdowns cannot be compared: one side has no traced steps.")
        comparison = Comparison(
            a=self.a,
            b=self.b,
            verdict=judged,
            evidence=evidence,
            unit=self.unit,
            ratio=estimate.ratio if estimate else None,
            interval=estimate.interval if estimate else None,
            noise_floor=floor,
            pairs=pairs,
            setup_s=setup_s(self.a, self.b),
            parts=part_changes(self.a, self.b, per_sample=self.unit == "sample"),
            loss=None
            if self.a.failure or self.b.failure
            else compare_losses(
                self.a,
                self.b,
                same_start=self.same_start,
                changes_training=self.changes_training,
                other_steps=self._other_steps(),
            ),
            differences=differences(self.a, self.b, sequential=evidence == "sequential"),
            notes=(*filter(None, [self.unfair]), *notes, *more),
            restored=restored,
        )
        if comparison.ratio is None or not comparison.parts:
            return comparison
        sides = (self.a, self.b) if evidence == "interleaved" else ()
        apart = [side for side in sides if not run_agrees(run_us(side.facts), side.blocks)]
        if not apart and profiled_runs_agree(comparison):
            return comparison
        of_a, of_b = durations(*profiled_us(comparison))
        why = f"in {ONE_RUN_EACH} a {comparison.unit} took {of_a} and {of_b}, which does not match their times"
        if apart:
            alone, in_blocks = durations(run_us(apart[0].facts) or 0.0, apart[0].us_per_step or 0.0)
            why = f"the traced run of {apart[0].label} took {alone} per step, its blocks {in_blocks}"
        return replace(comparison, parts=(), parts_left_out=why)

    def _verdict(self, estimate: Estimate | None, floor: float | None) -> Verdict:
        if self.unfair or estimate is None:
            return "not comparable"
        if contradicts(estimate.ratio, self.own_ratio):
            return "undecided"
        return verdict(estimate.ratio, estimate.interval, floor, estimate.count)

    def _other_steps(self) -> bool:
        """A step of B takes other samples than the same step of A: their losses are of different work."""
        a, b = self.a.settings, self.b.settings
        return self.unit == "sample" or any(a.get(n) != b.get(n) for n in {*a, *b} if changes_steps(n))


def with_times(side: Side) -> Side:
    """The side with the medians over its blocks; without a block as it is."""
    blocks = usable(side)
    if not blocks:
        return side
    counted = all(block.sample_count for block in blocks)
    return replace(
        side,
        us_per_step=_median([us(block, "step") for block in blocks]),
        us_per_sample=_median([us(block, "sample") for block in blocks]) if counted else None,
    )


def as_the_pairs_say(a: Side, b: Side, unit: Unit, ratio: float) -> Side:
    """B with A's time times the ratio, and all its times in proportion: then times and ratio are one fact.

    Its own medians hold what the machine did meanwhile, which the pairs cancel: on a busy one the two may point in
    opposite directions.
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
    """Blocks in which something was counted."""
    return tuple(b for b in side.blocks if b.step_count > 0 and b.time_ns > 0)


def us(block: Block, unit: Unit) -> float:
    """Microseconds of a block per step or per sample."""
    count = block.step_count if unit == "step" else block.sample_count
    assert count, "the unit is samples only where all are known"
    return block.time_ns / count / 1e3


def chosen_unit(a: Side, b: Side) -> tuple[Unit, str]:
    """Samples where the batch differs and all samples are known, else steps; and why steps would not be fair then."""
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


def _accounted(a: Side, b: Side) -> bool:
    return a.facts is not None and b.facts is not None and comparable_accounts(a.facts, b.facts)


def _median(values: Sequence[float]) -> float | None:
    return float(np.median(values)) if values else None


def counted(a: Side, b: Side) -> tuple[Side, Side, str]:
    """Both with samples counted from the inputs of their models, where a changed variable changed those; and a note.

    The rows of the inputs are samples for certain only where nothing but their number differs between the two.
    """
    if not changed_variables(a, b) or not (_uncounted(a) and _uncounted(b)):
        return a, b, ""
    rows_a, rows_b = _rows(a.step_inputs), _rows(b.step_inputs)
    if not rows_a or not rows_b or rows_a == rows_b or _tails(a.step_inputs) != _tails(b.step_inputs):
        return a, b, ""
    note = f"The samples of a step are the rows of what the model is given in it: {rows_a:,} and {rows_b:,}."
    return _with_rows(a, rows_a), _with_rows(b, rows_b), note


def unknown_work(a: Side, b: Side) -> str:
    """Why a step of one side may hold another number of samples; empty where nothing says so."""
    names = changed_variables(a, b)
    if not names or (a.step_inputs is not None and a.step_inputs == b.step_inputs):
        return ""
    named = ", ".join(f"`{name}`" for name in names)
    return f"Changing {named} may have changed how many samples a step has, and that is not known."


def changed_variables(a: Side, b: Side) -> tuple[str, ...]:
    """Names of the cell's variables whose values differ between the two on purpose."""
    of_a, of_b = _variables(a), _variables(b)
    return tuple(name for name in {**of_a, **of_b} if of_a.get(name) != of_b.get(name))


def _variables(side: Side) -> dict[str, str]:
    return {c.name: c.value for c in side.checks if c.kind.startswith("variable") and c.state != "no effect"}


def _uncounted(side: Side) -> bool:
    in_blocks = any(block.sample_count for block in side.blocks)
    return not in_blocks and (side.facts is None or not (side.facts.run.steps.sample_count >= 0).any())


def _rows(inputs: StepInputs | None) -> int | None:
    """Of all backward passes of a step; None where the inputs of one pass have not all the same number of rows."""
    if inputs is None:
        return None
    counts = [{shape[0] if len(shape) > 1 else None for shape in shapes} for shapes in inputs]
    rows = [next(iter(lengths)) for lengths in counts if len(lengths) == 1]
    return sum(r for r in rows if r) if len(rows) == len(inputs) and all(rows) else None


def _tails(inputs: StepInputs | None) -> set[tuple[tuple[int, ...], ...]]:
    """The inputs of each backward pass without their number of rows."""
    return {tuple(shape[1:] for shape in shapes) for shapes in inputs or ()}


def _with_rows(side: Side, rows: int) -> Side:
    figures = side.facts
    return replace(
        side,
        blocks=tuple(replace(block, sample_count=rows * block.step_count) for block in side.blocks),
        facts=None if figures is None else replace(figures, run=_run_with_rows(figures.run, rows)),
    )


def _run_with_rows(run: Run, rows: int) -> Run:
    whole = (run.steps.flags & StepFlag.PARTIAL) == 0
    samples: Int64 = np.where(whole, rows, -1).astype(np.int64)
    return replace(run, steps=replace(run.steps, sample_count=samples))


CLOCK_DIFFERS = 0.05
MOST_PACKAGES = 6
_UNKNOWN = ("", "not in the trace", "CPU (name not in the trace)", "GPU (name not in the trace)")
_MACHINE: tuple[tuple[str, str], ...] = (
    ("hostname", "machine"),
    ("cpu", "CPU"),
    ("usable_cores", "number of usable cores"),
    ("python", "Python"),
)
_LOADER_NAMES = {"batch_size": "batch size", "num_workers": "number of workers"}


def differences(a: Side, b: Side, *, sequential: bool) -> tuple[str, ...]:
    """Sentences, the gravest first. What the settings of a side change on purpose is none of them.

    Of arms of one experiment (not `sequential`) the code differs on purpose or not at all, and is not compared; nor are
    the options of the DataLoader where a side has settings.
    """
    sentences = list(_without_effect(a, b))
    if a.facts is not None and b.facts is not None:
        run_a, run_b = a.facts.run, b.facts.run
        sentences += _of_device(run_a, run_b)
        sentences += _of_machine(run_a, run_b)
        sentences += _of_dataset(run_a.loader, run_b.loader)
        if sequential:
            sentences += _of_code(run_a.code, run_b.code)
        if sequential and not a.settings and not b.settings:
            sentences += _of_loader(run_a.loader, run_b.loader)
        sentences += [*_of_workers(a), *_of_workers(b)]
        sentences += [*_of_outcome(a), *_of_outcome(b)]
        sentences += _of_neighbours(a, b)
        sentences += _of_clocks(a, b)
    return tuple(sentences)


def _without_effect(a: Side, b: Side) -> Iterator[str]:
    for side in (a, b):
        for check in side.checks:
            if check.state == "no effect":
                yield f"{check.name}={check.value} had no effect: {check.evidence}."


def _of_device(a: Run, b: Run) -> Iterator[str]:
    if a.device.kind != b.device.kind or _differ(a.device.name, b.device.name):
        yield f"Other device: {a.device.name} and {b.device.name}."
    elif a.device.kind == "cuda" and _differ(a.device.uuid, b.device.uuid):
        yield f"Another GPU of the same model ({a.device.name})."
    for key, name in (("driver", "driver"), ("power_limit_w", "power cap")):
        if _differ(a.device.details.get(key), b.device.details.get(key)):
            yield f"Other {name} of the GPU: {a.device.details[key]} and {b.device.details[key]}."


def _of_machine(a: Run, b: Run) -> Iterator[str]:
    for field, name in _MACHINE:
        in_a, in_b = getattr(a.environment, field), getattr(b.environment, field)
        if _differ(in_a, in_b):
            yield f"Other {name}: {in_a} and {in_b}."
    packages_a, packages_b = a.environment.packages, b.environment.packages
    changed = [p for p in packages_a if p in packages_b and packages_a[p] != packages_b[p]]
    changed.sort(key=lambda name: name != "torch")
    for package in changed[:MOST_PACKAGES]:
        yield f"Other {package}: {packages_a[package]} and {packages_b[package]}."
    if len(changed) > MOST_PACKAGES:
        yield f"Other versions of {len(changed) - MOST_PACKAGES} more packages."


def _of_dataset(a: Loader | None, b: Loader | None) -> Iterator[str]:
    if a is None or b is None:
        return
    if _differ(a.dataset, b.dataset) or _differ(a.dataset_length, b.dataset_length):
        yield f"Other dataset: {_dataset(a)} and {_dataset(b)}."


def _dataset(loader: Loader) -> str:
    return loader.dataset if loader.dataset_length is None else f"{loader.dataset} of {loader.dataset_length:,}"


def _of_loader(a: Loader | None, b: Loader | None) -> Iterator[str]:
    if a is None or b is None:
        return
    for name in Loader.__struct_fields__:
        if name in ("dataset", "dataset_length", "length"):
            continue
        in_a, in_b = getattr(a, name), getattr(b, name)
        if in_a == in_b or (name == "prefetch_factor" and None in (in_a, in_b)):  # None: there are no workers
            continue
        yield f"Other {_LOADER_NAMES.get(name, name)} of the DataLoader: {in_a} and {in_b}."


def _of_code(a: str, b: str) -> Iterator[str]:
    """Which lines differ; nothing where a side keeps no code."""
    if not a.strip() or not b.strip() or a.split() == b.split():
        return
    lines_a, lines_b = a.splitlines(), b.splitlines()
    changes = [c for c in difflib.SequenceMatcher(None, lines_a, lines_b, False).get_opcodes() if c[0] != "equal"]
    count = sum(max(c[2] - c[1], c[4] - c[3]) for c in changes)
    _, a_from, a_to, b_from, b_to = changes[0]
    first_a, first_b = _line(lines_a[a_from:a_to]), _line(lines_b[b_from:b_to])
    yield f"Other code: {plural(count, 'line')} differ{'' if count != 1 else 's'}, first {first_a} and {first_b}."


def _line(lines: list[str]) -> str:
    return f"“{lines[0].strip()[:60]}”" if lines else "nothing"


def _of_workers(side: Side) -> Iterator[str]:
    """A loader that ran with another number of workers than was asked for."""
    asked = side.settings.get(WORKERS.name, "")
    loader = side.facts.run.loader if side.facts is not None else None
    if loader is not None and asked.isdecimal() and loader.num_workers != int(asked):
        yield f"{side.label}: {asked} workers were asked for, {loader.num_workers} loaded."


def _of_outcome(side: Side) -> Iterator[str]:
    assert side.facts is not None
    run = side.facts.run
    if run.outcome in ("failed", "interrupted"):
        how = "ended by an exception" if run.outcome == "failed" else "was interrupted"
        yield f"{side.label} {how}{f': {run.outcome_detail}' if run.outcome_detail else ''}."


def _of_neighbours(a: Side, b: Side) -> Iterator[str]:
    for side in (a, b):
        most = _reading(side, "other_gpu_processes", np.nanmax)
        if most:
            yield f"{side.label}: {number(most)} other process{'es' if most > 1 else ''} used the GPU meanwhile."


def _of_clocks(a: Side, b: Side) -> Iterator[str]:
    for side in (a, b):
        reasons = _throttled(side)
        if reasons:
            yield f"{side.label}: the GPU was throttled ({', '.join(reasons)})."
    in_a, in_b = _reading(a, "sm_clock_mhz", np.nanmedian), _reading(b, "sm_clock_mhz", np.nanmedian)
    busy_a, busy_b = (_reading(side, "gpu_utilization_pct", np.nanmean) or 0.0 for side in (a, b))
    # a GPU with less to do lowers its clock by itself: that comes from the change, it does not disturb the comparison
    if in_a and in_b and abs(in_b / in_a - 1) > CLOCK_DIFFERS and (in_b - in_a) * (busy_b - busy_a) <= 0:
        yield f"Other GPU clock: {number(round(in_a))} and {number(round(in_b))} MHz (medians)."


def _throttled(side: Side) -> list[str]:
    """Reasons that held in at least one reading in ten: a single one at the start is no reason."""
    assert side.facts is not None
    series = side.facts.run.samples.get("throttle_reasons")
    if series is None or not len(series.value):
        return []
    bits = series.value[np.isfinite(series.value)].astype(np.int64)
    return [name for bit, name in THROTTLE_NAMES.items() if len(bits) and ((bits & bit) != 0).mean() >= 0.1]


def _reading(side: Side, name: str, summary: Callable[[np.ndarray], np.floating]) -> float | None:
    assert side.facts is not None
    series = side.facts.run.samples.get(name)
    if series is None or not np.isfinite(series.value).any():
        return None
    return float(summary(series.value))


def _differ(a: object, b: object) -> bool:
    """Both are known, and not the same."""
    both = a is not None and b is not None and a not in _UNKNOWN and b not in _UNKNOWN
    return both and a != b
