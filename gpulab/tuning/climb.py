"""The climb: measure, diagnose, try the best cure in interleaved blocks, keep it if the verdict is "faster", repeat."""

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
from gpulab.tuning.cell_code import on_interrupt
from gpulab.tuning.climb_policy import (
    Candidate,
    ClimbState,
    Predict,
    Trial,
    candidates,
    early_judgement,
    judge,
    others,
    promising,
    together,
    unsure,
    ways_back,
)
from gpulab.tuning.climb_record import Attempt, Bounds, Climb, Ending, Skip
from gpulab.tuning.code import Code
from gpulab.tuning.compare.differences import compare_losses
from gpulab.tuning.execute import FullRun
from gpulab.tuning.record import Comparison, Experiment, LossComparison, Side
from gpulab.tuning.runner import Runner
from gpulab.tuning.schedule import Arm, Clock, Listener, Plan, Progress
from gpulab.verdict import LEAST_EFFECT, TOO_FEW

BLOCKS_S = 30.0  # for the blocks of one attempt
LONGER = 2  # factor for the second measurement, if the first blocks scatter too much
LEAST_S = 5.0  # with less of the budget left no further attempt begins
WHOLE_SHARE = 0.15  # of the budget, reserved for the final comparison; at most `BLOCKS_S`
SCREENING_SHARE, SCREENING_S = 0.3, 60.0  # of the remaining budget, and at most, to screen every other knob
FULL_RUN_SHARE = 0.3  # of the remaining budget, for one full run

MakeRunner = Callable[[Code, Plan, Listener, Sequence[tuple[Arm, FullRun]]], Runner]


