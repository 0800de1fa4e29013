"""A machine that obeys a formula instead of a clock, so that a climb can be tested without one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from msgspec import Struct, field
from msgspec.structs import replace

from gpulab.analysis.facts import Facts
from gpulab.diagnosis.finding import Diagnosis, Evidence, Finding
from gpulab.knobs.observation import Observation, ObservedLoader, ObservedModule, ObservedOptimizer
from gpulab.prediction.prediction import Prediction
from gpulab.run import Change, Device, Loader, Memory
from gpulab.tuning.climb import Climber
from gpulab.tuning.climb_record import Bounds, Climb
from gpulab.tuning.code import Code
from gpulab.tuning.compare.blocks import compare_blocks
from gpulab.tuning.execute import FullRun
from gpulab.tuning.record import Experiment, Side
from gpulab.tuning.schedule import Arm, Listener, Plan
from tests.support.comparisons import blocks, facts_with, loss_curve

Settings = Mapping[str, str]

DATASET = Loader("Digits", 1797, 32, 0, None, False, False, 57, False)
SCENE = Observation(
    Device("cpu", "CPU"),
    loaders=(ObservedLoader(DATASET, False, False, "fork"),),
    optimizers=(ObservedOptimizer("AdamW", True, None, ("cpu",), ("float32",), False),),
    modules=(ObservedModule("Net", 1000, ("float32",), True, "contiguous", False, True, None),),
)


def finding(key: str, recoverable_us: float | None = None, **settings: str) -> Finding:
    """A cause, and what cures it."""
    return Finding(
        key=key,
        summary=f"The cause is {key}.",
        evidence=(Evidence("as scripted"),),
        recoverable_us_per_step=recoverable_us,
        confidence="measured",
        settings=tuple(settings.items()),
        cure=f"Cure {key} by hand.",
    )


HEALTHY = Diagnosis((finding("healthy"),))


def nothing_foretold(settings: Settings) -> Prediction:
    """No prediction."""
    return Prediction(dict(settings), None, None, "", refused="not in this test")


def no_loss(settings: Settings) -> tuple[float, ...]:
    """The same from whatever settings."""
    return loss_curve()


class Machine(Struct):
    """`step_ms` of settings; `fails` why some cannot run; `losses` of settings, of other seeds where "seed" is one."""

    step_ms: Callable[[Settings], float]
    diagnosis: Callable[[Settings], Diagnosis]
    losses: Callable[[Settings], tuple[float, ...]] = no_loss
    fails: Callable[[Settings], str] = lambda settings: ""
    predicted: Callable[[Settings], Prediction] = nothing_foretold
    peak_bytes: Callable[[Settings], int] = lambda settings: 2**30
    on_run: Callable[[Plan, Script], None] = lambda plan, script: None
    noise: float = 0.01
    plans: list[Plan] = field(default_factory=list)
    scripts: list[Script] = field(default_factory=list)

    def climb(self, **bounds: object) -> Climb:
        """A whole climb."""
        return self.climber(**bounds).run()

    def climber(self, **bounds: object) -> Climber:
        """A climber on this machine."""
        code = Code.of_text("workers = 0\n", {})
        given = Bounds(**bounds)  # type: ignore[arg-type]
        return Climber(
            code,
            given,
            self._diagnosed,
            lambda known, s: self.predicted(s),
            engine=self._engine,  # type: ignore[arg-type]
        )

    def _diagnosed(self, known: Facts) -> Diagnosis:
        return self.diagnosis(known.run.settings.knobs)

    def _engine(self, code: object, plan: Plan, tell: Listener, done: Sequence[tuple[Arm, FullRun]]) -> Script:
        self.plans.append(plan)
        script = Script(self, plan, done)
        self.scripts.append(script)
        return script

    def side(self, arm: Arm, place: int, seeds: int = 0) -> Side:
        """What a setting does here."""
        settings = arm.texts
        shares = {"data_wait": 0.3, "compute": 0.6}
        ms = self.step_ms(settings)
        made = facts_with(ms, shares, seed=place + 1)
        run = replace(
            made.run,
            settings=replace(made.run.settings, knobs=settings),
            memory=Memory(self.peak_bytes(settings), self.peak_bytes(settings), self.peak_bytes(settings), 2**34),
        )
        made = replace(made, run=run)
        checks = tuple(Change(n, v, "", "DataLoader option", "took effect", "as scripted") for n, v in settings.items())
        others = tuple(self.losses({**settings, "seed": str(number + 1)}) for number in range(seeds))
        return Side(
            arm.label,
            settings,
            None if self.fails(settings) else made,
            blocks(place, ms, per_turn=2 if place == 0 else 1, noise=self.noise),
            losses=self.losses(settings),
            seed_losses=others,
            checks=checks,
            failure=self.fails(settings),
            edit=f"# keep {arm.label}",
        )


class Script:
    """One plan, as `Runner` would run it."""

    def __init__(self, machine: Machine, plan: Plan, done: Sequence[tuple[Arm, FullRun]]) -> None:
        self.full_runs: list[FullRun] = []
        self.error: BaseException | None = None
        self.same_start = True
        self.stopped = False
        self.done = [arm.label for arm, _ in done]
        self._machine, self._plan = machine, plan

    def stop(self) -> None:
        self.stopped = True

    def run(self) -> Experiment:
        plan, machine = self._plan, self._machine
        machine.on_run(plan, self)
        sides = [machine.side(plan.base, 0, plan.seeds)]
        sides += [machine.side(arm, number) for number, arm in enumerate(plan.arms, start=1)]
        if plan.screening:  # blocks alone
            sides[1:] = [replace(side, facts=None, losses=()) for side in sides[1:]]
        for arm, side in zip((plan.base, *plan.arms), sides, strict=True):
            if arm.label not in self.done and side.facts is not None:
                self.full_runs.append(FullRun(side.facts.run, SCENE, side.losses))
        if self.stopped or not plan.interleaved:
            sides = [replace(side, blocks=()) for side in sides]
        compared = tuple(compare_blocks(sides[0], side) for side in sides[1:])
        return Experiment(tuple(sides), compared, 1.0, self.stopped or self.error is not None)
