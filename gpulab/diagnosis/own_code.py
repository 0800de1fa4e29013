"""Rules about the user's own code apart from the training: batches made in the loop, calls, pauses, and first calls."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from gpulab.analysis.breakdown import DEVICE_PARTS, PARTS
from gpulab.analysis.calls import LOOP, Call, costliest_call, costliest_part, has_looks, length_ns, paused_time
from gpulab.analysis.loader import share_beside
from gpulab.analysis.source_lines import lower_share
from gpulab.diagnosis.finding import BETWEEN, Evidence, Finding, FindingKind, RuleContext, Undetermined, evidence, pairs
from gpulab.formatting import capitalized, duration, percent, plural
from gpulab.intervals import intersect, union_of
from gpulab.run import BESIDE_KINDS, CallKind, OwnBatches, PauseKind
from gpulab.timeline.trace_steps import WORKERS
from gpulab.timeline.trace_steps import start_up as start_up_of

# -- a call ------------------------------------------------------------------------------------------------------------

_SELDOM = "Do it every 100 steps or once per epoch, or in another process."
_IN_LOADER = "Move it into the Dataset and use DataLoader(…, num_workers=2), or do it once, before training."
_CALL_CURES = {
    "tokenizing": _IN_LOADER,
    "image processing": _IN_LOADER,
    "environment steps": "Step the environments in other processes, or vectorize them with NumPy or PyTorch.",
    "saving": "Save less often, or write a copy from a background thread.",
    "checking data": "Check the data once, before training.",
}
_CALL_CURE = (
    "If training does not need it each time: do it every 100 steps. If it prepares the batch: move it into a "
    "DataLoader with workers. Else vectorize it."
)
_RARE = (
    "It already runs in few steps only. Vectorize it, or let another process do it beside the training; less often, if "
    "training allows."
)
_GROWING = (
    "Something piles up with each step: hooks registered again, a list or a metric that keeps everything, a graph that "
    "is never released. Drop what is no longer needed, or do this once per epoch."
)


def _call_in_steps(
    context: RuleContext, key: str, kinds: Collection[CallKind] = BESIDE_KINDS, *, saving: bool = False
) -> Finding | None:
    """The costliest call of these kinds, if it takes a notable part of the step apart from the training itself.

    A call with a known purpose (saving, logging, …) has a lower limit.
    """
    limits, call = context.thresholds, costliest_call(context.run, context.breakdown, kinds, saving=saving)
    if call is None or not context.step_us or call.interval[0] < limits.pause_notice:
        return None
    if call.share < (limits.pause_notice if call.word else limits.idle_notice) or context.facts.few_steps is not None:
        return None
    between_us = min(call.cost_us, context.whole_us - context.step_us)
    growth, cure = "", _CALL_CURES.get(call.word, _RARE if call.few_steps else _SELDOM if call.word else _CALL_CURE)
    if call.growth_us is not None:
        first, last = map(duration, call.growth_us)
        growth, cure = f"it grows: {first} per step in the first third of the steps, {last} in the last", _GROWING
    times = pairs(call.times)
    sampled = Evidence(f"{duration(call.cost_us)} per step (mean): {_sample_words(call)}", next(iter(times), None))
    return Finding(
        key,
        f"{_called(call)} {_part(context, call)}{', and it grows with the steps' if growth else ''}.",
        (sampled, *evidence(_hottest(call), growth)),
        call.cost_us,
        "measured" if call.exact else "likely",
        parts=(f"{BETWEEN}/{key}", *_host_parts(context)) if between_us else _host_parts(context),
        cure=cure,
        source_line=str(call.line),
        level="bad" if call.share >= 2 * limits.idle_notice else "notice",
        between_us_per_step=between_us,
        removed_ns=times,
        title=call.word or "one call",
    )


def leading_part(context: RuleContext) -> Call | None:
    """The costliest module of the forward pass, if it costs enough. None on a GPU: host time does not show it."""
    part = None if context.on_gpu else costliest_part(context.run, context.breakdown)
    worth_it = part is not None and part.interval[0] + part.backward_share >= context.thresholds.pause_notice
    return part if worth_it else None


def with_part(context: RuleContext, finding: Finding, part: Call | None) -> Finding:
    """The finding, extended by the costliest module of the forward pass."""
    if part is None:
        return finding
    whole = percent(part.whole_share)
    backward = f", with its backward pass {whole}" if whole != percent(part.share) else ""
    words = f"{duration(part.cost_us)} per step (mean) in the forward pass: {_sample_words(part)}"
    return replace(
        finding,
        summary=f"{finding.summary} {_called(part)} {_part(context, part)}{backward}.",
        evidence=(*evidence(_hottest(part) or str(part.line), words), *finding.evidence),
        source_line=str(part.line),
    )


def _called(call: Call) -> str:
    line = call.line
    where = f"your line {line.line}" if line.file == "cell" else f"{line.file}, line {line.line}"
    if call.other_lines:
        where += f" and {plural(call.other_lines, 'other line')}"
    if not call.callee:
        loop = "the loop at " if LOOP.match(line.text) else ""
        words = f"{loop}{where} takes"
        return capitalized(words) if loop or line.file.startswith("cell") else words  # not the name of a file
    if call.callee == line.function:
        return f"`{call.callee}` takes"
    if call.others:
        return f"`{call.callee}` and other {call.word}, called in {where}, take"
    return f"`{call.callee}`, called in {where}, takes"


def _part(context: RuleContext, call: Call) -> str:
    """ "48 % of each step", or the part of the step that holds the call."""
    share = percent(call.share)
    if call.few_steps is not None:
        few, steps = call.few_steps
        return f"{share} of the training time, nearly all of it in {few:,} of {steps:,} steps"
    return f"{share} of {context.unit}"


def _sample_words(call: Call) -> str:
    low, high = call.interval
    how = "" if call.exact else ", sampled within the process"
    return f"{call.looks:,} of {call.whole:,} samples of all untraced steps ({percent(low)} to {percent(high)}{how})"


def _hottest(call: Call) -> str:
    return f"most of it at {call.hot}" if call.hot is not None else ""


def _host_parts(context: RuleContext) -> tuple[str, ...]:
    """The parts of a step in which the program may do something else, apart from waiting for data."""
    return tuple(p for p in PARTS if p != "data_wait" and not (context.on_gpu and p in DEVICE_PARTS))


# -- batches that the loop makes itself --------------------------------------------------------------------------------

# Ours, shares of the time that batches take. If the thread sleeps for less than the first, the time is CPU work. If it
# sleeps for more than the second, and nothing else in the steps may sleep, it waits for a disk, a network or a lock.
_AT_WORK, _ASLEEP = 0.25, 0.6
_BATCHES_CURE = (
    "Overlap loading with training: move this code into a Dataset and use "
    "DataLoader(…, num_workers=2, persistent_workers=True), or a prefetch thread with a queue.Queue of two batches. Or "
    "prepare the batches once, before training."
)
_BECAUSE = {
    "cpu_preprocessing": "; it is CPU work",
    "storage_bound": "; it is blocked on I/O or locks",
    "data_starved": "",
}


def makes_own_batches(context: RuleContext) -> bool:
    """Whether the loop surely makes its batches itself, at known lines."""
    return _untraced(context) is not None or bool(context.breakdown is not None and context.breakdown.prepared_ns)


def making_own_batches(context: RuleContext) -> Finding | None:
    """A part of each step goes to lines that make the model's input."""
    account, limits, share = context.breakdown, context.thresholds, context.share("data_wait")
    if not makes_own_batches(context) or account is None or not context.step_us or context.withheld("idle_causes"):
        return None
    if share < limits.data_wait_notice:
        return None
    key, times = _kind_of_making(context), intersect(union_of(account.prepared_ns), account.host_covered)
    removed, bad = pairs(times), share >= limits.data_wait_bad
    call = costliest_call(context.run, account, ["batch"])
    figures: tuple[str, ...] = ()
    if call is not None and call.share >= limits.pause_notice:
        figures = (f"{_called(call)} {_part(context, call)}: {_sample_words(call)}", _hottest(call))
    return Finding(
        key,
        f"{'Input-bound: ' if bad else ''}{percent(share)} of {context.unit} goes to making the next batch"
        f"{_BECAUSE[key]}.",
        (Evidence(_basis(context, share * context.step_us), next(iter(removed), None)), *evidence(*figures)),
        share * context.step_us,
        "likely",
        parts=("data_wait",) if context.on_gpu else ("data_wait", "compute", "unknown"),
        cure=_BATCHES_CURE,
        source_line=context.python_line_at(times),
        level="bad" if bad else "notice",
        removed_ns=removed,
    )


