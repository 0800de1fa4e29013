"""What a report says, in order, as plain strings: the text, the page and the notebook tables only lay it out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from msgspec.structs import replace

from gpulab.analysis.breakdown import Breakdown
from gpulab.analysis.cores import CoreShare
from gpulab.analysis.facts import Facts, is_long_enough, too_few
from gpulab.analysis.operators import CostRow
from gpulab.analysis.step_shares import StepShares
from gpulab.analysis.steps import Spread
from gpulab.formatting import (
    NOT_MEASURABLE,
    capitalized,
    duration,
    duration_range,
    factor,
    gib,
    number,
    percent,
    plain_values,
    plural,
    rate,
    size,
)
from gpulab.intervals import measure, union_of
from gpulab.run import Change, Pause, PauseKind, Run, TraceOrigin
from gpulab.timeline.spans import is_loader, is_optimizer
from gpulab.views import wording
from gpulab.views.layout import PAIRS, TEXTS, Column, Row, Section, numbers, present
from gpulab.views.report.dataloader_section import loading_sections
from gpulab.views.report.trace_sections import trace_sections
from gpulab.views.wording import plain

NOT_WORTH_SAYING = 0.02  # of the wait for data, of a step
_LARGEST = 3  # parts that one line has room for
COSTLIEST = 10
NEARLY_ALL = 0.95  # of the whole cell's time in the profiled window: then the cell ran with the profiler
WHOLE_CELL = "whole cell"
TOO_SHORT = "too short to measure"

_OPERATORS_NOTE = "Self CPU time."
_DEVICE_NOTE = "GPU time: of the kernels that the operator itself launched."
_KERNELS_NOTE = "Time on the GPU."


def opening(facts: Facts) -> str:
    """What was run, on which device, and how it ended: one line."""
    run = facts.run
    outcome = "a trace from elsewhere" if run.source == "trace" else wording.OUTCOMES[run.outcome]
    if run.reached_step_limit:
        outcome = "ended at the step limit"
    if run.origin is not None and run.origin.is_cut_short:
        outcome += ", cut short"
    if run.outcome in ("failed", "stopped") and run.outcome_detail:
        ended = "cleaning up, the code raised " if run.outcome == "stopped" else ""
        outcome += f" ({ended}{wording.cut(plain(run.outcome_detail), 60)})"
    count = "no step found" if has_no_step(run) else plural(len(run.steps), "step")
    whose = wording.rank_words(run.job)
    parts = [plain(run.name), whose, device(run), count, duration(run.code_wall_ns / 1e3), outcome]
    return " · ".join(filter(None, parts))


def more(run: Run, unsaved: str = "") -> str:
    """How to see what the first screen leaves out."""
    if run.origin is not None:
        return "The rest: gpulab report FILE --all"
    if unsaved:
        return f"Not saved: {plain(unsaved)} The rest: .text(full=True)."
    if not run.settings.save:
        return "The rest: .text(full=True). The run is not saved (--no-save)."
    return f"The rest: gpulab report {plain(run.id)} --all"


def device(run: Run) -> str:
    """The device whose time is accounted, e.g. "device: CPU (AMD EPYC)"."""
    name = plain(run.device.name)
    if run.device.kind == "cpu":
        return "device: CPU" if name.lower() in ("", "cpu") else f"device: CPU ({name})"
    return f"device: {name}" if run.device.index is None else f"device: {name} (GPU {run.device.index})"


def has_no_step(run: Run) -> bool:
    """Whether the cell had no step of its own, so that it is accounted as one whole."""
    return run.step_source == WHOLE_CELL or len(run.steps) == 0


def sections(facts: Facts, unsaved: str = "", untold: Section | None = None) -> tuple[Section, ...]:
    """Every section of the report's figures in reading order.

    `unsaved` is the reason why the run is not on disk, if so; `untold` is the section about what could not be told.
    """
    loaded, whole = facts.run.source == "trace", facts.breakdown is not None and facts.breakdown.whole_window
    few = facts.few_steps
    return present(
        changes_section("Changed for this run", facts.run.changes),
        _step(facts),
        _parts(facts),
        _costliest("Top operators", _OPERATORS_NOTE, without_parts(facts.operators), few, whole=whole),
        _costliest("Top kernels and copies", _KERNELS_NOTE, facts.kernels, few, whole=whole),
        *pause_sections(facts.run),
        *trace_sections(facts),
        *(() if loaded else (_curves(facts), _memory(facts.run), *loading_sections(facts), _loader(facts.run))),
        untold,
        _missing(facts.run),
        _profiled_alone(facts),
        None if loaded else core_section(facts),
        None if loaded else _observer(facts),
        _choices(facts.run),
        _origin(facts.run.origin) if facts.run.origin else _keep(facts.run, unsaved),
    )


def _step(facts: Facts) -> Section:
    if has_no_step(facts.run):
        row = _whole_row(facts.run)
        return Section.table("Time", PAIRS, [row], _step_lines(facts), wide=True, result=f"{row[1]} for {row[0]}")
    own = facts.step_us is not None and facts.run.device.kind == "cpu"  # else the breakdown has another figure
    parts = [
        _spread_row(f"   of it {'waiting for' if own else 'the loop blocked in'} the DataLoader", facts.data_wait_us),
        _spread_row("   of it inside Optimizer.step, with its operators", facts.optimizer_us),
    ]
    profiled = _spread_row("a step, with the profiler", facts.traced_step_us)
    if facts.run.source == "trace":
        rows = [profiled, *parts]
    else:
        rows = [_spread_row("a step, without the profiler", facts.step_us), *parts, profiled]
    columns = (Column(""), *numbers("mean" if facts.whole_window else "median", "p10–p90", "steps"))
    return Section.table("Step time", columns, rows, _step_lines(facts), wide=True, result=_typical(facts))


def _typical(facts: Facts) -> str:
    """The typical step in one line."""
    step, how = (facts.step_us, "without") if facts.step_us is not None else (facts.traced_step_us, "with")
    if step is None:
        return NOT_MEASURABLE
    middle = f", p10–p90 {duration_range(step.p10, step.p90)}" if step.count > 1 else ""
    of = "mean" if facts.whole_window else "median"
    return f"{duration(step.median)} {how} the profiler ({of} of {plural(step.count, 'step')}{middle})"


def _whole_row(run: Run) -> tuple[str, ...]:
    """The time of code without steps, and for how much of it the profiler ran."""
    if run.source == "trace":
        return "the whole trace", _ns(run.code_wall_ns)
    recorded_ns = run.timeline.window_ns[1] - run.timeline.window_ns[0] if run.timeline is not None else 0
    if run.timeline is None and run.observer.profiler_start_ns is None:
        how = "without the profiler"
    elif recorded_ns >= NEARLY_ALL * run.code_wall_ns:
        how = "with the profiler"
    else:
        how = f"of which the profiler recorded {_ns(recorded_ns)}"
    return f"the whole run, {how}", _ns(run.code_wall_ns)


def _spread_row(label: str, spread: Spread | None) -> tuple[str, ...]:
    if spread is None:
        return label, NOT_MEASURABLE, "", ""
    middle = duration_range(spread.p10, spread.p90) if spread.count > 1 else ""
    return label, duration(spread.median), middle, f"{spread.count:,}"


def _step_lines(facts: Facts) -> list[str]:
    run = facts.run
    loaded = run.source == "trace"
    lines = []
    if has_no_step(run):
        lines.append(f"No {facts.step_name} was found in this {'trace' if loaded else 'code'}: it counts as one whole.")
    elif loaded:
        lines.append(f"Steps were found by: {plain(run.step_source)}.")
    elif len(run.steps):
        lines.append(f"Throughput (mean): {_throughput(facts)}. Steps were found by: {plain(run.step_source)}.")
    lines.append(_timed_where(facts))
    if any(s and s.count > 1 for s in (facts.step_us, facts.traced_step_us)):
        lines.append(_of_rounds(facts) or "p10–p90: 80 % of the steps lie in this range.")
    lines.append("" if loaded else _left_out(facts))
    if facts.outside_steps_fraction:
        lines.append(f"Outside steps (before, between and after): {percent(facts.outside_steps_fraction)}.")
    return [line for line in lines if line]


def _timed_where(facts: Facts) -> str:
    """On a GPU: whose time the steps without the profiler have."""
    run, rows = facts.run, facts.selection.rows
    if run.source == "trace" or run.device.kind != "cuda" or not len(rows):
        return ""
    device_ns = run.steps.device_ns
    missing = len(rows) if not len(device_ns) else int((device_ns[rows] < 0).sum())
    if not missing:
        return "A step lasts from when the GPU has finished the one before to when it has finished this one."
    if missing == len(rows):
        return "CPU times, which may run ahead of the GPU: CUDA events were not available."
    return f"{missing:,} of the {len(rows):,} steps have the CPU's time, which may be ahead of the GPU's."


def _of_rounds(facts: Facts) -> str:
    """Where times of a step are means of several."""
    turns = facts.round_steps
    if turns == 1:
        return ""
    if facts.whole_window:
        return "Some steps wait long for data and others hardly, so the first column is the mean over all of them."
    return (
        f"Batches come {turns} at once, from {turns} workers: one step waits, the next ones don't. So times are means "
        f"over {turns} consecutive steps."
    )


def _throughput(facts: Facts) -> str:
    if facts.steps_per_s is None and facts.samples_per_s is None:
        return NOT_MEASURABLE
    steps = rate(facts.steps_per_s, "steps")
    return steps if facts.samples_per_s is None else f"{rate(facts.samples_per_s, 'samples')}, {steps}"


def _left_out(facts: Facts) -> str:
    dropped = facts.selection.dropped
    if not dropped:
        return ""
    why = "; ".join(f"{d.count:,} {plain(d.reason)}" for d in dropped)
    return f"Left out of the untraced figures: {plural(sum(d.count for d in dropped), 'step')} ({why})."


def _parts(facts: Facts) -> Section:
    breakdown, shares = facts.breakdown, facts.shares
    title = "Time breakdown" if breakdown and breakdown.whole_window else "Step breakdown"
    if breakdown is None or shares is None:
        return Section(title, lines=(f"Not measurable: {why_no_breakdown(facts)}.",), wide=True)
    kind = facts.run.device.kind
    columns = (
        Column(""),
        *numbers("share", "time" if breakdown.whole_window else "per step"),
        Column("meaning", "wrap"),
    )
    rows, few = [], facts.few_steps
    for key in sorted(wording.PARTS, key=lambda name: -shares.share[name]):
        share, part = shares.share[key], wording.part_of(key, breakdown)
        if share > 0:
            share_words = () if few is not None else (percent(share),)
            cells = (part.label, *share_words, duration(shares.us(key)), part.meaning_on(kind))
            rows.append(Row(cells, bar=share if few is None else None, colour=part.colour))
    lines = tuple(_breakdown_lines(facts, breakdown, shares))
    result = ", ".join(f"{row.cells[1]} {row.cells[0]}" for row in rows[:_LARGEST])
    if few is not None:
        columns, lines = (columns[0], *columns[2:]), (f"{too_few(few)} for percentages.", *lines[:1])
    return Section(title, columns, tuple(rows), lines, wide=True, result=result)


def _profiled_alone(facts: Facts) -> Section | None:
    """The profiled steps by themselves, for who wants to check what the division rests on; of a text alone."""
    account = facts.breakdown
    if account is None or account.whole_window or not account.steps:
        return None
    parts = sorted((p for p in wording.PARTS if account.share[p] > 0), key=lambda part: -account.share[part])
    many = facts.few_steps is None
    rows = [
        (wording.part_of(p, account).label, *[percent(account.share[p])] * many, duration(_mean_us(account, p)))
        for p in parts
    ]
    what = "share of their summed time, and mean per step" if many else "mean per step"
    lines = [f"From {plural(len(account.steps), 'traced step')}: {what}."]
    columns = (Column(""), *numbers(*["share"] * many, "per step"))
    table = Section.table("Traced steps only, with profiler overhead", columns, rows, lines, aside=True)
    return replace(table, text_only=True)


def _mean_us(breakdown: Breakdown, part: str) -> float:
    """Per step, as the share beside it: a mean, where a median would belong to other steps."""
    return sum(step.parts_ns[part] for step in breakdown.steps) / max(1, len(breakdown.steps)) / 1e3


def why_no_breakdown(facts: Facts) -> str:
    """The reason for a missing breakdown: what is wrong with the trace, else what the record tells."""
    run, withheld = facts.run, facts.integrity.reason("breakdown") if facts.integrity is not None else None
    if withheld is not None:
        return plain(withheld)
    if not run.settings.trace:
        return "the run was made without the profiler (--no-trace)"
    missing = next((m for m in run.missing if m.key == "breakdown"), None)
    if missing is not None:
        return plain(missing.reason).rstrip(".")
    return "no trace was recorded" if run.timeline is None else "the trace holds no span"


def _breakdown_lines(facts: Facts, breakdown: Breakdown, shares: StepShares) -> list[str]:
    lines = [_basis(facts, shares)]
    if facts.run.device.kind == "cuda":
        lines.append(
            f"GPU busy (a kernel, copy or memset ran): {percent(breakdown.busy_fraction)} of the traced time; "
            f"kernels alone: {percent(breakdown.kernel_busy_fraction)}."
        )
    before_ns = breakdown.windows[0, 0] - breakdown.host_windows[0, 0]
    if breakdown.whole_window and before_ns:
        lines.append(f"Without the first {_ns(before_ns)}, of work that was launched before the recording.")
    if breakdown.start_up_ns:
        lines.append(f"Starting up took {_ns(breakdown.start_up_ns)}, once: it is in none of these shares.")
    lines += _annotated(facts, breakdown, shares)
    hidden = _hidden_wait(facts, shares)
    return [*lines, hidden] if hidden else lines


def _basis(facts: Facts, shares: StepShares) -> str:
    """Which steps tell what."""
    if facts.breakdown is not None and facts.breakdown.whole_window:
        return "No step lies wholly inside the traced window, so it counts as one."
    count, step = shares.profiled_count, facts.step_us
    profiled = "the one traced step" if count == 1 else f"{count:,} traced steps"
    if step is None:
        return f"From {profiled}."
    if shares.waits_known:
        return f"Data wait: {plural(step.count, 'untraced step')}; how the rest divides: {profiled}."
    return f"Step time: {plural(step.count, 'untraced step')}; how it divides: {profiled}."


def _annotated(facts: Facts, breakdown: Breakdown, shares: StepShares) -> list[str]:
    """Where in the program unknown time lies, as its annotations tell."""
    each = "the traced time" if breakdown.whole_window else "a step"
    scale = shares.share["unknown"] / breakdown.share["unknown"] if breakdown.share["unknown"] else 0.0
    return [
        f"Unknown, inside {plain(a.words)}, without operators: {percent(min(1.0, a.share * scale))} of {each}."
        for a in facts.annotated[:2]
        if a.share >= NOT_WORTH_SAYING
    ]


def _hidden_wait(facts: Facts, shares: StepShares) -> str:
    """Why the loop's wait is longer than what the accounting shows of it; empty where it is not."""
    wait, exposed_us = facts.data_wait_us, shares.us("data_wait")
    if wait is None or exposed_us is None or facts.run.device.kind != "cuda":
        return ""
    hidden_us = wait.median - exposed_us
    if hidden_us < NOT_WORTH_SAYING * wait.median:
        return ""
    return (
        f"The loop itself is blocked for {duration(wait.median)} per step. For {duration(hidden_us)} of that the "
        "GPU is still busy with earlier work; only the rest counts here, as for every other part."
    )


