"""Rules about giving the GPU enough to do: the CPU starts work too slowly, or each piece of work is too small.

Rules about waiting for the GPU: results read back in the loop, and copies to it that block the program.

Rules about where the model computes: on the CPU although a GPU is there, wholly or in part.
"""

from __future__ import annotations

from gpulab.analysis.blocking_calls import BlockingCalls, computing_on_cpu
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
from gpulab.diagnosis.finding import Evidence, Finding, FindingKind, RuleContext, Undetermined, pairs, record_again
from gpulab.diagnosis.own_code import leading_part, with_part
from gpulab.formatting import duration, number, percent, plural, size
from gpulab.intervals import Intervals, clip, joined, measure
from gpulab.prediction.predict import Waits
from gpulab.timeline.labels import differentiates_twice

_CALLING = ("compute", "unknown", "optimizer")  # where calls of operators lie, on a CPU
_LARGER = (
    "Double the batch size while memory allows, and judge by time per sample. A larger batch changes training: adjust "
    "the learning rate."
)
_COMPILED = (
    'Launch fewer, larger kernels: model = torch.compile(model, mode="reduce-overhead"), which also replays them as '
    "one CUDA graph."
)
_MOSTLY_REPLAYED = 0.5  # ours: of the time in kernels
_MOSTLY_SHORT = 0.5  # ours: of the kernels; fewer short ones leave room for another cause


def launch_bound(context: RuleContext) -> Finding | Undetermined | None:
    """The GPU idles because the CPU prepares and starts operations more slowly than the GPU works them off."""
    work, launches = context.facts.work, context.facts.trace.launches if context.facts.trace is not None else None
    if (
        work is None
        or not context.on_gpu
        or starves(context)
        or idle_us(context) < context.thresholds.idle_notice * _step(context)
    ):
        return None
    why = context.withheld("idle_causes")
    if why is not None:
        what = "Whether the CPU launches kernels too slowly"
        return record_again("launch_bound", what, why)
    launching = _launching_us(context)
    if launching < context.thresholds.launch_notice * _step(context):
        return None
    short = short_count_fraction(work.timeline, work.host_windows, context.thresholds.short_kernel_us)
    evidence = []
    if launches is not None and launches.median_us is not None and launches.per_step:
        each = "step" if context.unit == "each step" else "window"
        evidence.append(
            Evidence(f"{number(launches.per_step)} launches per {each}, {duration(launches.median_us)} each (median)")
        )
    if short is not None:
        limit = f"{number(context.thresholds.short_kernel_us)} µs"
        evidence.append(Evidence(f"{percent(short)} of the kernels are shorter than {limit}"))
    evidence.append(Evidence(f"in all, the GPU is idle for {percent(context.idle)} of {context.unit}"))
    share = launching / _step(context)
    if is_replayed(context):
        return _between_replays(context, launching, tuple(evidence))
    compiles = not differentiates_twice(context.facts.run)
    return Finding(
        "launch_bound",
        f"Launch-bound: the GPU is idle for {_lost(context, launching)}; the CPU launches kernels too slowly.",
        tuple(evidence),
        launching,
        "measured" if short is not None and short >= _MOSTLY_SHORT else "likely",
        parts=("launch", "queued"),
        settings=(("compile", "reduce-overhead"),) if compiles else (),
        cure=_COMPILED if compiles else _fewer(context),
        level="bad" if share >= context.thresholds.launch_bad else "notice",
    )


def _fewer(context: RuleContext) -> str:
    """How to call fewer operators; what torch.compile has made cannot be differentiated twice (torch 2.13)."""
    others = "" if differentiates_twice(context.facts.run) else ", or let torch.compile(model) fuse them"
    return f"Call fewer, larger operators: stack what a Python loop handles one by one{others}."


def _between_replays(context: RuleContext, launching_us: float, evidence: tuple[Evidence, ...]) -> Finding:
    """What is replayed is started as fast as can be: only what lies between two replays is left."""
    share = launching_us / _step(context)
    return Finding(
        "launch_bound",
        f"The GPU is idle for {_lost(context, launching_us)} between replayed graphs: the CPU prepares the next one "
        "too slowly.",
        evidence,
        launching_us,
        "likely",
        parts=("launch", "queued"),
        cure="Most kernels already run in replayed graphs. Do less between replays: copy the next inputs with "
        "non_blocking=True, read results later, or capture more steps in one graph.",
        level="bad" if share >= context.thresholds.launch_bad else "notice",
    )


