"""One run of the user's code with settings applied: a full run with its trace, a short block, or part of a capture."""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from time import perf_counter_ns

from msgspec import Struct
from msgspec.structs import replace

from gpulab.analysis.steps import select, setup_ns
from gpulab.capture.gpu import count_anew
from gpulab.capture.pilot import ShortRun
from gpulab.capture.recorder import Capture
from gpulab.capture.threads import outcome_of, stop_behind
from gpulab.capture.training_facts import Losses
from gpulab.devices.core_clock import CoreWait
from gpulab.errors import GpulabError, StoreError, UsageError
from gpulab.knobs import preparation
from gpulab.knobs.catalogue import parse_settings
from gpulab.knobs.knob import KnobEffects
from gpulab.knobs.observation import Observation
from gpulab.knobs.observer import SAMPLES, Observer, observe
from gpulab.knobs.variable_reads import observing_reads
from gpulab.knobs.variables import setting_names
from gpulab.memory.survey import clear_frames, empty_caches
from gpulab.patching.randomness import preserving_randomness
from gpulab.run import Change, Run, Settings
from gpulab.store.folders import Store, WriteTrace
from gpulab.tuning.cell_code import silence, users_code
from gpulab.tuning.code import Code
from gpulab.tuning.record import Block
from gpulab.tuning.resolve import NO_SETTINGS, Objects, ResolvedArm, observation_of, remember, resolve
from gpulab.tuning.schedule import Arm, Progress, Size, block_rows

FULL_RUN_LIMIT_S = 20.0  # a run with its trace is ended after this long, at a step boundary
PREPARATION_LIMIT_S = 120.0  # for the first step to complete


