"""Rules about an idle GPU: unused, with work that is too small or launched too slowly, or while the CPU waits."""

from __future__ import annotations

from collections.abc import Sequence

from gpulab.analysis.blocking_calls import BlockingCalls, blocking_calls, computing_on_cpu
from gpulab.analysis.device_peaks import exact_memory_fraction, peak_is_hidden
from gpulab.analysis.kernels import (
    exposed_upload_us,
    idle_within_us,
    not_launching_us,
    replayed_fraction,
    short_count_fraction,
    small_kernels_fraction,
)
from gpulab.analysis.operators import SHORT_NS
from gpulab.diagnosis.finding import Evidence, Finding, FindingKind, RuleContext, Undetermined, evidence, longest, pairs
from gpulab.diagnosis.own_code import leading_part, with_part
from gpulab.formatting import duration, number, percent, plural, size
from gpulab.intervals import clip, joined, measure
from gpulab.timeline.labels import differentiates_twice

# -- the GPU is not used -----------------------------------------------------------------------------------------------


def wrong_device(context: RuleContext) -> Finding | None:
    """The machine has a GPU, but the model or a part of it computes on the CPU."""
    choice = next((c for c in context.run.choices if c.what == "device" and c.value == "CPU"), None)
    if choice is not None:
        return _unused(context, choice.reason)
    return _partly(context) if context.on_gpu else None


def _unused(context: RuleContext, reason: str) -> Finding:
    computing_us = context.part_us("compute", "optimizer")
    return Finding(
        "wrong_device",
        "GPU unused: the model runs on the CPU.",
        evidence(
            f"{reason}, though PyTorch sees a GPU",
            f"{duration(computing_us)} of each step is CPU compute; the GPU's time for it was not measured",
        ),
        computing_us or None,
        "likely",  # the time on the GPU is unknown
        parts=("compute", "optimizer"),
        cure='Move the model and each batch to it: model.to("cuda") before the optimizer is made, and '
        'batch.to("cuda", non_blocking=True) in the loop.',
        level="bad",
    )


def _partly(context: RuleContext) -> Finding | None:
    timeline, account = context.run.timeline, context.breakdown
    if timeline is None or account is None or context.withheld("idle_causes"):
        return None
    on_cpu, costliest = computing_on_cpu(timeline)
    share = measure(clip(on_cpu, *account.span_ns)) / max(1, account.wall_ns)
    if not costliest or share < context.thresholds.on_cpu_notice:
        return None
    lost_us = share * context.step_us
    words = f"{costliest} ran on the CPU while the GPU idled, {duration(lost_us)} per step"
    return Finding(
        "wrong_device",
        f"Part of the model runs on the CPU: the GPU idles for {percent(share)} of {context.unit} because of it.",
        (Evidence(words, longest(on_cpu)),),
        lost_us,
        "measured",
        parts=("launch", "unknown"),
        cure='Move the whole model to the GPU with model.to("cuda"), including tensors made in forward, '
        "and keep its inputs there.",
        level="bad",
    )


# -- work that is too small, or started too slowly ---------------------------------------------------------------------

_LAUNCHING = ("launch", "queued")  # parts in which launches cost the GPU time
_CALLING = ("compute", "unknown", "optimizer")  # parts that hold calls of operators, on a CPU
_MOSTLY_REPLAYED = 0.5  # ours: share of the time in kernels
_MOSTLY_SHORT = 0.5  # ours: share of the kernels; with fewer short ones there may be another cause
_LARGER = (
    "Double the batch size while memory allows, and judge by time per sample. A larger batch changes training: adjust "
    "the learning rate."
)
_COMPILED = (
    'Launch fewer, larger kernels: model = torch.compile(model, mode="reduce-overhead"), which also replays them as '
    "one CUDA graph."
)
_BETWEEN_REPLAYS = (
    "Most kernels already run in replayed graphs. Do less between replays: copy the next inputs with "
    "non_blocking=True, read results later, or capture more steps in one graph."
)


