"""How many threads PyTorch splits an operator among on the CPU: fewer leave cores to the processes that load data."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from msgspec.structs import replace

from gpulab.knobs.knob import CodeEdit, Kind, Knob, KnobEffects, StepTimes, Value, Verification
from gpulab.knobs.observe.observation import Observation
from gpulab.run import Environment, Run

_AT_END = "threads at the end"


class ComputeThreads(Knob):
    """torch.set_num_threads. Worker processes of a DataLoader compute with one thread each in any case."""

    name = "compute_threads"
    title = "Compute threads"
    help = "Intra-op threads on the CPU: fewer threads leave cores for DataLoader workers"
    kind: Kind = "backend setting"
    options: tuple[Value, ...] = (1, 2, 4, 8)
    aliases = ("threads", "num_threads")
    same_training = True

    def value_in(self, observation: Observation) -> Value | None:
        """torch's setting at the end of the reference run."""
        return observation.compute_threads

    def refuses(self, observation: Observation, value: Value) -> str | None:
        if observation.device.kind == "cuda":
            return "this run computes on the GPU: these threads only run CPU operators"
        if observation.compute_threads is None:
            return "PyTorch's thread count was not observed"
        return None

    @contextmanager
    def applied(self, value: Value) -> Iterator[KnobEffects]:
        """For the whole process."""
        import torch

        effects, before = KnobEffects(), torch.get_num_threads()
        torch.set_num_threads(int(value))
        try:
            yield effects
        finally:
            effects.counts[_AT_END] = torch.get_num_threads()
            torch.set_num_threads(before)

    def verify(self, observation: Observation, value: Value, effects: KnobEffects, run: Run) -> Verification:
        """By torch's own number when the code was over: the code may set it, too."""
        count = effects.counts.get(_AT_END)
        if count is None:
            return Verification("cannot tell", "the run did not finish")
        if count != value:
            return Verification("no effect", f"the code sets the thread count itself: PyTorch had {count} at the end")
        return Verification("took effect", f"PyTorch had {count} at the end of the run")

    def environment_with(self, environment: Environment, value: Value) -> Environment:
        return replace(environment, compute_threads=int(value))

    def next_values(self, value: Value | None, times: StepTimes) -> Sequence[Value]:
        """Half as many, for small operators lose more by being shared than they gain; else all cores."""
        now, cores = int(value or 1), max(1, math.floor(times.cores))
        counts = [cores, now // 2] if now < cores else [now // 2]
        return [count for count in counts if count]

    def code_edit(self, observation: Observation, value: Value) -> CodeEdit:
        return CodeEdit(f"torch.set_num_threads({value})  # before the loop")


COMPUTE_THREADS = ComputeThreads()
