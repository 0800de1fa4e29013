"""Options of DistributedDataParallel: each takes hold where the code makes one, as if it were written there."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from threading import get_ident
from typing import Any

from gpulab.errors import UsageError
from gpulab.knobs.knob import CodeEdit, Kind, Knob, KnobEffects, Value, Verification
from gpulab.knobs.observe.observation import Observation, ObservedDataParallel
from gpulab.run import Run
from gpulab.torch_hooks.patching import replaced

WRAPPED = "wrapped models"
NO_DDP = "no DistributedDataParallel is called in your code"
NONE_WRAPPED = "the code created no DistributedDataParallel while it ran; one created earlier keeps its options"
LEAST_MB = 0.01


def data_parallel(observation: Observation) -> ObservedDataParallel | None:
    """The model whose gradients are exchanged; None where there is none."""
    return next((m.data_parallel for m in observation.modules if m.data_parallel is not None), None)


class DdpOption(Knob):
    """An argument of DistributedDataParallel of the knob's own name."""

    of_ranks = True
    kind: Kind = "module call"

    def value_in(self, observation: Observation) -> Value | None:
        seen = data_parallel(observation)
        return None if seen is None else getattr(seen, self.name)

    def refuses(self, observation: Observation, value: Value) -> str | None:
        return None if data_parallel(observation) is not None else NO_DDP

    @contextmanager
    def applied(self, value: Value) -> Iterator[KnobEffects]:
        effects = KnobEffects()

        def change(arguments: dict[str, Any]) -> None:
            arguments[self.name] = value
            effects.count(WRAPPED)

        with arguments_changed(change):
            yield effects

    def verify(self, observation: Observation, value: Value, effects: KnobEffects, run: Run) -> Verification:
        count = effects.counts.get(WRAPPED, 0)
        if not count:
            return Verification("no effect", NONE_WRAPPED)
        words = f"{count} DistributedDataParallel {'was' if count == 1 else 'were'} created with {self.name}={value}"
        return Verification("took effect", words)

    def code_edit(self, observation: Observation, value: Value) -> CodeEdit:
        line = f"model = DistributedDataParallel(model, {self.name}={value})"
        return CodeEdit(line, "DistributedDataParallel", self.name, str(value))


def arguments_changed(change: Callable[[dict[str, Any]], None]) -> AbstractContextManager[None]:
    """Inside, each DistributedDataParallel that this thread makes has the arguments that `change` leaves it."""
    from torch.nn.parallel import DistributedDataParallel

    thread = get_ident()

    def wrap(original: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(original)

        @functools.wraps(original)
        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
            if get_ident() != thread:
                original(self, *args, **kwargs)
                return
            bound = signature.bind(self, *args, **kwargs)
            change(bound.arguments)
            original(*bound.args, **bound.kwargs)

        return __init__

    return replaced(DistributedDataParallel, "__init__", wrap)


class BucketCap(DdpOption):
    """How many gradients are gathered before they are exchanged."""

    name = "bucket_cap_mb"
    title = "DDP bucket size"
    help = "MB of gradients per all-reduce: larger buckets mean fewer all-reduces, smaller ones start sooner"
    options: tuple[Value, ...] = (1, 5, 25, 100)
    climb_values = (100, 5)
    aliases = ("bucket", "bucket_size", "bucket_cap")
    helps_against: Mapping[str, int] = {"exposed_communication": 1, "small_collectives": 1}

    def parse(self, text: str) -> Value:
        """A number of MB, of which a part may be. Raises UsageError."""
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        if not LEAST_MB <= number < math.inf:
            raise UsageError(
                f"{self.name} must be a number of MB ≥ {LEAST_MB}, got {text!r}. PyTorch's default is {self.name}=25."
            )
        return int(number) if number.is_integer() else number


class BucketView(DdpOption):
    """Gradients that lie in the buckets: one copy less."""

    name = "gradient_as_bucket_view"
    title = "Gradients as bucket views"
    help = "Avoids a copy of all gradients: saves memory and time"
    options: tuple[Value, ...] = (False, True)
    aliases = ("bucket_view",)
    helps_against: Mapping[str, int] = {"exposed_communication": 3}


class StaticGraph(DdpOption):
    """The same parameters get gradients in each step, and DDP need not find out which."""

    name = "static_graph"
    title = "DDP static graph"
    help = "DDP records the used parameters in the first step and skips the search afterwards"
    options: tuple[Value, ...] = (False, True)

    def cautions(self, observation: Observation, value: Value) -> tuple[str, ...]:
        return ("if a later step uses other parameters, their gradients are wrong",) if value else ()


BUCKET_CAP_MB, GRADIENT_AS_BUCKET_VIEW, STATIC_GRAPH = BucketCap(), BucketView(), StaticGraph()
