"""Agreement among the ranks of one experiment: rank 0 decides, and a failure on one rank fails the run on all ranks.

A rank that ends a run earlier than the others leaves them waiting in a collective. So no clock ends a run of several
ranks: every rank runs the same number of steps, and the ranks decide between two runs whether another run follows.
"""

from __future__ import annotations

import gc
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from gpulab.analysis.facts import Facts, facts
from gpulab.capture.threads import stop_behind
from gpulab.errors import GpulabError, StoreError
from gpulab.knobs.variables import setting_names
from gpulab.patching.attributes import replaced
from gpulab.run import Run
from gpulab.tuning.record import Experiment, Side

Agreed = TypeVar("Agreed")

ATTEMPT = "TORCHELASTIC_RESTART_COUNT"  # torchrun's: with it the runs of each attempt are a job of their own
PORT, IS_THERE = "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE"  # the ranks' rendezvous port; a store listens on it
MOST_PAST_GROUPS = 8  # finished process groups that are held
LONGEST_WAIT_S = 3600.0  # for the slowest rank's run to end


class Agreement:
    """The agreement of a single process with itself."""

    rank = 0
    size = 1
    failed_s: float | None = None  # when the code of the latest run raised, by this machine's clock

    def of_first(self, value: Agreed) -> Agreed:
        """The value of rank 0. Plain data: numbers, texts, lists."""
        return value

    def of_all(self, value: Agreed) -> list[Agreed]:
        """The value of each rank, in order."""
        return [value]

    @property
    def is_of_several(self) -> bool:
        return self.size > 1

    @contextmanager
    def one_run(self) -> Iterator[None]:
        """Encloses one run of the user's code."""
        yield


class RanksAgreement(Agreement):
    """The agreement of ranks that torchrun started, through a file that all of them see. Imports torch."""

    def __init__(self, file: Path, environment: Mapping[str, str] = os.environ) -> None:
        from torch.distributed import FileStore  # type: ignore[attr-defined]

        self.rank, self.size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
        self._store: Any = FileStore(str(file), self.size)
        self._store.set_timeout(timedelta(seconds=LONGEST_WAIT_S))
        self._count = 0
        self._runs = 0
        self._past_groups: list[_PastGroup] = []

    def of_first(self, value: Agreed) -> Agreed:
        """The value of rank 0; waits for it."""
        key = self._next()
        if self.rank == 0:
            self._store.set(key, msgspec.msgpack.encode(value))
            return value
        first: Agreed = msgspec.msgpack.decode(self._store.get(key))
        return first

    def of_all(self, value: Agreed) -> list[Agreed]:
        """The value of each rank; waits for all of them."""
        key = self._next()
        self._store.set(f"{key}/{self.rank}", msgspec.msgpack.encode(value))
        return [msgspec.msgpack.decode(self._store.get(f"{key}/{rank}")) for rank in range(self.size)]

    @contextmanager
    def one_run(self) -> Iterator[None]:
        """The code inside may create a process group, as in a fresh process; the group is destroyed at the end."""
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        self._runs += 1
        self.failed_s = None
        if len(self._past_groups) > MOST_PAST_GROUPS:
            self.release()
        meeting = None  # a new store: a used one still holds the addresses of the last run's group
        if self.rank == 0:
            meeting = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        port = self.of_first(meeting.port if meeting is not None else 0)
        own = {ATTEMPT: str(self._runs), PORT: str(port), IS_THERE: str(True)}
        there = _default_group()
        with setting_names(os.environ, own):
            try:
                with _collecting_groups(self._past_groups, _sockets()):
                    yield
            except BaseException as error:
                self.failed_s = time.time()
                if stop_behind(error) is None:  # the others may wait for this rank
                    for group in self._past_groups:
                        group.abort()
                raise
            finally:
                if not there and _default_group():
                    with suppress(Exception):  # another rank has failed and left the group
                        sys.modules["torch.distributed"].destroy_process_group()

    def release(self) -> None:
        """Release finished process groups, so that no other reference is the last one."""
        gc.collect()
        for group in self._past_groups:
            group.release()
        self._past_groups.clear()

    def _next(self) -> str:
        self._count += 1
        return f"agreed-{self._count}"


class _PastGroup:
    """Holds a process group longer than its users, such as DistributedDataParallel in the frames of an earlier run.

    The last owner to release a group waits for the group's threads, which may need the GIL. PyTorch's Reducer holds the
    GIL while it waits, which is a deadlock; the Python object of a backend releases the GIL first.
    """

    def __init__(self, group: Any, before: Mapping[int, str]) -> None:
        """`before`: the process's sockets before the group began."""
        import torch

        self._sockets = dict(_sockets().items() - before.items())
        self._backends: list[Any] = []
        for kind in ("cpu", "cuda"):
            with suppress(RuntimeError):  # the group has no backend for that device
                self._backends.append(group._get_backend(torch.device(kind)))
        self._group = group

    def abort(self) -> None:
        """Make ranks that wait for this one fail instead of waiting.

        gloo's own `abort` does nothing, and its connections close only when its last user is gone.
        """
        for backend in self._backends:
            with suppress(Exception):
                backend.abort()
        for number, _ in self._sockets.items() & _sockets().items():
            with suppress(OSError), socket.socket(fileno=os.dup(number)) as connection:
                connection.getpeername()  # raises for a listening socket: without that one gloo ends the process
                connection.shutdown(socket.SHUT_RDWR)

    def release(self) -> None:
        self._group = None
        self._backends.clear()