class Climber:
    """Runs a climb. `run` returns the record; `stop`, from any thread, ends it at the next step boundary.

    The user's state is restored before each run and at the end, as by `Runner`. `on_attempt` is called with the record
    so far after each attempt. `tell` and `tick` are as in `Runner`. `error`: an interrupt, or an exception of the
    baseline, that ended the climb early.
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
        self._stop_requested = False
        self._current: Runner | None = None
        self._began_s = 0.0
        self._base = Arm()  # all settings that proved faster
        self._top: Facts | None = None  # of the cell with these settings
        self._trials: list[Trial] = []
        self._attempts: list[Attempt] = []
        self._skips: dict[str, Skip] = {}  # by label
        self._done: dict[str, tuple[Arm, FullRun]] = {}  # the full runs of the baseline and of each base, by label
        self._side: Side | None = None  # the baseline
        self._seeds: tuple[tuple[float, ...], ...] | None = None
        self._diagnosis: Diagnosis | None = None
        self._screenings: list[Arm] = []  # bases on which all other knobs were screened
        self._promising: list[Candidate] = []  # what the last screening showed

    def stop(self) -> None:
        """End at the next step boundary; the record holds what was measured until then."""
        self._stop_requested = True
        if self._current is not None:
            self._current.stop()

    def run(self) -> Climb:
        """Climb. Raises UsageError before anything runs if another thread measures or the plan cannot work."""
        self._began_s = self._clock()
        with threads.measuring(), on_interrupt(self.stop) as interrupt:
            whole: Comparison | None = None
            ended: Ending = "error"
            try:
                ended = self._measure() or self._climb()
                whole = self._as_a_whole()
            except KeyboardInterrupt as e:  # between two runs of the user's code
                self.error = e
            self.error = self.error or interrupt.error
        if self._over():
            ended = "error" if self.error is not None else "stopped"
        return self._record(ended, whole)

    # -- the course ----------------------------------------------------------------------------------------------

    def _measure(self) -> Ending | None:
        """Measure the baseline. Returns why the climb ends here, or None."""
        budget_s = self._bounds.budget_s
        plan = Plan(arms=(), interleaved=False, budget_s=budget_s, full_run_s=FULL_RUN_SHARE * budget_s)
        side = self._conduct(plan).sides[0]  # imports and preparation of the cell may take longer than its steps
        if self.error is None:
            self._side, self._top = side, side.facts
        if self._over() or side.facts is None:
            return "stopped"
        if self._rest_s() < LEAST_S and not len(side.facts.run.steps):
            return "budget"
        self._done[Arm().label] = (Arm(), self.full_runs[0])
        self.on_attempt(self._record("stopped"))
        return None

    def _climb(self) -> Ending:
        while not self._over():
            assert self._top is not None
            self._diagnosis = self._diagnose(self._top)
            able = self._candidates(self._top, self._diagnosis)
            if self._over():
                break
            if not able:
                return "nothing left"
            if self._bounds.rungs is not None and len(self._attempts) >= self._bounds.rungs:
                return "rungs"
            if self._blocks_rest_s() < LEAST_S:
                return "budget"
            self._try(able[0])
            self.on_attempt(self._record("stopped"))
            if self._attempts[-1].outcome == "stopped":
                break
        return "stopped"

    def _candidates(self, facts: Facts, diagnosis: Diagnosis) -> list[Candidate]:
        state = ClimbState(
            facts,
            self._done[Arm().label][1].observation,
            self._base.settings,
            tuple(self._trials),
            facts.run.environment.usable_cores or usable_cores(),
            self._bounds.without,
            self._bounds.allow,
        )
        predict = partial(self._predict, facts)
        able = self._noting_skips(candidates(diagnosis, state, predict))
        able = able or ways_back(diagnosis, state, predict) or self._screened(state, predict)
        return able if able or self._over() else together(state, predict)

    def _noting_skips(self, proposals: tuple[list[Candidate], list[Skip]]) -> list[Candidate]:
        able, skips = proposals
        for skip in skips:
            self._skips.pop(skip.label, None)
            self._skips[skip.label] = skip
        return able

    def _screened(self, state: ClimbState, predict: Predict) -> list[Candidate]:
        """If no finding proposes anything: screen every other knob with short blocks, the fastest first."""
        earlier = [trial.settings for trial in self._trials]
        waiting = [candidate for candidate in self._promising if candidate.settings not in earlier]
        rest_s = self._blocks_rest_s()
        if waiting or self._base in self._screenings or rest_s < LEAST_S or self._over():
            return waiting
        self._screenings.append(self._base)
        able = self._noting_skips(others(state, predict))
        slow = [candidate for candidate in able if candidate.slow_to_prepare]  # tried one by one, after the others
        able = [candidate for candidate in able if candidate not in slow]
        self._promising = slow
        if able:
            arms = tuple(candidate.on_top_of(state.base) for candidate in able)
            budget_s = max(LEAST_S, min(SCREENING_SHARE * rest_s, SCREENING_S))
            screening = self._conduct(Plan(arms=arms, base=self._base, budget_s=budget_s, screening=True))
            if self._over() or len(screening.comparisons) != len(able):
                return []
            self._promising = [*self._noting_skips(promising(screening, able)), *slow]
        return self._promising

    def _try(self, candidate: Candidate) -> None:
        """One attempt: the base against the base with the new settings on top."""
        began_s, new, arm = self._clock(), candidate.settings, candidate.on_top_of(self._base.settings)
        attempt = Attempt(
            len(self._attempts) + 1,
            Arm(new).texts,
            candidate.finding,
            candidate.prediction,
            "stopped",
            "stopped",
            back=candidate.back,
        )
        try:
            attempt = self._compared(attempt, arm, new)
        except UsageError as e:  # certain before anything ran
            attempt = replace(attempt, outcome="failed", words=str(e).rstrip("."))
        attempt = replace(attempt, seconds=self._clock() - began_s)
        self._attempts.append(attempt)
        comparison = attempt.comparison
        ratio = comparison.ratio if comparison is not None else None
        self._trials.append(Trial(new, self._base.settings, attempt.outcome, ratio))
        if attempt.kept and comparison is not None:
            self._base, self._top = arm, comparison.b.facts

    def _compared(self, attempt: Attempt, arm: Arm, new: Mapping[str, Plain]) -> Attempt:
        """The attempt with its comparison and outcome. Raises UsageError for a setting that certainly cannot be set.

        A full run comes first: if it shows an error, a broken loss or no effect, no blocks are needed.
        """
        full_s = FULL_RUN_SHARE * max(LEAST_S, self._rest_s())
        result = self._only(Plan(arms=(arm,), base=self._base, interleaved=False, budget_s=full_s))
        if result is None or self._over():
            return replace(attempt, comparison=result)
        # keep the full run just made of this arm, so that it is not repeated
        last = self.full_runs[-1] if self.full_runs else None
        if last is not None and dict(last.run.settings.knobs) == arm.texts and last.error is None:
            self._done[arm.label] = (arm, last)
        judgement, loss = early_judgement(result, tuple(new)), result.loss
        if judgement is None:
            result = self._in_turn(arm)
            attempt = replace(attempt, comparison=result)
            if result is None or self._over():
                return attempt
            loss = self._loss_verdict(result, new)
            if self._over():  # while the seeds ran
                return attempt
            judgement = judge(result, loss, tuple(new), self._bounds.allow, self._memory_full)
        prediction = result.b.prediction
        if prediction is not None and not prediction.refused:
            attempt = replace(attempt, prediction=prediction)
        return replace(attempt, comparison=result, outcome=judgement.outcome, words=judgement.words, loss=loss)

    def _in_turn(self, arm: Arm) -> Comparison | None:
        """The comparison in blocks; repeated with more blocks if they scatter too much to exclude a gain.

        Then only the second measurement counts: blocks that run until they show a gain would show one by chance.
        """
        result: Comparison | None = None
        for blocks_s in (BLOCKS_S, LONGER * BLOCKS_S):
            rest_s = self._blocks_rest_s()
            if result is not None and rest_s < blocks_s:
                return result
            latest = self._only(Plan(arms=(arm,), base=self._base, budget_s=max(1.0, min(blocks_s, rest_s))))
            if latest is None:
                return result
            result = latest
            hopeless = result.pairs >= TOO_FEW and (result.ratio or 1.0) > 1 - LEAST_EFFECT
            if hopeless or not unsure(result) or self._over():
                return result
        return result

    def _over(self) -> bool:
        return self._stop_requested or self.error is not None

    def _as_a_whole(self) -> Comparison | None:
        """The baseline against the base, in new blocks: the blocks by which the base was chosen flatter it."""
        if not any(attempt.kept for attempt in self._attempts) or self._over() or self._rest_s() <= 0:
            return None
        whole = self._only(Plan(arms=(self._base,), budget_s=min(BLOCKS_S, self._rest_s())))
        if whole is None or self._stop_requested or whole.evidence == "sequential":  # no time was left for a pair
            return None
        return replace(whole, loss=self._loss_verdict(whole, self._base.settings))

    # -- pieces ----------------------------------------------------------------------------------------------

    def _only(self, plan: Plan) -> Comparison | None:
        """The comparison of a plan with one arm; None if it was stopped before."""
        comparisons = self._conduct(plan).comparisons
        return comparisons[0] if comparisons else None

    def _conduct(self, plan: Plan) -> Experiment:
        """Run a plan with the bounds of the climb. Arms that had a full run do not get another."""
        bounds = self._bounds
        steps = bounds.steps if plan.interleaved else None
        plan = replace(
            plan, block_steps=steps, pairs=bounds.pairs, name=bounds.name, device=bounds.device, save=bounds.save
        )
        labels = dict.fromkeys(arm.label for arm in (Arm(), plan.base, *plan.arms))
        done = [self._done[label] for label in labels if label in self._done]
        engine = self._engine(self._code, plan, lambda p: self.tell(self._timed(p)), done)
        engine.tick = lambda p: self.tick(self._timed(p))
        self._current = engine
        if self._stop_requested:
            engine.stop()
        try:
            experiment = engine.run()
        finally:
            self._current = None
        self._same_start = engine.same_start
        self.full_runs += engine.full_runs
        self.error = self.error or engine.error
        self._stop_requested = self._stop_requested or experiment.stopped
        return experiment

    def _loss_verdict(self, comparison: Comparison, new: Mapping[str, Plain]) -> LossComparison | None:
        """Whether the loss is the same as without the new settings, or within the seeds' band around the baseline."""
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
        """Losses of the baseline under other seeds; run once, when first needed."""
        if self._seeds is None:
            plan = Plan(arms=(), seeds=self._bounds.seeds, interleaved=False, budget_s=max(LEAST_S, self._rest_s()))
            self._seeds = self._conduct(plan).sides[0].seed_losses if plan.seeds else ()
        return self._seeds

    def _timed(self, progress: Progress) -> Progress:
        """The progress of a plan as progress of the climb."""
        elapsed_s = self._clock() - self._began_s
        return replace(progress, elapsed_s=elapsed_s, about_s=None, most_s=self._bounds.budget_s, note="")

    def _rest_s(self) -> float:
        """The rest of the budget."""
        return self._bounds.budget_s - (self._clock() - self._began_s)

    def _blocks_rest_s(self) -> float:
        """The rest of the budget without the share reserved for the final comparison."""
        return self._rest_s() - min(BLOCKS_S, WHOLE_SHARE * self._bounds.budget_s)

    def _record(self, ended: Ending, whole: Comparison | None = None) -> Climb:
        seconds, attempts, skips = self._clock() - self._began_s, tuple(self._attempts), tuple(self._skips.values())
        return Climb(self._side, attempts, ended, seconds, whole, self._diagnosis, skips, self._bounds)
