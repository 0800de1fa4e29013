"""What filled the memory of a run at its peak, as rows whose sum is the peak; and how it changed over the steps."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from gpulab.memory_record import Holding, HoldingKind, Ledger
from gpulab.run import Run

KINDS: tuple[HoldingKind, ...] = (
    "parameters",
    "gradients",
    "optimizer state",
    "buffers",
    "saved activations",
    "batches",
    "variables",
    "unnamed",
)


class PeakMemory(Struct, frozen=True):
    """The peak of tensor memory on the run's device.

    `bytes` is the allocator's peak, or the sum of live storages where the allocator keeps no statistics (CPU).
    `unknown_bytes`: the rest of the peak that the ledger does not show: workspaces and results within operators.
    `reserve_bytes`: taken from the driver and unused at the peak; None without a caching allocator.
    """

    ledger: Ledger
    bytes: int
    unknown_bytes: int
    reserve_bytes: int | None

    def share(self, count: float) -> float:
        return count / self.bytes if self.bytes else 0.0

    @property
    def by_kind(self) -> list[tuple[HoldingKind, int]]:
        """The bytes of each kind, the largest first; no kind without bytes."""
        sums = [(kind, self.ledger.of(kind)) for kind in KINDS]
        return sorted(((kind, count) for kind, count in sums if count), key=lambda pair: -pair[1])

    def rows(self, kind: HoldingKind) -> list[Holding]:
        """The holdings of one kind, the largest first."""
        return [holding for holding in self.ledger.holdings if holding.kind == kind]


def device_name(run: Run) -> str:
    """The device as ledgers name it."""
    return "cpu" if run.device.kind == "cpu" else f"cuda:{run.device.index or 0}"


def ledgers_of(run: Run) -> tuple[Ledger, ...]:
    """The ledgers of the run's device."""
    account, device = run.memory_account, device_name(run)
    return () if account is None else tuple(ledger for ledger in account.ledgers if ledger.device == device)


def memory_peak(run: Run) -> PeakMemory | None:
    """None if no ledger was taken: the code had fewer than two backward passes."""
    ledgers = [ledger for ledger in ledgers_of(run) if ledger.moment != "end"]
    if not ledgers:
        return None
    first = ledgers[: next((i for i, one in enumerate(ledgers) if one.step != ledgers[0].step), len(ledgers))]
    ledger = max(first, key=lambda one: one.bytes)  # the first step's ledgers name modules and lines
    peak, reserved = run.memory.peak_allocated_bytes, run.memory.peak_reserved_bytes
    total = max(ledger.bytes, peak or 0)
    reserve = None if peak is None or reserved is None else max(0, reserved - peak)
    return PeakMemory(ledger, total, total - ledger.bytes, reserve)


def over_steps(ledgers: Sequence[Ledger]) -> list[Ledger]:
    """One ledger for each step in which one was taken: the larger of its two moments; none of the end of the run."""
    ledgers = [ledger for ledger in ledgers if ledger.moment != "end"]
    by_step: dict[int, Ledger] = {}
    for ledger in ledgers:
        if ledger.step not in by_step or by_step[ledger.step].bytes < ledger.bytes:
            by_step[ledger.step] = ledger
    return [by_step[step] for step in sorted(by_step)]


# -- what frees an owner's memory --------------------------------------------------------------------------------------

_NOT_NAMES = ("thread ", "module ", "no name ")  # `del` in the notebook does not free what these hold
_WORDS = {"sys.last_traceback": "traceback", "traceback": "traceback"}
_WORDS |= dict.fromkeys(("Out", "_", "__", "___", "_oh"), "out")


def what_frees(*owners: str) -> str:
    """`del` of all names that hold it, or the command for outputs and tracebacks; empty if neither frees it."""
    if any(owner.startswith(_NOT_NAMES) for owner in owners):
        return ""
    names = [_root(owner) for owner in owners if not _word(owner)]
    words = [_word(owner) for owner in owners if _word(owner)]
    parts = [f"del {', '.join(dict.fromkeys(names))}"] if names else []
    parts += [f"%gpulab memory --free {','.join(dict.fromkeys(words))}"] if words else []
    return "; ".join(parts)


def is_kept_by_python(owner: str) -> bool:
    """Whether IPython or Python holds it, an output or a traceback, and no name of the user's."""
    return bool(_word(owner))


def _word(owner: str) -> str:
    """What `--free` calls it: "traceback", "out"; empty for a name of the user's."""
    root = _root(owner)
    return _WORDS.get(root) or ("out" if root.startswith("_") and root[1:].isdigit() else "")


def _root(owner: str) -> str:
    """The name at which it begins: of `trainer.cache[0]` it is `trainer`."""
    for end in ("[", ":", " ", "'"):
        owner = owner.partition(end)[0]
    return owner if owner.startswith("sys.") else owner.partition(".")[0]