def launch_bound(context: RuleContext) -> Finding | Undetermined | None:
    """The GPU idles because the CPU launches operations more slowly than the GPU completes them.

    Replayed graphs start their kernels without the CPU, so for graphs only the time between two replays counts.
    """
    work, limits, step_us = context.work, context.thresholds, context.step_us
    if work is None or context.starves or context.idle_us < limits.idle_notice * step_us:
        return None
    if unclear := context.undetermined("launch_bound", "Whether the CPU launches kernels too slowly", "idle_causes"):
        return unclear
    lost_us = _launching_us(context)
    if lost_us < limits.launch_notice * step_us:
        return None
    short = short_count_fraction(work.timeline, work.host_windows, limits.short_kernel_us)
    launches = context.facts.trace.launches if context.facts.trace is not None else None
    started = ""
    if launches is not None and launches.median_us is not None and launches.per_step:
        each = f"{duration(launches.median_us)} each (median)"
        started = f"{number(launches.per_step)} launches per {_step_word(context)}, {each}"
    figures = evidence(
        started,
        ""
        if short is None
        else f"{percent(short)} of the kernels are shorter than {number(limits.short_kernel_us)} µs",
        f"in all, the GPU is idle for {percent(context.idle)} of {context.unit}",
    )
    replayed, compiles = is_replayed(context), not differentiates_twice(context.run)
    lost = f"{duration(lost_us)} of {context.whole}"  # not a part of the breakdown, so no share
    return Finding(
        "launch_bound",
        f"The GPU is idle for {lost} between replayed graphs: the CPU prepares the next one too slowly."
        if replayed
        else f"Launch-bound: the GPU is idle for {lost}; the CPU launches kernels too slowly.",
        figures,
        lost_us,
        "measured" if not replayed and short is not None and short >= _MOSTLY_SHORT else "likely",
        parts=_LAUNCHING,
        settings=(("compile", "reduce-overhead"),) if compiles and not replayed else (),
        cure=_BETWEEN_REPLAYS if replayed else _COMPILED if compiles else _fewer(context),
        level="bad" if lost_us >= limits.launch_bad * step_us else "notice",
    )


def _fewer(context: RuleContext) -> str:
    """The advice how to call fewer operators. Compiled code cannot be differentiated twice (torch 2.13)."""
    others = "" if differentiates_twice(context.run) else ", or let torch.compile(model) fuse them"
    return f"Call fewer, larger operators: stack what a Python loop handles one by one{others}."


def small_batch(context: RuleContext) -> Finding | Undetermined | None:
    """The GPU is half idle and its memory half empty, or its kernels are too small: larger batches cost little time."""
    work, limits, step_us, idle_us = context.work, context.thresholds, context.step_us, context.idle_us
    if not context.on_gpu:
        return _mostly_calls(context)
    if work is None or context.starves or context.withheld("idle_causes") is not None:
        return None
    memory, small = exact_memory_fraction(context.run), small_kernels_fraction(work)
    if idle_us < limits.idle_notice * step_us or (memory is not None and memory > limits.memory_underused):
        return None
    launching_us = _launching_us(context)
    half_idle = 1 - idle_us / step_us <= limits.utilization_low
    empty = small is not None and small >= limits.small_kernels_notice and launching_us >= limits.launch_bad * step_us
    if not half_idle and not empty:
        return None
    if memory is None and not empty:
        what = "Whether a larger batch would fit into the GPU's memory"
        return Undetermined("small_batch", what, how_to_know_memory(context))
    larger = _larger_batch(context)
    batched = bool(larger) or context.run.source == "trace"  # a trace does not show it
    working = f"it works for only {percent(1 - idle_us / step_us)} of {context.unit}"
    return Finding(
        "small_batch",
        f"{'The batch' if batched else 'A step'} is too small for this GPU: {working}.",
        evidence(
            "" if memory is None else f"peak GPU memory is {percent(memory)}",
            "" if small is None else f"{percent(small)} of the compute time is kernels that fill only part of the GPU",
        ),
        min(idle_us / 2, launching_us),  # twice the batch: the idle time of one step serves two
        "likely",
        parts=_LAUNCHING,
        settings=larger,
        cure=_LARGER if batched else _fewer(context),
    )


