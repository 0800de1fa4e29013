"""The content of a report, in order, as plain strings: the text, the page and the notebook tables only lay it out."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from gpulab.analysis.breakdown import Breakdown
from gpulab.analysis.facts import Facts, has_no_step, too_few
from gpulab.analysis.operators import CostRow, unknown_by_annotation
from gpulab.analysis.step_shares import StepShares
from gpulab.analysis.steps import Spread
from gpulab.formatting import (
    NOT_MEASURABLE,
    capitalized,
    duration,
    duration_ns,
    duration_range,
    number,
    percent,
    plural,
    rate,
)
from gpulab.run import Category, Run
from gpulab.timeline.labels import What, kind_of
from gpulab.views import wording
from gpulab.views.layout import PAIRS, Column, Row, Section, numbers, present
from gpulab.views.report.memory_sections import failure_section, memory_section
from gpulab.views.report.run_sections import (
    changes_section,
    choices_section,
    core_section,
    device_section,
    loader_section,
    loading_sections,
    missing_section,
    origin_section,
    overhead_section,
    pause_sections,
    stored_section,
)
from gpulab.views.report.trace_sections import trace_sections
from gpulab.views.wording import plain

NOT_WORTH_SAYING = 0.02  # share of the wait for data, or of a step
_LARGEST = 3  # parts that one line has room for
COSTLIEST = 10
NEARLY_ALL = 0.95  # profiled share of the whole cell: above it, the cell ran with the profiler

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
        cleanup = "cleaning up, the code raised " if run.outcome == "stopped" else ""
        outcome += f" ({cleanup}{wording.cut(plain(run.outcome_detail), 60)})"
    count = "no step found" if has_no_step(run) else plural(len(run.steps), "step")
    whose = wording.rank_words(run.job)
    parts = [plain(run.name), whose, device(run), count, duration(run.code_wall_ns / 1e3), outcome]
    return " · ".join(filter(None, parts))


def more(run: Run, unsaved: str = "") -> str:
    """The hint how to see what the first screen omits."""
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


def sections(facts: Facts, unsaved: str = "", open_questions: Section | None = None) -> tuple[Section, ...]:
    """Every section of the report's figures in reading order.

    `unsaved` is the reason why the run is not on disk, or empty. `open_questions` is the section about questions that
    no rule could decide.
    """
    loaded, whole = facts.run.source == "trace", facts.breakdown is not None and facts.breakdown.whole_window
    few = facts.few_steps
    account = facts.run.memory_account
    return present(
        failure_section(account.failure) if account is not None and account.failure is not None else None,
        changes_section("Changed for this run", facts.run.changes),
        _step(facts),
        _parts(facts),
        _costliest("Top operators", _OPERATORS_NOTE, without_parts(facts.operators), few, whole=whole),
        _costliest("Top kernels and copies", _KERNELS_NOTE, facts.kernels, few, whole=whole),
        *pause_sections(facts.run),
        *trace_sections(facts),
        *(
            ()
            if loaded
            else (device_section(facts), memory_section(facts.run), *loading_sections(facts), loader_section(facts.run))
        ),
        open_questions,
        missing_section(facts.run),
        _profiled_alone(facts),
        None if loaded else core_section(facts),
        None if loaded else overhead_section(facts),
        choices_section(facts.run),
        origin_section(facts.run.origin) if facts.run.origin else stored_section(facts.run, unsaved),
    )


def _step(facts: Facts) -> Section:
    if has_no_step(facts.run):
        row = _whole_row(facts.run)
        return Section.table("Time", PAIRS, [row], _step_lines(facts), wide=True, result=f"{row[1]} for {row[0]}")
    own = facts.step_us is not None and facts.run.device.kind == "cpu"  # else the breakdown has a different figure
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
    """The time of code without steps, and the part of that time in which the profiler ran."""
    if run.source == "trace":
        return "the whole trace", duration_ns(run.code_wall_ns)
    recorded_ns = run.timeline.window_ns[1] - run.timeline.window_ns[0] if run.timeline is not None else 0
    if run.timeline is None and run.observer.profiler_start_ns is None:
        how = "without the profiler"
    elif recorded_ns >= NEARLY_ALL * run.code_wall_ns:
        how = "with the profiler"
    else:
        how = f"of which the profiler recorded {duration_ns(recorded_ns)}"
    return f"the whole run, {how}", duration_ns(run.code_wall_ns)


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
    lines.append("" if loaded else _dropped_steps(facts))
    if facts.outside_steps_fraction:
        lines.append(f"Outside steps (before, between and after): {percent(facts.outside_steps_fraction)}.")
    return [line for line in lines if line]


def _timed_where(facts: Facts) -> str:
    """For a GPU: which clock timed the steps without the profiler."""
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
    """Why times are means over several steps; empty if they are not."""
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


def _dropped_steps(facts: Facts) -> str:
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
    """The traced steps by themselves, for readers who check the basis of the breakdown; only in the full text."""
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
    """Mean time per step of the part, to match the share in the same row; a median would come from different steps."""
    return sum(step.parts_ns[part] for step in breakdown.steps) / max(1, len(breakdown.steps)) / 1e3


def why_no_breakdown(facts: Facts) -> str:
    """The reason for a missing breakdown: the fault of the trace, else the reason in the record."""
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
        lines.append(f"Without the first {duration_ns(before_ns)}, of work that was launched before the recording.")
    if breakdown.start_up_ns:
        lines.append(f"Starting up took {duration_ns(breakdown.start_up_ns)}, once: it is in none of these shares.")
    lines += _annotated(facts, breakdown, shares)
    hidden = _hidden_wait(facts, shares)
    return [*lines, hidden] if hidden else lines


def _basis(facts: Facts, shares: StepShares) -> str:
    """The steps behind the breakdown, in words."""
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
    """Where in the program unknown time lies, according to its annotations."""
    each = "the traced time" if breakdown.whole_window else "a step"
    scale = shares.share["unknown"] / breakdown.share["unknown"] if breakdown.share["unknown"] else 0.0
    return [
        f"Unknown, inside {plain(a.words)}, without operators: {percent(min(1.0, a.share * scale))} of {each}."
        for a in facts.of(unknown_by_annotation)[:2]
        if a.share >= NOT_WORTH_SAYING
    ]


def _hidden_wait(facts: Facts, shares: StepShares) -> str:
    """Why the loop waits longer than the breakdown says; empty if it does not."""
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
    """The operators without the annotations around loading and the optimizer, whose time the breakdown has as parts."""
    marks = (What.LOADER, What.UPDATE, What.ZEROING)
    return tuple(row for row in operators if kind_of(Category.USER_ANNOTATION, row.name) not in marks)


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
