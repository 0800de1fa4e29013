"""The verdict if no cause was found: either all is well, or what is missing for a conclusion."""

from __future__ import annotations

from collections.abc import Callable

from msgspec.structs import replace

from gpulab.analysis.breakdown import Breakdown
from gpulab.analysis.cores import LEAST_OTHERS
from gpulab.analysis.operators import unknown_by_annotation
from gpulab.diagnosis.cores import core_loss
from gpulab.diagnosis.finding import FEWEST_STEPS, Evidence, Finding, FindingKind, Level, RuleContext
from gpulab.diagnosis.idle_gpu import idle_within_replays_us
from gpulab.diagnosis.own_code import leading_part, with_part
from gpulab.formatting import capitalized, duration, percent, plural, size
from gpulab.intervals import measure

_UNUSED = 0.3  # ours, share of a step: time in operators without CPU time that needs an explanation
_FEW_SAMPLES = 2  # ours: so small a batch is seldom meant for speed
_MOST = 0.5  # ours: a part with a smaller share of some time does not explain it


def cannot_tell(context: RuleContext) -> Finding | None:
    """No conclusion can be drawn, and why."""
    missing = next(filter(None, (reason(context) for reason in _REASONS)), None)
    if missing is not None:
        return missing
    unclear = next(filter(None, (reason(context) for reason in _OF_ALL)), None)
    return None if unclear is None else with_part(context, unclear, leading_part(context))


def healthy(context: RuleContext) -> Finding | None:
    """The device computes for nearly all of the time."""
    if cannot_tell(context) is not None:
        return None
    account = context.breakdown
    assert account is not None, "an accounting is needed"
    works = "works" if context.on_gpu else "computes"
    words = f"the {_device(context)} {works} for {percent(_working(context))} of {context.unit}."
    verdict = all_is_well(f"No clear bottleneck: {words}", (Evidence(_basis(context, account)),))
    part = leading_part(context)
    if part is not None and part.whole_share >= _MOST:  # where to look first
        verdict = replace(verdict, summary=capitalized(words), level="notice")
    return with_part(context, verdict, part)


def all_is_well(summary: str, evidence: tuple[Evidence, ...]) -> Finding:
    """The finding that nothing limits the training."""
    return Finding("healthy", summary, evidence, None, "measured", level="good")


# -- why it cannot be told, the strongest reason first -----------------------------------------------------------------


def _cut_short(context: RuleContext) -> Finding | None:
    origin = context.run.origin
    if origin is None or not context.is_cut_short:
        return None
    return cannot_tell_because(
        "This file is cut short: it ends in the middle, so no conclusion is drawn from the rest.",
        f"It ends after {size(origin.text_bytes)} of text, and PyTorch writes the GPU's work last. Copy the whole file "
        "again, or record the trace again",
    )


def _no_steps(context: RuleContext) -> Finding | None:
    run, account = context.run, context.breakdown
    if len(run.steps):
        return None
    wall, loaded = duration(run.code_wall_ns / 1e3), run.source == "trace"
    withheld = context.withheld("breakdown")
    if account is None and withheld:
        return None
    elsewhere = next((m for m in run.missing if m.key == "ranks"), None)
    if elsewhere is not None:
        return cannot_tell_because(
            "This code started processes of its own, and gpulab did not measure what they did.",
            elsewhere.reason,
        )
    empty = next((m for m in run.missing if m.key == "empty_loader"), None)
    if empty is not None:
        return cannot_tell_because(
            f"Your {empty.reason.removeprefix('the ')}.",
            "So no training step ran: give it data, a smaller batch_size, or drop_last=False",
        )
    if account is None:
        return cannot_tell_because(
            f"No {context.facts.step_name} was found in {wall}, so there is no step breakdown.",
            "Record the trace with profiler.step() after each step"
            if loaded
            else "Mark steps with gpulab.step(), or profile from the first line with --whole",
        )
    if account.busy_fraction is not None:
        return None  # the GPU's waits are known without steps
    busiest = max(account.share, key=lambda p: account.share[p])
    return cannot_tell_because(
        f"No {context.facts.step_name} was found: this is the whole {'trace' if loaded else 'run'}, {wall}, as one.",
        f"Largest part: {busiest.replace('_', ' ')}, {percent(account.share[busiest])} of the traced time",
        "notice",
    )


