"""Runs an experiment: the baseline, each arm once with its trace, then short blocks of all arms in random order."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Sequence
from contextlib import suppress

from msgspec.structs import replace

from gpulab.analysis.facts import facts
from gpulab.capture import threads
from gpulab.capture.windows import TRACED
from gpulab.devices import gpus
from gpulab.devices.machine import detect_device
from gpulab.errors import DeviceLost
from gpulab.formatting import duration
from gpulab.knobs.accumulation import ACCUMULATE
from gpulab.knobs.observation import Observation
from gpulab.options import QUICK_MEASURED, QUICK_NOTE, is_quick
from gpulab.run import Run, Settings
from gpulab.store.folders import Store
from gpulab.store.prediction_log import errors_here
from gpulab.tuning import schedule
from gpulab.tuning.agreement import Agreement, error_of_all
from gpulab.tuning.arms import (
    ArmPredictions,
    ArmState,
    carry_verdicts,
    failure_of,
    faster_half,
    log_predictions,
    no_effect,
)
from gpulab.tuning.cell_code import on_interrupt
from gpulab.tuning.code import Code
from gpulab.tuning.compare.blocks import compare_blocks
from gpulab.tuning.execute import FULL_RUN_LIMIT_S, Execution, FullRun, Stopper, release, run_block, run_full, seeded
from gpulab.tuning.record import BASELINE, Block, Comparison, Experiment, Side
from gpulab.tuning.resolve import Setting, check_arms, remember, resolve
from gpulab.tuning.schedule import Arm, Budget, Clock, Listener, Plan, Progress, repeated
from gpulab.tuning.snapshots import Start

FEWEST_UNPROFILED_STEPS = 8  # if time is short
UNPROFILED_STEPS = 25  # of a traced run: warm-up steps, measured steps, and a few after the profiled steps
LEAST_BLOCKS_S = 3.0  # no early end before this: a short wait for a narrower interval


class Runner:
    """Runs a plan. `run` returns the experiment; `stop`, from any thread, ends it at the next step boundary.

    The user's state is restored before each run and at the end. Names that the cell creates keep the values from its
    run as written. An exception of the code as written is kept in `error`.

    `done`: full runs of arms from the same state, which are not repeated. If the plan has a base, `done` includes the
    run as written, which shows what the cell uses. `step_s`: the step of an earlier run of the same code, to estimate
    the time in advance.

    `tell` is called when something begins, on the thread that calls `run`; `tick` in between, on another thread.
    """

    def __init__(
        self,
        code: Code,
        plan: Plan,
        tell: Listener = lambda progress: None,
        done: Sequence[tuple[Arm, FullRun]] = (),
        *,
        step_s: float | None = None,
        clock: Clock = time.monotonic,
        ranks: Agreement | None = None,
    ) -> None:
        self._code, self._done = code, {arm.label: full_run for arm, full_run in done}
        self._plan = plan = plan.bounded
        self._ranks = ranks if ranks is not None else Agreement()
        self.tell = tell
        self.tick: Listener = lambda progress: None
        self._budget = Budget(plan, clock)
        self._stopper = Stopper(late=lambda: self._budget.over and not self._ranks.is_of_several)
        steps_s = (schedule.step_s(full_run.run) for _, full_run in done if len(full_run.run.steps))
        self._step_s = step_s if step_s is not None else next(steps_s, None)
        self._now = Progress("saving the training state", 0, 1, None)
        self._steps: int | None = None  # planned steps of the current run
        self._seeds_done = 0
        self._store = Store() if plan.save else None
        # a generator of its own: the user's random state is untouched
        self._random = random.Random(self._ranks.of_first(random.SystemRandom().getrandbits(32)))
        self._notes: list[str] = [QUICK_NOTE] if is_quick() else []
        self._start: Start  # from `run` on
        self._arms: list[ArmState] = []
        self._blocks = 0  # blocks run so far
        self._time_spent: tuple[str, ...] = ()
        self._stopped = False  # a stop of several ranks: takes effect between two runs
        self.error: BaseException | None = None  # what ended it early: an interrupt, an error of the baseline
        self.full_runs: list[FullRun] = []

    @property
    def same_start(self) -> bool:
        """Whether the whole state was restored before each run, so that losses can be compared."""
        return self._start.whole

    @property
    def blocks(self) -> tuple[Block, ...]:
        """The blocks so far; `Block.arm` is 0 for the baseline, then follows the order of the plan."""
        return tuple(sorted((b for arm in self._arms for b in arm.blocks), key=lambda block: block.order))

    def stop(self) -> None:
        """End at the next step boundary, or with several ranks before the next run; keeps the results so far."""
        if self._ranks.is_of_several:
            self._stopped = True
        else:
            self._stopper.stop()

    def run(self) -> Experiment:
        """Run the plan. Raises UsageError before anything runs if it cannot work or another thread measures."""
        with threads.measuring(), on_interrupt(self.stop) as interrupt, repeated(self._poll):
            self._check()
            detect_device(self._plan.device)
            start = self._start = Start(self._code)
            start.notes = self._notes
            try:
                self._expect()
                self._run_in_full()
                if self._arms[0].full_run is not None and self.error is None:
                    self._run_blocks()
            except KeyboardInterrupt as e:  # between two runs of the user's code
                self.error = e
            finally:
                self._now = replace(self._now, what="comparing")
                start.end()
                self._take_loss()
            experiment = self._experiment(self._budget.elapsed_s)
        self.error = self.error or interrupt.error
        return experiment

    def _check(self) -> None:
        check_arms(self._plan.arms, self._code)

    # -- state ---------------------------------------------------------------------------------------------------

    def _restore(self) -> bool:
        """Restore the state. False if nothing can run any more."""
        restored = self._start.restore()
        self._take_loss()
        return restored

    def _take_loss(self) -> None:
        """End the experiment if a GPU was lost, with the error of the user's code if there is one."""
        lost = self._start.lost
        if lost is None or isinstance(self.error, DeviceLost):
            return
        if self.error is None:
            self.error = lost
        elif lost.NEXT_STEP not in getattr(self.error, "__notes__", ()):
            self.error.add_note(lost.NEXT_STEP)

    def _all_restore(self) -> bool:
        """Restore on all ranks. False if any rank cannot."""
        return all(self._ranks.of_all(self._restore()))

    def _release(self, error: Exception) -> None:
        """Free what a failed run holds. If the GPU is unusable now, the experiment ends with `error`."""
        lost = gpus.lost()
        if lost is None:
            release(error)
        else:
            self.error = error
            self._start.lose(lost)
            self._take_loss()

    # -- runs with their trace -----------------------------------------------------------------------------------

    def _run_in_full(self) -> None:
        """The full run of the base, the predictions, then full runs of the arms and of other seeds.

        Arms with a full run from before are not run again; a plan that is `early` or `screening` runs no arm in full.
        """
        first = self._first()
        self._arms = [first]
        self._say(first.arm.label, 0)
        if first.full_run is None:
            self._run_full(first, quiet=False)
        self._start.keep_new_names()
        baseline = self._baseline_run
        if first.full_run is None or baseline is None or self.error is not None:
            return
        for arm in self._plan.arms:
            ready = self._make_ready(arm, baseline.observation)
            if self._plan.interleaved:
                ready.failure = ready.failure or ready.execution.arm.unchanged(self._plan.base.settings)
            ready.failure = self._ranks.of_first(ready.failure)
            self._arms.append(ready)
        if self._plan.screening:
            return
        self._predict(first.full_run.run)
        self._expect()
        if not self._plan.early:
            self._run_arms_in_full()
        self._with_other_seeds(first)

    def _run_arms_in_full(self) -> None:
        for number, ready in enumerate(self._arms[1:], start=1):
            if self._ended or ready.failure or ready.full_run is not None:
                continue
            self._say(ready.arm.label, number)
            if self._all_restore():
                self._run_full(ready, quiet=True)

    def _predict(self, run: Run) -> None:
        """Predict each arm against the run of the base, before any of them runs."""
        able = [arm for arm in self._arms[1:] if not arm.failure]
        if not able or self._ended:
            return
        predictions = ArmPredictions(facts(run), errors_here(run))
        if self._plan.interleaved and not (self._plan.early or self._ranks.is_of_several or is_quick()):
            predictions.measure_sizes([arm.execution.arm for arm in able], self._run_size)
        for arm in able:
            arm.prediction = predictions.of(arm.execution.arm, arm.arm.texts, self._plan.base.texts)

    def _run_size(self, batch: Setting, size: int) -> Block | None:
        """A block of A with another batch size; None if that cannot run."""
        a, baseline = self._arms[0].full_run, self._baseline_run
        if self._ended or a is None or baseline is None:
            return None
        self._say(f"a short run with {batch.name}={size}, to predict others", 0)
        ready = self._make_ready(Arm({**self._plan.base.settings, batch.name: size}), baseline.observation)
        if ready.failure or not self._restore():
            return None
        return self._run_block(ready, schedule.block_size([a.run]), on_gpu=a.run.device.kind == "cuda")

    def _run_block(self, arm: ArmState, size: schedule.Size, *, on_gpu: bool) -> Block | None:
        """One block of that arm; None if it failed."""
        self._steps = size.total
        result = run_block(arm.execution, size, self._stopper, on_gpu=on_gpu)
        error = error_of_all(self._ranks, None if isinstance(result, Block) else result)
        if isinstance(result, Block) and error is None:
            return replace(result, time_ns=max(self._ranks.of_all(result.time_ns)))
        self._fail(arm, error, arm.full_run)
        return None

    def _fail(self, arm: ArmState, error: BaseException | None, full_run: FullRun | None) -> None:
        """An interrupt or an error of the base ends the experiment; an error of another arm ends that arm."""
        if not isinstance(error, Exception) or arm is self._arms[0]:
            self.error = error
        else:
            arm.failure = failure_of(error, full_run)
            self._release(error)

    def _first(self) -> ArmState:
        """The base, with which all other arms are compared."""
        base, baseline = self._plan.base, self._done.get(BASELINE)
        if not base.settings:
            return ArmState(base, Execution(self._code, within=self._ranks.one_run), full_run=baseline)
        assert baseline is not None, "a base needs the run of the baseline"
        return self._make_ready(base, baseline.observation)

    @property
    def _baseline_run(self) -> FullRun | None:
        """The full run of the baseline."""
        return self._done.get(BASELINE) or (self._arms[0].full_run if not self._plan.base.settings else None)

    def _with_other_seeds(self, first: ArmState) -> None:
        """Runs of A with other seeds, which show how much losses differ by random numbers alone."""
        steps = UNPROFILED_STEPS + TRACED
        settings = Settings(steps=steps, trace=False, live=False, save=False, device=self._plan.device)
        for seed in range(1, self._plan.seeds + 1):
            if self._ended:
                return
            self._steps = steps
            self._say(f"{BASELINE}, seed {seed}", 0)
            if not self._all_restore():
                return
            limit_s = self._full_run_s()
            with seeded(seed):
                full_run = run_full(first.execution, settings, self._stopper, None, quiet=True, limit_s=limit_s)
            self._seeds_done = seed
            error = error_of_all(self._ranks, full_run.error)
            if isinstance(error, Exception):
                self._release(error)
            first.seed_losses.append(full_run.losses)

    def _make_ready(self, arm: Arm, observation: Observation) -> ArmState:
        resolved = resolve(arm, self._code, observation)
        execution = Execution(self._code, resolved, self._ranks.one_run)
        return ArmState(arm, execution, self._done.get(arm.label), resolved.failure)

    def _unprofiled_steps(self, profiled: int) -> int:
        """The unprofiled steps of a full run; without blocks in the plan, the number that the user named."""
        if not self._plan.interleaved and self._plan.block_steps is not None:
            return schedule.WARMUP + self._plan.block_steps
        if is_quick():
            return QUICK_MEASURED
        if self._step_s is None:
            return UNPROFILED_STEPS
        room_s = min(self._full_run_s(), FULL_RUN_LIMIT_S) - schedule.STARTING_S
        return max(FEWEST_UNPROFILED_STEPS, min(UNPROFILED_STEPS, int(room_s / self._step_s) - profiled))

    def _full_run_s(self) -> float:
        """The time limit of the next full run; none for several ranks, which end by the number of steps."""
        if self._ranks.is_of_several:
            return math.inf
        rest = self._full_run_count - len(self.full_runs) - self._seeds_done + self._plan.seeds
        most_s = self._plan.full_run_s
        return min(self._budget.full_run_s(rest), FULL_RUN_LIMIT_S, math.inf if most_s is None else most_s)

    @property
    def _full_run_count(self) -> int:
        """The number of full runs, without runs with other seeds."""
        return sum(self._done.get(arm.label) is None for arm in (self._plan.base, *self._plan.arms))

    def _run_full(self, arm: ArmState, *, quiet: bool) -> None:
        profiled = self._ranks.of_first(arm.profiled_steps(self._baseline_run))
        settings = Settings(
            name=self._plan.run_name(arm.arm),
            steps=self._ranks.of_first(self._unprofiled_steps(profiled)) + profiled,
            trace_steps=profiled,
            trace=self._plan.trace,
            live=False,
            save=self._plan.save,
            device=self._plan.device,
            knobs=arm.arm.texts,
        )
        self._steps = settings.steps
        full_run = run_full(
            arm.execution,
            settings,
            self._stopper,
            self._store,
            quiet=quiet,
            limit_s=self._full_run_s(),
            ends_alone=not self._ranks.is_of_several,
        )
        error = error_of_all(self._ranks, full_run.error)
        self.full_runs.append(full_run)
        self._step_s = schedule.step_s(full_run.run) if len(full_run.run.steps) else self._step_s
        is_baseline = not arm.arm.settings
        if is_baseline:
            remember(self._code, full_run.observation)
        if error is None or (is_baseline and isinstance(error, Exception)):
            arm.full_run = full_run
        if error is not None:
            self._fail(arm, error, full_run)
        elif not is_baseline and not arm.failure:
            arm.failure = self._ranks.of_first(no_effect(full_run.run))

    # -- blocks --------------------------------------------------------------------------------------------------

    def _run_blocks(self) -> None:
        """Run turns until the pairs suffice or decide, time is over, one arm remains, or the user stops."""
        arms, plan, budget, ranks = self._arms, self._plan, self._budget, self._ranks
        able = [
            i for i, a in enumerate(arms) if (a.full_run is not None or plan.screening or plan.early) and not a.failure
        ]
        if len(able) < 2 or not plan.interleaved or self._ended:
            return
        size, runs = self._block_size(able)
        on_gpu = runs[0].device.kind == "cuda"
        began_s, turn_s = budget.elapsed_s, schedule.turn_s(runs, size)
        least, early = plan.pairs or schedule.FEWEST_TURNS, ""
        turn, turns = 0, self._make_room(began_s, turn_s, least)
        while turn < turns and not self._ended and ranks.of_first(turn < least or turn_s <= budget.rest_s):
            order = [able[i] for i in schedule.turn_order(len(able), self._random, early=plan.early and not turn)]
            self._turn(order, size, turn, turns, began_s, on_gpu)
            turn += 1
            able = [i for i in able if not arms[i].failure]
            if plan.early and turn == 1 and len(able) > 1:
                before_s = budget.elapsed_s
                self._run_arms_in_full()
                began_s += budget.elapsed_s - before_s
                able = [i for i in able if not arms[i].failure]
            if plan.screening and len(able) > 1:
                able = ranks.of_first(faster_half(arms, able, turn))
            if len(able) < 2:
                break
            turn_s = (budget.elapsed_s - began_s) / turn
            turns = self._make_room(began_s, turn_s, least)
            long_enough = plan.pairs is None and not plan.screening and turn * turn_s >= LEAST_BLOCKS_S
            if ranks.of_first(long_enough and carry_verdicts([arms[i] for i in able])):
                early = " The blocks ended as soon as they decided it."
                break
        blocks, full = (duration(s * 1e6) for s in (budget.elapsed_s - began_s, began_s))
        self._time_spent = (f"Time: the blocks took {blocks}, the full runs before them {full}.{early}",)

    def _block_size(self, able: list[int]) -> tuple[schedule.Size, list[Run]]:
        """The block size for these arms, and the full runs that determine it."""
        arms, baseline = [self._arms[i] for i in able], self._baseline_run
        runs = [arm.full_run.run for arm in arms if arm.full_run is not None]
        rounds = [int(k) for arm in arms for knob, k in arm.execution.arm.knobs.items() if knob is ACCUMULATE]
        waiting = [arm for arm in arms if self._plan.early and arm.full_run is None]
        loaders = [loader for arm in waiting if baseline is not None and (loader := arm.loader(baseline)) is not None]
        size = schedule.block_size(runs, self._plan.block_steps, rounds, loaders)
        return schedule.Size(*self._ranks.of_first([1 if is_quick() else size.warmup, size.steps])), runs

    def _make_room(self, began_s: float, turn_s: float, least: int) -> int:
        """The number of turns that fit; a budget that the user did not set first grows to `least` turns."""
        budget = self._budget
        budget.expect(began_s + least * turn_s)
        room_s = budget.rest_s + budget.elapsed_s - began_s
        turns = self._ranks.of_first(schedule.pairs_within(room_s, turn_s, self._plan.pairs))
        budget.expected_s = began_s + turns * turn_s
        return turns

    def _turn(self, order: list[int], size: schedule.Size, turn: int, turns: int, began_s: float, on_gpu: bool) -> None:
        """Run one turn: each of these arms, in this order."""
        budget, total = self._budget, turns * len(order)
        for i in order:
            arm, ran = self._arms[i], self._blocks
            if self._ended:
                break
            if arm.failure:
                continue
            spent_s = budget.elapsed_s - began_s
            rest_s = min(spent_s / ran * (total - ran), max(0.0, budget.rest_s)) if ran else None
            of_all = f" of {total}" if self._plan.pairs is not None else ""
            self._tell(Progress(f"block {ran + 1}{of_all}: {arm.arm.label}", ran, total, rest_s, in_blocks=True))
            if not self._all_restore():
                break
            block = self._run_block(arm, size, on_gpu=on_gpu)
            is_cut = block is None or block.step_count < size.steps
            if any(self._ranks.of_all(self._halted or (budget.over and is_cut))):
                break
            if block is not None and block.step_count:
                arm.blocks.append(replace(block, arm=i, turn=turn, order=ran))
                self._blocks += 1

    # -- results -------------------------------------------------------------------------------------------

    def _experiment(self, seconds: float) -> Experiment:
        sides = [arm.side_with_edit(self._code) for arm in self._arms]
        comparisons = [self._comparison(sides[0], arm, b) for arm, b in zip(self._arms[1:], sides[1:], strict=True)]
        sides[1:] = [comparison.b for comparison in comparisons]
        notes = (*self._notes, *self._time_spent, *filter(None, [self._budget.too_short]))
        plan = self._plan
        whole = Experiment(tuple(sides), tuple(comparisons), seconds, self._halted, plan.name, notes)
        if not plan.save or self._halted or plan.screening or self._ranks.is_of_several:
            return whole
        problem = log_predictions(whole)
        return replace(whole, notes=(*notes, problem)) if problem else whole

    def _comparison(self, a: Side, arm: ArmState, b: Side) -> Comparison:
        resolved, start = arm.execution.arm, self._start
        comparison = compare_blocks(
            a,
            b,
            restored=start.words,
            same_start=start.whole,
            changes_training=resolved.changes_training(b.checks, self._plan.base.settings),
            notes=tuple(self._notes),
        )
        how = "Stopped" if self._halted else ""
        if isinstance(self.error, Exception):
            how = f"Ended by {type(self.error).__name__}"
        if not how and self._budget.over and comparison.pairs < (self._plan.pairs or schedule.FEWEST_TURNS):
            how = f"The budget of {self._budget.words} was over"
        loads = any(knob.kind == "DataLoader option" for knob in resolved.knobs)
        first = filter(None, [start.used_up_words(loads=loads)])
        return replace(
            comparison,
            differences=(*first, *comparison.differences),
            ended_early=f"{how} {arm.reached(comparison)}" if how and not arm.failure else "",
        )

    @property
    def _halted(self) -> bool:
        """Whether the user or an error ended it."""
        return self._stopped or self._stopper.requested or self.error is not None

    @property
    def _ended(self) -> bool:
        """Whether nothing more begins. The ranks agree on it: a rank may wait here for the others."""
        said = self._ranks.of_all([self._halted, self._budget.over])
        return any(halted for halted, _ in said) or said[0][1]

    # -- progress ----------------------------------------------------------------------------------

    def _say(self, what: str, done: int) -> None:
        self._tell(Progress(what, done, 1 + len(self._plan.arms), None))

    def _tell(self, progress: Progress) -> None:
        self._now = progress
        self.tell(self._budget.timed(progress))

    def _poll(self) -> None:
        """Called every half second on another thread: enforces the time limits and reports progress."""
        self._stopper.poll()
        if self._budget.over and not self._ranks.is_of_several:
            self._stopper.cut()
        now = self._stopper.progress(self._now, self._steps)
        with suppress(Exception):  # a failing view must not end a run
            self.tick(self._budget.timed(now))

    def _expect(self) -> None:
        """Estimate the whole time, as soon as the length of a step is known."""
        if self._step_s is not None and self._plan.interleaved and self._plan.arms:
            least_s, self._budget.expected_s = schedule.expected(self._step_s, len(self._plan.arms), self._plan.pairs)
            self._budget.expect(least_s)
