"""One run of the user's code with settings applied: in full with its trace, as a short block, or inside a capture."""

from __future__ import annotations

import gc
import math
import random
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter_ns
from typing import Self

from msgspec import Struct
from msgspec.structs import replace

from gpulab.analysis.steps import select, setup_ns
from gpulab.capture.gpu import count_anew
from gpulab.capture.pilot import ShortRun, stop_behind
from gpulab.capture.recorder import Capture
from gpulab.capture.step_values import Losses
from gpulab.devices.core_clock import CoreWait
from gpulab.errors import GpulabError, StoreError
from gpulab.knobs import preparation
from gpulab.knobs.knob import Knob, KnobEffects, Value
from gpulab.knobs.observation import Observation
from gpulab.knobs.observer import Observed, observe
from gpulab.knobs.variable_reads import watching
from gpulab.knobs.variables import Plain, is_plain, setting_names
from gpulab.run import Change, Outcome, Run, Settings
from gpulab.store.folders import Store, WriteTrace
from gpulab.torch_hooks.randomness import preserving_randomness
from gpulab.tuning.cell_code import silence, users_code
from gpulab.tuning.plan import Arm, Code, Size, counted_rows
from gpulab.tuning.record import Block
from gpulab.tuning.resolve import ResolvedArm, changes_unseen, outside_of, resolve_beforehand

TRIAL_LIMIT_S = 20.0  # a run with its trace is ended after this long, at a step boundary
PREPARATION_LIMIT_S = 120.0  # as long as no step is complete

_OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "not enough memory", "cannot allocate memory")


@dataclass(slots=True)
class Setting:
    """One arm made ready: the code, with its variables set in the text, and the knobs to apply around it."""

    code: Code
    knobs: Mapping[Knob, Value]
    label: str
    variables: Mapping[str, Plain] = field(default_factory=dict)
    within: Callable[[], AbstractContextManager[object]] = nullcontext  # around each run of the code
    _outside: Mapping[str, Plain] = field(init=False)

    def __post_init__(self) -> None:
        self._outside = outside_of(self.code, self.variables)

    def applied(self, stack: ExitStack) -> dict[str, KnobEffects]:
        """Set and turn it all until the stack ends. Cheap: what an arm does before a block slows down that block."""
        stack.enter_context(setting_names(self.code.namespace, self._outside))
        return {knob.name: stack.enter_context(knob.applied(value)) for knob, value in self.knobs.items()}


class Trial(Struct, frozen=True):
    """What came out of one full run. `error`: what the user's code raised, other than the end we asked for."""

    run: Run
    observation: Observation
    effects: Mapping[str, KnobEffects]
    losses: tuple[float, ...]
    error: BaseException | None = None
    unsaved: str = ""
    path: Path | None = None
    setup_ns: int | None = None  # before its steps (analysis/steps.py)


class Stopper(Struct):
    """Ends what runs now at its next step, and everything after it."""

    asked: bool = False
    late: Callable[[], bool] = lambda: False  # the time is over: what runs then is ended as well
    current: Capture | ShortRun | None = None
    after: str = ""  # a run has ended: what is done with it, in words

    @property
    def words(self) -> str:
        """Where it is: "step 12", "starting 2 workers"; empty between two runs. From any thread."""
        current = self.current
        return self.after if current is None else current.beside_steps or f"step {current.step_count}"

    @property
    def ends(self) -> bool:
        return self.asked or self.late()

    def stop(self) -> None:
        self.asked = True
        self.cut()

    def cut(self) -> None:
        """End what runs now, whoever asked for it: at its next step, and what a knob prepares before it."""
        current = self.current
        if current is not None:
            preparation.end()
        if isinstance(current, Capture):
            current.request_stop()
        elif current is not None:
            current.stop()

    def now(self, current: Capture | ShortRun | None) -> None:
        self.current = current
        if self.ends and current is not None:
            self.cut()


class _Raised(Struct):
    """What the user's code raised, our own end of it aside.

    Knobs that are taken out after it may raise on top of it, on a lost GPU for one.
    """

    error: BaseException | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.error = error if stop_behind(error) is None else None

    def first(self, error: BaseException) -> BaseException:
        """The error that came first of these two; an interrupt is never passed over."""
        return error if self.error is None or not isinstance(error, Exception) else self.error