def without_parts(operators: Sequence[CostRow]) -> tuple[CostRow, ...]:
    """Without the annotations around loading and the optimizer: the breakdown has their time as parts of its own."""
    return tuple(row for row in operators if not is_loader(row.name) and not is_optimizer(row.name))


def _costliest(
    title: str, note: str, rows: Sequence[CostRow], few_steps: int | None, *, whole: bool = False
) -> Section | None:
    if not rows:
        return None
    on_gpu, shared = any(row.device_us is not None for row in rows), few_steps is None
    per, where = ("in the whole trace", "in the whole trace") if whole else ("per step", "per traced step")
    times = ("GPU time", "CPU time") if on_gpu else (*["share"] * shared, "time" if whole else per)
    columns = (Column("", "cut"), *numbers(*times, "calls"))
    what = "" if on_gpu or not shared else "; share of the traced time"
    lines = [f"{capitalized(where)}{what}. {note}", *([_DEVICE_NOTE] if on_gpu else [])]
    if len(rows) > COSTLIEST:
        lines.append(f"{plural(len(rows) - COSTLIEST, 'more name')} not shown.")
    costs = tuple(_cost_row(r, on_gpu, shared) for r in rows[:COSTLIEST])
    of = f"of GPU time {per}" if on_gpu else "of traced time" if shared else where
    result = f"{wording.short_name(rows[0].name)}, {costs[0].cells[1]} {of}"
    return Section(title, columns, costs, tuple(lines), result=result)


