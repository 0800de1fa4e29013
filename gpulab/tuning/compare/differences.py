"""What else differs between the two sides, and would explain a difference as well as the change that was made."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator

import numpy as np

from gpulab.formatting import number, plural
from gpulab.knobs.dataloader.loader_options import WORKERS
from gpulab.run import THROTTLE_NAMES, Loader, Run
from gpulab.tuning.record import Side

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
            yield f"{side.label}: the GPU was held down by {', '.join(reasons)}."
    in_a, in_b = _reading(a, "sm_clock_mhz", np.nanmedian), _reading(b, "sm_clock_mhz", np.nanmedian)
    if in_a and in_b and abs(in_b / in_a - 1) > CLOCK_DIFFERS:
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