class _Limit:
    """Ends a capture that takes long, on a thread of its own. What a knob needs to get ready does not count."""

    def __init__(self, capture: Capture, effects: Mapping[str, KnobEffects], limit_s: float) -> None:
        self._capture = capture
        self._effects = effects
        self._limit_s = limit_s
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._wait, name="gpulab-trial-limit", daemon=True)
        self._thread.start()

    def _wait(self) -> None:
        first_s: float | None = None  # when the first step was complete: it may have compiled the model
        while not self._over.wait(0.25):
            spent_s = self._capture.now() / 1e9
            if first_s is None and self._capture.step_count:
                first_s = spent_s
            prepared_s = sum(one.preparation_s for one in list(self._effects.values()))
            late = spent_s - prepared_s > PREPARATION_LIMIT_S if first_s is None else spent_s - first_s > self._limit_s
            if late and math.isfinite(self._limit_s):
                self._capture.request_stop()
                return

    def cancel(self) -> None:
        self._over.set()
        self._thread.join()


def full_trial(
    setting: Setting,
    settings: Settings,
    stopper: Stopper,
    store: Store | None,
    *,
    quiet: bool,
    changes: Callable[[Run, Mapping[str, KnobEffects]], tuple[Change, ...]] | None = None,
    limit_s: float = TRIAL_LIMIT_S,
    ends_alone: bool = True,
) -> Trial:
    """Run the code once with capture and trace. Never raises what the code raises, unless the record fails, too.

    `changes` tells of a run that did not fail whether the knobs took effect: the record holds it. `limit_s` is how long
    it may go on after its first step; infinite: to its end, however long. Where others wait for each step of it,
    `ends_alone` is false: SIGTERM is left to the caller.
    """

    def keep(run: Run, write_trace: WriteTrace | None) -> None:
        _save(run, write_trace, store)

    source, text = setting.code.source, setting.code.text
    capture = Capture(settings, source, text, keep=keep if store is not None and ends_alone else None)
    losses = Losses()
    raised, error = _Raised(), None
    outcome: Outcome = "completed"
    effects: dict[str, KnobEffects] = {}
    seen, began_ns = Observed(), 0
    counted = count_anew()
    capture.start()
    stopper.now(capture)
    origin_ns = perf_counter_ns() - capture.now()
    limit = _Limit(capture, effects, limit_s)
    try:
        with ExitStack() as stack:
            seen = stack.enter_context(observe())
            effects.update(setting.applied(stack))
            stack.enter_context(losses.heard())
            lines, reads = stack.enter_context(watching(setting.code.namespace, setting.variables))
            effects.update(reads)
            code = setting.code.through(lines) if reads else setting.code
            if quiet:
                stack.enter_context(silence())
            began_ns = capture.now()
            with users_code(), raised, setting.within():
                code.run()
    except BaseException as e:
        outcome, error = _ending(capture, raised.first(e))
    finally:
        limit.cancel()
        stopper.after = "reading its trace" if settings.trace else ""
        stopper.now(None)
        try:
            run, write_trace = _finished(capture, outcome, error)
            if counted is not None:
                run = replace(run, choices=(*run.choices, counted))
            if changes is not None and error is None:
                run = replace(run, changes=changes(run, effects))
            path, unsaved = (None, "") if capture.terminated else _save(run, write_trace, store)
        finally:
            stopper.after = ""
            capture.close()
    setup = setup_ns(run.steps, select(run).rows, began_ns)
    per_step = losses.per_step(run.steps, origin_ns)
    return Trial(run, seen.observation(run), effects, per_step, error, unsaved, path, setup)


def short_trial(setting: Setting, size: Size, stopper: Stopper, *, on_gpu: bool) -> Block | BaseException:
    """Run the code as one block, whose place in an experiment is not set yet. Gives back what was raised, if it was."""
    losses, raised, waits = Losses(), _Raised(), CoreWait()
    block = ShortRun(size.total, setting.code.text, on_gpu=on_gpu)
    began_ns, waited_ns = perf_counter_ns(), waits.read()
    try:
        with block:
            stopper.now(block)
            with ExitStack() as stack:
                setting.applied(stack)
                stack.enter_context(losses.heard())
                stack.enter_context(silence())
                with users_code(), raised, setting.within():
                    setting.code.run()
    except BaseException as e:
        return raised.first(e)
    finally:
        stopper.now(None)
        missed_ns, took_ns = waits.read() - waited_ns, perf_counter_ns() - began_ns
        waits.close()
    if block.fault is not None:
        return GpulabError(f"gpulab failed while measuring a block: {block.fault}")
    rows = counted_rows(block.steps, size)
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


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """All global random numbers begin at `seed` inside, and are put back: of torch, its GPUs, NumPy and Python."""
    with preserving_randomness():
        random.seed(seed)
        sys.modules["numpy"].random.seed(seed)
        sys.modules["torch"].manual_seed(seed)
        yield


def out_of_memory(error: BaseException) -> bool:
    """Whether the device or the host had no memory left."""
    torch = sys.modules.get("torch")
    if isinstance(error, MemoryError) or (torch is not None and isinstance(error, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error).lower() for words in _OUT_OF_MEMORY)