def _kind_of_making(context: RuleContext) -> str:
    """Whether making batches is CPU work or sleep, by the thread's CPU time. Unknown on a GPU."""
    cores, account, share = context.facts.cores, context.breakdown, context.share("data_wait")
    if context.on_gpu or cores is None or cores.thread_cpu_fraction is None or cores.thread_wait_fraction is None:
        return "data_starved"
    asleep = 1 - cores.thread_cpu_fraction - cores.thread_wait_fraction
    if asleep <= _AT_WORK * share:
        return "cpu_preprocessing"
    elsewhere = 0.0 if account is None else account.share["unknown"] + account.share["other"]
    return "storage_bound" if asleep >= _ASLEEP * share and elsewhere <= _AT_WORK * share else "data_starved"


def _untraced(context: RuleContext) -> OwnBatches | None:
    return context.run.own_batches if share_beside(context.run) is not None else None


def _basis(context: RuleContext, time_us: float) -> str:
    own, stack, account = _untraced(context), context.run.stack, context.breakdown
    basis = ""
    if own is not None and not context.on_gpu:
        low = lower_share(own.preparing_looks, own.looks)
        high = 1 - lower_share(own.looks - own.preparing_looks, own.looks)
        between = f"{percent(low)} to {percent(high)}"  # with 95 %
        basis = f"{own.preparing_looks} of {own.looks} samples beside the traced steps: {between}"
    elif stack is not None and account is not None:
        steps = plural(len(account.steps), "traced step")
        basis = f"{int((stack.prepares_batch == 1).sum())} of {len(stack.t_ns)} samples, {steps}"
    return f"{duration(time_us)} of {context.whole} goes into making the model's input ({basis})"


