"""A machine whose clock the test holds: full runs and blocks take what a formula says, and nothing really runs."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec import Struct, field
from msgspec.structs import replace

from gpulab.run import Run, Settings
from gpulab.tuning.execute import FULL_RUN_LIMIT_S, Execution, FullRun, Stopper
from gpulab.tuning.record import Block, Experiment
from gpulab.tuning.runner import Runner
from gpulab.tuning.schedule import Plan, Progress, Size
from tests.support.comparisons import facts_with
from tests.support.scripted_climb import SCENE

MS = 1_000_000
PROFILER_S = 2.0


class ScriptedRuns(Struct, dict=True):
    """`step_s` of each setting's label. `full_runs` and `blocks` count what ran, `told` is what was said meanwhile."""

    step_s: Callable[[str], float]
    now_s: float = 1000.0
    full_runs: list[Settings] = field(default_factory=list)
    blocks: list[str] = field(default_factory=list)
    told: list[Progress] = field(default_factory=list)
    poll: Callable[[], None] = lambda: None  # what the runner's other thread does
    on_block: Callable[[ScriptedRuns], None] = lambda runs: None

    def clock(self) -> float:
        return self.now_s

    def install(self, monkeypatch: pytest.MonkeyPatch) -> ScriptedRuns:
        monkeypatch.setattr("gpulab.tuning.runner.run_full", self.run_full)
        monkeypatch.setattr("gpulab.tuning.runner.run_block", self.run_block)
        return self

    def conduct(self, code: Any, plan: Plan, step_s: float | None = None) -> Experiment:
        """The plan on this machine."""
        return self.runner(code, plan, step_s).run()

    def runner(self, code: Any, plan: Plan, step_s: float | None = None) -> Runner:
        runner = Runner(code, plan, self.told.append, step_s=step_s, clock=self.clock)
        self.poll = runner._poll
        return runner

    def run_full(
        self,
        execution: Execution,
        settings: Settings,
        stopper: Stopper,
        store: object,
        *,
        quiet: bool,
        limit_s: float | None = None,
        ends_alone: bool = True,
    ) -> FullRun:
        began_s, step_s, most = self.now_s, self.step_s(_label(execution)), settings.steps or 0
        limit_s = FULL_RUN_LIMIT_S if limit_s is None else min(limit_s, FULL_RUN_LIMIT_S)
        for number in range(most):
            self.now_s += step_s
            stopper.current = SimpleNamespace(step_count=number + 1, beside_steps="", stop=_nothing)  # type: ignore[assignment]
            self.poll()
            if stopper.ends or self.now_s - began_s - step_s > limit_s:
                break
        stopper.current = None
        self.now_s += PROFILER_S
        self.full_runs.append(settings)
        return FullRun(_run(step_s, settings), SCENE, ())

    def run_block(self, execution: Execution, size: Size, stopper: Stopper, *, on_gpu: bool) -> Block:
        step_s, done = self.step_s(_label(execution)), 0
        while done < size.total and not stopper.ends:
            self.now_s += step_s
            done += 1
        self.blocks.append(_label(execution))
        self.on_block(self)
        counted = max(0, done - size.warmup)
        return Block(0, 0, 0, counted, done - counted, 32 * counted, int(counted * step_s * 1e3 * MS))


def _label(execution: Execution) -> str:
    return ", ".join(f"{name}={value}" for name, value in execution.arm.texts.items()) or "baseline"


def _nothing() -> None:
    """It ends by itself."""


def _run(step_s: float, settings: Settings) -> Run:
    return replace(facts_with(step_s * 1e3, {"data_wait": 0.3, "compute": 0.6}).run, settings=settings)
