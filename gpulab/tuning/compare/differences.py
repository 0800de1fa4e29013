"""What differs between two sides besides their times: device, machine, versions, data, code, clocks and losses."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from gpulab.formatting import difference, number, plural
from gpulab.knobs.loader_options import WORKERS
from gpulab.run import THROTTLE_NAMES, Float64, Loader, Run
from gpulab.tuning.compare.statistics import student_975
from gpulab.tuning.record import LossComparison, LossVerdict, Side

CLOCK_DIFFERS = 0.05
MOST_PACKAGES = 6
_UNKNOWN = ("", "not in the trace", "CPU (name not in the trace)", "GPU (name not in the trace)")
_SAME: tuple[tuple[str, Callable[[Run], object]], ...] = (
    ("driver of the GPU", lambda run: run.device.details.get("driver")),
    ("power cap of the GPU", lambda run: run.device.details.get("power_limit_w")),
    ("machine", lambda run: run.environment.hostname),
    ("CPU", lambda run: run.environment.cpu),
    ("number of usable cores", lambda run: run.environment.usable_cores),
    ("Python", lambda run: run.environment.python),
)
_LOADER_NAMES = {"batch_size": "batch size", "num_workers": "number of workers"}


def differences(a: Side, b: Side, *, sequential: bool) -> tuple[str, ...]:
    """Sentences, the gravest first, without the changes that the settings of a side make on purpose.

    The code of arms of one experiment (not `sequential`) is not compared: it differs on purpose or not at all. Options
    of the DataLoader are not compared either if a side has settings.
    """
    sentences = list(_without_effect(a, b))
    if a.facts is not None and b.facts is not None:
        run_a, run_b = a.facts.run, b.facts.run
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


def _of_machine(a: Run, b: Run) -> Iterator[str]:
    if a.device.kind != b.device.kind or _differ(a.device.name, b.device.name):
        yield f"Other device: {a.device.name} and {b.device.name}."
    elif a.device.kind == "cuda" and _differ(a.device.uuid, b.device.uuid):
        yield f"Another GPU of the same model ({a.device.name})."
    for name, value in _SAME:
        if _differ(value(a), value(b)):
            yield f"Other {name}: {value(a)} and {value(b)}."
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
    """How many lines differ, with the first one; nothing if a side has no code."""
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
    """A sentence if a loader ran with another number of workers than the setting says."""
    workers = side.settings.get(WORKERS.name, "")
    loader = side.facts.run.loader if side.facts is not None else None
    if loader is not None and workers.isdecimal() and loader.num_workers != int(workers):
        yield f"{side.label}: {workers} workers were asked for, {loader.num_workers} loaded."


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
    # a GPU with less work lowers its clock by itself: that is an effect of the setting, not a disturbance
    if in_a and in_b and abs(in_b / in_a - 1) > CLOCK_DIFFERS and (in_b - in_a) * (busy_b - busy_a) <= 0:
        yield f"Other GPU clock: {number(round(in_a))} and {number(round(in_b))} MHz (medians)."


def _throttled(side: Side) -> list[str]:
    """Throttle reasons in at least a tenth of the readings: a single reading at the start does not count."""
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
    """Whether both are known and differ."""
    both = a is not None and b is not None and a not in _UNKNOWN and b not in _UNKNOWN
    return both and a != b


SAME = 1e-6  # relative: the last bits of float32, which depend on the order of additions
UNMOVED = "the other seeds changed nothing: your code sets its own seed, or draws no random numbers"
UNSEEDED = "how far another seed alone moves them was not measured (--seeds 3 does)"
Curve = tuple[float, ...]


def compare_losses(
    a: Side, b: Side, *, same_start: bool = True, changes_training: str = "", other_steps: bool = False
) -> LossComparison | None:
    """Both curves, and the verdict on them; None if no loss was recorded on either side.

    `other_steps`: the same step processes different samples on the two sides (batch size, accumulation);
    `changes_training` says why. Otherwise losses that differ are judged by the band of `a.seed_losses`; without these,
    no seeds were run. If the seeds changed nothing, every difference is due to the setting.
    """
    if not a.losses and not b.losses:
        return None
    of_seeds = [losses for losses in a.seed_losses if np.isfinite(losses).any()]  # a failed run has no losses
    unmoved = bool(of_seeds) and all(repeats(a.losses, losses) for losses in of_seeds)
    band = loss_band([a.losses, *of_seeds]) if of_seeds and not unmoved else ()
    seeds = len(of_seeds)

    def said(verdict: LossVerdict, words: str) -> LossComparison:
        return LossComparison(a.losses, b.losses, band, seeds, verdict, words)

    common = min(len(a.losses), len(b.losses))
    of_a, of_b = np.array(a.losses[:common], np.float64), np.array(b.losses[:common], np.float64)
    identical, broken = np.array_equal(of_a, of_b, equal_nan=True), _broken(of_a, of_b)
    if broken:
        return said("same" if identical else "different", broken)
    if not (np.isfinite(of_a) & np.isfinite(of_b)).any():
        return said("not measurable", "No step of both sides began its backward pass at a single loss")
    if identical:
        return said("same", f"Bitwise identical over {plural(common, 'step')}")
    apart = _apart(of_a, of_b)
    first, worst = float(apart[np.isfinite(apart)][0]), float(np.nanmax(apart))
    if worst <= SAME:
        return said("same", f"Equal within {SAME:g} of their value over {plural(common, 'step')}")
    if other_steps:
        why = changes_training or "the steps use different samples"
        return said("not comparable", f"Losses aren't comparable: {why}")
    how_far = f"differ by up to {_percent(worst)} over {plural(common, 'step')}, by {_percent(first)} in the first"
    if not same_start:
        return said("not comparable", f"Losses {how_far}; the two did not start from the same state")
    if unmoved:
        return said("different", f"Losses {how_far}; {UNMOVED}")
    if not band:
        return said("seeds not run", f"Losses {how_far}; {UNSEEDED}")
    curves = [a.losses, *of_seeds]
    if _distance(of_b, curves) <= student_975(len(curves) - 1):
        return said(
            "within the band", f"Losses {how_far}, no further than another seed may move them ({seeds + 1} seeds)"
        )
    return said(
        "outside the band",
        f"Losses {how_far}, further than another seed moves them ({seeds + 1} seeds): another training",
    )


def loss_band(curves: Sequence[Curve]) -> tuple[tuple[float, float], ...]:
    """Lowest and highest loss of each step that all curves have."""
    common = min(map(len, curves))
    table = np.array([curve[:common] for curve in curves], np.float64)
    return tuple((float(low), float(high)) for low, high in zip(table.min(axis=0), table.max(axis=0), strict=True))


def repeats(first: Curve, again: Curve) -> bool:
    """Whether two runs at identical settings gave the same losses, over the steps that both recorded."""
    common = min(len(first), len(again))
    apart = _apart(np.array(first[:common], np.float64), np.array(again[:common], np.float64))
    return bool(np.nanmax(apart, initial=0.0) <= SAME)


def _broken(a: Float64, b: Float64) -> str:
    """The step at which a loss became NaN or infinite, on one side or on both."""
    lines = []
    for side, own, other in (("A", a, b), ("B", b, a)):
        last = len(own) - 1  # the last step may have been cut off before its loss
        bad = [i for i in range(last) if math.isinf(own[i]) or (math.isnan(own[i]) and math.isfinite(other[i]))]
        if bad:
            kind = "infinite" if math.isinf(own[bad[0]]) else "not a number"
            lines.append(f"{side}'s loss is {kind} from step {bad[0] + 1} on")
    return "; ".join(lines)


def _apart(a: Float64, b: Float64) -> Float64:
    with np.errstate(invalid="ignore", divide="ignore"):
        scale = np.maximum(np.abs(a), np.abs(b))
        difference: Float64 = np.where(a == b, 0.0, np.abs(a - b) / scale)
    return difference


def _distance(b: Float64, seeds: Sequence[Curve]) -> float:
    """Distance of b from the mean of the seeds, divided by the expected distance of one more seed: a Student's t.

    Root mean square over the steps, so that a constant offset and a single excursion count alike.
    """
    common = min(len(b), *map(len, seeds))
    table = np.array([curve[:common] for curve in seeds], np.float64)
    finite = np.isfinite(b[:common]) & np.isfinite(table).all(axis=0)
    if not finite.any():
        return math.inf
    table, own = table[:, finite], b[:common][finite]
    apart = math.sqrt(((own - table.mean(axis=0)) ** 2).mean())
    expected = math.sqrt(table.var(axis=0, ddof=1).mean() * (1 + 1 / len(table)))
    return apart / expected if expected else (math.inf if apart else 0.0)


def _percent(fraction: float) -> str:
    return difference(fraction) if math.isfinite(fraction) else "an unknown part"