def _mostly_calls(context: RuleContext) -> Finding | None:
    """Most of the step does not depend on the batch size; without a batch size: most goes into calling operators.

    A larger batch is advised only if a DataLoader makes the batches.
    """
    host, updating, limits, loader = context.facts.host, context.facts.optimizer, context.thresholds, context.loader
    if host is None:
        return None
    larger = _larger_batch(context)
    share, notice = (host.fixed_share, limits.fixed_notice) if larger else (host.calling_share, limits.calling_notice)
    if share < notice or context.share("data_wait") >= share:
        return None
    typical = context.of_typical(max(0.0, share - host.calls_share) if larger else share, *_CALLING)
    cost_us = typical * context.step_us - (updating.host_us if updating is not None else 0.0)
    if cost_us < limits.calling_left_notice * context.step_us:  # other rules cover the rest
        return None
    short = f"{number(host.short_count)} of {number(host.count)} operators per step"
    batch = f", at batch size {loader.batch_size}" if loader is not None and loader.batch_size else ""
    what = "is fixed cost, the same for a larger batch" if larger else "goes into calling them"
    tiny = Finding(
        "small_batch",
        f"{'The batch is too small' if larger else 'Tiny operators'}: {percent(typical)} of {context.unit} {what}.",
        evidence(f"{short} are shorter than {SHORT_NS // 1000} µs{batch}: about the cost of a call"),
        cost_us,
        "likely",
        parts=_CALLING,
        settings=larger,
        cure=_LARGER if larger else _fewer(context),
        title="" if larger else "tiny operators",
    )
    return with_part(context, tiny, leading_part(context))


def is_replayed(context: RuleContext) -> bool:
    """Whether replayed graphs do most of the GPU's work: then hardly any kernel is launched singly."""
    return context.work is not None and replayed_fraction(context.work) >= _MOSTLY_REPLAYED


def idle_within_replays_us(context: RuleContext) -> float:
    """Idle time inside replayed graphs, where the GPU waits only for the order of the graph."""
    return idle_within_us(context.work) if context.work is not None else 0.0


def how_to_know_memory(context: RuleContext) -> str:
    """How to measure the peak of the GPU's memory."""
    if peak_is_hidden(context.run) and context.run.memory.peak_allocated_bytes:
        return "Run it in a restarted kernel: an earlier run of this process took more memory and hides this one's peak"
    return "Run it under gpulab, or record the trace with profile_memory=True"


def _launching_us(context: RuleContext) -> float:
    """Idle time caused by launches, without long gaps and without time in which the host waits for the GPU, in µs."""
    work = context.work
    if work is None:
        return 0.0
    blocked = joined(*(b.times for b in context.facts.of(blocking_calls)))
    elsewhere = joined(blocked, work.timeline.loading)
    own_us = context.part_us(*_LAUNCHING) - not_launching_us(work, elsewhere) - idle_within_us(work)
    rest_us = context.idle_us - context.part_us("data_wait") - work.host_per_step_us(blocked)
    return max(0.0, min(own_us, rest_us))


def _larger_batch(context: RuleContext) -> tuple[tuple[str, str], ...]:
    loader = context.loader
    return (("batch_size", str(2 * loader.batch_size)),) if loader is not None and loader.batch_size else ()


# -- the CPU waits for the GPU -----------------------------------------------------------------------------------------

_SEVERAL, _ONCE = 1.5, 0.75  # ours: the counts per step that are worded as several, or as one
# The user's call, by the operator that the trace names.
_CALL_WORDS = {
    "aten::item": ".item(), float() or print of a GPU value",
    "aten::_local_scalar_dense": ".item(), float() or print of a GPU value",
    "aten::is_nonzero": "an if on a GPU value",
    "aten::nonzero": "nonzero() or a mask used as an index",
    "aten::masked_select": "masked_select() or a mask used as an index",
    "aten::equal": "torch.equal()",
    "aten::unique": "unique()",
    "aten::_unique2": "unique()",
    "aten::to": ".cpu() or .to()",
    "aten::_to_copy": ".cpu() or .to()",
    "aten::cpu": ".cpu()",
    "aten::copy_": "a copy to the CPU",
    "": "torch.cuda.synchronize() or a library's sync",
}


