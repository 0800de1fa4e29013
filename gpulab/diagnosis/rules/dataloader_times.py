"""What the time to make a batch goes to, cause by cause: which of them is cured depends on it."""

from __future__ import annotations

from gpulab.analysis.host.dataloader import LoadingFacts
from gpulab.formatting import duration

_MOST = 0.5  # ours: what takes half of a batch's time decides what its workers need
_PART_TOLD, _WAIT_TOLD = 0.01, 0.05  # ours, of a batch's time: a smaller part, or wait, is left out of the sentence


def times_by_cause(inside: LoadingFacts) -> dict[str, float]:
    """µs per batch by cause. Waiting for a core is part of what computes; other waiting is not ready for one."""
    waited = inside.read_us * (inside.read_waited_fraction or 0.0)
    waited += inside.transform_us * (inside.transform_waited_fraction or 0.0)
    working, free = inside.read_us + inside.transform_us - waited, 1 - (inside.core_wait_fraction or 0.0)
    return {
        "cpu_preprocessing": working * free,
        "storage_bound": waited,
        "slow_collate": inside.collate_us * free,
        "cpu_oversubscribed": (working + inside.collate_us) * (1 - free),
    }


def mostly_waits(inside: LoadingFacts) -> bool:
    """At least half of the time to make a batch is waiting for a disk, a network or a lock: it needs no core."""
    return times_by_cause(inside)["storage_bound"] >= _MOST * inside.batch_us


def making(inside: LoadingFacts) -> str:
    """How long a batch takes to make and what that goes to, in words."""
    return f"making one batch takes {duration(inside.batch_us)} (median of {inside.batches}), of it {_split(inside)}"


def _split(inside: LoadingFacts) -> str:
    parts = {
        "reading": inside.read_us,
        "transforming": inside.transform_us,
        "putting together": inside.collate_us,
        "page-locking": inside.pin_us or 0.0,
    }
    told = ", ".join(f"{name} {duration(us)}" for name, us in parts.items() if us >= _PART_TOLD * inside.batch_us)
    waits = {"for a disk, a network or a lock": "storage_bound", "for a free processor core": "cpu_oversubscribed"}
    times = times_by_cause(inside)
    for what, key in waits.items():
        if times[key] >= _WAIT_TOLD * inside.batch_us:
            told += f"; {duration(times[key])} is waiting {what}"
    return told


__all__ = ["making", "mostly_waits", "times_by_cause"]