# -- pauses, known by name ---------------------------------------------------------------------------------------------

_OTHERS = tuple(kind for kind in BESIDE_KINDS if kind != "batch")  # if another finding has the batches
_MUCH_MORE = 1.25  # ours: above it, a call does much more than its named pauses


class _Words(Struct, frozen=True):
    """The texts of a finding about one kind of pauses: `{share}` of training time, `{times}` how often, `{each}` how
    long.
    """

    summary: str
    evidence: str
    cure: str
    title: str = ""  # if this kind of finding also covers other pauses


_WORDS: Mapping[PauseKind, _Words] = MappingProxyType(
    {
        "checkpoint_save": _Words(
            "Saving checkpoints or other files takes {share} of the training time.",
            "training paused {times} to write a file, {each} each",
            "Save less often, or write a copy of the state from a background thread.",
        ),
        "logging": _Words(
            "Logging takes {share} of the training time.",
            "{times} something was logged (to a logger, TensorBoard, wandb, MLflow or a figure's file), {each} each",
            "Log every 100 steps, keep the loss on the device in between, and write from another thread.",
            "logging",
        ),
        "evaluation": _Words(
            "Evaluation takes {share} of the training time.",
            "the model was evaluated {times}, {each} each",
            "Evaluate less often or on a subset, under torch.inference_mode and with larger batches.",
            "evaluation",
        ),
        "callback": _Words(
            "Callbacks and schedulers take {share} of the training time.",
            "training paused {times} in a callback or a scheduler, {each} each",
            "Do that work every 100 steps or once per epoch, or drop the callback.",
            "callbacks and schedulers",
        ),
        "compile": _Words(
            "Recompilation takes {share} of the training time.",
            "recompiled {times} after warm-up, {each} each",
            "Keep input shapes constant (drop_last=True, padding to few lengths), or compile with dynamic=True.",
        ),
        "gc": _Words(
            "Python's garbage collection takes {share} of the training time.",
            "it ran {times}, {each} each",
            "Drop gc.collect() from the loop, if it is there. Else call gc.freeze() once before it, or gc.disable() in "
            "it and gc.collect() once per epoch.",
        ),
    }
)


