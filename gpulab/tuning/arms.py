"""The arms while an experiment runs: their state, their predictions, and which of them run in the next turn."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
from msgspec import Struct, field
from msgspec.structs import replace

from gpulab.analysis.facts import Facts, facts
from gpulab.analysis.steps import loaded_ahead
from gpulab.capture.gpu import count_anew, gpu_peak_bytes
from gpulab.capture.windows import TRACED
from gpulab.errors import StoreError
from gpulab.formatting import plural, settings_words, size
from gpulab.knobs.loader_options import BATCH_SIZE, with_settings
from gpulab.memory.failure import out_of_memory
from gpulab.options import QUICK_TRACED, is_quick
from gpulab.prediction.predict import knob_names, predict, refusal
from gpulab.prediction.prediction import Prediction, PriorEvidence
from gpulab.run import Loader, Run
from gpulab.store import prediction_log
from gpulab.store.prediction_log import Record, Scoreboard
from gpulab.tuning.code import Code
from gpulab.tuning.compare.blocks import carries_verdict, pair_ratios
from gpulab.tuning.compare.verdicts import unit_of, with_sample_counts, with_times
from gpulab.tuning.execute import Execution, FullRun
from gpulab.tuning.record import NO_EFFECT, Block, Comparison, Experiment, Side
from gpulab.tuning.resolve import ResolvedArm, Setting
from gpulab.tuning.schedule import SCREENED, SCREENING_TURNS, Arm
from gpulab.verdict import is_decided

MOST_AHEAD = 40  # batches loaded ahead that a run lets pass before it profiles
BATCH = BATCH_SIZE.name
ROUNDS = 2  # runs of each size
LEAST_STEPS = 3  # of a run, to measure the step of a batch size
_BATCH_NAME = re.compile(r"(?:^|_)(?:batch(?:_?size)?|bs)$", re.IGNORECASE)
UNKNOWN_AHEAD = 10  # batches that four workers load ahead; used until a first run has shown how the cell loads


class ArmState(Struct):
    """One arm while the experiment runs: its full run and its blocks so far."""

    arm: Arm
    execution: Execution
    full_run: FullRun | None = None
    failure: str = ""
    prediction: Prediction | None = None
    seed_losses: list[tuple[float, ...]] = field(default_factory=list)
    blocks: list[Block] = field(default_factory=list)
    _facts: Facts | None = None

    @property
    def side(self) -> Side:
        """The measurements so far."""
        full_run = self.full_run
        side = Side(self.arm.label, self.arm.texts, None, tuple(self.blocks), failure=self.failure)
        side = replace(side, seed_losses=tuple(self.seed_losses), prediction=self.prediction)
        if full_run is None:
            return side
        if self._facts is None:
            self._facts = facts(full_run.run)
        # a full run from before began from another start: then the losses of the first block count
        of_blocks = next((block.losses for block in self.blocks if block.losses), ())
        return replace(
            side,
            facts=self._facts,
            checks=full_run.run.changes,
            losses=full_run.losses or of_blocks,
            step_inputs=full_run.observation.step_inputs,
            setup_ns=full_run.setup_ns,
        )

    def reached(self, comparison: Comparison) -> str:
        """How far this arm had come when the experiment ended early: "after 3 pairs of blocks"."""
        if self.full_run is None:
            return f"before {self.arm.label} had run"
        if comparison.evidence == "interleaved":
            return f"after {plural(comparison.pairs, 'pair')} of blocks"
        return "before a pair of blocks had run: only the full run of each is there"

    def loader(self, baseline: FullRun) -> Loader | None:
        """The DataLoader under this arm, as far as it is known before the run."""
        settings = {knob.name: value for knob, value in self.execution.arm.knobs.items()}
        loader = with_settings(baseline.observation, settings).loader
        return loader.record if loader is not None else None

    def profiled_steps(self, baseline: FullRun | None) -> int:
        """The number of profiled steps: `TRACED`, plus the steps whose batches were loaded ahead."""
        if is_quick():
            return QUICK_TRACED
        if baseline is None:
            return TRACED + UNKNOWN_AHEAD
        loader = self.loader(baseline)
        return TRACED + (min(loaded_ahead(loader), MOST_AHEAD) if loader is not None else 0)

    def side_with_edit(self, code: Code) -> Side:
        """The side with its times and with what makes its settings permanent."""
        side = with_times(self.side)
        edit = self.execution.arm.edit(code, side.checks)
        return side if edit is None else replace(side, edit=edit.text, edit_is_diff=edit.is_diff, edit_cell=edit.cell)


def failure_of(error: BaseException, full_run: FullRun | None) -> str:
    """Why an arm could not be run, in words."""
    if not out_of_memory(error):
        return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    memory = full_run.run.memory if full_run is not None else None
    peak = memory and (memory.peak_allocated_bytes or memory.peak_rss_bytes)
    return f"out of memory, having reached {size(peak)}" if peak else "out of memory"


def no_effect(run: Run) -> str:
    """Why blocks are pointless: the run shows that none of the knobs had an effect; else empty."""
    idle = [c for c in run.changes if c.state == "no effect" and c.kind != "variable"]
    return NO_EFFECT + "; ".join(c.evidence for c in idle) if idle and len(idle) == len(run.changes) else ""


def faster_half(arms: Sequence[ArmState], able: list[int], turn: int) -> list[int]:
    """Successive halving: every second turn the slower half of the arms drops out; A alone remains at the end."""
    others = able[1:]
    if turn % SCREENING_TURNS:
        return able
    if len(others) <= SCREENED:
        return able[:1]

    def median_ratio(i: int) -> float:
        a, b, _ = with_sample_counts(arms[0].side, arms[i].side)
        ratios = pair_ratios(a, b, unit_of(a, b)[0])
        return float(np.median(ratios)) if len(ratios) else math.inf

    ranked = sorted(others, key=median_ratio)
    return [able[0], *sorted(ranked[: max(SCREENED, math.ceil(len(others) / 2))])]


def carry_verdicts(arms: Sequence[ArmState]) -> bool:
    """Whether the blocks so far decide each arm against the first, and with several arms also their ranking."""
    a, *sides = (arm.side for arm in arms)
    return all(carries_verdict(a, b, precise=len(sides) > 1) for b in sides)


class ArmPredictions(Struct):
    """Predictions of one experiment. `errors`: as `PriorEvidence.errors`, for this machine's device."""

    facts: Facts
    errors: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    sizes: dict[int, tuple[float, int | None]] = field(default_factory=dict)

    def of(self, arm: ResolvedArm, settings: Mapping[str, str], base: Mapping[str, str]) -> Prediction:
        """The prediction for these settings against the base. A variable named like a batch size counts as one."""
        changed = {d.name: d for d in arm.settings if d.name not in base or base[d.name] != settings.get(d.name)}
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
        """Run short blocks at the present and two other batch sizes, if an arm changes the batch size."""
        batches = [d for arm in arms for d in arm.settings if names_batch(d) and not d.refusal and not d.is_current]
        targets = [d.value for d in batches if isinstance(d.value, int) and d.value > 0]
        if not targets or self.sizes:
            return
        first = batches[0]
        before = first.current
        if isinstance(before, bool) or not isinstance(before, int) or before < 1:
            return
        times: dict[int, list[float]] = {}
        for batch in ROUNDS * sizes_to_run(before, targets):
            count_anew()
            block = run_size(first, batch)
            if block is None:
                return
            if block.step_count < LEAST_STEPS:
                continue
            times.setdefault(batch, []).append(block.time_ns / 1e3 / block.step_count)
            self.sizes[batch] = float(np.mean(times[batch])), gpu_peak_bytes(self.facts.run.device) or None
        peak_bytes = self.facts.run.memory.peak_allocated_bytes
        if before in self.sizes and peak_bytes:
            self.sizes[before] = self.sizes[before][0], peak_bytes


def names_batch(setting: Setting) -> bool:
    """Whether the setting is the batch size, as a knob or as a variable of the cell."""
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
