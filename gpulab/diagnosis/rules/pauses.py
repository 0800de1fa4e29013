"""Rules about what the program does besides training: saving, logging, evaluating, compiling, collecting garbage."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from gpulab.analysis.breakdown import DEVICE_PARTS, PARTS
from gpulab.analysis.host.dataloader import loading_times
from gpulab.diagnosis.context import RuleContext, Undetermined
from gpulab.diagnosis.finding import BETWEEN, Evidence, Finding, pairs
from gpulab.diagnosis.kind import FindingKind
from gpulab.diagnosis.rules.other_work import between_steps, following_update, in_own_code, named_work
from gpulab.formatting import duration, percent
from gpulab.intervals import EMPTY, Intervals, clip, intersect, joined, measure, subtract, union, union_of
from gpulab.prediction.removal import Pauses
from gpulab.run import Pause, PauseKind, Phase, StepFlag

# Where one lies within another its time belongs to the first of these: garbage is collected in all of them.
_ORDER: tuple[PauseKind, ...] = ("compile", "checkpoint_save", "evaluation", "logging", "gc")
# Times: ours. One pause may be chance; Python collects garbage twice in nearly every run.
_LEAST = {"gc": 3}
_LEAST_OF_OTHERS = 2
_OF_CHECKPOINTS = (
    "Saving checkpoints takes {share} of the training time.",
    "the training stood still {times} while a checkpoint was written, {each} each",
    "Save less often, or hand a copy of the state to a thread that writes it while the training goes on.",
)
_OF_FILES = (
    "Saving files takes {share} of the training time.",
    "the training stood still {times} while a file was written, {each} each",
    "Save less often, or hand a copy of what is saved to a thread that writes it while the training goes on.",
)
_COLLECTING = ("gc.collect(", "release_memory(", "clear_device_cache(", "garbage_collect(")
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
    summary, evidence, cure = _OF_CHECKPOINTS if _saves_checkpoints(context) else _OF_FILES
    return pauses.finding(
        context,
        "checkpoint_save",
        summary.format(share=percent(pauses.share)),
        evidence.format(times=pauses.times, each=pauses.each),
        cure,
    )


def _saves_checkpoints(context: RuleContext) -> bool:
    """Whether anything but NumPy saved: its files hold predictions or metrics as often as weights."""
    saves = [p for p in context.facts.run.pauses if p.kind == "checkpoint_save"]
    return any(not p.detail.startswith("numpy.") for p in saves)


def logging_or_eval(context: RuleContext) -> Finding | Undetermined | None:
    """Logging or evaluation takes a part of the time that is worth a look; also work beside training without a name."""
    key = "logging_or_eval"
    logged, evaluated = _paused(context, "logging"), _paused(context, "evaluation")
    if logged is not None and logged.share >= context.thresholds.pause_notice:
        logging = logged.finding(
            context,
            key,
            f"Logging takes {percent(logged.share)} of the training time.",
            f"something was logged {logged.times} (to a logger, TensorBoard, wandb, MLflow or a figure's file), "
            f"{logged.each} each",
            "Log every hundredth step, keep the loss on the device in between, and write from another thread.",
        )
        return _with_what_is_around(context, logging, _beside(context, key) if logged.within_us else None)
    if evaluated is not None and evaluated.share >= context.thresholds.evaluation_notice:
        return evaluated.finding(
            context,
            key,
            f"Evaluation takes {percent(evaluated.share)} of the training time.",
            f"the model was evaluated {evaluated.times}, {evaluated.each} each",
            "Evaluate less often or on a sample, without gradients (torch.inference_mode) and with larger batches.",
        )
    return (
        _beside(context, key)
        or named_work(context, key)
        or between_steps(context, key)
        or _undetermined(context, key, "Whether logging takes time")
    )


def _beside(context: RuleContext, key: str) -> Finding | None:
    """What a step does beside training, by where it does it, or in code of the user's own."""
    return following_update(context, key) or in_own_code(context, key)


def _with_what_is_around(context: RuleContext, logging: Finding, around: Finding | None) -> Finding:
    """What is logged is made somewhere: a loop that logs after each update makes it there, and only for that."""
    logged_us, more_us = (f.recoverable_us_per_step if f is not None else None for f in (logging, around))
    if around is None or logged_us is None or more_us is None:
        return logging
    share = (logged_us + more_us) / max(context.whole_us or 0.0, context.step_us or 0.0, logged_us + more_us)
    return replace(
        logging,
        summary=f"Logging, and making what is logged, takes {percent(share)} of the training time.",
        evidence=(*logging.evidence, Evidence(f"beside that, {around.evidence[0].words}", around.evidence[0].span)),
        recoverable_us_per_step=logged_us + more_us,
        parts=tuple(dict.fromkeys((*logging.parts, *around.parts))),
        gone=pairs(union_of((*logging.gone, *around.gone))),
    )


def recompilation(context: RuleContext) -> Finding | Undetermined | None:
    """Something is compiled again and again after the warm-up, as with inputs of ever new shapes."""
    pauses = _paused(context, "compile") or _compile_steps(context)
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
        _GC_CURE[any(call in pauses.line for call in _COLLECTING)],
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
    if len(pauses) < _LEAST.get(kind, _LEAST_OF_OTHERS):
        return _short(context, kind)
    outer = [p for p in run.pauses if _ORDER.index(p.kind) < _ORDER.index(kind)]
    elsewhere = joined(_covered(outer), loading_times(run)) if kind == "gc" else _covered(outer)
    times = clip(subtract(_covered(pauses), elsewhere), since, until)
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


def _short(context: RuleContext, kind: PauseKind) -> _Paused | None:
    """Pauses too short to be kept one by one: they are in the steps, and which is not known."""
    steps, step = context.facts.run.steps, context.step_us or 0.0
    total = next((p for p in context.facts.run.more_pauses if p.kind == kind), None)
    if total is None or total.count < _LEAST.get(kind, _LEAST_OF_OTHERS):
        return None
    cost_us = total.total_ns / len(steps) / 1e3
    if context.idle is not None:
        cost_us = min(cost_us, context.idle * step)
    share = cost_us / max(context.whole_us or 0.0, step)
    return _Paused(cost_us, 0.0, share, total.count, total.total_ns / total.count / 1e3, None, EMPTY)


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


def _compile_steps(context: RuleContext) -> _Paused | None:
    """Steps in which something was compiled, by how much longer they take than others."""
    steps, step = context.facts.run.steps, context.step_us
    later = steps.phase != Phase.WARMUP
    rows = np.flatnonzero(later & ((steps.flags & StepFlag.COMPILE) != 0))
    if len(rows) < _LEAST_OF_OTHERS or not step:
        return None
    longer_us = np.maximum(0.0, steps.time_ns[rows] / 1e3 - step)
    cost_us = float(longer_us.sum()) / int(later.sum())
    slowest = int(rows[np.argmax(longer_us)])
    span = (int(steps.start_ns[slowest]), int(steps.end_ns[slowest]))
    share = cost_us / max(context.whole_us or 0.0, step + cost_us)
    end = steps.end_ns[rows]
    longer = union(end - (longer_us * 1e3).astype(np.int64), end)
    return _Paused(0.0, cost_us, share, len(rows), float(np.median(longer_us)), span, longer)


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