def small_batch(context: RuleContext) -> Finding | Undetermined | None:
    """The GPU is half idle and half empty, or its operations are too small to fill it: a larger batch costs little."""
    work, limits = context.facts.work, context.thresholds
    if not context.on_gpu:
        return _mostly_calls(context)
    if work is None or starves(context) or context.withheld("idle_causes") is not None:
        return None
    idle = idle_us(context)
    if idle < limits.idle_notice * _step(context):
        return None
    memory, small = exact_memory_fraction(context.facts.run), small_kernels_fraction(work)
    if memory is not None and memory > limits.memory_underused:
        return None
    half_idle = 1 - idle / _step(context) <= limits.utilization_low
    empty = (
        small is not None
        and small >= limits.small_kernels_notice
        and _launching_us(context) >= limits.launch_bad * _step(context)
    )
    if half_idle and memory is None and not empty:
        return Undetermined(
            "small_batch", "Whether a larger batch would fit into the GPU's memory", how_to_know_memory(context)
        )
    if not (half_idle and memory is not None) and not empty:
        return None
    evidence = []
    if memory is not None:
        evidence.append(Evidence(f"peak GPU memory is {percent(memory)}"))
    if small is not None:
        evidence.append(Evidence(f"{percent(small)} of the compute time is kernels that fill only part of the GPU"))
    larger = _larger(context)
    batched = bool(larger) or context.facts.run.source == "trace"  # which does not tell
    return Finding(
        "small_batch",
        f"{'The batch' if batched else 'A step'} is too small for this GPU: it works for only "
        f"{percent(1 - idle / _step(context))} of {context.unit}.",
        tuple(evidence),
        min(idle / 2, _launching_us(context)),  # twice the batch: the idle time of one step serves two
        "likely",
        parts=("launch", "queued"),
        settings=larger,
        cure=_LARGER if batched else _fewer(context),
    )


def _mostly_calls(context: RuleContext) -> Finding | None:
    """Most of the step is the same whatever the batch's size; without one: operators with next to nothing to compute.

    Only where a DataLoader makes batches can a larger one be asked for.
    """
    host, updating, limits = context.facts.host, context.facts.optimizer, context.thresholds
    if host is None:
        return None
    larger = _larger(context)
    share, notice = (host.fixed_share, limits.fixed_notice) if larger else (host.calling_share, limits.calling_notice)
    if share < notice or context.share("data_wait") >= share:
        return None
    typical = context.of_typical(max(0.0, share - host.calls_share) if larger else share, *_CALLING)
    cost_us = typical * _step(context) - (updating.host_us if updating is not None else 0.0)
    if cost_us < limits.calling_left_notice * _step(context):  # the rest has other rules
        return None
    short = (
        f"{number(host.short_count)} of {number(host.count)} operators per step are shorter than {SHORT_NS // 1000} µs"
    )
    what = "is fixed cost, the same for a larger batch" if larger else "goes into calling them"
    tiny = Finding(
        "small_batch",
        f"{'The batch is too small' if larger else 'Tiny operators'}: {percent(typical)} of {context.unit} {what}.",
        (Evidence(f"{short}{_samples(context)}: about the cost of a call"),),
        cost_us,
        "likely",
        parts=_CALLING,
        settings=larger,
        cure=_LARGER if larger else _fewer(context),
        title="" if larger else "tiny operators",
    )
    return with_part(context, tiny, leading_part(context))


def _samples(context: RuleContext) -> str:
    loader = context.facts.run.loader
    return f", at batch size {loader.batch_size}" if loader is not None and loader.batch_size else ""


# -- what other rules ask too ------------------------------------------------------------------------------------------


def starves(context: RuleContext) -> bool:
    """Waiting for data covers most of the idle time: then nothing that gives the GPU more work can help."""
    return context.loop_waits >= context.thresholds.data_wait_notice and context.waits_mostly_for_data


def is_replayed(context: RuleContext) -> bool:
    """Whether replayed graphs do most of the GPU's work: then nothing starts single operations."""
    work = context.facts.work
    return work is not None and replayed_fraction(work) >= _MOSTLY_REPLAYED


def idle_within_replays_us(context: RuleContext) -> float:
    """Idle time inside replayed graphs, where the GPU waits for nobody but the graph's own order."""
    return idle_within_us(context.facts.work) if context.facts.work is not None else 0.0


def idle_us(context: RuleContext) -> float:
    """Idle time of the GPU in the typical step."""
    return (context.idle or 0.0) * _step(context)


