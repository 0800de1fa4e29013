"""The steps of a training loop, read off the marks that it leaves by itself. Pure: knows times, not torch.

Marks are read as they come or all at once, with the same result. What makes a step, best evidence first:

- `gpulab.step()`: each call ends a step.
- DataLoader and optimizer: a step begins when the loader is asked for its first batch and ends when a loader is asked
  again after an optimizer has stepped; so gradient accumulation is one step, a GAN's two optimizers are one step.
- optimizer alone (batches sliced from an array): from one `Optimizer.step` to the next of the same optimizer. Where
  others step in between, the last of the first round ends a step.
- DataLoader alone (inference, weights updated by hand): from one request to the next of the same loader.
- backward passes alone (neither loader nor optimizer): from the first backward pass after an update of the weights to
  the first one after the next update; so accumulation and a GAN's two passes are one step.

Batches that train nothing belong to no step: what was fetched before the first backward pass, a whole pass over a
loader without a backward pass, batches of a loader that never trained when one that did is asked again. A loader begun
in the middle of an accumulation is evaluation too; its time cannot be taken out of the step, its batches do not count.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from gpulab.run import Int64, Phase, StepFlag, Steps
from gpulab.tape.marks import Kind, Marks
from gpulab.tape.step_rows import (
    BATCHES,
    END,
    ENDED_FIRST,
    FEEDER,
    FLAGS,
    OPTIMIZER,
    OWN,
    PHASE,
    SAMPLES,
    START,
    UNKNOWN,
    WAIT,
    StepRows,
    live_columns,
    repeated_rows,
    steps_of_rows,
)

EPOCH_START, PROFILER_EDGE, PARTIAL = int(StepFlag.EPOCH_START), int(StepFlag.PROFILER_EDGE), int(StepFlag.PARTIAL)
COMPILED = int(StepFlag.COMPILE)
OPTIMIZER_RETIRES_AFTER = 16  # steps of other optimizers without one of the first
UNSETTLED_BATCHES = 32  # batches with a backward pass but no optimizer: after these, each batch is a step
AT_A_TIME = 256  # marks
ALIKE, REPEATS = 3, 1024  # turns of as many marks until it is tried to read more at once, and at most so many


def steps_of(marks: Marks, origin_ns: int, end_ns: int | None = None) -> Steps:
    """The steps of a tape, on a clock that starts at `origin_ns`; `end_ns`: when the code ended, None while it runs."""
    finder = StepFinder(origin_ns)
    finder.read(marks)
    return finder.steps(end_ns)


class _Step(Struct, gc=False):
    """The step that is open, and the row that it becomes. What is seldom filled is an empty tuple."""

    row: list[int]
    asked: bool = False  # a loader was asked for anything
    fed: tuple[int, ...] = ()  # loaders that gave a batch, in order, each once
    guests: tuple[int, ...] = ()  # loaders begun amid an accumulation: evaluation
    ended: int | None = None  # the loader that had none left, if that was the last answer
    ended_first: bool = False  # it had none left already when the optimizer stepped
    backwards: int = 0
    optimized_ns: int | None = None  # end of the last optimizer step within
    batches_when_optimized: int = -1
    others: tuple[tuple[int, int, list[int]], ...] = ()  # steps of other optimizers: which, end, the row by then


def _begun(start_ns: int, backwards: int = 0) -> _Step:
    return _Step([start_ns, 0, 0, 0, 0, 0, 0, 0, 0, -1], backwards=backwards)


class StepFinder:
    """Reads marks in order; each costs gpulab `mark_ns`. Where steps are taken back `generation` grows."""

    def __init__(self, origin_ns: int, mark_ns: int = 0) -> None:
        self._origin_ns = origin_ns
        self._mark_ns = mark_ns
        self._heard = self._heard_before = 0  # marks, and those until the newest step ended
        self._open = _begun(origin_ns)
        self._rows = StepRows()
        self._training: set[int] = set()  # loaders that have fed an optimizer step
        self._fed_backward: set[int] = set()  # loaders that have fed a step with a backward pass and no optimizer
        self._optimizer: int | None = None
        self._strangers = 0  # steps of other optimizers since the last one of `_optimizer`
        self._round = 0  # most such steps between two of `_optimizer`
        self._manual = self._by_optimizer = self._by_backward = False  # what ends steps, where no loader does
        self.feeder: int | None = None  # the first loader of the newest step that had one
        self._feeding = 0  # how many loaders fed that step
        self._fed = 0  # consecutive steps that a loader fed all the same
        self._first_backward_ns = self._backward_end_ns = 0
        self._passing = False  # a backward pass is going on
        self._first_backwards = 0  # passes in the first step that they made
        self.loader_seen = self._backward_seen = self._settled = self._stopped = False
        self._depth = self._asking = self._asked_ns = 0
        self._began: dict[int, int] = {}  # optimizers that are stepping, and since when
        self._scaling: list[tuple[int, int] | None] = []  # GradScaler's calls: optimizer, since when; None: it stepped
        self._phase = int(Phase.WARMUP)
        self._own_ns = 0  # what gpulab has said of its own time
        self.generation = 0

    # -- what is known ---------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def count(self) -> int:
        """Steps that are certain. Batches before a first optimizer step may still become one accumulated step."""
        return 0 if self._optimizer is None and self.undecided else len(self)

    def marks_until(self, count: int) -> int:
        """After how many marks, at the earliest, there can be so many steps: who waits for them need not look before.

        Each mark ends one step at most, but for optimizers' steps that turn out to be steps of their own.
        """
        step = self._open
        return max(1, count - len(self) - len(step.others) - (step.optimized_ns is not None))

    @property
    def without_optimizer(self) -> bool:
        """Whether no optimizer has stepped and the user has marked nothing: weights may be updated by hand."""
        return self._optimizer is None and not self._manual

    @property
    def undecided(self) -> bool:
        """Whether there were backward passes and nothing yet that tells a batch from a whole step."""
        return self._backward_seen and self.without_optimizer and not self._settled and not self._by_backward

    @property
    def trains(self) -> bool:
        """Whether there was more than batches: a backward pass, an optimizer, a step marked by hand."""
        return self._backward_seen or self._optimizer is not None or self._manual

    @property
    def optimizer_ends_steps(self) -> bool:
        """Whether steps end at `Optimizer.step` itself: code of the same step may still follow it."""
        return self._by_optimizer and not self._manual

    @property
    def training(self) -> bool:
        """Whether the open step has had a backward pass whose gradients no optimizer has used."""
        return self._open.backwards > 0 and self._open.optimized_ns is None

    @property
    def end_ns(self) -> int:
        """When the newest step has ended. Raises IndexError without a step."""
        return self._rows.newest[END]

    @property
    def hooks_ns(self) -> int:
        """What all marks have cost, with what gpulab did at them."""
        return self._own_ns + self._heard * self._mark_ns

    def last_batches(self) -> int:
        """Batches that the newest step took from each of its loaders. Raises IndexError without a step."""
        return self._rows.newest[BATCHES] // max(1, self._feeding)

    def rows_since(self, count: int) -> Int64:
        """Start, end, data wait (ns) and samples (-1 unknown) of the steps after so many, [n, 4]."""
        return live_columns(self._rows.table(count))

    @property
    def source(self) -> str:
        """What marks the steps, in the user's words; empty while nothing did."""
        if self._manual:
            return "gpulab.step()"
        if self._optimizer is not None:
            return "Optimizer.step" if self._by_optimizer else "DataLoader and Optimizer.step"
        if self._by_backward:
            return "backward passes"
        return "DataLoader" if self.loader_seen and len(self) else ""

    def steps(self, end_ns: int | None = None) -> Steps:
        """All of them; once the code has ended, also one whose work was done but that no boundary closed."""
        if end_ns is not None:
            self._close_what_is_left(end_ns)
        return steps_of_rows(self._rows.table(), self._origin_ns, ended=end_ns is not None)

    # -- marks -----------------------------------------------------------------------------------------------------

    def read(self, marks: Marks) -> None:
        """Go on with these. Turns of the loop that only repeat the one before are read all at once."""
        at, turn, last, alike = 0, 0, -1, 0
        state: dict[str, Any] = {}
        steps = self._rows
        while at < len(marks):
            first, rows = at, marks[at : at + AT_A_TIME].tolist()
            for at, (t_ns, kind, argument) in enumerate(rows, first + 1):
                count = len(steps)
                self._hear(t_ns, kind, argument)
                if len(steps) != count + 1:
                    continue
                before, turn, last = turn, at - 1 - last, at - 1
                alike = alike + 1 if turn == before and len(steps) > UNSETTLED_BATCHES else 0
                if alike < ALIKE:
                    continue
                earlier, state = state, self._state()
                if alike > ALIKE:
                    repeated = self._repeat(marks, last, turn) if state == earlier else 0
                    alike, at, last = 0, at + repeated, last + repeated
                    break
        self._rows.pack()

    def _state(self) -> dict[str, Any]:
        """All that decides, and no time."""
        times = {"_asked_ns", "_backward_end_ns", "_rows", "_open", "_heard", "_heard_before", "_own_ns"}
        own = {name: value for name, value in vars(self).items() if name not in times}
        step = replace(self._open, row=self._open.row[1:])
        return own | {"open": step, "_training": len(self._training), "_began": [*self._began]}

    def _repeat(self, marks: Marks, last: int, turn: int) -> int:
        """Close a step for each turn that follows and is like the one that ended at mark `last`: so many marks."""
        near = marks[last - turn : last + 1 + REPEATS * turn]
        table = repeated_rows(near, turn, self._rows.newest, self._mark_ns)
        count = (len(table) - 1) * turn
        if count > 0:
            self._rows.extend(table[1:])
            self._own_ns += int(table[1:, OWN].sum()) - count * self._mark_ns
            self._heard += count
            self._heard_before += count
            self._open.row[START] = int(table[-1, END])
        return max(0, count)

    def _hear(self, t_ns: int, kind: int, argument: int) -> None:
        """Frequent kinds come first."""
        if self._stopped:
            return
        match kind:
            case Kind.ASK | Kind.ITER:
                self._asked(argument, t_ns, kind == Kind.ITER)
            case Kind.GOT | Kind.END | Kind.ITERATOR:
                self._answered(kind, argument, t_ns)
            case Kind.BACKWARD | Kind.GRAD:
                self._differentiated(bool(argument), t_ns, backward=kind == Kind.BACKWARD)
            case Kind.BACKWARD_END:
                self._passing, self._backward_end_ns = False, t_ns
            case Kind.STEP:
                self._began[argument] = t_ns
            case Kind.STEPPED:
                if self._scaling:
                    self._scaling[-1] = None
                self._optimized(argument, self._began.pop(argument, t_ns), t_ns)
            case Kind.HAND:
                self._ended_by_hand(t_ns)
            case Kind.SCALE:
                self._scaling.append((argument, t_ns))
            case Kind.SCALED | Kind.SCALE_FAILED:
                held_back = self._scaling.pop()
                if kind == Kind.SCALED and held_back is not None:
                    self._optimized(*held_back, t_ns)
            case Kind.RESUME:
                self._open.row[START] = max(self._open.row[START], t_ns)
                self._open.row[FLAGS] |= PROFILER_EDGE * argument
                self._open.others = ()
                self._asked_ns = max(self._asked_ns, t_ns)
            case Kind.OWN:
                self._own_ns += argument
                self._open.row[OWN] += argument
                self._asked_ns += argument if self._depth else 0
            case Kind.COMPILE:
                self._open.row[FLAGS] |= COMPILED
            case Kind.UPDATED:
                self._settled = True
            case Kind.PHASE:
                self._phase = argument
            case Kind.BEGIN:
                self._open.row[START] = t_ns
            case Kind.STOP:
                self._stopped = True
        self._heard += 1

    def _asked(self, loader: int, t_ns: int, fresh: bool) -> None:
        """A loader is asked. Nested requests count once."""
        self._depth += 1
        if self._depth > 1:
            return
        if not (self._manual or self._by_optimizer or self._by_backward):
            self._before_loader(loader, t_ns, fresh)
        self.loader_seen = self._open.asked = True
        if fresh and loader not in self._open.guests:
            self._open.row[FLAGS] |= EPOCH_START
        self._asking, self._asked_ns = loader, t_ns

    def _answered(self, kind: int, samples: int, t_ns: int) -> None:
        self._depth -= 1
        if self._depth > 0:
            return
        step, asking = self._open, self._asking
        step.row[WAIT] += max(0, t_ns - max(self._asked_ns, step.row[START]))
        if asking in step.guests:
            return
        if kind == Kind.GOT:
            step.row[BATCHES] += 1
            step.row[SAMPLES] += samples if samples >= 0 else UNKNOWN
            step.ended = None
            if asking not in step.fed:
                step.fed += (asking,)
        else:
            step.ended = asking if kind == Kind.END else None

    def _differentiated(self, updated: bool, t_ns: int, *, backward: bool) -> None:
        """A backward pass begins; `updated`: the first one after weights were updated."""
        if updated and self.without_optimizer and (self._by_backward or not self._open.fed):
            self._updated(t_ns)
        if not backward:
            return
        if not self._backward_seen:
            if self.without_optimizer:
                self._fold(self._fetched_ahead())
            self._first_backward_ns = t_ns
            self._backward_seen = True
        self._open.backwards += 1
        self._passing = True

    def _updated(self, t_ns: int) -> None:
        """Weights were updated, and no optimizer or loader tells steps apart: one ends here."""
        if not self._by_backward:
            self._by_backward = True
            self._fold(0)
            start_ns = max(self._open.row[START], self._first_backward_ns)
            self._open = _begun(start_ns, self._open.backwards)
        if self._is_fed_by_loader():
            self._by_backward = False
            return
        if len(self) == 1 and self._first_backwards < self._open.backwards:
            self._fold(0)  # the watched weights are updated amid a step (a GAN): the first row was a part of one
        if not len(self):
            self._first_backwards = self._open.backwards
        self._close(t_ns)

    def _ended_by_hand(self, t_ns: int) -> None:
        """From the first `gpulab.step()` on nothing else makes steps."""
        if not self._manual:
            self._manual = True
            begun = np.flatnonzero(self._rows.table()[:, FLAGS] & EPOCH_START)
            anew = self._open.row[FLAGS] & EPOCH_START or self._by_backward
            self._fold(0 if anew else len(self) - (int(begun[-1]) if len(begun) else 0))
        self._close(t_ns)

    # -- a loader is asked -----------------------------------------------------------------------------------------

    def _before_loader(self, loader: int, t_ns: int, fresh: bool) -> None:
        """Close, keep or begin the open step."""
        step = self._open
        if step.optimized_ns is not None:
            self._training.update(step.fed)
            self._close(t_ns)
        elif not step.fed:
            if fresh and step.ended is not None and self.undecided:
                self._settled = len(self) > 0  # a whole pass trained and no optimizer stepped
            if step.ended is not None or not step.asked:
                self._open = _begun(t_ns)
        elif self._optimizer is None:
            self._next_batch(loader, t_ns, fresh)
        elif self._trained_nothing(loader, fresh):
            self._open = _begun(t_ns)
        elif fresh and step.backwards and self._training and loader not in self._training:
            step.guests += (loader,)

    def _next_batch(self, loader: int, t_ns: int, fresh: bool) -> None:
        """Without an optimizer: the same loader's next batch is the next step, another loader's belongs to this one."""
        step = self._open
        if step.ended is not None and step.ended not in step.fed:  # zip: the other loader had none left
            self._open = _begun(t_ns)
        elif fresh and step.backwards and self.undecided and loader not in (*step.fed, step.ended):
            step.guests += (loader,)
        elif fresh or loader in step.fed:
            if step.backwards:
                self._fed_backward.update(step.fed)
            elif self._backward_seen and self._fed_backward.isdisjoint(step.fed):
                self._open = _begun(t_ns)  # a batch of an evaluation
                return
            self._close(t_ns)

    def _trained_nothing(self, loader: int, fresh: bool) -> bool:
        """Whether the batches of the open step, which no optimizer has used, were evaluation."""
        step = self._open
        if step.backwards:  # an accumulation; left over from the last epoch where an evaluation followed
            return fresh and bool(step.guests) and loader not in step.guests
        if loader in step.fed:
            return fresh or step.ended is not None
        never_trained = self._training.isdisjoint(step.fed)
        return step.ended in step.fed or (never_trained and (fresh or loader in self._training))

    # -- an optimizer has stepped ----------------------------------------------------------------------------------

    def _optimized(self, optimizer: int, start_ns: int, end_ns: int) -> None:
        """Also where GradScaler decided that it should not."""
        if self._optimizer is None:  # batches since the first backward pass were one step, without any they were none
            self._optimizer = optimizer
            if not self._manual and (not self._backward_seen or self._by_backward or not self._settled):
                self._fold(len(self) if self._backward_seen and not self._by_backward else 0)
                self._by_backward = False
        if not self._manual:
            self._learn(optimizer)
        step = self._open
        step.row[OPTIMIZER] += max(0, end_ns - max(start_ns, self._backward_end_ns, step.row[START]))
        if step.optimized_ns is None:
            step.ended_first = step.ended is not None
        step.optimized_ns, step.batches_when_optimized = end_ns, step.row[BATCHES]
        if optimizer != self._optimizer:
            self._stranger(optimizer, end_ns)
            return
        self._round, self._strangers = max(self._round, self._strangers), 0
        if not self._by_optimizer or self._manual:
            return
        self._fed = self._fed + 1 if step.row[BATCHES] else 0
        if self._fed >= 2:
            self._by_optimizer = False
        else:
            self._close(end_ns)

    def _learn(self, optimizer: int) -> None:
        """Find out whether optimizer steps alone make the steps, and which of a round ends one: the last."""
        step, others = self._open, self._open.others
        if not self._by_optimizer and not self.loader_seen:
            self._by_optimizer = True
        elif optimizer != self._optimizer:
            return
        elif self._by_optimizer:
            if self._round or len(self) != 1 or not others or len({o[0] for o in others}) < len(others):
                return
            self._optimizer, end_ns, more = others[-1]
            first = self._rows.pop()
            for column in (WAIT, OPTIMIZER, OWN):
                first[column] += more[column]
            first[END], first[FLAGS] = end_ns, first[FLAGS] | step.row[FLAGS] & PROFILER_EDGE
            self._rows.append(first)
            self._open, self._strangers, self._round = _begun(end_ns), 0, len(others)
        elif step.optimized_ns is not None and step.row[BATCHES] == step.batches_when_optimized:
            self._by_optimizer, self._fed = True, 0
            self._close(step.optimized_ns)

    def _stranger(self, optimizer: int, end_ns: int) -> None:
        """Another optimizer has stepped: part of this step, or the beginning of a new loop with its own optimizer."""
        self._strangers += 1
        if self._by_optimizer and not self._manual:
            self._open.others += ((optimizer, end_ns, self._open.row[:]),)
        alone = self._by_optimizer and self._round == 0 and len(self) >= 2  # it has never missed a step
        if self._strangers > (1 if alone else OPTIMIZER_RETIRES_AFTER):
            self._optimizer, self._strangers, self._round = optimizer, 0, 0
            self._split()

    def _split(self) -> None:
        """The steps of the optimizer that came last were steps of their own."""
        others, before = self._open.others, [0] * PHASE
        for _, end_ns, row in [o for o in others if o[0] == others[-1][0]]:
            self._open.row[WAIT:PHASE] = [a - b for a, b in zip(row[WAIT:PHASE], before[WAIT:PHASE], strict=True)]
            self._close(end_ns)
            before = row

    # -- rows ------------------------------------------------------------------------------------------------------

    def _close(self, end_ns: int) -> None:
        step, row = self._open, self._open.row
        row[END], row[PHASE] = max(end_ns, row[START]), self._phase
        row[OWN] += self._mark_ns * (self._heard - self._heard_before)
        self._heard_before = self._heard
        if step.fed:
            self.feeder, self._feeding, row[FEEDER] = step.fed[0], len(step.fed), step.fed[0]
        if step.ended_first and not self._by_optimizer and not self._manual:
            row[FLAGS] |= ENDED_FIRST
        self._rows.append(row)
        self._settled |= len(self) >= UNSETTLED_BATCHES
        self._open = _begun(row[END])

    def _fold(self, count: int) -> None:
        """The newest `count` rows were the beginning of the open step; older ones were no steps."""
        row, rows = self._open.row, self._rows.table(len(self) - count)
        if count:
            row[START] = int(rows[0, START])
            row[FLAGS] |= int(rows[0, FLAGS]) & EPOCH_START | int(np.bitwise_or.reduce(rows[:, FLAGS])) & COMPILED
            row[WAIT:PHASE] = (rows[:, WAIT:PHASE].sum(0) + row[WAIT:PHASE]).tolist()
        self._settled = False
        self.generation += len(self) > 0
        self._rows.clear()

    def _fetched_ahead(self) -> int:
        """Rows of the pass in which the first backward pass begins: batches fetched for it (Accelerate)."""
        step = self._open
        loader = step.fed[0] if step.fed else step.ended
        if step.row[FLAGS] & EPOCH_START or loader is None:
            return 0
        rows = self._rows.table()[: -UNSETTLED_BATCHES - 1 : -1]
        begun = np.flatnonzero(rows[:, FLAGS] & EPOCH_START)
        other = np.flatnonzero(rows[:, FEEDER] != loader)
        ahead = int(min([len(rows), *(begun[:1] + 1), *other[:1]]))
        return 0 if ahead == UNSETTLED_BATCHES or (ahead > 1 and not step.fed) else ahead  # list(loader)

    def _is_fed_by_loader(self) -> bool:
        """Whether a loader feeds the loop after all: batches in one step alone are an evaluation's."""
        step = self._open
        self._fed = self._fed + 1 if step.row[BATCHES] else 0
        if self._fed < 2:
            step.row[WAIT] = step.row[BATCHES] = step.row[SAMPLES] = 0
            step.fed = ()
        return self._fed >= 2

    def _close_what_is_left(self, end_ns: int) -> None:
        """A step whose work was done. The last update by hand leaves no mark: it ends with its backward pass."""
        step, at_ns = self._open, None
        if self._manual:
            return
        if self._by_optimizer:
            if self._strangers > max(1, self._round) and len({o[0] for o in step.others}) == 1:
                self._split()
        elif self._by_backward:
            passed = step.backwards - self._passing > 0  # one at which the run ends was none
            at_ns = self._backward_end_ns if passed and not self._is_fed_by_loader() else None
        elif step.optimized_ns is not None:
            at_ns = step.optimized_ns
        elif self._optimizer is None and len(self) and step.fed and step.ended is None:
            at_ns = end_ns
        if at_ns is not None:
            step.row[FLAGS] |= PARTIAL
            self._close(at_ns)