class Execution:
    """An arm that can run again and again: the code with the arm's literals replaced, and the knobs to set around it.

    `within` is entered around each run of the code. After a run `effects` holds what its settings did, and `observed`
    what the code used, if PyTorch was imported.
    """

    def __init__(
        self,
        code: Code,
        arm: ResolvedArm = NO_SETTINGS,
        within: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        literals = code.variables.literals if arm.variables else {}  # slow: inspects all objects that the code uses
        inside = {name: value for name, value in arm.variables.items() if name in literals}
        self.arm, self.within = arm, within
        self.code = code.replacing(inside)
        self.effects: dict[str, KnobEffects] = {}
        self.observed: Observer | None = None
        self.began_ns = 0
        self._outside = {name: value for name, value in arm.variables.items() if name not in literals}
        self._put_back = {name: (value, literals[name]) for name, value in inside.items()}

    @contextmanager
    def applied(self, *, in_full: bool = True, module_calls: int = SAMPLES) -> Iterator[Code]:
        """Apply all settings inside; yields the code to run. `in_full`: also observe the code, which slows its steps.

        `module_calls`: how often a few module calls are observed, at most.
        """
        namespace, variables = self.code.namespace, self.arm.variables
        self.effects.clear()
        with ExitStack() as stack:
            stack.callback(self._put_literals_back)
            stack.enter_context(setting_names(namespace, self._outside))
            for knob, value in self.arm.knobs.items():
                self.effects[knob.name] = stack.enter_context(knob.applied(value))
            if not in_full:
                yield self.code
                return
            if "torch" in sys.modules:  # outside the knobs: sees loaders before knobs change them
                self.observed = stack.enter_context(observe(module_calls))
            lines, reads = stack.enter_context(observing_reads(namespace, variables))
            self.effects.update(reads)
            yield self.code.through(lines) if reads else self.code

    def observation(self, run: Run) -> Observation:
        """The loaders, modules and optimizers that the code used in `run`."""
        return (self.observed or Observer()).observation(run)

    def changes(self, run: Run) -> tuple[Change, ...]:
        """Whether the settings took effect in `run`."""
        return self.arm.changes(self.effects, run, self.observation(run)) if self.arm.settings else ()

    def remember(self, run: Run) -> None:
        """Remember what the code used in `run`, if it ran without settings."""
        if self.observed is not None and not self.arm.settings:
            remember(self.code, self.observation(run))

    def _put_literals_back(self) -> None:
        """Names that still have the value set for a literal get the literal's own value back."""
        names = self.code.namespace
        for name, (value, literal) in self._put_back.items():
            if name in names and type(names[name]) is type(value) and names[name] == value:
                names[name] = literal


def execution_with(settings: Sequence[str] | None, code: Code) -> Execution:
    """The execution of code with the settings of `--set`. Raises UsageError if one certainly cannot be set."""
    variables = code.variables
    arm = Arm(parse_settings(settings or (), variables.has, variables.names))
    resolved = resolve(arm, code, Objects(code, observation_of(code))) if arm.settings else NO_SETTINGS
    if resolved.refusal:
        raise UsageError(f"{resolved.refusal}.")
    return Execution(code, resolved)


class FullRun(Struct, frozen=True):
    """The result of one full run. `error`: what the user's code raised; None if gpulab itself ended the run."""

    run: Run
    observation: Observation
    losses: tuple[float, ...]
    error: BaseException | None = None
    unsaved: str = ""
    path: Path | None = None
    setup_ns: int | None = None  # time before the steps (analysis/steps.py)


class Stopper(Struct):
    """Ends the current run at its next step, and every run after it."""

    requested: bool = False
    late: Callable[[], bool] = lambda: False  # whether time is over: then runs are ended as well
    current: Capture | ShortRun | None = None
    after: str = ""  # what happens to a run that has just ended, in words
    limit_s: float = math.inf  # of a full run, from the end of its first step
    effects: Mapping[str, KnobEffects] = {}  # of the current run's settings
    _first_step_s: float | None = None  # when the first step was complete; it may have compiled the model

    @property
    def words(self) -> str:
        """What the run is doing: "step 12", "starting 2 workers"; empty between two runs. From any thread."""
        current = self.current
        return self.after if current is None else current.beside_steps or f"step {current.step_count}"

    def progress(self, now: Progress, total: int | None) -> Progress:
        """The progress with the current step, of `total` planned steps. From any thread."""
        words, current = self.words, self.current
        share, of_all = 0.0, ""
        if current is not None and total:
            share = min(1.0, current.step_count / total)
            of_all = f" of {total}" if words.startswith("step ") else ""
        what = f"{now.what}: {words}{of_all}" if words else now.what
        return replace(now, what=what, done=now.done + share)

    @property
    def ends(self) -> bool:
        return self.requested or self.late()

    def stop(self) -> None:
        self.requested = True
        self.cut()

    def cut(self) -> None:
        """End the current run at its next step, and any preparation by a knob."""
        current = self.current
        if current is not None:
            preparation.end()
        if isinstance(current, Capture):
            current.request_stop()
        elif current is not None:
            current.stop()

    def poll(self) -> None:
        """End a full run that is over its limit; called repeatedly from another thread."""
        current = self.current
        if isinstance(current, Capture) and math.isfinite(self.limit_s) and self._is_over_limit(current):
            current.request_stop()

    def _is_over_limit(self, capture: Capture) -> bool:
        """Time that knobs spend on preparation does not count."""
        spent_s = capture.now() / 1e9
        if self._first_step_s is None and capture.step_count:
            self._first_step_s = spent_s
        if self._first_step_s is not None:
            return spent_s - self._first_step_s > self.limit_s
        return spent_s - sum(one.preparation_s for one in list(self.effects.values())) > PREPARATION_LIMIT_S

    def start(self, current: Capture | ShortRun) -> None:
        """Make this the current run."""
        self._first_step_s, self.current = None, current
        if self.ends:
            self.cut()


def run_full(
    execution: Execution,
    settings: Settings,
    stopper: Stopper,
    store: Store | None,
    *,
    quiet: bool,
    limit_s: float = FULL_RUN_LIMIT_S,
    ends_alone: bool = True,
) -> FullRun:
    """Run the code once with capture and trace. Raises the code's exception only if the record fails, too.

    `limit_s`: how long it may run after its first step; infinite: until the code ends. `ends_alone` is false for a rank
    on which other ranks wait: then SIGTERM is left to the caller.
    """

    def save(run: Run, write_trace: WriteTrace | None) -> None:
        _save(run, write_trace, store)

    code = execution.code
    capture = Capture(settings, code.source, code.text, keep=save if store is not None and ends_alone else None)
    losses, choice = Losses(), count_anew()
    stopper.limit_s, stopper.effects = limit_s, execution.effects
    capture.start()
    try:
        origin_ns = perf_counter_ns() - capture.now()
        error = _execute(execution, capture, stopper, losses, in_full=True, quiet=quiet)
        stopper.after = "reading its trace" if settings.trace else ""
        outcome, detail = outcome_of(error)
        error = _unless_own(capture, error)
        try:
            run, write_trace = capture.finish(outcome, detail, error)
        except Exception as fault:
            raise error or fault from None  # gpulab's fault must not hide the code's exception
        if choice is not None:
            run = replace(run, choices=(*run.choices, choice))
        if error is None:
            run = replace(run, changes=execution.changes(run))
        path, unsaved = (None, "") if capture.terminated else _save(run, write_trace, store)
    finally:
        stopper.after = ""
        capture.close()
    return FullRun(
        run,
        execution.observation(run),
        losses.per_step(run.steps, origin_ns),
        error,
        unsaved,
        path,
        setup_ns(run.steps, select(run).rows, execution.began_ns - origin_ns),
    )


def run_block(execution: Execution, size: Size, stopper: Stopper, *, on_gpu: bool) -> Block | BaseException:
    """Run the code as one block, not yet numbered in an experiment; or return the exception that it raised."""
    losses, waits = Losses(), CoreWait()
    block = ShortRun(size.total, execution.code.text, on_gpu=on_gpu)
    began_ns, waited_ns = perf_counter_ns(), waits.read()
    error: BaseException | None = None
    try:
        with block:
            error = _unless_own(block, _execute(execution, block, stopper, losses, in_full=False, quiet=True))
    except BaseException as e:
        error = _first(error, e)
    missed_ns, took_ns = waits.read() - waited_ns, perf_counter_ns() - began_ns
    waits.close()
    if error is not None:
        return error
    if block.fault is not None:
        return GpulabError(f"gpulab failed while measuring a block: {block.fault}")
    rows = block_rows(block.steps, size)
    samples = block.steps.sample_count[rows]
    return Block(
        arm=0,
        turn=0,
        order=0,
        step_count=len(rows),
        dropped=len(block.steps) - len(rows),
        sample_count=int(samples.sum()) if len(rows) and (samples >= 0).all() else None,
        time_ns=int(block.steps.time_ns[rows].sum()),
        losses=losses.per_step(block.steps, block.origin_ns),
        setup_ns=setup_ns(block.steps, rows),
        own_fraction=1 - min(0.99, missed_ns / took_ns) if waited_ns >= 0 else None,
    )


def _execute(
    execution: Execution,
    capture: Capture | ShortRun,
    stopper: Stopper,
    losses: Losses,
    *,
    in_full: bool,
    quiet: bool,
) -> BaseException | None:
    """Run the code inside a capture that has started. Returns the exception raised, gpulab's own stop included.

    Undoing the knobs afterwards may raise a second exception, for example on a lost GPU.
    """
    own: BaseException | None = None
    stopper.start(capture)
    try:
        with ExitStack() as stack:
            code = stack.enter_context(execution.applied(in_full=in_full))
            stack.enter_context(losses.recording())
            if quiet:
                stack.enter_context(silence())
            execution.began_ns = perf_counter_ns()
            with users_code():
                try:
                    with execution.within():
                        code.run()
                except BaseException as e:
                    own = e if stop_behind(e) is None else None
                    raise
    except BaseException as e:
        return _first(own, e)
    finally:
        stopper.current = None
    return None


def _first(error: BaseException | None, later: BaseException) -> BaseException:
    """The earlier of two errors; but an interrupt always wins."""
    return later if error is None or not isinstance(later, Exception) else error


def _unless_own(capture: Capture | ShortRun, error: BaseException | None) -> BaseException | None:
    """The error, or None if it is gpulab's own stop of this run.

    The caller must not keep gpulab's stop in a local variable: its traceback keeps alive everything that the code
    held, GPU memory too.
    """
    stop = stop_behind(error)
    return error if stop is None else None if stop.capture is capture else stop


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seeds torch, its GPUs, NumPy and Python inside, and restores their random states at the end."""
    with preserving_randomness():
        random.seed(seed)
        sys.modules["numpy"].random.seed(seed)
        sys.modules["torch"].manual_seed(seed)
        yield


def release(error: BaseException | None) -> None:
    """Release everything that a failed run holds through its traceback, and cached device memory."""
    clear_frames(error)
    empty_caches()


def _save(run: Run, write_trace: WriteTrace | None, store: Store | None) -> tuple[Path | None, str]:
    if store is None:
        return None, "Saving was switched off."
    try:
        return store.save(run, write_trace), ""
    except StoreError as e:
        return None, str(e)
