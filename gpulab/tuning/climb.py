"""The climb: measure, diagnose, try the best cure by blocks in turn, keep what is faster for certain, and again."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from msgspec.structs import replace

from gpulab.analysis.facts import Facts
from gpulab.capture import threads
from gpulab.devices.machine import usable_cores
from gpulab.diagnosis.finding import Diagnosis
from gpulab.errors import UsageError
from gpulab.knobs.catalogue import changes_steps
from gpulab.knobs.variables import Plain
from gpulab.prediction.prediction import Prediction
from gpulab.thresholds import DEFAULT
from gpulab.tuning.cell_code import interrupts_heard
from gpulab.tuning.climb_policy import (
    Candidate,
    ClimbState,
    Tried,
    candidates,
    judged,
    others,
    promising,
    spoiled,
    together,
    unsure,
    ways_back,
)
from gpulab.tuning.climb_record import Attempt, Bounds, Climb, Ending, Passed
from gpulab.tuning.code import Code
from gpulab.tuning.compare.differences import compare_losses
from gpulab.tuning.execute import FullRun
from gpulab.tuning.plan import Arm, Clock, Listener, Plan, Progress
from gpulab.tuning.record import Comparison, Experiment, LossComparison, Side
from gpulab.tuning.runner import Runner
from gpulab.verdict import LEAST_EFFECT, TOO_FEW

BLOCKS_S = 30.0  # for the blocks of one try
LONGER = 2  # times as long for the second look, where the first blocks lie too far apart
LEAST_S = 5.0  # of the budget: with less left no further try is begun
WHOLE_SHARE = 0.15  # of the budget, kept for the comparison as a whole: at most `BLOCKS_S`
SCREENING_SHARE, SCREENING_S = 0.3, 60.0  # of what is left, and at most, for a look at every other knob
FULL_RUN_SHARE = 0.3  # of what is left, for one run in full

MakeRunner = Callable[[Code, Plan, Listener, Sequence[tuple[Arm, FullRun]]], Runner]


class Climber:
    """Climbs. `run` gives the record; `stop`, from any thread, ends it at the next step boundary with what there is.

    The user's state is put back before each run and at the end, as by `Runner`. `on_attempt` is called with the record
    so far after each attempt. `tell` and `tick` are as those of `Runner`. `error`: what ended it early, an interrupt or
    an exception of the baseline.
    """

    def __init__(
        self,
        code: Code,
        bounds: Bounds,
        diagnose: Callable[[Facts], Diagnosis],
        predict: Callable[[Facts, Mapping[str, str]], Prediction],
        *,
        memory_full: float = DEFAULT.memory_full,
        tell: Listener = lambda progress: None,
        on_attempt: Callable[[Climb], None] = lambda record: None,
        engine: MakeRunner = Runner,
        clock: Clock = time.monotonic,
    ) -> None:
        self.tell = tell
        self.tick: Listener = lambda progress: None
        self._clock = clock
        self.on_attempt = on_attempt
        self.error: BaseException | None = None
        self.full_runs: list[FullRun] = []  # all full runs, in order
        self._code, self._bounds, self._engine = code, bounds, engine
        self._diagnose, self._predict = diagnose, predict
        self._memory_full = memory_full
        self._asked = False
        self._current: Runner | None = None
        self._began = 0.0
        self._kept: dict[str, Plain] = {}
        self._tried: list[Tried] = []
        self._attempts: list[Attempt] = []
        self._passed: list[Passed] = []
        self._done: dict[str, FullRun] = {}  # the full runs of the baseline and of kept settings, by label
        self._side: Side | None = None  # the baseline
        self._top: Facts | None = None  # of the cell with all that is kept
        self._seeds: tuple[tuple[float, ...], ...] | None = None
        self._diagnosis: Diagnosis | None = None
        self._screened_on: list[dict[str, Plain]] = []  # what was kept when all other knobs were screened
        self._promising: list[Candidate] = []  # what that showed

    def stop(self) -> None:
        """End at the next step boundary, with what there is."""
        self._asked = True
        if (current := self._current) is not None:
            current.stop()

    def run(self) -> Climb:
        """All of it. Raises UsageError before anything runs: another thread measures, or the plan cannot work."""
        self._began = self._clock()
        with threads.measuring(), interrupts_heard(self.stop) as heard:
            whole: Comparison | None = None
            ended: Ending = "error"
            try:
                ended = self._measure() or self._climb()
                whole = self._as_a_whole() if ended != "error" else None
            except KeyboardInterrupt as e:  # between two runs of the user's code
                self.error = e
            self.error = self.error or heard.error
            ended = "error" if self.error is not None else "stopped" if self._asked else ended
        return self._record(ended, whole)

    # -- the course ----------------------------------------------------------------------------------------------

    def _measure(self) -> Ending | None:
        """The baseline; why there is nothing to climb, if so."""
        budget_s = self._bounds.budget_s
        plan = Plan(arms=(), interleaved=False, budget_s=budget_s, full_run_s=FULL_RUN_SHARE * budget_s)
        experiment = self._conduct(plan)  # what the cell imports and prepares may take longer than its steps
        if self.error is not None:
            return "error"
        self._side = experiment.sides[0]
        if self._asked or self._side.facts is None:
            return "stopped"
        if self._left_s() < LEAST_S and not len(self._side.facts.run.steps):
            return "budget"
        self._done[Arm().label] = self.full_runs[0]
        self.on_attempt(self._record("stopped"))
        return None

    def _climb(self) -> Ending:
        while True:
            assert self._side is not None and self._side.facts is not None
            facts = self._top if self._top is not None else self._side.facts
            diagnosis = self._diagnosis = self._diagnose(facts)
            if self._asked:
                return "stopped"
            able = self._candidates(facts, diagnosis)
            if self._over():
                return "error" if self.error is not None else "stopped"
            if not able:
                return "nothing left"
            if self._bounds.rungs is not None and len(self._attempts) >= self._bounds.rungs:
                return "rungs"
            if self._left_s() - self._kept_for_whole_s < LEAST_S:
                return "budget"
            self._try(able[0])
            self.on_attempt(self._record("stopped"))
            if self.error is not None:
                return "error"
            if self._attempts[-1].outcome == "stopped":
                return "stopped"

    def _candidates(self, facts: Facts, diagnosis: Diagnosis) -> list[Candidate]:
        state = ClimbState(
            facts,
            self._done[Arm().label].observation,
            dict(self._kept),
            tuple(self._tried),
            facts.run.environment.usable_cores or usable_cores(),
            self._bounds.without,
            self._bounds.allow,
        )
        predict = partial(self._predict, facts)
        able, passed = candidates(diagnosis, state, predict)
        self._pass_over(passed)
        able = able or ways_back(diagnosis, state, predict) or self._screened(state, predict)
        return able if able or self._over() else together(state, predict)

    def _pass_over(self, passed: Sequence[Passed]) -> None:
        labels = {p.label for p in passed}
        self._passed = [p for p in self._passed if p.label not in labels] + list(passed)

    def _screened(self, state: ClimbState, predict: Callable[[Mapping[str, str]], Prediction]) -> list[Candidate]:
        """Where nothing is named any more: what a few short blocks of every other knob show, the fastest first."""
        tried = [t.settings for t in self._tried]
        waiting = [c for c in self._promising if c.settings not in tried]
        left_s = self._left_s() - self._kept_for_whole_s
        if waiting or dict(self._kept) in self._screened_on or left_s < LEAST_S:
            return waiting
        self._screened_on.append(dict(self._kept))
        able, passed = others(state, predict)
        self._pass_over(passed)
        slow = [candidate for candidate in able if candidate.slow_to_prepare]  # each is tried by itself, after them
        able = [candidate for candidate in able if candidate not in slow]
        if not able:
            self._promising = slow
            return slow
        arms = tuple(candidate.on_top_of(self._kept) for candidate in able)
        budget_s = max(LEAST_S, min(SCREENING_SHARE * left_s, SCREENING_S))
        base = Arm(dict(self._kept))
        screened = self._conduct(Plan(arms=arms, base=base, budget_s=budget_s, screening=True))
        if self._over() or len(screened.comparisons) != len(able):
            return []
        looked, passed = promising(screened, able)
        self._pass_over(passed)
        self._promising = [*looked, *slow]
        return self._promising

    def _try(self, candidate: Candidate) -> None:
        """One attempt: all kept settings against them with the new ones on top."""
        began = self._clock()
        new, arm = candidate.settings, candidate.on_top_of(self._kept)
        shown = Arm(new).shown
        number = len(self._attempts) + 1
        attempt = Attempt(number, shown, candidate.finding, candidate.prediction, "stopped", "stopped")
        try:
            attempt = self._compared(attempt, arm, new)
        except UsageError as e:  # certain before anything ran
            attempt = replace(attempt, outcome="failed", words=str(e).rstrip("."))
        attempt = replace(attempt, back=candidate.back, seconds=self._clock() - began)
        self._attempts.append(attempt)
        ratio = attempt.comparison.ratio if attempt.comparison is not None else None
        self._tried.append(Tried(new, dict(self._kept), attempt.outcome, ratio))
        if attempt.kept and attempt.comparison is not None:
            self._kept, self._top = dict(arm.settings), attempt.comparison.b.facts

    def _compared(self, attempt: Attempt, arm: Arm, new: Mapping[str, Plain]) -> Attempt:
        """The attempt with its comparison and what became of it. Raises UsageError for what certainly cannot be set.

        One run in full comes first: what it spoils (an error, a broken loss, no effect) needs no blocks.
        """
        base = Arm(dict(self._kept))
        full_s = FULL_RUN_SHARE * max(LEAST_S, self._left_s())
        experiment = self._conduct(Plan(arms=(arm,), base=base, interleaved=False, budget_s=full_s))
        result = experiment.comparisons[0] if experiment.comparisons else None
        if result is None or self._over():
            return replace(attempt, comparison=result)
        # the full run that was just made of an arm, so that it is not made again
        last = self.full_runs[-1] if self.full_runs else None
        if last is not None and dict(last.run.settings.knobs) == arm.shown and last.error is None:
            self._done[arm.label] = last
        verdict = spoiled(result, tuple(new))
        loss = result.loss
        if verdict is None:
            result = self._in_turn(arm, base)
            attempt = replace(attempt, comparison=result)
            if result is None or self._over():
                return attempt
            loss = self._judged_loss(result, new)
            if self._over():  # while the seeds ran
                return attempt
            verdict = judged(result, loss, tuple(new), self._bounds.allow, self._memory_full)
        prediction = result.b.prediction
        if prediction is not None and not prediction.refused:
            attempt = replace(attempt, prediction=prediction)
        return replace(attempt, comparison=result, outcome=verdict.outcome, words=verdict.words, loss=loss)

    def _in_turn(self, arm: Arm, base: Arm) -> Comparison | None:
        """In blocks; where they lie too far apart to tell a gain that there may be, anew in more of them.

        Only the second look counts then: one that went on until it finds something would find it by chance.
        """
        result: Comparison | None = None
        for blocks_s in (BLOCKS_S, LONGER * BLOCKS_S):
            left_s = self._left_s() - self._kept_for_whole_s
            if result is not None and left_s < blocks_s:
                return result
            experiment = self._conduct(Plan(arms=(arm,), base=base, budget_s=max(1.0, min(blocks_s, left_s))))
            if not experiment.comparisons:
                return result
            result = experiment.comparisons[0]
            hopeless = result.pairs >= TOO_FEW and (result.ratio or 1.0) > 1 - LEAST_EFFECT
            if hopeless or not unsure(result) or self._over():
                return result
        return result

    def _over(self) -> bool:
        return self._asked or self.error is not None

    def _as_a_whole(self) -> Comparison | None:
        """The baseline against all that was kept, in blocks of its own: those that chose it flatter it."""
        if not any(attempt.kept for attempt in self._attempts) or self._asked or self._left_s() <= 0:
            return None
        blocks_s = min(BLOCKS_S, self._left_s())
        experiment = self._conduct(Plan(arms=(Arm(dict(self._kept)),), budget_s=blocks_s))
        if not experiment.comparisons or experiment.stopped:
            return None
        whole = experiment.comparisons[0]
        if whole.evidence == "sequential":  # no time was left for a pair of blocks
            return None
        return replace(whole, loss=self._judged_loss(whole, self._kept))

    # -- its pieces ----------------------------------------------------------------------------------------------

    def _conduct(self, plan: Plan) -> Experiment:
        """Run a plan with the bounds of the climb. What was run in full before is not run again."""
        bounds = self._bounds
        steps = bounds.steps if plan.interleaved else None
        plan = replace(
            plan, block_steps=steps, pairs=bounds.pairs, name=bounds.name, device=bounds.device, save=bounds.save
        )
        arms = (Arm(), plan.base, *plan.arms)
        done = {arm.label: (arm, self._done[arm.label]) for arm in arms if arm.label in self._done}
        engine = self._engine(self._code, plan, lambda p: self.tell(self._timed(p)), tuple(done.values()))
        engine.tick = lambda p: self.tick(self._timed(p))
        self._current = engine
        if self._asked:
            engine.stop()
        try:
            experiment = engine.run()
        finally:
            self._current = None
        self._same_start = engine.same_start
        self.full_runs += engine.full_runs
        self.error = self.error or engine.error
        self._asked = self._asked or experiment.stopped
        return experiment

    def _judged_loss(self, comparison: Comparison, new: Mapping[str, Plain]) -> LossComparison | None:
        """The same as without the new settings, or within the band of the seeds around the baseline."""
        loss = comparison.loss
        if loss is None or loss.verdict in ("same", "not measurable") or any(map(changes_steps, new)):
            return loss
        if not self._same_start:
            words = "The cell's state could not be restored, so losses cannot be compared"
            return replace(loss, verdict="not measurable", words=words)
        seeds = self._seed_losses() if comparison.verdict == "faster" else ()
        if not seeds or self._side is None:
            return loss
        return compare_losses(replace(self._side, seed_losses=seeds), comparison.b)

    def _seed_losses(self) -> tuple[tuple[float, ...], ...]:
        """Of the baseline under other seeds, run once, when first needed."""
        if self._seeds is None:
            wanted = self._bounds.seeds
            plan = Plan(arms=(), seeds=wanted, interleaved=False, budget_s=max(LEAST_S, self._left_s()))
            self._seeds = self._conduct(plan).sides[0].seed_losses if wanted else ()
        return self._seeds

    def _timed(self, progress: Progress) -> Progress:
        """As part of the climb."""
        elapsed_s = self._clock() - self._began
        return replace(progress, elapsed_s=elapsed_s, about_s=None, most_s=self._bounds.budget_s, note="")

    def _left_s(self) -> float:
        return self._bounds.budget_s - (self._clock() - self._began)

    @property
    def _kept_for_whole_s(self) -> float:
        return min(BLOCKS_S, WHOLE_SHARE * self._bounds.budget_s)

    def _record(self, ended: Ending, whole: Comparison | None = None) -> Climb:
        seconds, attempts = self._clock() - self._began, tuple(self._attempts)
        return Climb(self._side, attempts, ended, seconds, whole, self._diagnosis, tuple(self._passed), self._bounds)
