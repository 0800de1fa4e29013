"""The headspace test: how much faster a cell would be if loading its data took no time, by interleaved blocks.

definitions.md, "Headspace" (Mohan et al., "Analyzing and Mitigating Data Stalls in DNN Training", 2021,
section 4). Three arms: batches that are already on the device give the ideal step; real data from files in the page
cache adds the preparation stall; files that must be read from the disk add the fetch stall.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from msgspec import Struct

from gpulab.errors import UsageError
from gpulab.knobs.changed_loader import overriding
from gpulab.knobs.knob import KnobEffects
from gpulab.knobs.observation import Observation
from gpulab.run import Device, Run
from gpulab.tuning import headspace_data, schedule
from gpulab.tuning.code import Code
from gpulab.tuning.execute import Execution, run_block
from gpulab.tuning.record import Block, Comparison, Experiment
from gpulab.tuning.runner import Runner
from gpulab.tuning.schedule import Arm, Listener, Plan, Progress
from gpulab.verdict import Verdict

IDEAL = Arm({"batches": "kept on the device"})
COLD = Arm({"files": "read from the disk"})
NO_LOADER = "The cell uses no DataLoader: there is no loading to measure."


class Headspace(Struct, frozen=True):
    """The result. Times are µs per step; None: not measurable, with the reason in `reasons` under "ideal" or "cold".

    `ceiling` is how many times as fast the cell would be with a perfect loader, `interval` its 95 % interval; neither
    is below 1. `preparation_us` and `fetch_us`: what each stall adds to a step. `verdicts`: of "ideal" and "cold"
    against the baseline.
    """

    run: Run  # the baseline
    experiment: Experiment
    step_us: float | None  # of the baseline, with its files in the page cache as far as they fit
    ideal_us: float | None
    cold_us: float | None
    ceiling: float | None
    interval: tuple[float, float] | None
    preparation_us: float | None
    fetch_us: float | None
    verdicts: dict[str, Verdict]
    reasons: dict[str, str]
    notes: tuple[str, ...]

    @property
    def certain(self) -> frozenset[str]:
        """Those of "ideal" and "cold" whose verdict shows a difference, in the only possible direction."""
        expected: dict[str, Verdict] = {"ideal": "faster", "cold": "slower"}
        return frozenset(name for name, said in self.verdicts.items() if said == expected[name])

    @property
    def preparation_share(self) -> float | None:
        return _share(self.preparation_us, self.step_us)

    @property
    def fetch_share(self) -> float | None:
        return _share(self.fetch_us, self.cold_us)


class Differential(Runner):
    """Runs the test. `headspace` returns the result; `stop`, from any thread, ends it at the next step boundary.

    The user's state is restored before each run and at the end, as by `Runner`. `error`: what ended the test early.
    """

    def __init__(
        self,
        code: Code,
        *,
        budget_s: float | None = None,
        steps: int | None = None,
        pairs: int | None = None,
        device: str = "auto",
        tell: Listener = lambda progress: None,
        step_s: float | None = None,
    ) -> None:
        plan = Plan(
            (IDEAL, COLD),
            block_steps=steps,
            pairs=pairs,
            budget_s=budget_s,
            device=device,
            trace=False,
            save=False,
        )
        super().__init__(code, plan, tell, step_s=step_s)
        self._batch_device = "cpu"
        self._files: list[str] = []

    def headspace(self) -> Headspace:
        """Run the test. Raises UsageError if another thread measures, or the cell takes no data from a DataLoader."""
        experiment = self.run()
        side = experiment.sides[0]
        if side.facts is None:
            raise self.error or UsageError("The cell did not run.")
        if not self._ended and not self._fed:
            raise UsageError(NO_LOADER)
        by_label = {c.b.label: c for c in experiment.comparisons}
        ideal, cold = by_label.get(IDEAL.label), by_label.get(COLD.label)
        step_us = experiment.sides[0].us_per_step
        ideal_us, cold_us = _times(step_us, ideal), _times(step_us, cold)
        ceiling, interval = _ceiling(ideal)
        arms = {"ideal": ideal, "cold": cold}
        return Headspace(
            run=side.facts.run,
            experiment=experiment,
            step_us=step_us,
            ideal_us=ideal_us,
            cold_us=cold_us,
            ceiling=ceiling,
            interval=interval,
            preparation_us=_added(step_us, ideal_us),
            fetch_us=_added(cold_us, step_us),
            verdicts={name: c.verdict for name, c in arms.items() if c is not None and _ratio(c) is not None},
            reasons={name: _reason(c, experiment) for name, c in arms.items() if _ratio(c) is None},
            notes=experiment.notes,
        )

    def _check(self) -> None:
        """Nothing to check: the arms are no knobs."""

    @property
    def _full_run_count(self) -> int:
        """Only the baseline has a full run."""
        return 1

    # -- the arms ------------------------------------------------------------------------------------------------

    def _make_ready(self, arm: Arm, observation: Observation) -> Any:
        """The arm runs in blocks only, without a full run."""
        ready = super()._make_ready(Arm(), observation)
        ways = {IDEAL.label: self._ideally, COLD.label: self._coldly}
        ready.arm, ready.execution = arm, Execution(self._code, within=ways[arm.label])
        ready.full_run = self._baseline_run
        return ready

    def _ideally(self) -> AbstractContextManager[None]:
        return headspace_data.reusing_batches(self._batch_device)

    @contextmanager
    def _coldly(self) -> Iterator[None]:
        headspace_data.drop(self._files)
        yield

    # -- before the blocks ---------------------------------------------------------------------------------------

    @property
    def _fed(self) -> bool:
        full_run = self._baseline_run
        if full_run is None or full_run.observation.loader is None:
            return False
        return bool(full_run.run.steps.batch_count.any())

    def _run_blocks(self) -> None:
        full_run = self._baseline_run
        if not self._fed or full_run is None:
            return
        size = schedule.block_size([full_run.run], self._plan.block_steps)
        for prepare in (self._prepare_ideal, self._prepare_cold):
            if not self._ended:
                prepare(full_run.run, size)
        if not self._ended:
            super()._run_blocks()

    def _prepare_ideal(self, run: Run, size: schedule.Size) -> None:
        """Try batches on the device; if the cell cannot take them, batches in host memory."""
        arm = next(a for a in self._arms if a.arm is IDEAL)
        places = dict.fromkeys((_torch_name(run.device), "cpu"))
        for place in places:
            self._batch_device = place
            error = self._probe(self._ideally, size, "batches kept")
            if error is None:
                arm.failure = ""
                if place != next(iter(places)):
                    self._notes.append(
                        "The cell cannot take batches that are on the GPU already. They were kept in host "
                        "memory, so copying them is part of the ideal step."
                    )
                return
            arm.failure = f"{type(error).__name__}: {error}"
            self._release(error)
            if self.error is not None:
                return
        self._notes.append(f"The cell cannot run on kept batches ({arm.failure}).")

    def _prepare_cold(self, run: Run, size: schedule.Size) -> None:
        """Log which files the first steps read: all runs read the same ones."""
        arm = next(a for a in self._arms if a.arm is COLD)
        log = headspace_data.FileLog()

        @contextmanager
        def logging() -> Iterator[None]:
            nonlocal log
            with overriding("num_workers", 0, KnobEffects()), headspace_data.logging_files() as log:
                yield

        error = self._probe(logging, size, "looking for files")
        if error is not None:
            self._release(error)
        self._files = log.data
        arm.failure = headspace_data.why_not(self._files)

    def _probe(
        self, within: Callable[[], AbstractContextManager[object]], size: schedule.Size, what: str
    ) -> Exception | None:
        """One short run that is not measured. Returns the exception that it raised."""
        self._tell(Progress(what, 0, 1, None))
        if not self._restore():
            return None
        result = run_block(Execution(self._code, within=within), size, self._stopper, on_gpu=False)
        if isinstance(result, Block):
            return None
        if isinstance(result, Exception):
            return result
        self.error = result
        return None


def _torch_name(device: Device) -> str:
    return "cpu" if device.kind == "cpu" else f"cuda:{device.index or 0}"


def _ratio(comparison: Comparison | None) -> float | None:
    """The ratio, if it is from interleaved blocks."""
    if comparison is None or comparison.evidence != "interleaved" or not comparison.pairs:
        return None
    return comparison.ratio


def _times(step_us: float | None, comparison: Comparison | None) -> float | None:
    ratio = _ratio(comparison)
    return None if step_us is None or ratio is None else step_us * ratio


def _ceiling(ideal: Comparison | None) -> tuple[float | None, tuple[float, float] | None]:
    ratio = _ratio(ideal)
    if ideal is None or ratio is None:
        return None, None
    interval = ideal.interval and (max(1.0, 1 / ideal.interval[1]), max(1.0, 1 / ideal.interval[0]))
    return max(1.0, 1 / ratio), interval


def _added(more_us: float | None, less_us: float | None) -> float | None:
    return None if more_us is None or less_us is None else max(0.0, more_us - less_us)


def _share(part: float | None, whole: float | None) -> float | None:
    return None if part is None or not whole else part / whole


def _reason(comparison: Comparison | None, experiment: Experiment) -> str:
    if comparison is not None and comparison.b.failure:
        return comparison.b.failure
    if experiment.stopped:
        return "stopped before it was measured"
    late = comparison is None or comparison.ended_early
    return "the budget was over before it was measured" if late else "no pair of blocks was measured"