def _too_few(context: RuleContext) -> Finding | None:
    n = len(context.run.steps)
    timed = context.facts.typical_step_us is not None
    if not n or (timed and not context.too_few_steps):
        return None
    return cannot_tell_because(
        f"Only {plural(n, 'step')} ran, too few to name a bottleneck.",
        f"Run at least {FEWEST_STEPS} steps",
    )


def _damaged(context: RuleContext) -> Finding | None:
    """The trace does not support a conclusion about the device."""
    reason = context.withheld("breakdown")
    if reason is not None and context.breakdown is None:
        why = "no work of the device was read" if context.run.device.kind == "unknown" else "the trace is damaged"
        what = "what the GPU did" if context.on_gpu else "where the time goes"
        return cannot_tell_because(f"{capitalized(why)}, so nothing can be said about {what}.", reason)
    if not context.on_gpu:
        return None
    reason, idle = context.withheld("idle_causes"), context.idle
    if reason is None or idle is None or idle < context.thresholds.idle_notice:
        return None
    return cannot_tell_because(
        f"The GPU is idle for {percent(idle)} of {context.unit}; this trace doesn't show why.",
        reason,
        parts=("unknown",),
    )


def _not_profiled(context: RuleContext) -> Finding | None:
    step = context.facts.typical_step_us
    if context.breakdown is not None or step is None:
        return None
    waited = context.facts.data_wait_us
    fed = (
        f"; time waiting for data is below {percent(context.thresholds.data_wait_notice)} of it"
        if waited is not None and waited.median < context.thresholds.data_wait_notice * step.median
        else ""
    )
    training = context.run.training
    if training is not None and training.profiled:
        return cannot_tell_because(
            f"Your own profiler records every step; how much of its {duration(step.median)} that takes is unknown.",
            "It also keeps gpulab from a trace. Record a few steps: "
            "profile(schedule=torch.profiler.schedule(wait=5, warmup=2, active=3, repeat=1))",
            "notice",
        )
    return cannot_tell_because(
        f"No trace: a {context.facts.step_name} takes {duration(step.median)}, but where that time goes is unknown.",
        f"Median of {plural(step.count, 'step')}{fed}. Run it with the profiler, which is on unless told otherwise",
    )


def _unexplained(context: RuleContext) -> Finding | None:
    unknown = context.share("unknown")
    work, limit = context.work, context.thresholds.unknown_too_much
    if unknown < limit or (work is not None and measure(work.idle) < limit * measure(work.windows)):
        return None  # the GPU may have been busy with work that was not recorded
    where = context.facts.of(unknown_by_annotation)[:1]
    if where and context.of_typical(where[0].share, "unknown") >= _MOST * unknown:
        place = f"most of this time lies inside {where[0].words}"
    else:
        place = "the time goes to Python code that the trace doesn't name"
    each = "a step" if context.unit == "each step" else context.unit
    inside = "".join(
        f"; inside {a.words}, without operators: {percent(context.of_typical(a.share, 'unknown'))} of {each}"
        for a in where
    )
    return cannot_tell_because(
        f"For {percent(unknown)} of {context.unit} PyTorch ran nothing: {place}.",
        f"{duration(context.part_us('unknown'))} of {duration(context.step_us)} without an operator{inside}",
        "notice",
        parts=("unknown",),
    )