def release(error: BaseException | None) -> None:
    """Let go of everything that a failed run holds through its traceback, and give cached device memory back."""
    waiting, seen = [error], set[int]()
    while waiting:
        e = waiting.pop()
        if e is None or id(e) in seen:
            continue
        seen.add(id(e))
        with suppress(Exception):
            traceback.clear_frames(e.__traceback__)
        e.__traceback__ = None
        waiting += [e.__cause__, e.__context__]
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        with suppress(RuntimeError):  # a GPU whose error stays has nothing to give
            torch.cuda.empty_cache()


def _ending(capture: Capture, error: BaseException) -> tuple[Outcome, BaseException | None]:
    """How the code ended, and its error, unless that was our own end of it.

    Here and not in `full_trial`: a local there that names our own end is in the traceback of it, and so keeps alive all
    that the code held, GPU memory too.
    """
    stop = stop_behind(error)
    if stop is None:
        return ("interrupted" if isinstance(error, KeyboardInterrupt) else "failed"), error
    return "stopped", None if stop.capture is capture else stop


def _finished(
    capture: Capture, outcome: Outcome, error: BaseException | None
) -> tuple[Run, Callable[[Path], None] | None]:
    """End the capture. A fault of ours there must not take the place of what the code raised."""
    detail = "".join(traceback.format_exception_only(error)).strip() if error is not None else ""
    try:
        return capture.finish(outcome, detail)
    except Exception:
        if error is None:
            raise
    raise error


def _save(run: Run, write_trace: WriteTrace | None, store: Store | None) -> tuple[Path | None, str]:
    if store is None:
        return None, "Saving was switched off."
    try:
        return store.save(run, write_trace), ""
    except StoreError as e:
        return None, str(e)


OBSERVATIONS_KEPT = 50


class _Remembered(Struct, frozen=True):
    """What code was seen to use as written, and whether each name that it reads is still what it was then."""

    observation: Observation
    same: Mapping[str, Callable[[object], bool]]


_observations: dict[str, _Remembered] = {}  # of cells that ran as written in this process, by their text


def remember(code: Code, observation: Observation) -> None:
    """What this code was just seen to use as written."""
    names = code.namespace
    same = {name: _sameness(names[name]) for name in code.variables.read if name in names}
    _observations.pop(code.text, None)
    _observations[code.text] = _Remembered(observation, same)
    for old in list(_observations)[:-OBSERVATIONS_KEPT]:
        del _observations[old]


def observation_of(code: Code) -> Observation | None:
    """What this code was seen to use; None where it did not run as written yet, or reads other objects now."""
    remembered = _observations.get(code.text)
    names = code.namespace
    if remembered is None or not all(name in names and same(names[name]) for name, same in remembered.same.items()):
        return None
    return remembered.observation


def _sameness(value: object) -> Callable[[object], bool]:
    if is_plain(value):
        return lambda now: type(now) is type(value) and now == value
    try:
        there = weakref.ref(value)
    except TypeError:  # a list or dict of objects
        place = id(value)
        return lambda now: id(now) == place
    return lambda now: there() is now


class Changing:
    """The settings of an arm for one run. Raises UsageError for a name that is neither a knob nor a variable."""

    def __init__(self, arm: Arm, code: Code) -> None:
        self._written = observation_of(code)
        self.decided: ResolvedArm = resolve_beforehand(arm, self._written, code)
        self.code = code.replacing(self.decided.variables)
        literals = code.variables.literals
        self._literals = {n: literals[n] for n in self.decided.variables if n in literals}
        self._effects: dict[str, KnobEffects] = {}
        self._seen = Observed()

    @contextmanager
    def applied(self) -> Iterator[Code]:
        """Everything is set inside; the code to run."""
        decided = self.decided
        with ExitStack() as stack:
            stack.callback(self._put_literals_back)
            stack.enter_context(setting_names(self.code.namespace, outside_of(self.code, decided.variables)))
            self._effects = {k.name: stack.enter_context(k.applied(v)) for k, v in decided.knobs.items()}
            self._seen = stack.enter_context(observe())  # over the knobs: it sees loaders before they change them
            lines, reads = stack.enter_context(watching(self.code.namespace, decided.variables))
            self._effects.update(reads)
            yield self.code.through(lines) if reads else self.code

    def _put_literals_back(self) -> None:
        """What the code has made of a literal set for it becomes what it would have made of its own."""
        names = self.code.namespace
        for name, literal in self._literals.items():
            value = self.decided.variables[name]
            if name in names and type(names[name]) is type(value) and names[name] == value:
                names[name] = literal

    def changes(self, run: Run) -> tuple[Change, ...]:
        """Whether they took effect in that run."""
        return changes_unseen(self.decided, self._written, self._seen.observation(run), self._effects, run)
