"""Rules about what the program does besides training: saving, logging, evaluating, compiling, collecting garbage."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from gpulab.analysis.breakdown import DEVICE_PARTS, PARTS
from gpulab.analysis.calls import has_looks, length_ns, paused_time
from gpulab.diagnosis.context import FindingKind, RuleContext, Undetermined
from gpulab.diagnosis.finding import BETWEEN, Evidence, Finding, pairs
from gpulab.diagnosis.rules.calls import call_in_steps
from gpulab.diagnosis.rules.own_batches import making_own_batches
from gpulab.formatting import duration, percent
from gpulab.prediction.removal import Pauses
from gpulab.run import BESIDE_KINDS, PauseKind

_OTHERS = tuple(kind for kind in BESIDE_KINDS if kind != "batch")  # where another finding is about the batches
_MUCH_MORE = 1.25  # ours: a call does much besides what is known by name
_GC_CURE = (
    "Drop gc.collect() from the loop, if it is there. Else call gc.freeze() once before it, or gc.disable() in it and "
    "gc.collect() once per epoch."
)
_GC_ASKED_CURE = "That line asks for it: leave it out, or do it once per epoch."


def checkpoint_save(context: RuleContext) -> Finding | Undetermined | None:
    """The training stands still while its state is written."""
    key: Final = "checkpoint_save"
    exactly, seen = (
        _finding(context, key, key, context.thresholds.pause_notice),
        call_in_steps(context, key, saving=True),
    )
    return _larger(seen, exactly) or _undetermined(context, key, "Whether saving checkpoints costs time")


def logging_or_eval(context: RuleContext) -> Finding | Undetermined | None:
    """Logging or evaluation takes a part of the time that is worth a look; also work beside training without a name."""
    key = "logging_or_eval"
    pauses = (
        _finding(context, key, "logging", context.thresholds.pause_notice),
        _finding(context, key, "evaluation", context.thresholds.evaluation_notice),
        _finding(context, key, "callback", context.thresholds.pause_notice),
    )
    exactly = max((f for f in pauses if f is not None), key=lambda f: f.cost_us, default=None)
    call = call_in_steps(context, key, _OTHERS if making_own_batches(context) is not None else BESIDE_KINDS)
    named = _larger(call, exactly)
    return named or _unsampled(context, key) or _undetermined(context, key, "Whether logging takes time")


def _larger(call: Finding | None, exactly: Finding | None) -> Finding | None:
    """The pauses, whose name is known, unless the call does much more than they hold."""
    much = call is not None and (exactly is None or call.cost_us > _MUCH_MORE * exactly.cost_us)
    return call if much else exactly


def recompilation(context: RuleContext) -> Finding | Undetermined | None:
    """Something is compiled again and again after the warm-up, as with inputs of ever new shapes."""
    return _finding(context, "recompilation", "compile", context.thresholds.silence) or _undetermined(
        context, "recompilation", "Whether the model is recompiled"
    )


def gc_pause(context: RuleContext) -> Finding | Undetermined | None:
    """Python stops to look for garbage, often because millions of objects are alive."""
    finding = _finding(context, "gc_pause", "gc", context.thresholds.pause_notice)
    if finding is None:
        return _undetermined(context, "gc_pause", "Whether Python's garbage collection costs time")
    return replace(finding, cure=_GC_ASKED_CURE) if "gc.collect(" in finding.source_line else finding


# -- what is said of it ------------------------------------------------------------------------------------------------


class _Words(Struct, frozen=True):
    """A finding about pauses of one kind; `{share}` is of the training time, `{times}` how often, `{each}` how long."""

    summary: str
    evidence: str
    cure: str
    title: str = ""  # where its kind of finding has pauses of other kinds, too


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
            "Python's garbage collection takes {share} of the training time.", "it ran {times}, {each} each", _GC_CURE
        ),
    }
)


def _finding(context: RuleContext, key: str, kind: PauseKind, least_share: float) -> Finding | None:
    """None where pauses of that kind take less than `least_share` of the time, or would if the longest one, which may
    be one of a kind, were like the others.
    """
    paused, words = paused_time(context.facts.run, kind, context.step_us, context.whole_us, context.idle), _WORDS[kind]
    if paused is None or paused.share * paused.regular_fraction < least_share:
        return None
    cost_us = paused.within_us + paused.between_us
    host = tuple(p for p in PARTS if not (context.on_gpu and p in DEVICE_PARTS) and p != "data_wait")
    longest = max(paused.pauses, key=length_ns)
    median_us = float(np.median([length_ns(p) for p in paused.pauses])) / 1e3
    evidence = words.evidence.format(times=f"{len(paused.pauses):,} times", each=f"{duration(median_us)} (median)")
    whole = Evidence(f"{evidence}: {duration(cost_us)} per step", (longest.start_ns, longest.end_ns))
    return Finding(
        key,
        words.summary.format(share=percent(paused.share)),
        (whole,),
        cost_us,
        "measured",
        parts=(f"{BETWEEN}/{key}", *(host if paused.within_us else ())),
        cure=words.cure,
        source_line=str(context.facts.run.places[longest.place]) if longest.place >= 0 else "",
        level="bad" if paused.share >= context.thresholds.idle_notice else "notice",
        between_us_per_step=paused.between_us,
        removed_ns=pairs(paused.times_ns),
        title=words.title,
    )


def _undetermined(context: RuleContext, key: str, what: str) -> Undetermined | None:
    """A trace from elsewhere names no pauses; that matters where it leaves time unexplained."""
    if context.facts.run.source != "trace" or context.share("unknown", "other") < context.thresholds.pause_notice:
        return None
    return Undetermined(key, what, "Run the training under gpulab: a trace of another tool does not name pauses")


def _unsampled(context: RuleContext, key: str) -> Undetermined | None:
    """Python code takes the time, and too few samples of the whole stack tell whose."""
    run = context.facts.run
    if run.source == "trace" or has_looks(run) or context.share("unknown") < context.thresholds.idle_notice:
        return None
    what = "Which of your Python code takes the time without a PyTorch operator"
    return Undetermined(key, what, "Run more steps, best on Linux: the stack was sampled too seldom in untraced ones")


FINDINGS = (
    FindingKind(
        "checkpoint_save", "saving checkpoints", checkpoint_save, removal=Pauses(("checkpoint_save",)), asked_again=True
    ),
    FindingKind(
        "logging_or_eval",
        "logging, evaluation and callbacks",
        logging_or_eval,
        lesson="09_host",
        removal=Pauses(("logging", "evaluation", "callback")),
        asked_again=True,
    ),
    FindingKind("recompilation", "recompilation", recompilation, removal=Pauses(("compile",))),
    FindingKind("gc_pause", "Python's garbage collection", gc_pause, removal=Pauses(("gc",))),
)