def checkpoint_save(context: RuleContext) -> Finding | Undetermined | None:
    """The training pauses while its state is saved."""
    call = _call_in_steps(context, "checkpoint_save", saving=True)
    pauses = _pauses(context, "checkpoint_save", "checkpoint_save", context.thresholds.pause_notice)
    return _larger(call, pauses) or _unnamed(context, "checkpoint_save", "Whether saving checkpoints costs time")


def logging_or_eval(context: RuleContext) -> Finding | Undetermined | None:
    """Logging, evaluation or other work apart from the training takes a notable part of the time."""
    key, limits = "logging_or_eval", context.thresholds
    pauses = (
        _pauses(context, key, "logging", limits.pause_notice),
        _pauses(context, key, "evaluation", limits.evaluation_notice),
        _pauses(context, key, "callback", limits.pause_notice),
    )
    exactly = max((f for f in pauses if f is not None), key=lambda f: f.cost_us, default=None)
    call = _call_in_steps(context, key, _OTHERS if making_own_batches(context) is not None else BESIDE_KINDS)
    return _larger(call, exactly) or _unsampled(context, key) or _unnamed(context, key, "Whether logging takes time")


def recompilation(context: RuleContext) -> Finding | Undetermined | None:
    """The model is compiled again and again after the warm-up, e.g. because input shapes keep changing."""
    finding = _pauses(context, "recompilation", "compile", context.thresholds.silence)
    return finding or _unnamed(context, "recompilation", "Whether the model is recompiled")


def gc_pause(context: RuleContext) -> Finding | Undetermined | None:
    """Python stops to collect garbage, often because millions of objects are alive."""
    finding = _pauses(context, "gc_pause", "gc", context.thresholds.pause_notice)
    if finding is None:
        return _unnamed(context, "gc_pause", "Whether Python's garbage collection costs time")
    is_explicit = "gc.collect(" in finding.source_line
    return (
        replace(finding, cure="That line asks for it: leave it out, or do it once per epoch.")
        if is_explicit
        else finding
    )


def _pauses(context: RuleContext, key: str, kind: PauseKind, least_share: float) -> Finding | None:
    """The finding about pauses of that kind; None if they take less than `least_share` of the time. The longest pause
    may be an exception, so for this limit it counts as long as the others.
    """
    paused, words = paused_time(context.run, kind, context.step_us, context.whole_us, context.idle), _WORDS[kind]
    if paused is None or paused.share * paused.regular_fraction < least_share:
        return None
    cost_us, longest = paused.within_us + paused.between_us, max(paused.pauses, key=length_ns)
    each = f"{duration(float(np.median([length_ns(p) for p in paused.pauses])) / 1e3)} (median)"
    figures = words.evidence.format(times=f"{len(paused.pauses):,} times", each=each)
    return Finding(
        key,
        words.summary.format(share=percent(paused.share)),
        (Evidence(f"{figures}: {duration(cost_us)} per step", (longest.start_ns, longest.end_ns)),),
        cost_us,
        "measured",
        parts=(f"{BETWEEN}/{key}", *(_host_parts(context) if paused.within_us else ())),
        cure=words.cure,
        source_line=str(context.run.places[longest.place]) if longest.place >= 0 else "",
        level="bad" if paused.share >= context.thresholds.idle_notice else "notice",
        between_us_per_step=paused.between_us,
        removed_ns=pairs(paused.times_ns),
        title=words.title,
    )


