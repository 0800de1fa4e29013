"""Finds the steps of a training loop in the marks of its hooks. Needs times only, no torch.

It gives the same result whether it reads the marks one by one or all at once. What makes a step, best evidence first:

- `gpulab.step()`: each call ends a step.
- DataLoader and optimizer: a step begins with the first request to the loader and ends with the next request to a
  loader after an optimizer has stepped; so gradient accumulation is one step, a GAN's two optimizers are one step.
- optimizer alone (batches sliced from an array): from one `Optimizer.step` to the next of the same optimizer. If
  others step in between, the last optimizer of the first round ends a step.
- DataLoader alone (inference, weights updated by hand): from one request to the next of the same loader.
- backward passes alone (neither loader nor optimizer): from the first backward pass after an update of the weights to
  the first one after the next update; so accumulation and a GAN's two passes are one step.

In a loop that trains, batches that train nothing belong to no step: those before the batch of the first backward pass,
those of a whole pass over a loader without a backward pass, and those of a loader that has never trained, once the
training loader gets its next request. A loader that begins in the middle of an accumulation is evaluation too: its
batches do not count, but its time cannot be separated from the step's.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from msgspec.structs import replace

from gpulab.run import Int64, Phase, Steps
from gpulab.tape.marks import Kind, Marks
from gpulab.tape.step_rows import (
    BATCHES,
    COMPILED,
    END,
    EPOCH_START,
    EXHAUSTED_FIRST,
    FEEDER,
    FLAGS,
    OPTIMIZER,
    OWN,
    PARTIAL,
    PHASE,
    PROFILER_EDGE,
    SAMPLES,
    START,
    UNKNOWN,
    WAIT,
    StepRows,
    live_columns,
    open_step,
    prefetch_count,
    repeated_rows,
    steps_of_rows,
)

OPTIMIZER_RETIRES_AFTER = 16  # steps of other optimizers without a step of the first one
UNSETTLED_BATCHES = 32  # batches with a backward pass but no optimizer: after these, each batch is a step
AT_A_TIME = 256  # marks
ALIKE, REPEATS = 3, 1024  # after 3 steps with equally many marks, up to 1,024 more of them are read at once


def steps_of(marks: Marks, origin_ns: int, end_ns: int | None = None) -> Steps:
    """The steps of a tape, on a clock that starts at `origin_ns`; `end_ns`: when the code ended, None while it runs."""
    finder = StepFinder(origin_ns)
    finder.read(marks)
    return finder.steps(end_ns)


class StepFinder:
    """Reads marks in order; each mark costs gpulab `mark_ns`. When it withdraws steps, `generation` grows."""

    def __init__(self, origin_ns: int, mark_ns: int = 0) -> None:
        self._origin_ns = origin_ns
        self._mark_ns = mark_ns
        self._mark_count = self._marks_before = 0  # marks so far, and those until the newest step ended
        self._open = open_step(origin_ns)
        self._rows = StepRows()
        self._training_loaders: set[int] = set()  # loaders that have fed an optimizer step
        self._backward_loaders: set[int] = set()  # loaders that have fed a step with a backward pass and no optimizer
        self._optimizer: int | None = None  # the optimizer whose steps end the run's steps
        self._other_steps = 0  # steps of other optimizers since the last one of `_optimizer`
        self._round = 0  # most such steps between two steps of `_optimizer`
        self._manual = self._by_optimizer = self._by_backward = False  # what ends steps if no loader does
        self.feeder: int | None = None  # the first loader of the newest step that had one
        self._feeder_count = 0  # how many loaders fed that step
        self._fed_steps = 0  # consecutive steps that a loader fed, although something else ends steps
        self._first_backward_ns = self._backward_end_ns = 0
        self._in_backward = False
        self._first_backwards = 0  # backward passes in the first step that backward passes ended
        self.has_loader = self._has_backward = self._batch_is_step = self._stopped = False
        self._depth = self._requested_loader = self._request_ns = 0
        self._began: dict[int, int] = {}  # optimizers in the middle of a step, and since when
        self._scaling: list[tuple[int, int] | None] = []  # GradScaler's calls: optimizer, since when; None: it stepped
        self._phase = int(Phase.WARMUP)
        self._own_ns = 0  # gpulab's own time, as its marks report it
        self.generation = 0

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def count(self) -> int:
        """The number of steps so far; 0 while the batches may turn out to be one accumulated step."""
        return 0 if self._optimizer is None and self.undecided else len(self)

    def marks_until(self, count: int) -> int:
        """The fewest further marks after which there can be `count` steps.

        Each mark ends at most one step, unless the steps of several optimizers turn out to be separate steps.
        """
        step = self._open
        return max(1, count - len(self) - len(step.others) - (step.optimized_ns is not None))

    @property
    def without_optimizer(self) -> bool:
        """Whether no optimizer has stepped and the user has marked no step: weights may be updated by hand."""
        return self._optimizer is None and not self._manual

    @property
    def undecided(self) -> bool:
        """Whether there were backward passes, and it is still open whether each batch is a step."""
        return self._has_backward and self.without_optimizer and not self._batch_is_step and not self._by_backward

    @property
    def trains(self) -> bool:
        """Whether the loop does more than load: it made a backward pass, an optimizer's step, or a mark by hand."""
        return self._has_backward or self._optimizer is not None or self._manual

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
        """The cost of all marks, and of what gpulab did at them."""
        return self._own_ns + self._mark_count * self._mark_ns

    def last_batches(self) -> int:
        """Batches that the newest step took from each of its loaders. Raises IndexError without a step."""
        return self._rows.newest[BATCHES] // max(1, self._feeder_count)

    def rows_since(self, count: int) -> Int64:
        """Start, end, data wait (ns) and samples (-1: unknown) of the steps after the first `count`, [n, 4]."""
        return live_columns(self._rows.table(count))

    @property
    def source(self) -> str:
        """What ends the steps, in the user's words; empty without any."""
        if self._manual:
            return "gpulab.step()"
        if self._optimizer is not None:
            return "Optimizer.step" if self._by_optimizer else "DataLoader and Optimizer.step"
        if self._by_backward:
            return "backward passes"
        return "DataLoader" if self.has_loader and len(self) else ""

    def steps(self, end_ns: int | None = None) -> Steps:
        """All steps; once the code has ended, also a last step that did its work and has no boundary."""
        if end_ns is not None:
            self._close_last_step(end_ns)
        return steps_of_rows(self._rows.table(), self._origin_ns, ended=end_ns is not None)

    def read(self, marks: Marks) -> None:
        """Continue with these marks. Steps that only repeat the previous step are read all at once."""
        at, turn, last, alike = 0, 0, -1, 0  # `turn`: marks of the newest step, which ended at mark `last`
        state: dict[str, Any] = {}
        steps = self._rows
        while at < len(marks):
            first, rows = at, marks[at : at + AT_A_TIME].tolist()
            for at, (t_ns, kind, argument) in enumerate(rows, first + 1):
                count = len(steps)
                self._read_mark(t_ns, kind, argument)
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
        """Everything that decides how the next mark is read, without times."""
        times = {"_request_ns", "_backward_end_ns", "_rows", "_open", "_mark_count", "_marks_before", "_own_ns"}
        own = {name: value for name, value in vars(self).items() if name not in times}
        step = replace(self._open, row=self._open.row[1:])
        return own | {"open": step, "_training_loaders": len(self._training_loaders), "_began": [*self._began]}

    def _repeat(self, marks: Marks, last: int, turn: int) -> int:
        """Close a step for each turn after mark `last` that repeats the previous one; returns the number of marks."""
        near = marks[last - turn : last + 1 + REPEATS * turn]
        table = repeated_rows(near, turn, self._rows.newest, self._mark_ns)
        count = (len(table) - 1) * turn
        if count > 0:
            self._rows.extend(table[1:])
            self._own_ns += int(table[1:, OWN].sum()) - count * self._mark_ns
            self._mark_count += count
            self._marks_before += count
            self._open.row[START] = int(table[-1, END])
        return max(0, count)

    def _read_mark(self, t_ns: int, kind: int, argument: int) -> None:
        """Read one mark; frequent kinds come first."""
        if self._stopped:
            return
        match kind:
            case Kind.ASK | Kind.ITER:
                self._request(argument, t_ns, kind == Kind.ITER)
            case Kind.GOT | Kind.END | Kind.ITERATOR:
                self._answer(kind, argument, t_ns)
            case Kind.BACKWARD | Kind.GRAD:
                self._backward_pass(bool(argument), t_ns, backward=kind == Kind.BACKWARD)
            case Kind.BACKWARD_END:
                self._in_backward, self._backward_end_ns = False, t_ns
            case Kind.STEP:
                self._began[argument] = t_ns
            case Kind.STEPPED:
                if self._scaling:
                    self._scaling[-1] = None
                self._optimizer_step(argument, self._began.pop(argument, t_ns), t_ns)
            case Kind.HAND:
                self._end_by_hand(t_ns)
            case Kind.SCALE:
                self._scaling.append((argument, t_ns))
            case Kind.SCALED | Kind.SCALE_FAILED:
                call = self._scaling.pop()
                if kind == Kind.SCALED and call is not None:
                    self._optimizer_step(*call, t_ns)
            case Kind.RESUME:
                self._open.row[START] = max(self._open.row[START], t_ns)
                self._open.row[FLAGS] |= PROFILER_EDGE * argument
                self._open.others = ()
                self._request_ns = max(self._request_ns, t_ns)
            case Kind.OWN:
                self._own_ns += argument
                self._open.row[OWN] += argument
                self._request_ns += argument if self._depth else 0
            case Kind.COMPILE:
                self._open.row[FLAGS] |= COMPILED
            case Kind.UPDATED:
                self._batch_is_step = True
            case Kind.PHASE:
                self._phase = argument
            case Kind.BEGIN:
                self._open.row[START] = t_ns
            case Kind.STOP:
                self._stopped = True
        self._mark_count += 1

    def _request(self, loader: int, t_ns: int, fresh: bool) -> None:
        """The loop requests an iterator or a batch from a loader. A loader within a loader does not count."""
        self._depth += 1
        if self._depth > 1:
            return
        if not (self._manual or self._by_optimizer or self._by_backward):
            self._before_loader(loader, t_ns, fresh)
        self.has_loader = self._open.has_request = True
        if fresh and loader not in self._open.evaluations:
            self._open.row[FLAGS] |= EPOCH_START
        self._requested_loader, self._request_ns = loader, t_ns

    def _answer(self, kind: int, samples: int, t_ns: int) -> None:
        self._depth -= 1
        if self._depth > 0:
            return
        step, asking = self._open, self._requested_loader
        step.row[WAIT] += max(0, t_ns - max(self._request_ns, step.row[START]))
        if asking in step.evaluations:
            return
        if kind == Kind.GOT:
            step.row[BATCHES] += 1
            step.row[SAMPLES] += samples if samples >= 0 else UNKNOWN
            step.exhausted = None
            if asking not in step.feeders:
                step.feeders += (asking,)
        else:
            step.exhausted = asking if kind == Kind.END else None

    def _backward_pass(self, updated: bool, t_ns: int, *, backward: bool) -> None:
        """A backward pass begins; `updated`: the first one after weights were updated."""
        if updated and self.without_optimizer and (self._by_backward or not self._open.feeders):
            self._updated(t_ns)
        if not backward:
            return
        if not self._has_backward:
            if self.without_optimizer:
                self._merge_rows(self._prefetch_count())
            self._first_backward_ns = t_ns
            self._has_backward = True
        self._open.backwards += 1
        self._in_backward = True

    def _updated(self, t_ns: int) -> None:
        """Weights were updated by hand, and no loader separates steps: a step ends here."""
        if not self._by_backward:
            self._by_backward = True
            self._merge_rows(0)
            start_ns = max(self._open.row[START], self._first_backward_ns)
            self._open = open_step(start_ns, self._open.backwards)
        if self._is_fed_by_loader():
            self._by_backward = False
            return
        if len(self) == 1 and self._first_backwards < self._open.backwards:
            self._merge_rows(0)  # a GAN updates the compared weights amid a step: the first row was part of a step
        if not len(self):
            self._first_backwards = self._open.backwards
        self._close(t_ns)

    def _end_by_hand(self, t_ns: int) -> None:
        """After the first `gpulab.step()`, only `gpulab.step()` ends steps."""
        if not self._manual:
            self._manual = True
            begun = np.flatnonzero(self._rows.table()[:, FLAGS] & EPOCH_START)
            anew = self._open.row[FLAGS] & EPOCH_START or self._by_backward
            self._merge_rows(0 if anew else len(self) - (int(begun[-1]) if len(begun) else 0))
        self._close(t_ns)

    # -- requests to a loader --------------------------------------------------------------------------------------

    def _before_loader(self, loader: int, t_ns: int, fresh: bool) -> None:
        """Close the open step, continue it, or begin it anew."""
        step = self._open
        if step.optimized_ns is not None:
            self._training_loaders.update(step.feeders)
            self._close(t_ns)
        elif not step.feeders:
            if fresh and step.exhausted is not None and self.undecided:
                self._batch_is_step = len(self) > 0  # a whole epoch trained, and no optimizer stepped
            if step.exhausted is not None or not step.has_request:
                self._open = open_step(t_ns)
        elif self._optimizer is None:
            self._next_batch(loader, t_ns, fresh)
        elif self._is_evaluation(loader, fresh):
            self._open = open_step(t_ns)
        elif fresh and step.backwards and self._training_loaders and loader not in self._training_loaders:
            step.evaluations += (loader,)

    def _next_batch(self, loader: int, t_ns: int, fresh: bool) -> None:
        """Without an optimizer the same loader's next batch begins a step; other loaders' batches belong to it."""
        step = self._open
        if step.exhausted is not None and step.exhausted not in step.feeders:  # zip: the other loader had none left
            self._open = open_step(t_ns)
        elif fresh and step.backwards and self.undecided and loader not in (*step.feeders, step.exhausted):
            step.evaluations += (loader,)
        elif fresh or loader in step.feeders:
            if step.backwards:
                self._backward_loaders.update(step.feeders)
            elif self._has_backward and self._backward_loaders.isdisjoint(step.feeders):
                self._open = open_step(t_ns)  # a batch of an evaluation
                return
            self._close(t_ns)

    def _is_evaluation(self, loader: int, fresh: bool) -> bool:
        """Whether the batches of the open step, with which no optimizer stepped, were evaluation."""
        step = self._open
        if step.backwards:  # an unfinished accumulation at the end of an epoch, followed by an evaluation
            return fresh and bool(step.evaluations) and loader not in step.evaluations
        if loader in step.feeders:
            return fresh or step.exhausted is not None
        never_trained = self._training_loaders.isdisjoint(step.feeders)
        return step.exhausted in step.feeders or (never_trained and (fresh or loader in self._training_loaders))

    # -- optimizer steps -------------------------------------------------------------------------------------------

    def _optimizer_step(self, optimizer: int, start_ns: int, end_ns: int) -> None:
        """An optimizer has stepped, or GradScaler has skipped its step."""
        if self._optimizer is None:  # all batches since the first backward pass are one step; without one, no step
            self._optimizer = optimizer
            if not self._manual and (not self._has_backward or self._by_backward or not self._batch_is_step):
                self._merge_rows(len(self) if self._has_backward and not self._by_backward else 0)
                self._by_backward = False
        if not self._manual:
            self._choose_optimizer(optimizer)
        step = self._open
        step.row[OPTIMIZER] += max(0, end_ns - max(start_ns, self._backward_end_ns, step.row[START]))
        if step.optimized_ns is None:
            step.exhausted_first = step.exhausted is not None
        step.optimized_ns, step.batches_when_optimized = end_ns, step.row[BATCHES]
        if optimizer != self._optimizer:
            self._other_optimizer(optimizer, end_ns)
            return
        self._round, self._other_steps = max(self._round, self._other_steps), 0
        if not self._by_optimizer or self._manual:
            return
        self._fed_steps = self._fed_steps + 1 if step.row[BATCHES] else 0
        if self._fed_steps >= 2:
            self._by_optimizer = False
        else:
            self._close(end_ns)

    def _choose_optimizer(self, optimizer: int) -> None:
        """Decide whether optimizer steps alone make the steps, and which optimizer ends one: the last of a round."""
        step, others = self._open, self._open.others
        if not self._by_optimizer and not self.has_loader:
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
            self._open, self._other_steps, self._round = open_step(end_ns), 0, len(others)
        elif step.optimized_ns is not None and step.row[BATCHES] == step.batches_when_optimized:
            self._by_optimizer, self._fed_steps = True, 0
            self._close(step.optimized_ns)

    def _other_optimizer(self, optimizer: int, end_ns: int) -> None:
        """Another optimizer has stepped: as part of this step, or because a new loop with this optimizer has begun."""
        self._other_steps += 1
        if self._by_optimizer and not self._manual:
            self._open.others += ((optimizer, end_ns, self._open.row[:]),)
        sole = self._by_optimizer and self._round == 0 and len(self) >= 2  # no other optimizer has stepped so far
        if self._other_steps > (1 if sole else OPTIMIZER_RETIRES_AFTER):
            self._optimizer, self._other_steps, self._round = optimizer, 0, 0
            self._split_step()

    def _split_step(self) -> None:
        """Each step of the newest optimizer turns out to be a step of the run."""
        others, before = self._open.others, [0] * PHASE
        for _, end_ns, row in [o for o in others if o[0] == others[-1][0]]:
            self._open.row[WAIT:PHASE] = [a - b for a, b in zip(row[WAIT:PHASE], before[WAIT:PHASE], strict=True)]
            self._close(end_ns)
            before = row

    def _close(self, end_ns: int) -> None:
        step, row = self._open, self._open.row
        row[END], row[PHASE] = max(end_ns, row[START]), self._phase
        row[OWN] += self._mark_ns * (self._mark_count - self._marks_before)
        self._marks_before = self._mark_count
        if step.feeders:
            self.feeder, self._feeder_count, row[FEEDER] = step.feeders[0], len(step.feeders), step.feeders[0]
        if step.exhausted_first and not self._by_optimizer and not self._manual:
            row[FLAGS] |= EXHAUSTED_FIRST
        self._rows.append(row)
        self._batch_is_step |= len(self) >= UNSETTLED_BATCHES
        self._open = open_step(row[END])

    def _merge_rows(self, count: int) -> None:
        """Add the newest `count` rows to the open step, whose beginning they were; drop the older ones."""
        self._open.prepend(self._rows.table(len(self) - count))
        self._batch_is_step = False
        self.generation += len(self) > 0
        self._rows.clear()

    def _prefetch_count(self) -> int:
        """How many rows are batches fetched ahead (Accelerate) in the epoch of the first backward pass."""
        step = self._open
        loader = step.feeders[0] if step.feeders else step.exhausted
        if step.row[FLAGS] & EPOCH_START or loader is None:
            return 0
        ahead = prefetch_count(self._rows.table()[-UNSETTLED_BATCHES:], loader)
        return 0 if ahead == UNSETTLED_BATCHES or (ahead > 1 and not step.feeders) else ahead  # list(loader)

    def _is_fed_by_loader(self) -> bool:
        """Whether a loader feeds the loop after all: two steps in a row have batches. A single one is an evaluation."""
        step = self._open
        self._fed_steps = self._fed_steps + 1 if step.row[BATCHES] else 0
        if self._fed_steps < 2:
            step.row[WAIT] = step.row[BATCHES] = step.row[SAMPLES] = 0
            step.feeders = ()
        return self._fed_steps >= 2

    def _close_last_step(self, end_ns: int) -> None:
        """Close a last step that did its work. A last update by hand has no mark: it ends at its backward pass."""
        step, at_ns = self._open, None
        if self._manual:
            return
        if self._by_optimizer:
            if self._other_steps > max(1, self._round) and len({o[0] for o in step.others}) == 1:
                self._split_step()
        elif self._by_backward:
            complete = step.backwards - self._in_backward > 0  # a pass that the run's end cut short does not count
            at_ns = self._backward_end_ns if complete and not self._is_fed_by_loader() else None
        elif step.optimized_ns is not None:
            at_ns = step.optimized_ns
        elif self._optimizer is None and len(self) and step.feeders and step.exhausted is None:
            at_ns = end_ns
        if at_ns is not None:
            step.row[FLAGS] |= PARTIAL
            self._close(at_ns)
