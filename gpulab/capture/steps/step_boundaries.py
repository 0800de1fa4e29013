"""Find the steps of a training loop from marks that the loop leaves by itself. Pure: knows times, not torch.

A mark is one of: a DataLoader is asked (`__iter__` or `__next__`), it answers, a backward pass begins, an optimizer has
stepped, weights were changed without one, the user called `gpulab.step()`. What makes a step, best evidence first:

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

from collections import deque

from gpulab.capture.dataloader.wait_hooks import Answer
from gpulab.capture.steps.rows import BATCHES, EPOCH_START, FLAGS, PROFILER_EDGE, OpenStep, OtherStep, Rows
from gpulab.run import Phase, StepFlag, Steps
from gpulab.store.table_file import Writer

OPTIMIZER_RETIRES_AFTER = 16  # steps of other optimizers without one of the first
UNSETTLED_BATCHES = 32  # batches with a backward pass but no optimizer: after these, each batch is a step


class StepTracker:
    """Collects steps from marks. Marks that can end a step return True where they did.

    Marks and `last` are on any one clock, that of `origin_ns`; the steps of `finish` count from there.
    """

    def __init__(self, origin_ns: int) -> None:
        self._origin_ns = origin_ns
        self._open = OpenStep(origin_ns)
        self._rows = Rows()
        self._training: set[int] = set()  # loaders that have fed an optimizer step
        self.feeder: int | None = None  # the first loader of the newest step that had one
        self._feeding = 0  # how many loaders fed that step
        self._feeders: deque[int | None] = deque(maxlen=UNSETTLED_BATCHES)  # those of the newest rows
        self._optimizer: int | None = None
        self._strangers = 0  # steps of other optimizers since the last one of `_optimizer`
        self._round = 0  # most such steps between two of `_optimizer`
        self._by_optimizer = False  # steps end at Optimizer.step itself: no loader feeds them
        self._fed = 0  # consecutive steps that a loader fed, while `_by_optimizer`
        self._manual = False
        self._by_backward = False  # steps end where a backward pass begins: nothing else tells
        self._backward_ns: tuple[int, int] = (0, 0)  # begin of the first backward pass, end of the last
        self._first_backwards = 0  # passes in the first step that they made
        self.loader_seen = False  # a DataLoader was asked for anything
        self._backward_seen = False
        self._settled = False
        self._epoch_row: int | None = None  # the first step of the newest epoch
        self._asking = 0
        self._asked_ns = 0
        self._depth = 0
        self.phase = Phase.WARMUP
        self.generation = 0  # grows when the steps counted so far are taken back

    def begin(self, now_ns: int) -> None:
        """The user's code begins now: no step began before it."""
        self._open.start_ns = now_ns

    # -- what is known -------------------------------------------------------------------------------------------

    @property
    def count(self) -> int:
        """Steps that are certain. Batches before a first optimizer step may still become one accumulated step."""
        if self._optimizer is None and self.undecided:
            return 0
        return self._rows.count

    @property
    def undecided(self) -> bool:
        """Whether there were backward passes and nothing yet that tells a batch from a whole step."""
        return self._backward_seen and self.without_optimizer and not self._settled and not self._by_backward

    @property
    def without_optimizer(self) -> bool:
        """Whether no optimizer has stepped and the user has marked nothing: weights may be updated by hand."""
        return self._optimizer is None and not self._manual

    @property
    def source(self) -> str:
        """What marks the steps, in the user's words; empty while nothing did."""
        if self._manual:
            return "gpulab.step()"
        if self._optimizer is not None:
            return "Optimizer.step" if self._by_optimizer else "DataLoader and Optimizer.step"
        if self._by_backward:
            return "backward passes"
        return "DataLoader" if self.loader_seen and len(self._rows) else ""

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

    def last(self) -> tuple[int, int, int, int]:
        """Start, end, data wait (ns) and samples (-1 unknown) of the newest step. Raises IndexError without one."""
        return self._rows.last()

    def last_batches(self) -> int:
        """Batches that the newest step took from each of its loaders. Raises IndexError without a step."""
        return self._rows.value(-1, BATCHES) // max(1, self._feeding)

    # -- marks ---------------------------------------------------------------------------------------------------

    def loader_asked(self, loader: int, t_ns: int, *, fresh: bool = False) -> bool:
        """A loader is asked for a batch, or (`fresh`) for a new iterator. Nested requests count once."""
        self._depth += 1
        if self._depth > 1:
            return False
        closed = self._before_loader(loader, t_ns, fresh)
        self.loader_seen = True
        step = self._open
        step.asked = True
        if fresh and loader not in step.guests:
            step.flags |= EPOCH_START
        self._asking, self._asked_ns = loader, t_ns
        return closed

    def waits_from(self, t_ns: int, own_ns: int = 0) -> None:
        """What was done since the loader was asked, `own_ns` of it, was gpulab's own: the loop waits from now on."""
        self._open.own_ns += own_ns
        if self._depth == 1 and t_ns > self._asked_ns:
            self._asked_ns = t_ns

    def loader_answered(self, t_ns: int, answer: Answer, samples: int | None = None, own_ns: int = 0) -> None:
        """The loader gave a batch of `samples` (None: unknown), an iterator, or had none left (or raised).

        While the loop waited for it, gpulab itself was at work for `own_ns`.
        """
        self._depth -= 1
        step, asking = self._open, self._asking
        step.own_ns += own_ns
        if self._depth > 0:
            return
        began_ns = self._asked_ns if self._asked_ns > step.start_ns else step.start_ns
        wait_ns = t_ns - began_ns if t_ns > began_ns else 0
        if step.guests and asking in step.guests:
            step.data_wait_ns += wait_ns
            return
        step.data_wait_ns = max(0, step.data_wait_ns + wait_ns - own_ns)
        if answer == "batch":
            step.batches += 1
            if samples is None:
                step.samples_known = False
            else:
                step.samples += samples
            if asking not in step.fed:
                step.fed += (asking,)
        step.ended = asking if answer == "end" else None

    def spent(self, own_ns: int) -> None:
        """So long gpulab itself was at work in the open step."""
        self._open.own_ns += own_ns

    def backward(self, t_ns: int = 0) -> None:
        """A backward pass begins."""
        if not self._backward_seen:
            if self.without_optimizer:
                self._fold(self._fetched_ahead())
            self._backward_ns = (t_ns, t_ns)
            self._backward_seen = True
        self._open.backwards += 1

    def backward_ended(self, t_ns: int) -> None:
        if self._optimizer is None:
            self._backward_ns = (self._backward_ns[0], t_ns)

    def updated(self, t_ns: int) -> bool:
        """The next backward pass begins, and since the last one weights have changed that no optimizer has updated."""
        if not self.without_optimizer or (not self._by_backward and self._open.fed):
            return False
        if not self._by_backward:
            self._by_backward = True
            self._fold(0)
            backwards = self._open.backwards
            self._open = OpenStep(max(self._open.start_ns, self._backward_ns[0]), backwards=backwards)
        if self._is_fed_by_loader():
            self._by_backward = False
            return False
        if len(self._rows) == 1 and self._first_backwards < self._open.backwards:
            self._fold(0)  # the watched weights are updated amid a step (a GAN): the first row was a part of one
        if not len(self._rows):
            self._first_backwards = self._open.backwards
        self._close(t_ns)
        return True

    def by_hand(self) -> None:
        """Weights have changed and no optimizer did it: from here on each batch is a step."""
        self._settled = True

    def optimized(self, optimizer: int, start_ns: int, end_ns: int) -> bool:
        """An optimizer has stepped, or GradScaler decided that it should not."""
        if self._optimizer is None:
            self._first_optimizer(optimizer)
        closed, step = False, self._open
        if not self._manual and (self._by_optimizer or not self.loader_seen or step.optimized_ns is not None):
            closed = self._before_optimized(optimizer)
            step = self._open
        if start_ns < step.start_ns:
            start_ns = step.start_ns
        if end_ns > start_ns:
            step.optimizer_ns += end_ns - start_ns
        if step.optimized_ns is None:
            step.ended_first = step.ended is not None
        step.optimized_ns = end_ns
        step.batches_when_optimized = step.batches
        if optimizer != self._optimizer:
            return self._stranger(optimizer, end_ns) or closed
        if self._strangers:
            self._round, self._strangers = max(self._round, self._strangers), 0
        if not self._by_optimizer or self._manual:
            return closed
        self._fed = self._fed + 1 if step.batches else 0
        if self._fed >= 2:
            self._by_optimizer = False
            return closed
        self._close(end_ns)
        return True

    def manual(self, t_ns: int) -> bool:
        """The user says that a step ends here; from the first call on nothing else makes steps."""
        if not self._manual:
            self._manual = True
            anew = self._open.flags & EPOCH_START or self._by_backward
            self._fold(0 if anew else self._rows.since_epoch())
        self._close(t_ns)
        return True

    def resume(self, t_ns: int, *, profiler_edge: bool) -> None:
        """The open step begins now: what we did ourselves since its start belongs to no step."""
        self._open.start_ns = max(self._open.start_ns, t_ns)
        self._open.others = ()
        self._asked_ns = max(self._asked_ns, t_ns)
        if profiler_edge:
            self._open.flags |= PROFILER_EDGE

    def flag(self, flag: StepFlag) -> None:
        if self._rows.count:
            self._rows.add_flags(-1, int(flag))

    def finish(self, end_ns: int) -> Steps:
        """All steps. One whose work was done but that no boundary closed is kept, flagged PARTIAL."""
        self._close_what_is_left(end_ns)
        return self._rows.steps(self._origin_ns)

    def so_far(self, origin_ns: int) -> Steps:
        """The steps that have ended, while the run goes on. From any thread."""
        return self._rows.so_far(origin_ns)

    def write(self, spool: Writer) -> None:
        """Append the steps that are new to the journal. From one thread of ours at a time. Raises OSError."""
        self._rows.write(spool)

    # -- decisions: a loader is asked ------------------------------------------------------------------------------

    def _before_loader(self, loader: int, t_ns: int, fresh: bool) -> bool:
        """Close, keep or begin the open step, now that a loader is asked."""
        step = self._open
        if self._manual or self._by_optimizer or self._by_backward:
            return False
        if step.optimized_ns is not None:
            if not self._training.issuperset(step.fed):
                self._training.update(step.fed)
            self._close(t_ns)
            return True
        if not step.fed:
            if fresh and step.ended is not None and self.undecided:
                self._settled = len(self._rows) > 0  # a whole pass trained and no optimizer stepped
            if step.ended is not None or not step.asked:
                self._open = OpenStep(t_ns)
            return False
        if self._optimizer is None:
            return self._next_batch(loader, t_ns, fresh)
        if self._trained_nothing(loader, fresh):
            self._open = OpenStep(t_ns)
        elif fresh and step.backwards and self._training and loader not in self._training:
            step.guests += (loader,)
        return False

    def _next_batch(self, loader: int, t_ns: int, fresh: bool) -> bool:
        """Without an optimizer: the same loader's next batch is the next step, another loader's belongs to this one."""
        step = self._open
        if step.ended is not None and step.ended not in step.fed:  # zip: the other loader had none left
            self._open = OpenStep(t_ns)
            return False
        if loader not in step.fed and not fresh:
            return False
        if fresh and step.backwards and self.undecided and loader not in (*step.fed, step.ended):
            step.guests += (loader,)
            return False
        self._close(t_ns)
        return True

    def _trained_nothing(self, loader: int, fresh: bool) -> bool:
        """Whether the batches of the open step, which no optimizer has used, were evaluation."""
        step = self._open
        if step.backwards:  # an accumulation; left over from the last epoch where an evaluation followed
            return fresh and bool(step.guests) and loader not in step.guests
        if loader in step.fed:
            return fresh or step.ended is not None
        never_trained = self._training.isdisjoint(step.fed)
        return step.ended in step.fed or (never_trained and (fresh or loader in self._training))

    # -- decisions: an optimizer has stepped -----------------------------------------------------------------------

    def _first_optimizer(self, optimizer: int) -> None:
        """The batches since the first backward pass were one accumulated step; without any they were no steps."""
        self._optimizer = optimizer
        if self._manual:
            return
        if not self._backward_seen or self._by_backward:
            self._fold(0)
            self._by_backward = False
        elif not self._settled:
            self._fold(len(self._rows))

    def _before_optimized(self, optimizer: int) -> bool:
        """Find out whether optimizer steps alone make the steps; close what that decision leaves open."""
        step = self._open
        if self._by_optimizer:
            if optimizer == self._optimizer:
                self._learn_round(optimizer)
            return False
        if not self.loader_seen:
            self._by_optimizer = True
            return False
        again = step.optimized_ns is not None and step.batches == step.batches_when_optimized
        if again and optimizer == self._optimizer:
            assert step.optimized_ns is not None
            self._by_optimizer, self._fed = True, 0
            self._close(step.optimized_ns)
            return True
        return False

    def _learn_round(self, optimizer: int) -> None:
        """The first optimizer's second step: if each other one stepped once since, the last of them ends a step."""
        step, rows = self._open, self._rows
        others = [s.optimizer for s in step.others]
        if self._round or len(rows) != 1 or not others or len(set(others)) < len(others):
            return
        last = step.others[-1]
        rows.extend_first(last, step.flags & PROFILER_EDGE)
        self._open = OpenStep(last.end_ns)
        self._optimizer, self._strangers, self._round = last.optimizer, 0, len(others)

    def _stranger(self, optimizer: int, end_ns: int) -> bool:
        """Another optimizer has stepped: part of this step, or the beginning of a new loop with its own optimizer."""
        self._strangers += 1
        step = self._open
        if self._by_optimizer and not self._manual:
            sums = (step.data_wait_ns, step.optimizer_ns, step.batches, step.samples)
            step.others += (OtherStep(optimizer, end_ns, *sums),)
        if self._strangers <= self._patience():
            return False
        self._optimizer, self._strangers, self._round = optimizer, 0, 0
        return self._split()

    def _patience(self) -> int:
        """How many steps of others the first optimizer may miss; one that always stepped alone misses none."""
        alone = self._by_optimizer and self._round == 0 and len(self._rows) >= 2
        return 1 if alone else OPTIMIZER_RETIRES_AFTER

    def _split(self) -> bool:
        """The steps of the optimizer that came last were steps of their own."""
        others = self._open.others
        ends = [s for s in others if s.optimizer == others[-1].optimizer]
        before = OtherStep(0, 0, 0, 0, 0, 0)
        for s in ends:
            step = self._open
            step.data_wait_ns = s.data_wait_ns - before.data_wait_ns
            step.optimizer_ns = s.optimizer_ns - before.optimizer_ns
            step.batches = s.batches - before.batches
            step.samples = s.samples - before.samples
            samples_known = step.samples_known
            self._close(s.end_ns)
            self._open.samples_known = samples_known
            before = s
        if ends:
            self._open.samples_known = True
        return bool(ends)

    # -- rows ------------------------------------------------------------------------------------------------------

    def _close_what_is_left(self, end_ns: int) -> None:
        step = self._open
        if self._manual:
            return
        if self._by_backward:
            return self._close_last_backward()
        if self._by_optimizer:
            if self._strangers > max(1, self._round) and len({s.optimizer for s in step.others}) == 1:
                self._split()
            return
        inferred = self._optimizer is None and len(self._rows) > 0 and step.fed and step.ended is None
        if step.optimized_ns is not None or inferred:
            step.flags |= int(StepFlag.PARTIAL)
            self._close(step.optimized_ns if step.optimized_ns is not None else end_ns)

    def _close_last_backward(self) -> None:
        """The last update leaves no mark: its step ends with its backward pass, as far as is known."""
        if self._open.backwards and not self._is_fed_by_loader():
            self._open.flags |= int(StepFlag.PARTIAL)
            self._close(self._backward_ns[1])

    def _is_fed_by_loader(self) -> bool:
        """Whether a loader feeds the loop after all: batches in one step alone are an evaluation's."""
        step = self._open
        self._fed = self._fed + 1 if step.batches else 0
        if self._fed >= 2:
            return True
        step.batches = step.samples = step.data_wait_ns = 0
        step.fed = ()
        return False

    def _fetched_ahead(self) -> int:
        """Closed rows of the pass in which the first backward pass begins: batches fetched for it (Accelerate)."""
        step, rows = self._open, self._rows
        loader = step.fed[0] if step.fed else step.ended
        if step.flags & EPOCH_START or loader is None:
            return 0
        ahead = 0
        while ahead < len(self._feeders) and self._feeders[-ahead - 1] == loader:
            ahead += 1
            if rows.value(-ahead, FLAGS) & EPOCH_START:
                break
        if ahead == UNSETTLED_BATCHES or (ahead > 1 and not step.fed):  # list(loader): a pass kept for later
            return 0
        return ahead

    def _fold(self, count: int) -> None:
        """The newest `count` rows were the beginning of the open step; older ones were no steps."""
        self._rows.lead_into(self._open, count)
        self._epoch_row, self._settled = None, False
        self._feeders.clear()
        if len(self._rows):
            self.generation += 1
            self._rows.clear()

    def _close(self, end_ns: int) -> None:
        step, rows, fed = self._open, self._rows, self._open.fed
        if end_ns < step.start_ns:
            end_ns = step.start_ns
        if fed:
            self.feeder, self._feeding = fed[0], len(fed)
        if self._optimizer is None:  # afterwards nobody asks
            self._feeders.append(fed[0] if fed else None)
        if step.ended_first and not self._by_optimizer and not self._manual:
            self._give_back_batch(step)
        if step.flags & EPOCH_START:
            self._epoch_row = rows.count
        rows.append(step, end_ns, self.phase)
        if not self._settled and rows.count >= UNSETTLED_BATCHES:
            self._settled = True
        self._open = OpenStep(end_ns)

    def _give_back_batch(self, step: OpenStep) -> None:
        """A loop that fetches one batch ahead (Accelerate) has fetched the last step's batch in the epoch's first."""
        first, rows = self._epoch_row, self._rows
        if first is None or first == rows.count or step.flags & EPOCH_START or rows.value(first, BATCHES) < 2:
            return
        second = rows.value(first + 1, BATCHES) if first + 1 < rows.count else 0
        if step.batches == 0 or rows.value(first, BATCHES) == second + 1:
            rows.give_batch(first, step)