def sync_points(context: RuleContext) -> Finding | Undetermined | None:
    """The loop reads results from the GPU, so it waits until the GPU's work is done before it launches more."""
    calls = [b for b in context.facts.of(blocking_calls) if b.direction in ("read", "wait")]
    waited_us = sum(b.waited_us for b in calls)
    lost_us = min(waited_us, _not_for_data_us(context))
    if context.work is None or not lost_us:
        return None
    if unclear := context.undetermined("sync_points", "What the GPU loses at host-device syncs", "idle_causes"):
        return unclear
    times = joined(*(b.times for b in calls))
    words = f"{_calls(calls)} wait for {duration(waited_us)} per {_step_word(context)}"
    idle = f"the GPU then idles for {duration(sum(b.idle_us for b in calls))} until new work arrives"
    return Finding(
        "sync_points",
        f"The CPU syncs with the GPU{_how_often(context, calls)}, and then the GPU idles.",
        (Evidence(words, longest(times)), Evidence(idle)),
        lost_us,
        "likely",
        parts=("sync_wait", "launch", "blocking_copy"),
        cure="Keep results on the GPU (loss.detach()); read them every 100 steps, or once after the loop.",
        source_line=context.line_at(times),
        removed_ns=pairs(times),
    )


def blocking_copy(context: RuleContext) -> Finding | Undetermined | None:
    """Batches are copied to the GPU from pageable memory: the copy is slow and blocks the program.

    The loss is time without compute on the device, at most the time that the host blocks. The device copies while the
    host blocks; that time counts once.
    """
    work, loader = context.work, context.loader
    uploads = next((b for b in context.facts.of(blocking_calls) if b.direction == "upload"), None)
    if work is None or uploads is None:
        return None
    exposed_us, moved, _ = exposed_upload_us(work)
    idle_us = min(uploads.idle_us, _not_for_data_us(context))
    lost_us = min(max(uploads.waited_us, exposed_us), exposed_us + idle_us)
    if not lost_us:
        return None
    if unclear := context.undetermined(
        "blocking_copy", "What the GPU loses while batches are copied to it", "idle_causes"
    ):
        return unclear
    copies = f"copies{f' of {size(moved)}' if moved else ''} per {_step_word(context)}"
    return Finding(
        "blocking_copy",
        "Blocking copies: batches go to the GPU from pageable memory, and the CPU waits for each copy.",
        (
            Evidence(f"{copies} take {duration(exposed_us)}, with no compute on the GPU"),
            Evidence(f"the CPU blocks in them for {duration(uploads.waited_us)}", longest(uploads.times)),
        ),
        lost_us,
        "likely",
        parts=("memcpy", "blocking_copy", "sync_wait", "launch"),
        settings=() if loader is not None and loader.pin_memory else (("pin_memory", "True"),),
        cure="DataLoader(…, pin_memory=True) and batch.to(device, non_blocking=True): a faster copy that doesn't "
        "block. The second needs the first.",
        source_line=context.line_at(uploads.times),
        removed_ns=pairs(uploads.times),
    )


def _not_for_data_us(context: RuleContext) -> float:
    """The most that waiting for the GPU can cost, in µs: idle time that no wait for data explains."""
    return max(0.0, context.idle_us - context.part_us("data_wait") - idle_within_replays_us(context))


def _how_often(context: RuleContext, calls: Sequence[BlockingCalls]) -> str:
    per_step = sum(b.per_step for b in calls)
    if not context.by_step:
        return f" {plural(per_step, 'time')}"
    several, once = per_step >= _SEVERAL, per_step >= _ONCE
    return f" {number(per_step)} times in each step" if several else " in each step" if once else ""


def _calls(calls: Sequence[BlockingCalls]) -> str:
    """The two most frequent kinds of calls."""
    counts: dict[str, float] = {}
    for name, count in (pair for b in calls for pair in b.operators):
        words = _CALL_WORDS.get(name, name)
        counts[words] = counts.get(words, 0.0) + count
    most = sorted(counts, key=lambda words: -counts[words])[:2]
    return " and ".join(f"{words} ({number(counts[words])}×)" for words in most)


def _step_word(context: RuleContext) -> str:
    return "step" if context.by_step else "window"


FINDINGS = (
    FindingKind("wrong_device", "running on the CPU although there is a GPU", wrong_device),
    FindingKind("launch_bound", "kernel launch overhead", launch_bound, lesson="09_host"),
    FindingKind("small_batch", "small batches", small_batch, lesson="05_batch_size"),
    FindingKind("sync_points", "host-device syncs", sync_points, lesson="09_host", removal="waits"),
    FindingKind("blocking_copy", "blocking copies", blocking_copy, lesson="03_starving_gpu", removal="waits"),
)
