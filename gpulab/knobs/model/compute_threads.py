"""How many threads PyTorch splits an operator among on the CPU: fewer leave cores to the processes that load data."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from gpulab.knobs.knob import Kind, Log, Permanent, Value, Verification
from gpulab.knobs.observe.observation import Scene
from gpulab.knobs.values import whole_number
from gpulab.run import Run

_AT_END = "threads at the end"


class ComputeThreads:
    """torch.set_num_threads. Worker processes of a DataLoader compute with one thread each in any case."""

    name = "compute_threads"
    title = "Compute threads"
    help = "Threads that share an operator on the CPU: fewer, where processes that load data need the cores"
    kind: Kind = "backend setting"
    lesson = ""
    changes_training = ""
    options: tuple[Value, ...] = (1, 2, 4, 8)

    def parse(self, text: str) -> Value:
        """A whole number from 1 on. Raises UsageError."""
        return whole_number(self.name, text, 1)

    def found(self, scene: Scene) -> Value | None:
        """torch's setting at the end of the reference run."""
        return scene.compute_threads

    def refuses(self, scene: Scene, value: Value) -> str | None:
        """Where a GPU computes, or PyTorch was not used."""
        if scene.device.kind == "cuda":
            return "the GPU computes here: these are threads of operators on the CPU"
        if scene.compute_threads is None:
            return "how many threads PyTorch computes with was not seen"
        return None

    @contextmanager
    def applied(self, value: Value) -> Iterator[Log]:
        """For the whole process."""
        import torch

        log, before = Log(), torch.get_num_threads()
        torch.set_num_threads(int(value))
        try:
            yield log
        finally:
            log.counts[_AT_END] = torch.get_num_threads()
            torch.set_num_threads(before)

    def forget(self) -> None:
        """Nothing is kept."""

    def verify(self, scene: Scene, value: Value, log: Log, run: Run) -> Verification:
        """By torch's own number when the code was over: the code may set it, too."""
        count = log.counts.get(_AT_END)
        if count is None:
            return Verification("cannot tell", "the run did not come to its end")
        if count != value:
            return Verification("no effect", f"the code sets the number itself: PyTorch had {count} at the end")
        return Verification("took effect", f"PyTorch had {count} at the end of the run")

    def permanent(self, scene: Scene, value: Value) -> Permanent:
        """One line before the loop."""
        return Permanent(f"torch.set_num_threads({value})  # before the loop")


COMPUTE_THREADS = ComputeThreads()

__all__ = ["COMPUTE_THREADS"]
