"""The sections of a report apart from its steps: device, memory, pauses, loading, settings, and how it was measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from gpulab.analysis.cores import CoreShare
from gpulab.analysis.facts import Facts, is_long_enough
from gpulab.analysis.loader import LoadingFacts, WorkerRow, sampled
from gpulab.formatting import (
    duration,
    duration_ns,
    factor,
    number,
    percent,
    plain_values,
    plural,
    rate,
    size,
)
from gpulab.intervals import measure, union_of
from gpulab.run import Change, Pause, PauseKind, Run, TraceOrigin
from gpulab.views import wording
from gpulab.views.layout import PAIRS, TEXTS, Column, Row, Section, numbers, present
from gpulab.views.wording import Part, plain

TOO_SHORT = "too short to measure"


def device_section(facts: Facts) -> Section | None:
    brief = [s for s in facts.run.samples.series if len(s.value) and not is_long_enough(s)]
    if not facts.curves and not brief:
        return None
    cells = [
        (
            plain(c.label),
            "–" if c.step_mean is None else wording.quantity(c.step_mean, c.name, c.unit),
            wording.quantity(c.mean, c.name, c.unit),
            wording.quantity(c.maximum, c.name, c.unit),
            f"{c.count:,}",
            plain(c.source),
        )
        for c in facts.curves
    ]
    cells += [(plain(s.label), TOO_SHORT, "", "", f"{len(s.value):,}", plain(s.source)) for s in brief]
    columns = (Column("", "cut"), *numbers("in steps", "in all", "maximum", "readings"), Column("source"))
    if brief:
        result = f"{plain(brief[0].label)}: {TOO_SHORT}"
    else:
        first = facts.curves[0]
        mean, where = (first.mean, "on average") if first.step_mean is None else (first.step_mean, "in counted steps")
        result = f"{plain(first.label)}: {wording.quantity(mean, first.name, first.unit)} {where}"
    return Section.table("Device", columns, cells, result=result)


def loader_section(run: Run) -> Section | None:
    title = "DataLoader settings"
    loader = run.loader
    if loader is None:
        return None
    pairs = {
        "dataset": plain(loader.dataset)
        + ("" if loader.dataset_length is None else f", {plural(loader.dataset_length, 'item')}"),
        "batch_size": _or_unknown(loader.batch_size),
        "num_workers": f"{loader.num_workers:,}"
        + (" (loads in the training process itself)" if not loader.num_workers else ""),
        "prefetch_factor": "none without workers" if not loader.num_workers else _or_unknown(loader.prefetch_factor),
        "pin_memory": str(loader.pin_memory),
        "persistent_workers": str(loader.persistent_workers),
        "batches per epoch": _or_unknown(loader.length),
    }
    result = f"batch_size {pairs['batch_size']}, {plural(loader.num_workers, 'worker')}"
    return Section.table(title, PAIRS, pairs.items(), result=result)


def _or_unknown(value: int | None) -> str:
    return "unknown" if value is None else f"{value:,}"


def missing_section(run: Run) -> Section | None:
    title = "What could not be measured"
    rows = []
    if not run.settings.trace:
        rows.append(("where a step's time goes", "the run was made without the profiler (--no-trace)"))
    if not any(len(s.value) for s in run.samples.series) and not any(m.key == "curves" for m in run.missing):
        rows.append(("device curves and peak memory", "the run ended before the meters were first read"))
    for m in run.missing:
        since = "" if m.since_ns is None else f" (from {duration(m.since_ns / 1e3)} into the run on)"
        rows.append((plain(m.what), plain(m.reason) + since))
    return Section.table(title, TEXTS, rows, aside=True) if rows else None


def overhead_section(facts: Facts) -> Section:
    observer = facts.run.observer
    rows = [("gpulab's own code per step (already subtracted)", duration(facts.observer_us_per_step))]
    if observer.own_ns:
        rows.append(("gpulab's own time outside the steps, in all", duration_ns(observer.own_ns)))
    if facts.run.timeline is not None:
        rows += [
            ("starting the profiler, once", duration_ns(observer.profiler_start_ns)),
            ("stopping the profiler, once", duration_ns(observer.profiler_stop_ns)),
            ("events recorded", f"{observer.event_count:,}"),
        ]
    lines = []
    ratio = facts.profiled_over_unprofiled
    if ratio is not None:
        longer, other = ("A traced", "an untraced") if ratio >= 1 else ("An untraced", "a traced")
        lines.append(f"{longer} step took {factor(max(ratio, 1 / ratio))}× the time of {other} one (medians).")
    if observer.window_truncated:
        lines.append(f"The traced window ended early: {plain(observer.window_truncated)}.")
    return Section.table("Profiling overhead", PAIRS, rows, lines, aside=True)


def changes_section(title: str, changes: Sequence[Change]) -> Section | None:
    """The changes and whether they took effect; None if there are no changes."""
    if not changes:
        return None
    cells = (
        (
            f"{plain(c.name)}={plain(c.value)}",
            plain(c.found) or "unknown",
            plain(c.kind),
            f"{wording.effect(c)}: {plain(c.evidence)}",
        )
        for c in changes
    )
    columns = (Column("setting"), Column("before"), Column("kind"), Column("", "wrap"))
    result = ", ".join(f"{plain(c.name)}={plain(c.value)}: {wording.effect(c)}" for c in changes)
    return Section.table(title, columns, cells, wide=True, result=result)


def choices_section(run: Run) -> Section | None:
    if not run.choices:
        return None
    cells = ((plain(c.what), f"{plain(c.value)}: {plain(c.reason)}") for c in run.choices)
    return Section.table("What gpulab chose", PAIRS, cells, aside=True)


def origin_section(origin: TraceOrigin) -> Section:
    """The origin of a loaded trace, as far as the trace names it."""
    versions = ", ".join(f"{plain(name)} {plain(version)}" for name, version in origin.versions.items())
    rank = "" if origin.rank is None else f"{origin.rank}" + (f" of {origin.world_size}" if origin.world_size else "")
    pairs = {
        "file": plain(origin.path),
        "size": f"{size(origin.size_bytes)}, {size(origin.text_bytes)} of text",
        "events": f"{origin.events_read:,}, clock in {'nanoseconds' if origin.clock == 'ns' else 'microseconds'}",
        "rank": rank,
        "versions": versions,
    }
    return Section.table("This trace", PAIRS, (pair for pair in pairs.items() if pair[1]), aside=True)


def stored_section(run: Run, unsaved: str) -> Section:
    lines = [f"Run {plain(run.id)}, {plain(run.created)}."]
    if unsaved:
        lines.append(f"Not saved: {plain(unsaved)}")
    elif not run.settings.save:
        lines.append("Not saved (--no-save).")
    else:
        lines.append(f"Open it again: gpulab report {plain(run.id)}")
    return Section("This run", lines=tuple(lines), aside=True)


def core_section(facts: Facts) -> Section | None:
    """The readings of the CPU cores; None if there are no readings."""
    cores = facts.cores
    if cores is None:
        return None
    rows = [("usable by this process", _usable(cores))]
    for what, count in (
        ("used by this process and its workers", cores.got_cores),
        ("used by all other programs", cores.others_cores),
    ):
        if count is not None:
            rows.append((what, f"{number(round(count, 2))} (mean during the steps)"))
    if cores.thread_wait_fraction is not None:
        rows.append(("waiting for a CPU core, loading or not", f"{duration(cores.wait_us)} per step (mean)"))
    if cores.throttled_fraction is not None and cores.quota_cores is not None:
        rows.append(("CPU quota ran out", f"in {percent(cores.throttled_fraction)} of its periods"))
    return Section.table("CPU cores", PAIRS, rows, aside=True)


def _usable(cores: CoreShare) -> str:
    count = "unknown" if cores.cores is None else number(cores.cores)
    if cores.quota_cores is None or (cores.cores is not None and cores.quota_cores >= cores.cores):
        return count
    return f"{number(cores.quota_cores)}: the quota of its container, on {plural(cores.cores or 0, 'core')}"


KINDS: Mapping[PauseKind, str] = MappingProxyType(
    {
        "checkpoint_save": "saving",
        "evaluation": "evaluation",
        "logging": "logging",
        "callback": "callbacks",
        "compile": "compiling",
        "gc": "collecting garbage",
    }
)


_LEAST_SHARE, _LEAST_NS = 0.001, 10_000_000  # share of the run's time: pauses below both are not listed


_NOTE = "Training paused during these, within a step or between steps. One pause may lie within another."


_NO_STEPS = "No training step was found, so these times are of the whole code. One pause may lie within another."


_SHORT = "Pauses under 1 ms count in the sum, but have no line of their own."


def pause_sections(run: Run) -> tuple[Section, ...]:
    """The sections of pauses and of alerts, if there were any."""
    return present(_pauses(run), _alerts(run))


def _pauses(run: Run) -> Section | None:
    rows = [row for kind in KINDS if (row := _pause_cells(run, kind)) is not None]
    if not rows:
        return None
    columns = (Column(""), *numbers("times", "together", "longest"), Column("started by", "wrap"))
    note = _NOTE if len(run.steps) else _NO_STEPS
    lines = (note, _SHORT) if run.more_pauses else (note,)
    result = ", ".join(f"{kind} {together}" for kind, _, together, *_ in rows)
    return Section.table("Pauses", columns, rows, lines, wide=True, result=result)


def _pause_cells(run: Run, kind: PauseKind) -> tuple[str, ...] | None:
    single = [p for p in run.pauses if p.kind == kind]
    more = [s for s in run.more_pauses if s.kind == kind]
    count = len(single) + sum(s.count for s in more)
    together_ns = total_ns(single) + sum(s.total_ns for s in more)
    if not count or together_ns < max(_LEAST_NS, _LEAST_SHARE * run.code_wall_ns):
        return None
    longest = max(single, key=lambda p: p.end_ns - p.start_ns, default=None)
    return (
        KINDS[kind],
        f"{count:,}",
        duration(together_ns / 1e3),
        duration((longest.end_ns - longest.start_ns) / 1e3) if longest else "< 1 ms",
        _place(run, longest) if longest else "",
    )


def total_ns(pauses: list[Pause]) -> int:
    """The time that these pauses cover, in ns; overlapping time counts once."""
    return measure(union_of((p.start_ns, p.end_ns) for p in pauses))


def _place(run: Run, pause: Pause) -> str:
    where = plain(str(run.places[pause.place])) if pause.place >= 0 else "unknown"
    return f"{where} ({plain(pause.detail)})" if pause.detail else where


def _alerts(run: Run) -> Section | None:
    if not run.alerts:
        return None
    cells = (
        (
            duration(alert.since_ns / 1e3),
            "the end" if alert.until_ns is None else duration(alert.until_ns / 1e3),
            plain(alert.words),
        )
        for alert in run.alerts
    )
    columns = (*numbers("from", "to"), Column("", "wrap"))
    result = plain(run.alerts[0].words)
    return Section.table("Alerts while it ran", columns, cells, ("Times since the start of the run.",), result=result)


def pauses_document(run: Run) -> dict[str, object]:
    """Pauses as plain data: each pause, the sums of pauses too short to be listed, and the alerts. Times in µs."""
    return {
        "pauses": [
            {
                "kind": p.kind,
                "start_us": p.start_ns / 1e3,
                "end_us": p.end_ns / 1e3,
                "source_line": str(run.places[p.place]) if p.place >= 0 else None,
                "detail": p.detail,
            }
            for p in run.pauses
        ],
        "more_pauses": [plain_values(s) for s in run.more_pauses],
        "alerts": [
            {
                "key": a.key,
                "words": a.words,
                "since_us": a.since_ns / 1e3,
                "until_us": None if a.until_ns is None else a.until_ns / 1e3,
            }
            for a in run.alerts
        ],
    }


TITLE = "Inside the DataLoader"
WORTH_SAYING = 0.05  # share of a part's time, or of the wait

_READ = Part("read", "the dataset gets its items: opens, reads and decodes them", "#E69F00")
_READ_ALL = Part("read and transform", "the dataset's __getitem__, with whatever it does to an item", "#E69F00")
_TRANSFORM = Part("transform", "the dataset's transforms change the items", "#D55E00")
_COLLATE = Part("collate", "items become one batch (collate_fn)", "#56B4E9")
_HAND_OVER = Part("hand over", "from the worker to the main process, which waits for it; or its sampler", "#CC79A7")
_PIN = Part("pin memory", "copied into page-locked memory", "#999933")
_COPY = Part("copying to the GPU", "in a traced step, after the DataLoader", "#0072B2")


def loading_sections(facts: Facts) -> tuple[Section, ...]:
    """The time of one batch, and of each worker if there are several; empty if the inside of batches was not timed."""
    inside = facts.loading
    if inside is None:
        return ()
    return (_batch(inside), *((_workers(inside.workers),) if len(inside.workers) > 1 else ()))


def _batch(inside: LoadingFacts) -> Section:
    others = [
        (_TRANSFORM if inside.transform_us else None, inside.transform_us, inside.transform_waited_fraction),
        (_COLLATE, inside.collate_us, None),
        (_HAND_OVER, inside.hand_over_us, None),
        (_PIN if inside.pin_us else None, inside.pin_us, None),
        (_COPY, inside.copy_us, None),
    ]
    read = _READ if inside.transform_us else _READ_ALL
    rows = [_loading_row(read, inside.read_us, inside.read_waited_fraction, inside.batch_us)]
    rows += [
        _loading_row(part, us, waited, inside.batch_us)
        for part, us, waited in others
        if part is not None and us is not None
    ]
    columns = (Column(""), *numbers("per batch"), Column("meaning", "wrap"))
    lines, result = tuple(line for line in _loading_lines(inside) if line), f"{duration(inside.batch_us)} per batch"
    return Section(TITLE, columns, tuple(rows), lines, wide=True, result=result)


def _loading_row(part: Part, us: float, waited: float | None, batch_us: float) -> Row:
    meaning = part.meaning
    if waited is not None and waited >= WORTH_SAYING:
        meaning += f"; blocked on I/O or locks for {duration(waited * us)} of it"
    share = min(1.0, us / batch_us) if batch_us > 0 else 0.0
    return Row((part.label, duration(us), meaning), bar=share, colour=part.colour)


def _loading_lines(inside: LoadingFacts) -> list[str]:
    items = "" if inside.items_per_batch is None else f" of {plural(round(inside.items_per_batch), 'item')}"
    core = inside.core_wait_fraction
    return [
        f"One batch{items} takes {duration(inside.batch_us)} to load (median of {sampled(inside)}), {_where(inside)}.",
        _waiting(inside),
        f"For {percent(core)} of the loading time the code waited for a CPU core."
        if core is not None and core >= WORTH_SAYING
        else "",
        "" if inside.transform_us else "The dataset has no separate transform, so its transforms count as read.",
        "" if inside.pin_us is not None else "The time for pinning could not be measured.",
    ]


def _where(inside: LoadingFacts) -> str:
    if [row.worker for row in inside.workers] == [-1]:
        return "in the main process, which blocks meanwhile"
    count = len(inside.workers)
    return "in one worker process" if count == 1 else f"in each of {count:,} worker processes"


def _waiting(inside: LoadingFacts) -> str:
    """What the loop waited for, the longest wait first."""
    wait = inside.wait
    if wait is None or wait.total_us <= 0:
        return ""
    parts = {
        (_READ if inside.transform_us else _READ_ALL).label: wait.read_us,
        _TRANSFORM.label: wait.transform_us,
        _COLLATE.label: wait.collate_us,
        _HAND_OVER.label: wait.hand_over_us,
        _PIN.label: wait.pin_us,
    }
    longest = sorted(((us, name) for name, us in parts.items() if us >= WORTH_SAYING * wait.total_us), reverse=True)
    shares = ", ".join(f"{percent(us / wait.total_us)} {name}" for us, name in longest)
    return f"The wait for a batch splits into: {shares}."


def _workers(workers: tuple[WorkerRow, ...]) -> Section:
    cells = (
        (
            str(row.worker),
            f"{row.batches:,}",
            *(duration(us) for us in (row.batch_us, row.read_us, row.transform_us, row.collate_us, row.hand_over_us)),
            percent(row.waited_fraction),
            rate(row.items_per_s, "items"),
            percent(row.idle_fraction),
        )
        for row in workers
    )
    columns = numbers(
        "worker", "batches", "per batch", "read", "transform", "collate", "hand over",
        "blocked on I/O", "while it works", "idle",
    )  # fmt: skip
    line = "An idle worker has prefetched as far as it may: training doesn't wait for it."
    idle = [row.idle_fraction for row in workers if row.idle_fraction is not None]
    result = f"{len(workers):,}" + (f", idle for {percent(min(idle))} of their time or more" if idle else "")
    return Section.table("Workers of the DataLoader", columns, cells, (line,), result=result)