def how_to_know_memory(context: RuleContext) -> str:
    """What would tell the peak of the GPU's memory."""
    if peak_is_hidden(context.facts.run) and context.facts.run.memory.peak_allocated_bytes:
        return "Run it in a restarted kernel: an earlier run of this process took more memory and hides this one's peak"
    return "Run it under gpulab, or record the trace with profile_memory=True"


def _launching_us(context: RuleContext) -> float:
    """Idle time that launches make: not that of long gaps, nor that in which the host waits for the GPU."""
    work = context.facts.work
    if work is None:
        return 0.0
    blocked = joined(*(b.times for b in context.facts.blocking))
    elsewhere = joined(blocked, work.timeline.loading)
    own = context.part_us("launch", "queued") - not_launching_us(work, elsewhere)
    own -= idle_within_us(work)
    left = idle_us(context) - context.part_us("data_wait") - work.host_per_step_us(blocked)
    return max(0.0, min(own, left))


def _lost(context: RuleContext, time_us: float) -> str:
    """A time that is no part of the step's breakdown, so not as a share: "3.1 ms of each 9.2 ms step"."""
    return f"{duration(time_us)} of {context.whole}"


def _step(context: RuleContext) -> float:
    return context.step_us or 0.0


def _larger(context: RuleContext) -> tuple[tuple[str, str], ...]:
    loader = context.facts.run.loader
    return (("batch_size", str(2 * loader.batch_size)),) if loader is not None and loader.batch_size else ()


