"""Predictions for the arms of an experiment, made before they run and logged with the measurement after."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
from msgspec import Struct, field
from msgspec.structs import replace

from gpulab.analysis.facts import Facts
from gpulab.capture.gpu import count_anew, gpu_peak_bytes
from gpulab.errors import StoreError
from gpulab.formatting import settings_words
from gpulab.knobs.loader_options import BATCH_SIZE
from gpulab.prediction.predict import knob_names, predict, refusal
from gpulab.prediction.prediction import Prediction, PriorEvidence
from gpulab.store import prediction_log
from gpulab.store.prediction_log import Record, Scoreboard
from gpulab.tuning.record import Block, Comparison, Experiment
from gpulab.tuning.resolve import ResolvedArm, Setting
from gpulab.verdict import is_decided

BATCH = BATCH_SIZE.name
ROUNDS = 2  # runs of each size
LEAST_STEPS = 3  # of a run that tells a size's step
_BATCH_NAME = re.compile(r"(?:^|_)(?:batch(?:_?size)?|bs)$", re.IGNORECASE)


class ArmPredictions(Struct):
    """Predictions of one experiment. `errors`: as `PriorEvidence.errors`, of this machine's device."""

    facts: Facts
    errors: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    sizes: dict[int, tuple[float, int | None]] = field(default_factory=dict)

    def of(self, arm: ResolvedArm, settings: Mapping[str, str], base: Mapping[str, str]) -> Prediction:
        """The prediction for these settings against the base. A variable named like a batch size counts as one."""
        changed = {d.name: d for d in arm.names if d.name not in base or base[d.name] != settings.get(d.name)}
        strange = [d.name for d in changed.values() if d.knob is None and not names_batch(d)]
        if strange:
            return refusal(settings, f"the effect of another {strange[0]} is not predictable")
        new = {BATCH if names_batch(d) else d.name: d.text for d in changed.values()}
        before = {
            BATCH if names_batch(d) else d.name: str(d.current) for d in changed.values() if d.current is not None
        }
        prediction = predict(self.facts, new, PriorEvidence(self.errors, self.sizes, before))
        return replace(prediction, settings=dict(settings))

    def measure_sizes(self, arms: Iterable[ResolvedArm], run_size: Callable[[Setting, int], Block | None]) -> None:
        """Run short blocks at the present and two other batch sizes, where an arm changes the batch size."""
        batches = [d for arm in arms for d in arm.names if names_batch(d) and not d.refusal and not d.is_current]
        targets = [d.value for d in batches if isinstance(d.value, int) and d.value > 0]
        if not targets or self.sizes:
            return
        first = batches[0]
        before = first.current
        if isinstance(before, bool) or not isinstance(before, int) or before < 1:
            return
        times: dict[int, list[float]] = {}
        for size in ROUNDS * sizes_to_run(before, targets):
            count_anew()
            block = run_size(first, size)
            if block is None:
                return
            if block.step_count < LEAST_STEPS:
                continue
            times.setdefault(size, []).append(block.time_ns / 1e3 / block.step_count)
            self.sizes[size] = float(np.mean(times[size])), gpu_peak_bytes(self.facts.run.device) or None
        peak_bytes = self.facts.run.memory.peak_allocated_bytes
        if before in self.sizes and peak_bytes:
            self.sizes[before] = self.sizes[before][0], peak_bytes


def names_batch(setting: Setting) -> bool:
    """Whether it is the batch size, as a knob or as a variable of the cell."""
    return setting.name == BATCH or (setting.knob is None and _BATCH_NAME.search(setting.name) is not None)


def sizes_to_run(before: int, targets: Sequence[int]) -> list[int]:
    """The present batch size and two others; sizes that are to be predicted are left out."""
    furthest = max(targets, key=lambda size: abs(np.log(size / before)))
    between = round(float(np.sqrt(before * furthest)))
    other = max(1, before // 2) if furthest > before else round(float(np.sqrt(before * between)))
    return sorted({other, before, between} - set(targets))


def log_predictions(experiment: Experiment) -> str:
    """Add predictions with their measurements to the scoreboard. Returns the reason of a failure, or an empty text."""
    records = [r for r in (_record(c) for c in experiment.comparisons) if r is not None]
    try:
        Scoreboard().append(records)
    except (StoreError, ValueError) as e:
        return str(e)
    return ""


def _record(comparison: Comparison) -> Record | None:
    """None unless interleaved blocks decided the comparison and the settings took effect."""
    prediction, facts = comparison.b.prediction, comparison.a.facts
    if prediction is None or prediction.ratio is None or prediction.interval is None or facts is None:
        return None
    if comparison.evidence != "interleaved" or comparison.ratio is None or comparison.interval is None:
        return None
    if (
        not is_decided(comparison.verdict)
        or comparison.b.failure
        or any(c.state == "no effect" for c in comparison.b.checks)
    ):
        return None
    changed = {n: v for n, v in comparison.b.settings.items() if comparison.a.settings.get(n) != v}
    names = {BATCH if _BATCH_NAME.search(n) else n: v for n, v in changed.items()}
    if BATCH in names and comparison.unit != "sample":
        return None
    return Record(
        when=prediction_log.now(),
        knob=knob_names(names),
        value=settings_words(changed),
        predicted=prediction.ratio,
        predicted_interval=prediction.interval,
        measured=comparison.ratio,
        measured_interval=comparison.interval,
        device=facts.run.device.name,
        cell=prediction_log.digest(facts.run.code),
        only_sign=prediction.only_sign,
    )