@contextmanager
def _collecting_groups(groups: list[_PastGroup], before: Mapping[int, str]) -> Iterator[None]:
    """Adds each default process group that is created inside. `before`: the sockets that are open already."""
    from torch.distributed import distributed_c10d

    name = "_update_default_pg"  # PyTorch calls this for each default group; a version without it may deadlock

    def wrap(original: Callable[[Any], None]) -> Callable[[Any], None]:
        def update(group: Any) -> None:
            if group is not None:
                with suppress(Exception):
                    groups.append(_PastGroup(group, before))
            original(group)

        return update

    with replaced(distributed_c10d, name, wrap) if hasattr(distributed_c10d, name) else nullcontext():
        yield


def _sockets() -> dict[int, str]:
    """The sockets of this process by file descriptor, with their inode names; empty outside Linux."""
    folder, here = "/proc/self/fd", dict[int, str]()
    with suppress(OSError):
        for name in os.listdir(folder):
            with suppress(OSError):
                target = os.readlink(f"{folder}/{name}")
                if target.startswith("socket:"):
                    here[int(name)] = target
    return here


class RankEnded(BaseException):
    """Another rank was interrupted or exited: the experiment ends."""


def error_of_all(ranks: Agreement, own: BaseException | None) -> BaseException | None:
    """The first error of the run on any rank; later errors are mere consequences. `own`: the error of this rank.

    "First" by each rank's own clock; an error that is no `Exception` (an interrupt) comes before all others.
    """
    if not ranks.is_of_several:
        return own
    goes_on = own is None or isinstance(own, Exception)
    words = "" if own is None else f"{type(own).__name__}: {own}"
    errors: list[list[Any]] = ranks.of_all([words, ranks.failed_s or time.time(), goes_on])
    failed = [(bool(may), float(when), rank, str(text)) for rank, (text, when, may) in enumerate(errors) if text]
    if not failed:
        return None
    experiment_goes_on, _, rank, text = min(failed)
    if rank == ranks.rank:
        return own
    message = f"rank {rank} failed: {text}"
    return GpulabError(message) if experiment_goes_on else RankEnded(message)


def _default_group() -> bool:
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and bool(distributed.is_available()) and bool(distributed.is_initialized())


class _Document(Struct, frozen=True):
    """`runs` are the ids of the sides' full runs; empty for a side without one."""

    experiment: Experiment
    runs: tuple[str, ...]


def encode(experiment: Experiment) -> bytes:
    """The experiment without its runs, for `decode`."""
    runs = tuple(side.facts.run.id if side.facts is not None else "" for side in experiment.sides)
    sides = tuple(map(_bare, experiment.sides))
    comparisons = tuple(replace(c, a=_bare(c.a), b=_bare(c.b)) for c in experiment.comparisons)
    return msgspec.msgpack.encode(_Document(replace(experiment, sides=sides, comparisons=comparisons), runs))


def decode(content: bytes, load: Callable[[str], Run]) -> Experiment:
    """Raises StoreError if the content cannot be read, or `load` does not find a run."""
    try:
        document = msgspec.msgpack.decode(content, type=_Document)
    except msgspec.MsgspecError as e:
        raise StoreError(f"What the ranks measured cannot be read: {e}.") from e
    experiment = document.experiment
    figures: list[Facts | None] = [facts(load(id_)) if id_ else None for id_ in document.runs]
    sides = tuple(replace(side, facts=own) for side, own in zip(experiment.sides, figures, strict=True))
    comparisons = tuple(
        replace(c, a=replace(c.a, facts=figures[0]), b=replace(c.b, facts=own))
        for c, own in zip(experiment.comparisons, figures[1:], strict=True)
    )
    return replace(experiment, sides=sides, comparisons=comparisons)


def joined(experiments: list[Experiment]) -> Experiment:
    """One experiment from several that ran on separate nodes, each with other settings of the same code.

    Each comparison keeps the A that ran on its own node.
    """
    first = experiments[0]
    return replace(
        first,
        sides=(first.sides[0], *(side for one in experiments for side in one.sides[1:])),
        comparisons=tuple(c for one in experiments for c in one.comparisons),
        seconds=max(one.seconds for one in experiments),
        stopped=any(one.stopped for one in experiments),
        notes=tuple(dict.fromkeys(note for one in experiments for note in one.notes)),
    )


def _bare(side: Side) -> Side:
    return replace(side, facts=None)
