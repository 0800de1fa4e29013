"""A call that takes a part of each step, by the user's line and the function below it, whoever wrote it."""

from __future__ import annotations

from collections.abc import Collection

from msgspec.structs import replace

from gpulab.analysis.breakdown import DEVICE_PARTS, PARTS
from gpulab.analysis.calls import LOOP, Call, costliest_call, costliest_part
from gpulab.diagnosis.context import RuleContext
from gpulab.diagnosis.finding import BETWEEN, Evidence, Finding, pairs
from gpulab.formatting import capitalized, duration, percent, plural
from gpulab.run import BESIDE_KINDS, CallKind, Place

_SELDOM = "Do it every 100 steps or once per epoch, or in another process."
_IN_LOADER = "Move it into the Dataset and use DataLoader(…, num_workers=2), or do it once, before training."
_CURES = {
    "tokenizing": _IN_LOADER,
    "image processing": _IN_LOADER,
    "environment steps": "Step the environments in other processes, or vectorize them with NumPy or PyTorch.",
    "saving": "Save less often, or write a copy from a background thread.",
    "checking data": "Check the data once, before training.",
}
_CURE = (
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


def call_in_steps(
    context: RuleContext, key: str, kinds: Collection[CallKind] = BESIDE_KINDS, *, saving: bool = False
) -> Finding | None:
    """The costliest call of these kinds, beside the training itself, takes a part of the step that is worth a look.

    What is surely none of the training's needs a smaller part for that.
    """
    step_us, whole_us = context.step_us, context.whole_us
    call = costliest_call(context.facts.run, context.facts.breakdown, kinds, saving=saving)
    if call is None or not step_us or call.interval[0] < context.thresholds.pause_notice:
        return None
    least = context.thresholds.pause_notice if call.word else context.thresholds.idle_notice
    if call.share < least or context.facts.few_steps is not None:
        return None
    cost_us = call.cost_us
    between_us = min(cost_us, max(0.0, (whole_us or 0.0) - step_us))
    host = tuple(p for p in PARTS if p != "data_wait" and not (context.on_gpu and p in DEVICE_PARTS))
    return Finding(
        key,
        f"{_called(call)} {_part(context, call)}{', and it grows with the steps' if call.growth_us else ''}.",
        (
            Evidence(f"{duration(cost_us)} per step (mean): {_looks(call)}", next(iter(pairs(call.times)), None)),
            *_inside(call),
            *_grows(call),
        ),
        cost_us,
        "measured" if call.exact else "likely",
        parts=(f"{BETWEEN}/{key}", *host) if between_us else host,
        cure=_cure(call),
        source_line=str(call.line),
        level="bad" if call.share >= 2 * context.thresholds.idle_notice else "notice",
        between_us_per_step=between_us,
        removed_ns=pairs(call.times),
        title=call.word or "one call",
    )


def _cure(call: Call) -> str:
    if call.growth_us:
        return _GROWING
    return _CURES.get(call.word, _RARE if call.few_steps else _SELDOM if call.word else _CURE)


def batch_call(context: RuleContext) -> tuple[Evidence, ...]:
    """Of making the next batch, the call that takes most of it."""
    call = costliest_call(context.facts.run, context.facts.breakdown, ["batch"])
    if call is None or call.share < context.thresholds.pause_notice:
        return ()
    return (Evidence(f"{_called(call)} {_part(context, call)}: {_looks(call)}"), *_inside(call))


def leading_part(context: RuleContext) -> Call | None:
    """What takes most of the forward pass, where that is worth a word. On a GPU the host's time does not tell it."""
    part = None if context.on_gpu else costliest_part(context.facts.run, context.facts.breakdown)
    worth_it = part is not None and part.interval[0] + part.backward_share >= context.thresholds.pause_notice
    return part if worth_it else None


def with_part(context: RuleContext, finding: Finding, part: Call | None) -> Finding:
    """The finding, and what takes most of the forward pass."""
    if part is None:
        return finding
    whole = percent(part.whole_share)
    backward = f", with its backward pass {whole}" if whole != percent(part.share) else ""
    words = f"{duration(part.cost_us)} per step (mean) in the forward pass: {_looks(part)}"
    return replace(
        finding,
        summary=f"{finding.summary} {_called(part)} {_part(context, part)}{backward}.",
        evidence=(*(_inside(part) or (Evidence(str(part.line)),)), Evidence(words), *finding.evidence),
        source_line=str(part.line),
    )


def _called(call: Call) -> str:
    where = _where(call.line) + (f" and {plural(call.other_lines, 'other line')}" if call.other_lines else "")
    if not call.callee:
        loop = "the loop at " if LOOP.match(call.line.text) else ""
        words = f"{loop}{where} takes"
        return capitalized(words) if loop or call.line.file.startswith("cell") else words  # not the name of a file
    if call.callee == call.line.function:
        return f"`{call.callee}` takes"
    if call.others:
        return f"`{call.callee}` and other {call.word}, called in {where}, take"
    return f"`{call.callee}`, called in {where}, takes"


def _part(context: RuleContext, call: Call) -> str:
    """ "48 % of each step", or where it lies."""
    share = percent(call.share)
    if call.few_steps is not None:
        few, steps = call.few_steps
        return f"{share} of the training time, nearly all of it in {few:,} of {steps:,} steps"
    return f"{share} of {context.unit}"


def _grows(call: Call) -> tuple[Evidence, ...]:
    if call.growth_us is None:
        return ()
    first, last = call.growth_us
    return (
        Evidence(f"it grows: {duration(first)} per step in the first third of the steps, {duration(last)} in the last"),
    )


def _where(line: Place) -> str:
    return f"your line {line.line}" if line.file == "cell" else f"{line.file}, line {line.line}"


def _looks(call: Call) -> str:
    low, high = call.interval
    how = "" if call.exact else ", sampled within the process"
    return f"{call.looks:,} of {call.whole:,} samples of all untraced steps ({percent(low)} to {percent(high)}{how})"


def _inside(call: Call) -> tuple[Evidence, ...]:
    return (Evidence(f"most of it at {call.hot}"),) if call.hot is not None else ()