_SEVERAL, _ONCE = 1.5, 0.75  # ours: from there on a count per step rounds to several, or to one
# What a person wrote, by the operator that the trace names.
_WRITTEN = {
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
    """The loop asks for results of the GPU, waits until all is done, and only then starts the next work."""
    if context.facts.work is None or not context.on_gpu:
        return None
    calls = [b for b in context.facts.blocking if b.direction in ("read", "wait")]
    waited = sum(b.waited_us for b in calls)
    lost = min(waited, _not_for_data_us(context))
    if not calls or not lost:
        return None
    why = context.withheld("idle_causes")
    if why is not None:
        what = "What the GPU loses at host-device syncs"
        return record_again("sync_points", what, why)
    times = joined(*(b.times for b in calls))
    return Finding(
        "sync_points",
        f"The CPU syncs with the GPU{_how_often(context, calls)}, and then the GPU idles.",
        (
            Evidence(f"{_calls(calls)} wait for {duration(waited)} per {_step_word(context)}", _longest(times)),
            Evidence(f"the GPU then idles for {duration(sum(b.idle_us for b in calls))} until new work arrives"),
        ),
        lost,
        "likely",
        parts=("sync_wait", "launch", "blocking_copy"),
        cure="Keep results on the GPU (loss.detach()); read them every 100 steps, or once after the loop.",
        source_line=context.line_at(times),
        removed_ns=pairs(times),
    )


def blocking_copy(context: RuleContext) -> Finding | Undetermined | None:
    """Batches are copied to the GPU from ordinary memory: the copy is slow, and the program stands still meanwhile."""
    if context.facts.work is None or not context.on_gpu:
        return None
    uploads = next((b for b in context.facts.blocking if b.direction == "upload"), None)
    exposed, moved, _ = exposed_upload_us(context.facts.work)
    lost = _lost_to_copies_us(context, uploads, exposed) if uploads is not None else 0.0
    if uploads is None or not lost:
        return None
    why = context.withheld("idle_causes")
    if why is not None:
        what = "What the GPU loses while batches are copied to it"
        return record_again("blocking_copy", what, why)
    of_bytes = f" of {size(moved)}" if moved else ""
    return Finding(
        "blocking_copy",
        "Blocking copies: batches go to the GPU from pageable memory, and the CPU waits for each copy.",
        (
            Evidence(
                f"copies{of_bytes} per {_step_word(context)} take {duration(exposed)}, with no compute on the GPU"
            ),
            Evidence(
                f"the CPU blocks in them for {duration(uploads.waited_us)}",
                _longest(uploads.times),
            ),
        ),
        lost,
        "likely",
        parts=("memcpy", "blocking_copy", "sync_wait", "launch"),
        settings=_pinned(context),
        cure="DataLoader(…, pin_memory=True) and batch.to(device, non_blocking=True): a faster copy that doesn't "
        "block. The second needs the first.",
        source_line=context.line_at(uploads.times),
        removed_ns=pairs(uploads.times),
    )


def _lost_to_copies_us(context: RuleContext, uploads: BlockingCalls, exposed_us: float) -> float:
    """The most that such copies cost: time without computing on the device, and no more than the host stands still.

    While the host stands still the device copies: that time counts once.
    """
    idle_us = min(uploads.idle_us, _not_for_data_us(context))
    return min(max(uploads.waited_us, exposed_us), exposed_us + idle_us)


def _not_for_data_us(context: RuleContext) -> float:
    """The most that waiting for the GPU can cost: idle time for which no wait for data accounts."""
    return max(0.0, idle_us(context) - context.part_us("data_wait") - idle_within_replays_us(context))


def _pinned(context: RuleContext) -> tuple[tuple[str, str], ...]:
    loader = context.facts.run.loader
    return () if loader is not None and loader.pin_memory else (("pin_memory", "True"),)


def _how_often(context: RuleContext, calls: list[BlockingCalls]) -> str:
    per_step = sum(b.per_step for b in calls)
    if context.unit != "each step":
        return f" {plural(per_step, 'time')}"
    several, once = per_step >= _SEVERAL, per_step >= _ONCE
    return f" {number(per_step)} times in each step" if several else " in each step" if once else ""


def _calls(calls: list[BlockingCalls]) -> str:
    """The two kinds of calls that are made most."""
    counts: dict[str, float] = {}
    for name, count in (pair for b in calls for pair in b.operators):
        words = _WRITTEN.get(name, name)
        counts[words] = counts.get(words, 0.0) + count
    most = sorted(counts, key=lambda words: -counts[words])[:2]
    return " and ".join(f"{words} ({number(counts[words])}×)" for words in most)


def _step_word(context: RuleContext) -> str:
    return "step" if context.unit == "each step" else "window"


def _longest(times: Intervals) -> tuple[int, int] | None:
    return max(pairs(times), key=lambda span: span[1] - span[0], default=None)


def wrong_device(context: RuleContext) -> Finding | None:
    """A GPU is there, and the model or a part of it computes on the CPU."""
    chosen = next((c for c in context.facts.run.choices if c.what == "device" and c.value == "CPU"), None)
    if chosen is not None:
        return _unused(context, chosen.reason)
    return _partly(context) if context.on_gpu else None


def _unused(context: RuleContext, reason: str) -> Finding:
    computing = context.part_us("compute", "optimizer")
    return Finding(
        "wrong_device",
        "GPU unused: the model runs on the CPU.",
        (
            Evidence(f"{reason}, though PyTorch sees a GPU"),
            Evidence(f"{duration(computing)} of each step is CPU compute; the GPU's time for it was not measured"),
        ),
        computing or None,
        "likely",  # what the GPU takes for it is not known
        parts=("compute", "optimizer"),
        cure='Move the model and each batch to it: model.to("cuda") before the optimizer is made, and '
        'batch.to("cuda", non_blocking=True) in the loop.',
        level="bad",
    )


def _partly(context: RuleContext) -> Finding | None:
    timeline, account = context.facts.run.timeline, context.facts.breakdown
    if timeline is None or account is None or context.withheld("idle_causes"):
        return None
    on_cpu, costliest = computing_on_cpu(timeline)
    time_ns = measure(clip(on_cpu, *account.span_ns))
    share = time_ns / max(1, account.wall_ns)
    if not costliest or share < context.thresholds.on_cpu_notice:
        return None
    longest = max(pairs(on_cpu), key=lambda span: span[1] - span[0])
    return Finding(
        "wrong_device",
        f"Part of the model runs on the CPU: the GPU idles for {percent(share)} of {context.unit} because of it.",
        (
            Evidence(
                f"{costliest} ran on the CPU while the GPU idled, {duration(share * (context.step_us or 0))} per step",
                longest,
            ),
        ),
        share * (context.step_us or 0.0),
        "measured",
        parts=("launch", "unknown"),
        cure='Move the whole model to the GPU with model.to("cuda"), including tensors made in forward, '
        "and keep its inputs there.",
        level="bad",
    )


FINDINGS = (
    FindingKind("launch_bound", "kernel launch overhead", launch_bound, lesson="09_host"),
    FindingKind("small_batch", "small batches", small_batch, lesson="05_batch_size"),
    FindingKind("sync_points", "host-device syncs", sync_points, lesson="09_host", removal=Waits(("read", "wait"))),
    FindingKind(
        "blocking_copy",
        "blocking copies",
        blocking_copy,
        lesson="03_starving_gpu",
        removal=Waits(("upload",)),
    ),
    FindingKind("wrong_device", "running on the CPU although there is a GPU", wrong_device),
)
