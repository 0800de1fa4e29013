"""Rules about waiting for the GPU: results read back in the loop, and copies to it that block the program."""

from __future__ import annotations

from gpulab.analysis.blocking_calls import BlockingCalls
from gpulab.analysis.kernels import exposed_upload_us
from gpulab.diagnosis.context import FindingKind, RuleContext, Undetermined, record_again
from gpulab.diagnosis.finding import Evidence, Finding, pairs
from gpulab.diagnosis.rules.launches import idle_us, idle_within_replays_us
from gpulab.formatting import duration, number, plural, size
from gpulab.intervals import Intervals, joined
from gpulab.prediction.removal import Waits

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


FINDINGS = (
    FindingKind("sync_points", "host-device syncs", sync_points, lesson="09_host", removal=Waits(("read", "wait"))),
    FindingKind(
        "blocking_copy",
        "blocking copies",
        blocking_copy,
        lesson="03_starving_gpu",
        removal=Waits(("upload",)),
    ),
)
