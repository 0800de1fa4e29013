"""What the ranks of one experiment have to agree on: each decision is the first one's, each failure everyone's.

A rank that ends a run earlier than the others leaves them waiting in a collective. So nothing ends a run of ranks by
the clock: it has as many steps on all of them, and whether another one follows is decided between two runs.
"""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import msgspec

Agreed = TypeVar("Agreed")

ATTEMPT = "TORCHELASTIC_RESTART_COUNT"  # torchrun's: with it the runs of each attempt are a job of their own
PORT, IS_THERE = "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE"  # where the ranks meet, and that somebody listens there
KEPT_GROUPS = 8  # of process groups that are over
LONGEST_WAIT_S = 3600.0  # for the slowest rank's run to end


class Agreement:
    """Of one process alone: what it says holds."""

    rank = 0
    size = 1

    def of_first(self, value: Agreed) -> Agreed:
        """What the first rank says. Plain data: numbers, texts, lists."""
        return value

    def of_all(self, value: Agreed) -> list[Agreed]:
        """What each rank says, in their order."""
        return [value]

    @property
    def is_of_several(self) -> bool:
        return self.size > 1

    @contextmanager
    def one_run(self) -> Iterator[None]:
        """The user's code runs inside."""
        yield


class RanksAgreement(Agreement):
    """Of the ranks that torchrun has started, by a file that all of them see. Imports torch."""

    def __init__(self, file: Path, environment: Mapping[str, str] = os.environ) -> None:
        from torch.distributed import FileStore  # type: ignore[attr-defined]

        self.rank, self.size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
        self._store: Any = FileStore(str(file), self.size)
        self._store.set_timeout(timedelta(seconds=LONGEST_WAIT_S))
        self._count = 0
        self._runs = 0
        self._past_groups: list[_Group] = []

    def of_first(self, value: Agreed) -> Agreed:
        """As the first rank has it. Waits for it."""
        key = self._next()
        if self.rank == 0:
            self._store.set(key, msgspec.msgpack.encode(value))
            return value
        decided: Agreed = msgspec.msgpack.decode(self._store.get(key))
        return decided

    def of_all(self, value: Agreed) -> list[Agreed]:
        """As each rank has it. Waits for all of them."""
        key = self._next()
        self._store.set(f"{key}/{self.rank}", msgspec.msgpack.encode(value))
        return [msgspec.msgpack.decode(self._store.get(f"{key}/{rank}")) for rank in range(self.size)]

    @contextmanager
    def one_run(self) -> Iterator[None]:
        """The code may begin a process group inside, as in a process of its own; it is gone at the end."""
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        self._runs += 1
        if len(self._past_groups) > KEPT_GROUPS:
            gc.collect()
            self._past_groups.clear()
        meeting = None  # a store of its own: in one that was used the addresses of the last run's group still stand
        if self.rank == 0:
            meeting = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        port = self.of_first(meeting.port if meeting is not None else 0)
        own = {ATTEMPT: str(self._runs), PORT: str(port), IS_THERE: str(True)}
        before, there = {name: os.environ.get(name) for name in own}, _default_group()
        os.environ.update(own)
        try:
            yield
        finally:
            if not there and _default_group():
                with suppress(Exception):  # another rank has failed, and its end of the group with it
                    self._past_groups.append(_Group())
                    sys.modules["torch.distributed"].destroy_process_group()
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value

    def _next(self) -> str:
        self._count += 1
        return f"agreed-{self._count}"


class _Group:
    """Outlives its users, such as DistributedDataParallel in the frames of a run that ended early.

    Whoever lets go of it last waits for its threads, and these may need the interpreter's lock: a user's object holds
    that meanwhile, and all stand still; these references of PyTorch's own do not.
    """

    def __init__(self) -> None:
        import torch

        world: Any = torch.distributed.group.WORLD
        devices = [torch.device(kind) for kind in ("cpu", "cuda")]
        self._backends: list[Any] = []
        for device in devices:
            with suppress(RuntimeError):  # it has none for that device
                self._backends.append(world._get_backend(device))
        self._world = world


class Failed(msgspec.Struct, frozen=True):
    """A run that failed on some rank; `when_s` by that rank's own clock."""

    rank: int
    words: str
    when_s: float


def first_failure(ranks: Agreement, words: str) -> Failed | None:
    """Whose failure came first, of what each rank says of its own run (empty: it went well)."""
    failures: list[list[Any]] = ranks.of_all([words, time.time()])
    failed = [Failed(rank, str(text), float(when)) for rank, (text, when) in enumerate(failures) if text]
    return min(failed, key=lambda one: one.when_s, default=None)


def _default_group() -> bool:
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and bool(distributed.is_available()) and bool(distributed.is_initialized())