def _without_cores(context: RuleContext) -> Finding | None:
    """The step is longer than the computing in it, and what it waits for is not known."""
    cores, loss = context.facts.cores, core_loss(context)
    if cores is None or context.on_gpu or context.own is not None:  # its cause is reported
        return None
    by_others = cores.others_cores is None or cores.others_cores >= LEAST_OTHERS * (cores.cores or 1)
    waits = loss is not None and loss.total_us >= context.thresholds.core_wait_notice * context.step_us
    if loss is not None and waits and by_others:  # otherwise its own threads take turns
        return cannot_tell_because(
            f"No free CPU core for {duration(loss.total_us)} of {context.whole}; which program had them is unknown.",
            "Run it longer, or look at top while it runs",
            "notice",
            parts=("core_wait",),
        )
    used = None if cores.thread_wait_fraction is not None else cores.thread_cpu_fraction
    if used is None or used >= _working(context) - _UNUSED:
        return None
    return cannot_tell_because(
        f"The main thread was on a core for only {percent(used)} of the steps' time; this system doesn't show what it "
        "waited for.",
        f"PyTorch's operators were running for {percent(_working(context))} of {context.unit}",
        parts=("compute",),
    )


def _inside_replays(context: RuleContext) -> Finding | None:
    idle, step = context.idle, context.step_us
    if idle is None or not step or idle < context.thresholds.idle_notice:
        return None
    inside = idle_within_replays_us(context) / step
    if inside < _MOST * idle:
        return None
    return cannot_tell_because(
        f"The GPU is idle for {percent(inside)} of {context.unit} inside replayed graphs: each kernel waits for the "
        "one before, not for the CPU.",
        f"The GPU works for {percent(1 - idle)} of {context.unit}; fewer and larger kernels in a graph would leave "
        "fewer gaps",
        "notice",
    )


def _many_small_causes(context: RuleContext) -> Finding | None:
    account, working = context.breakdown, _working(context)
    if account is None or working >= 1 - context.thresholds.idle_notice:
        return None
    return cannot_tell_because(
        f"The {_device(context)} computes for {percent(working)} of {context.unit}; no single cause explains the rest.",
        f"{_basis(context, account)}; what happened in {percent(context.share('unknown'))} of the time is unknown",
    )


def _tiny_batch(context: RuleContext) -> Finding | None:
    """With one or two samples per step nothing shows whether a larger batch would take longer."""
    size = context.facts.samples_per_step
    if size is None or size > _FEW_SAMPLES or context.breakdown is None:
        return None
    sizes = ",".join(str(size * factor) for factor in (1, 2, 4, 8))
    return cannot_tell_because(
        f"Would a larger batch take less time per sample? Each step trains on {plural(size, 'sample')}; the "
        f"{_device(context)} computes for {percent(_working(context))} of {context.unit}.",
        f"Too few samples to show it: measure with %%gpuprofile --sweep batch_size={sizes}, which changes the "
        f"training, too. {_basis(context, context.breakdown)}",
    )


_REASONS: tuple[Callable[[RuleContext], Finding | None], ...] = (
    _cut_short,
    _no_steps,
    _too_few,
    _damaged,
    _not_profiled,
)
_OF_ALL = (_without_cores, _unexplained, _inside_replays, _many_small_causes, _tiny_batch)  # about whole steps


def cannot_tell_because(summary: str, evidence: str, level: Level = "unknown", parts: tuple[str, ...] = ()) -> Finding:
    """The finding that no conclusion can be drawn, and what is missing for one."""
    return Finding("cannot_tell", summary, (Evidence(evidence),), None, "measured", parts=parts, level=level)


def _device(context: RuleContext) -> str:
    return "CPU" if context.idle is None else "GPU"


def _working(context: RuleContext) -> float:
    return context.share("compute") if context.idle is None else 1 - context.idle


def _basis(context: RuleContext, account: Breakdown) -> str:
    step = context.facts.typical_step_us
    if step is not None:
        if step.count == 1:
            return f"The one measured step took {duration(step.median)}"
        return f"A step took {duration(step.median)} (median of {plural(step.count, 'step')})"
    start_ns, end_ns = account.span_ns
    return f"This was measured over {duration((end_ns - start_ns) / 1e3)}"


FINDINGS = (
    FindingKind("cannot_tell", "open question", cannot_tell, role="open question"),
    FindingKind("healthy", "nothing that holds training back", healthy, role="all is well"),
)
