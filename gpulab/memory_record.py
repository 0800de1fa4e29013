"""The record of memory: who holds it, what a step needs, and why a run ran out of it. No I/O, no conclusions."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

HoldingKind = Literal[
    "parameters", "buffers", "gradients", "optimizer state", "saved activations", "batches", "variables", "unnamed"
]
Moment = Literal["backward", "update", "end"]


class Holding(Struct, frozen=True):
    """Tensor memory with one owner; each storage is counted once, however many views it has.

    `owner`: as the user would write it (`history`, `Out[2]`), or a module's path and class. `line`: the user's line
    that made it; empty if unknown. `others`: further names that keep the same memory alive.
    """

    kind: HoldingKind
    owner: str
    bytes: int
    line: str = ""
    others: tuple[str, ...] = ()


class Ledger(Struct, frozen=True):
    """All live tensors on one device: before a backward pass, before an update, or at the end of the run."""

    device: str
    step: int
    moment: Moment
    holdings: tuple[Holding, ...]

    @property
    def bytes(self) -> int:
        """The sum of all holdings: the bytes of all live storages."""
        return sum(holding.bytes for holding in self.holdings)

    def of(self, kind: HoldingKind) -> int:
        """The bytes of one kind."""
        return sum(holding.bytes for holding in self.holdings if holding.kind == kind)


class Growth(Struct, frozen=True):
    """One owner's memory that grows with each step or each run of a cell; `line`: where it grows, empty if unknown."""

    owner: str
    bytes_each: float
    count: int  # steps or runs over which it grew
    line: str = ""


class Pool(Struct, frozen=True):
    """The caching allocator of a GPU: bytes in use, bytes taken from the driver, and the largest free block.

    `retries`: how often it had to give all its cached memory back and ask again.
    """

    allocated_bytes: int
    reserved_bytes: int
    largest_free_bytes: int
    retries: int


ADDRESS_SPACE = "RLIMIT_AS"


class Room(Struct, frozen=True):
    """How much more memory a process may take, and its limit (ADDRESS_SPACE, "control group", "GPU" or "machine")."""

    free_bytes: int
    total_bytes: int
    limit: str

    @property
    def kills(self) -> bool:
        """Whether the kernel kills the process at the limit, without an exception."""
        return self.limit in ("control group", "machine")


class OutOfMemory(Struct, frozen=True):
    """How a run ran out of memory. `request_bytes`: what was asked for, None if the error does not say.

    `room`: what was free when the error arrived.
    """

    device: str
    request_bytes: int | None
    line: str
    steps: int  # complete steps
    holdings: tuple[Holding, ...] = ()
    room: Room | None = None
    pool: Pool | None = None


class Survey(Struct, frozen=True):
    """The owners of all tensor memory, the largest first, by device. `garbage_bytes`: freed by collecting cycles.

    `is_whole` is false if the search took too long.
    """

    owners: dict[str, tuple[Holding, ...]]
    garbage_bytes: dict[str, int]
    is_whole: bool = True

    @property
    def total_bytes(self) -> dict[str, int]:
        return {device: sum(holding.bytes for holding in rows) for device, rows in self.owners.items()}


class MemoryAccount(Struct, frozen=True):
    """What is known of a run's tensor memory. `ledgers`: in order of time; None: it did not happen."""

    ledgers: tuple[Ledger, ...] = ()
    growth: tuple[Growth, ...] = ()  # per step
    rerun: Growth | None = None  # per run of the same cell
    failure: OutOfMemory | None = None
    pool: Pool | None = None
    room: Room | None = None
    cost_ns: int = 0  # time spent on ledgers