def _larger(call: Finding | None, exactly: Finding | None) -> Finding | None:
    """The finding about pauses, whose cause is known, unless the call takes much longer than the pauses."""
    much = call is not None and (exactly is None or call.cost_us > _MUCH_MORE * exactly.cost_us)
    return call if much else exactly


def _unnamed(context: RuleContext, key: str, what: str) -> Undetermined | None:
    """The open question of a trace from another tool, which names no pauses, if it leaves time unexplained."""
    if context.run.source != "trace" or context.share("unknown", "other") < context.thresholds.pause_notice:
        return None
    return Undetermined(key, what, "Run the training under gpulab: a trace of another tool does not name pauses")


def _unsampled(context: RuleContext, key: str) -> Undetermined | None:
    """The open question which Python code takes the time, if there are too few stack samples to name it."""
    run = context.run
    if run.source == "trace" or has_looks(run) or context.share("unknown") < context.thresholds.idle_notice:
        return None
    what = "Which of your Python code takes the time without a PyTorch operator"
    return Undetermined(key, what, "Run more steps, best on Linux: the stack was sampled too seldom in untraced ones")


# -- first calls -------------------------------------------------------------------------------------------------------

_MOST_CALLS = 3  # ours: the longest calls; nobody reads more


def start_up(context: RuleContext) -> Finding | None:
    """The profiled window holds the first calls: libraries are loaded, the context is created, workers are started."""
    account, timeline = context.breakdown, context.run.timeline
    if account is None or timeline is None or context.withheld("idle_causes") is not None:
        return None
    share = account.start_up_ns / max(1, account.wall_ns)
    if share < context.thresholds.idle_notice:
        return None
    starting, once_us = start_up_of(timeline, account.device_index), account.start_up_ns / 1e3
    if not len(starting.times):
        return None
    if starting.calls[0][0] != WORKERS:
        what = "starting up, once: the first calls load libraries and prepare the device"
    elif context.run.traced_numbers:
        what = "starting up, once: the DataLoader starts its workers at the first fetch"
    else:
        what = "waiting for the only batch of this trace, once: the workers of a DataLoader start in their first batch"
    calls = ", ".join(f"{name} {duration(ns / 1e3)}" for name, ns in starting.calls[:_MOST_CALLS])
    removed = pairs(starting.times)
    return Finding(
        "start_up",
        f"{percent(share)} of the traced time is {what}.",
        (Evidence(f"{duration(once_us)} of {duration(account.wall_ns / 1e3)}: {calls}", removed[0]),),
        None,
        "measured",
        parts=("start_up",),
        cure="Leave it out: run some steps before the profiler records, as "
        "torch.profiler.schedule(wait=1, warmup=3, active=5) does, and measure only after them.",
        removed_ns=removed,
        once_us=once_us,
    )


FINDINGS = (
    FindingKind("checkpoint_save", "saving checkpoints", checkpoint_save, removal="pauses", second_round=True),
    FindingKind(
        "logging_or_eval",
        "logging, evaluation and callbacks",
        logging_or_eval,
        lesson="09_host",
        removal="pauses",
        second_round=True,
    ),
    FindingKind("recompilation", "recompilation", recompilation, removal="pauses"),
    FindingKind("gc_pause", "Python's garbage collection", gc_pause, removal="pauses"),
    FindingKind("start_up", "starting up inside the traced window", start_up),
)
