"""How much of the GPU's memory a run took at its peak."""

from __future__ import annotations

from gpulab.run import Run


def memory_fraction(run: Run) -> float | None:
    """The peak of what tensors took, of the GPU's memory; None where either is not known."""
    total = run.memory.total_bytes or run.device.memory_total_bytes
    return run.memory.peak_allocated_bytes / total if run.memory.peak_allocated_bytes and total else None


def exact_memory_fraction(run: Run) -> float | None:
    """The same where the peak is exact; None where an earlier run hides it, so that it may have been higher."""
    return None if peak_is_hidden(run) else memory_fraction(run)


def peak_is_hidden(run: Run) -> bool:
    """Whether an earlier run of the process took more, so that this one's peak is not known."""
    return any(m.key == "memory" for m in run.missing)
