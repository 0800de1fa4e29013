"""Rules about where an epoch begins: a loader that starts its workers anew each time."""

from __future__ import annotations

import numpy as np

from gpulab.diagnosis.context import FindingKind, RuleContext, Undetermined
from gpulab.diagnosis.finding import BETWEEN, Evidence, Finding
from gpulab.diagnosis.rules.dataloader_evidence import waiting_times
from gpulab.formatting import decapitalized, duration, percent, plural
from gpulab.run import StepFlag

_KEEP_WORKERS = (
    "Keep the workers alive between epochs: DataLoader(…, persistent_workers=True), with one iterator per epoch."
)
_MAKE_ONCE_AND_KEEP = (
    "Create the DataLoader once, before the loop (in Lightning leave reload_dataloaders_every_n_epochs at 0): its "
    f"workers end with it. Then {decapitalized(_KEEP_WORKERS).replace('the workers', 'them', 1)}"
)
_MOST_STEPS = 0.5  # ours: more beginnings than that are no epochs, but `next(iter(loader))` in the loop


def worker_restart(context: RuleContext) -> Finding | Undetermined | None:
    """Workers are started again for each epoch, and the first step of it waits until they have a batch.

    Counted is what those steps wait longer than others do, without the very first start, spread over all steps.
    """
    run, loader, step = context.facts.run, context.facts.run.loader, context.step_us
    stay = loader is not None and loader.persistent_workers and not loader.remade  # else they end with their loader
    if not step or not len(run.steps) or context.facts.worker_count == 0 or stay:
        return None
    fresh = np.flatnonzero((run.steps.flags & StepFlag.EPOCH_START) != 0)
    whole = (run.steps.flags & StepFlag.PARTIAL) == 0
    again = fresh[whole[fresh]][1:] if len(fresh) and fresh[0] == 0 else fresh[whole[fresh]]
    if not len(again):
        return None
    if len(fresh) > _MOST_STEPS * len(run.steps):
        return None
    others = np.setdiff1d(np.flatnonzero(whole), fresh)
    usual_ns = float(np.median(run.steps.data_wait_ns[others])) if len(others) else 0.0
    making_us = context.facts.loading.batch_us if context.facts.loading is not None else 0.0
    longer_us = np.maximum(0.0, (run.steps.data_wait_ns[again] - usual_ns) / 1e3 - making_us)
    cost_us = float(longer_us.sum()) / len(run.steps)
    whole_us = max(context.whole_us or 0.0, step + cost_us)
    if cost_us < context.thresholds.silence * whole_us:
        return None
    each = duration(float(np.median(longer_us)))
    if loader is None:
        return Undetermined(
            "worker_restart",
            f"Why each epoch starts with a wait of {each}: DataLoader workers may restart each time",
            "Load with torch.utils.data.DataLoader, whose options gpulab records",
        )
    slowest = int(again[np.argmax(longer_us)])
    return Finding(
        "worker_restart",
        f"Each epoch starts with a wait of {each}, because the DataLoader restarts its workers.",
        (
            Evidence(
                f"{plural(len(again), 'time')} in {len(run.steps):,} steps the first batch of an epoch came {each} "
                f"later than others: {duration(cost_us)} per step, {percent(cost_us / whole_us)}",
                (int(run.steps.start_ns[slowest]), int(run.steps.end_ns[slowest])),
            ),
        ),
        cost_us,
        "measured",
        parts=(f"{BETWEEN}/worker_restart",),
        settings=() if loader.remade else (("persistent_workers", "on"),),
        cure=_MAKE_ONCE_AND_KEEP if loader.remade else _KEEP_WORKERS,
    )


def new_iterators(context: RuleContext) -> Finding | None:
    """Nearly each step starts its loader anew, as `next(iter(loader))` does."""
    run, loader, step_us = context.facts.run, context.facts.run.loader, context.step_us
    wait, inside = context.facts.data_wait_us, context.facts.loading
    fresh = (run.steps.flags[context.facts.selection.rows] & StepFlag.EPOCH_START) != 0
    if not step_us or loader is None or wait is None or not len(fresh) or fresh.mean() <= _MOST_STEPS:
        return None
    cost_us = max(0.0, wait.median - (inside.batch_us if inside is not None else 0.0))
    if cost_us < context.thresholds.data_wait_notice * step_us:
        return None
    anew = f"starts {plural(loader.num_workers, 'worker')} and draws" if loader.num_workers else "draws"
    making = f"; making a batch takes {duration(inside.batch_us)}" if inside is not None else ""
    return Finding(
        "new_iterators",
        f"Each step makes a new iterator of its DataLoader: that takes {percent(cost_us / step_us)} of each step.",
        (Evidence(f"{int(fresh.sum()):,} of {len(fresh):,} steps do; each {anew} the order of all items{making}"),),
        cost_us,
        "measured" if inside is not None else "likely",
        parts=("data_wait",),
        cure="Make it once: loop over the loader itself (for batch in loader), or call iter(loader) before the loop "
        "and anew only at its end. Where an epoch is one batch, keep that batch.",
        source_line=context.line_at(waiting_times(context)),
    )


_LESSON = "03_starving_gpu"
FINDINGS = (
    FindingKind("worker_restart", "restarting DataLoader workers", worker_restart, _LESSON),
    FindingKind("new_iterators", "new iterators", new_iterators, _LESSON, explains=("data_starved", "slow_hand_over")),
)