def _cost_row(row: CostRow, on_gpu: bool, shared: bool) -> Row:
    time = duration(row.self_us)
    figures = (duration(row.device_us), time) if on_gpu else (*[percent(row.share)] * shared, time)
    cells = (wording.operator_name(row.name), *figures, number(row.calls_per_step))
    return Row(cells, full=plain(row.name))


def _curves(facts: Facts) -> Section | None:
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


def _memory(run: Run) -> Section:
    memory = run.memory
    rows = [("peak of the process and its workers", gib(memory.peak_rss_bytes))]
    if run.device.kind == "cuda":
        rows += [
            ("peak allocated by tensors on the GPU", gib(memory.peak_allocated_bytes)),
            ("peak reserved by PyTorch on the GPU", gib(memory.peak_reserved_bytes)),
        ]
    rows.append((f"memory of the {'machine' if run.device.kind == 'cpu' else 'GPU'}", gib(memory.total_bytes)))
    peak = memory.peak_rss_bytes if run.device.kind == "cpu" else memory.peak_reserved_bytes
    result = f"peak {gib(peak)} of {gib(memory.total_bytes)}" if peak is not None else NOT_MEASURABLE
    return Section.table("Memory", PAIRS, rows, result=result)


def _loader(run: Run) -> Section | None:
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


