"""The state of each arm while an experiment runs, and which arms run on in the next turn."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from msgspec import Struct, field
from msgspec.structs import replace

from gpulab.analysis.facts import Facts, facts
from gpulab.analysis.steps import loaded_ahead
from gpulab.capture.windows import TRACED
from gpulab.formatting import plural, size
from gpulab.knobs.loader_options import with_settings
from gpulab.options import QUICK_TRACED, is_quick
from gpulab.prediction.prediction import Prediction
from gpulab.run import Loader, Run
from gpulab.tuning.code import Code
from gpulab.tuning.compare.blocks import carries_verdict, pair_ratios
from gpulab.tuning.compare.verdicts import unit_of, with_sample_counts, with_times
from gpulab.tuning.execute import Execution, FullRun, out_of_memory
from gpulab.tuning.plan import SCREENED, SCREENING_TURNS, Arm
from gpulab.tuning.record import NO_EFFECT, Block, Comparison, Side

MOST_AHEAD = 40  # batches: more that workers have loaded are not waited for
UNKNOWN_AHEAD = 10  # batches that four workers load ahead: how the cell loads shows in its first run


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
        # of a run that was made before, and so from another start, the losses are those of its first block
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
        """When the experiment ended early, as far as this arm: "after 3 pairs of blocks"."""
        if self.full_run is None:
            return f"before {self.arm.label} had run"
        if comparison.evidence == "interleaved":
            return f"after {plural(comparison.pairs, 'pair')} of blocks"
        return "before a pair of blocks had run: only the full run of each is there"

    def loader(self, baseline: FullRun) -> Loader | None:
        """The DataLoader under this arm, as far as it can be told before the run."""
        settings = {knob.name: value for knob, value in self.execution.arm.knobs.items()}
        loader = with_settings(baseline.observation, settings).loader
        return loader.record if loader is not None else None

    def profiled_steps(self, baseline: FullRun | None) -> int:
        """The number of profiled steps: enough remain without the steps whose batches were loaded ahead."""
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
    """Whether the blocks so far decide each arm against the first; of several arms also their ranking."""
    a, *sides = (arm.side for arm in arms)
    return all(carries_verdict(a, b, precise=len(sides) > 1) for b in sides)
