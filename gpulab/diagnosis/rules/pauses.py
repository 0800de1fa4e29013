"""Rules about what the program does besides training: saving, logging, evaluating, compiling, collecting garbage."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gpulab.analysis.breakdown import DEVICE_PARTS, PARTS
from gpulab.diagnosis.context import RuleContext, Undetermined
from gpulab.diagnosis.finding import BETWEEN, Evidence, Finding, pairs
from gpulab.diagnosis.kind import FindingKind
from gpulab.diagnosis.rules.other_work import following_update, in_own_code
from gpulab.formatting import duration, percent
from gpulab.intervals import Intervals, clip, intersect, measure, subtract, union, union_of
from gpulab.prediction.removal import Pauses
from gpulab.run import Pause, PauseKind, Phase

# Where one lies within another its time belongs to the first of these: garbage is collected in all of them.
_ORDER: tuple[PauseKind, ...] = ("compile", "checkpoint_save", "evaluation", "logging", "gc")
_LEAST = 2  # ours: one pause may be chance
_GC_CURE = (
    "Where the code calls gc.collect(), leave that out of the loop. Else call gc.freeze() once before it, or "
    "gc.disable() in it and gc.collect() once per epoch.",
    "That line asks for it: leave it out, or do it once per epoch.",
)


def checkpoint_save(context: RuleContext) -> Finding | Undetermined | None:
    """The training stands still while its state is written."""
    pauses = _paused(context, "checkpoint_save")
    if pauses is None or pauses.share < context.thresholds.pause_notice:
        return _undetermined(context, "checkpoint_save", "Whether saving checkpoints holds the training up")
    return pauses.finding(
        context,
        "checkpoint_save",
        f"Saving checkpoints or other files takes {percent(pauses.share)} of the training time.",
        f"the training stood still {pauses.times} while a file was written, {pauses.each} each",
        "Save less often, or hand a copy of the state to a thread that writes it while the training goes on.",
    )


def logging_or_eval(context: RuleContext) -> Finding | Undetermined | None:
    """Logging or evaluation takes a part of the time that is worth a look; also work beside training without a name."""
    key = "logging_or_eval"
    logged, evaluated = _paused(context, "logging"), _paused(context, "evaluation")
    if logged is not None and logged.share >= context.thresholds.pause_notice:
        return logged.finding(
            context,
            key,
            f"Logging takes {percent(logged.share)} of the training time.",
            f"something was logged {logged.times} (to a logger, TensorBoard, wandb, MLflow or a figure's file), "
            f"{logged.each} each",
            "Log every hundredth step, keep the loss on the device in between, and write from another thread.",
        )
    if evaluated is not None and evaluated.share >= context.thresholds.evaluation_notice:
        return evaluated.finding(
            context,
            key,
            f"Evaluation takes {percent(evaluated.share)} of the training time.",
            f"the model was evaluated {evaluated.times}, {evaluated.each} each",
            "Evaluate less often or on a sample, without gradients (torch.inference_mode) and with larger batches.",
        )
    return (
        following_update(context, key)
        or in_own_code(context, key)
        or _undetermined(context, key, "Whether logging takes time")
    )


def recompilation(context: RuleContext) -> Finding | Undetermined | None:
    """Something is compiled again and again after the warm-up, as with inputs of ever new shapes."""
    pauses = _paused(context, "compile")
    if pauses is None or pauses.share < context.thresholds.silence:
        return _undetermined(context, "recompilation", "Whether the model is compiled again and again")
    return pauses.finding(
        context,
        "recompilation",
        f"The model is compiled again and again: {percent(pauses.share)} of the training time goes to that.",
        f"after the warm-up something was compiled {pauses.times}, {pauses.each} each",
        "Keep the shapes of the inputs the same (drop_last=True, padding to few lengths), or compile with "
        "dynamic=True.",
    )


def gc_pause(context: RuleContext) -> Finding | Undetermined | None:
    """Python stops to look for garbage, often because millions of objects are alive."""
    pauses = _paused(context, "gc")
    if pauses is None or pauses.share < context.thresholds.pause_notice:
        return _undetermined(context, "gc_pause", "Whether Python's garbage collection holds the training up")
    return pauses.finding(
        context,
        "gc_pause",
        f"Python's garbage collection takes {percent(pauses.share)} of the training time.",
        f"it ran {pauses.times}, {pauses.each} each",
        _GC_CURE["gc.collect(" in pauses.line],
    )


# -- how long it takes -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Paused:
    """Pauses of one kind after the warm-up, spread over the steps (µs): in the typical step, and besides it."""

    within_us: float
    between_us: float
    share: float  # of all time from the warm-up on
    count: int
    median_us: float
    longest: tuple[int, int] | None
    times_ns: Intervals  # when, without other kinds that count before it
    line: str = ""

    @property
    def times(self) -> str:
        return f"{self.count:,} times"

    @property
    def each(self) -> str:
        return f"{duration(self.median_us)} (median)"

    def finding(self, context: RuleContext, key: str, summary: str, evidence: str, cure: str) -> Finding:
        cost_us = self.within_us + self.between_us
        host = tuple(p for p in PARTS if not (context.on_gpu and p in DEVICE_PARTS) and p != "data_wait")
        return Finding(
            key,
            summary,
            (Evidence(f"{evidence}: {duration(cost_us)} per step", self.longest),),
            cost_us,
            "measured",
            parts=(f"{BETWEEN}/{key}", *(host if self.within_us else ())),
            cure=cure,
            source_line=self.line,
            level="bad" if self.share >= context.thresholds.idle_notice else "notice",
            between_us_per_step=self.between_us,
            gone=pairs(self.times_ns),
        )


def _paused(context: RuleContext, kind: PauseKind) -> _Paused | None:
    """None where there were none, too few to tell from chance, or no steps to spread them over."""
    run, step = context.facts.run, context.step_us
    first = np.flatnonzero(run.steps.phase != Phase.WARMUP)
    if not step or not len(first):
        return None
    since, until = int(run.steps.start_ns[first[0]]), int(run.steps.end_ns[-1])
    pauses = [p for p in run.pauses if p.kind == kind and since <= p.start_ns < until]
    if len(pauses) < _LEAST:
        return None
    outer = [p for p in run.pauses if _ORDER.index(p.kind) < _ORDER.index(kind)]
    times = clip(subtract(_covered(pauses), _covered(outer)), since, until)
    count = len(run.steps) - int(first[0])
    mean_us = measure(times) / count / 1e3
    within_us = min(mean_us, _typical_us(context, times, int(first[0])))  # of steps with and without one chance picks
    between_us = mean_us - within_us
    hidden_by = context.idle
    if hidden_by is not None:
        within_us = min(within_us, hidden_by * step)
    longest = max(pauses, key=lambda p: p.end_ns - p.start_ns)
    return _Paused(
        within_us,
        between_us,
        (within_us + between_us) / max(context.whole_us or 0.0, step + between_us),
        len(pauses),
        float(np.median([p.end_ns - p.start_ns for p in pauses])) / 1e3,
        (longest.start_ns, longest.end_ns),
        times,
        str(run.places[longest.place]) if longest.place >= 0 else "",
    )


def _covered(pauses: list[Pause]) -> Intervals:
    return union_of((p.start_ns, p.end_ns) for p in pauses)


def _typical_us(context: RuleContext, times: Intervals, first: int) -> float:
    """Median over the steps of how long one stands still; 0 where fewer than half of them do."""
    steps = context.facts.run.steps
    windows = np.stack((steps.start_ns[first:], steps.end_ns[first:]), axis=1)
    inside = intersect(times, union(windows[:, 0], windows[:, 1]))
    at = np.searchsorted(windows[:, 0], inside[:, 0], side="right") - 1
    per_step = np.zeros(len(windows), dtype=np.int64)
    np.add.at(per_step, at, inside[:, 1] - inside[:, 0])
    return float(np.median(per_step)) / 1e3


def _undetermined(context: RuleContext, key: str, what: str) -> Undetermined | None:
    """A trace from elsewhere names no pauses; that matters where it leaves time unexplained."""
    if context.facts.run.source != "trace" or context.share("unknown", "other") < context.thresholds.pause_notice:
        return None
    return Undetermined(key, what, "Run the training under gpulab: a trace from elsewhere does not name these pauses")


FINDINGS = (
    FindingKind(
        "checkpoint_save", "saving checkpoints", checkpoint_save, removal=Pauses(("checkpoint_save",)), asked_again=True
    ),
    FindingKind(
        "logging_or_eval",
        "logging, evaluation and other work beside training",
        logging_or_eval,
        removal=Pauses(("logging", "evaluation")),
        asked_again=True,
    ),
    FindingKind("recompilation", "compiling the model again and again", recompilation, removal=Pauses(("compile",))),
    FindingKind("gc_pause", "Python's garbage collection", gc_pause, removal=Pauses(("gc",))),
)