def _missing(run: Run) -> Section | None:
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


def _observer(facts: Facts) -> Section:
    observer = facts.run.observer
    rows = [("gpulab's own code per step (already subtracted)", duration(facts.observer_us_per_step))]
    if observer.own_ns:
        rows.append(("gpulab's own time outside the steps, in all", _ns(observer.own_ns)))
    if facts.run.timeline is not None:
        rows += [
            ("starting the profiler, once", _ns(observer.profiler_start_ns)),
            ("stopping the profiler, once", _ns(observer.profiler_stop_ns)),
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


def _ns(value: int | None) -> str:
    return duration(None if value is None else value / 1e3)


def changes_section(title: str, changes: Sequence[Change]) -> Section | None:
    """What was turned, and whether it took effect; None where nothing was."""
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


def _choices(run: Run) -> Section | None:
    if not run.choices:
        return None
    cells = ((plain(c.what), f"{plain(c.value)}: {plain(c.reason)}") for c in run.choices)
    return Section.table("What gpulab chose", PAIRS, cells, aside=True)


def _origin(origin: TraceOrigin) -> Section:
    """Where a loaded trace comes from, as far as it tells."""
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


def _keep(run: Run, unsaved: str) -> Section:
    lines = [f"Run {plain(run.id)}, {plain(run.created)}."]
    if unsaved:
        lines.append(f"Not saved: {plain(unsaved)}")
    elif not run.settings.save:
        lines.append("Not saved (--no-save).")
    else:
        lines.append(f"Open it again: gpulab report {plain(run.id)}")
    return Section("This run", lines=tuple(lines), aside=True)


def core_section(facts: Facts) -> Section | None:
    """None where nothing was read."""
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
_LEAST_SHARE, _LEAST_NS = 0.001, 10_000_000  # of the run's time: less together is nobody's concern

_NOTE = "Training paused during these, within a step or between steps. One pause may lie within another."
_NO_STEPS = "No training step was found, so these times are of the whole code. One pause may lie within another."
_SHORT = "Pauses under 1 ms count in the sum, but have no line of their own."


def pause_sections(run: Run) -> tuple[Section, ...]:
    """The section of pauses and that of alerts, where there were any."""
    return present(_pauses(run), _alerts(run))


def _pauses(run: Run) -> Section | None:
    rows = [row for kind in KINDS if (row := _row(run, kind)) is not None]
    if not rows:
        return None
    columns = (Column(""), *numbers("times", "together", "longest"), Column("started by", "wrap"))
    note = _NOTE if len(run.steps) else _NO_STEPS
    lines = (note, _SHORT) if run.more_pauses else (note,)
    result = ", ".join(f"{kind} {together}" for kind, _, together, *_ in rows)
    return Section.table("Pauses", columns, rows, lines, wide=True, result=result)


def _row(run: Run, kind: PauseKind) -> tuple[str, ...] | None:
    kept = [p for p in run.pauses if p.kind == kind]
    more = [s for s in run.more_pauses if s.kind == kind]
    count = len(kept) + sum(s.count for s in more)
    together_ns = total_ns(kept) + sum(s.total_ns for s in more)
    if not count or together_ns < max(_LEAST_NS, _LEAST_SHARE * run.code_wall_ns):
        return None
    longest = max(kept, key=lambda p: p.end_ns - p.start_ns, default=None)
    return (
        KINDS[kind],
        f"{count:,}",
        duration(together_ns / 1e3),
        duration((longest.end_ns - longest.start_ns) / 1e3) if longest else "< 1 ms",
        _place(run, longest) if longest else "",
    )


def total_ns(pauses: list[Pause]) -> int:
    """The time that these cover; two that overlap count once."""
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
    """The same as plain data: each kept pause, what was only counted, and the alerts. Times in µs."""
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
