"""A model of a pipeline: which stage works on which micro-batch when, and how long it idles."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple

import numpy as np

from gpulab.formatting import percent
from gpulab.lessons.lanes import Kind, Lane, Model, Played, Sliders, draw_lanes, refuse

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORWARD_MS, BACKWARD_MS = 10.0, 20.0  # of a whole batch in one stage: backward has about twice the arithmetic
MOST_LABELLED = 12  # micro-batches: more numbers would overlap

Schedule = Literal["GPipe", "1F1B"]


class Operation(NamedTuple):
    """One pass of one micro-batch through a stage: ("F", 0) is the forward pass of the first."""

    way: Literal["F", "B"]
    micro_batch: int

    def __repr__(self) -> str:
        return f"{self.way}{self.micro_batch}"


Order = Sequence[Operation]
Orders = Callable[[int, int, int], Order]  # stage, stages, micro-batches → what that stage runs, one after the other


class StagesWait(Exception):
    """Each stage waits for another; `waiting` has the operation at which each stage is blocked."""

    def __init__(self, waiting: dict[int, Operation]) -> None:
        super().__init__(", ".join(f"stage {stage} waits at {operation}" for stage, operation in waiting.items()))
        self.waiting = waiting


def gpipe(stage: int, stages: int, micro_batches: int) -> Order:
    """All forward passes, then all backward passes, on every stage."""
    return [Operation(way, i) for way in ("F", "B") for i in range(micro_batches)]


def one_forward_one_backward(stage: int, stages: int, micro_batches: int) -> Order:
    """Only as many forward passes as fill the pipeline, then one backward pass after each forward pass."""
    ahead = min(stages - stage - 1, micro_batches)
    order = [Operation("F", i) for i in range(ahead)]
    for i in range(micro_batches - ahead):
        order += [Operation("F", ahead + i), Operation("B", i)]
    return [*order, *(Operation("B", i) for i in range(micro_batches - ahead, micro_batches))]


SCHEDULES: dict[Schedule, Orders] = {"GPipe": gpipe, "1F1B": one_forward_one_backward}


class Pipeline(Model, frozen=True):
    """`slowest` is the factor by which the last stage takes longer than each of the others.

    A stage runs its operations in order, each when its input is there: a forward pass needs that of the previous stage,
    a backward pass that of the next stage. Messages take no time. definitions.md, "Bubble of a pipeline".
    """

    stages: int = 4
    micro_batches: int = 4
    schedule: Schedule = "GPipe"
    slowest: float = 1.0

    SLIDERS: ClassVar[Sliders] = {
        "stages": ("stages", 1, 8, 1),
        "micro_batches": ("micro-batches", 1, 32, 1),
        "schedule": ("schedule", *SCHEDULES),
        "slowest": ("last stage ×", 0.5, 3, 0.25),
    }
    MEANINGS: ClassVar[Mapping[Kind, str] | None] = {
        "compute": "forward",
        "copy": "backward",
        "wait": "nothing to do: the bubble",
    }

    def __post_init__(self) -> None:
        possible = min(self.stages, self.micro_batches) >= 1 and self.slowest > 0
        refuse(possible, "a pipeline has at least one stage and one micro-batch, and each takes some time")

    def play(self) -> Played:
        return play_orders(SCHEDULES[self.schedule], self.stages, self.micro_batches, self.slowest)

    def title(self, played: Played) -> str:
        return _pipeline_title(self.schedule, played)


def _pipeline_title(name: str, played: Played) -> str:
    return f"{name}: bubble {percent(played.share('wait'))}; stage 1 keeps {batches(int(played.each[0]))}"


def draw_orders(orders: Orders, stages: int, micro_batches: int, name: str) -> Figure:
    """The stages of a custom schedule. Raises StagesWait."""
    played = play_orders(orders, stages, micro_batches)
    return draw_lanes(played.lanes, _pipeline_title(name, played), meanings=Pipeline.MEANINGS)


def batches(count: int) -> str:
    """ "1 micro-batch", "8 micro-batches"."""
    return "1 micro-batch" if count == 1 else f"{count} micro-batches"


def bubble(stages: int, micro_batches: int) -> float:
    """The share of a step, 0 to 1, in which each of `stages` equal stages idles: (p - 1) / (m + p - 1)."""
    return (stages - 1) / (micro_batches + stages - 1)


def play_orders(orders: Orders, stages: int, micro_batches: int, slowest: float = 1.0) -> Played:
    """Play one batch; `each` is the most micro-batches whose activations a stage holds at once.

    Raises StagesWait if the stages wait for each other, or for an operation that no stage runs.
    """
    every = [[Operation(*operation) for operation in orders(stage, stages, micro_batches)] for stage in range(stages)]
    waiting = [list(order) for order in every]
    ends: dict[tuple[int, Operation], float] = {}
    lanes = [Lane() for _ in range(stages)]
    moved = True
    while moved:
        moved = False
        for stage, (lane, order) in enumerate(zip(lanes, waiting, strict=True)):
            while order and (ready := _ready(order[0], stage, stages, ends)) is not None:
                operation = order.pop(0)
                whole, kind = (FORWARD_MS, "compute") if operation.way == "F" else (BACKWARD_MS, "copy")
                length = whole / micro_batches * (slowest if stage == stages - 1 else 1)
                label = str(operation.micro_batch) if micro_batches <= MOST_LABELLED else ""
                lane.wait(ready)
                ends[stage, operation] = lane.add(length, kind, label, ready)  # type: ignore[arg-type]
                moved = True
    if any(waiting):
        raise StagesWait({stage: order[0] for stage, order in enumerate(waiting) if order})
    for lane in lanes:
        lane.wait(max(ends.values()))
    of_stages = {f"stage {number}": lane.blocks for number, lane in enumerate(lanes, start=1)}
    return Played(of_stages, max(ends.values()), tuple(_most_saved(order) for order in every))


def _ready(operation: Operation, stage: int, stages: int, ends: dict[tuple[int, Operation], float]) -> float | None:
    """When an operation's input is there; None while it is not."""
    if operation.way == "F":
        return 0.0 if stage == 0 else ends.get((stage - 1, operation))
    own = ends.get((stage, Operation("F", operation.micro_batch)))
    after = own if stage == stages - 1 else ends.get((stage + 1, operation))
    return None if own is None or after is None else max(own, after)


def _most_saved(order: Order) -> int:
    """The most micro-batches with saved activations: each keeps them from its forward to its backward pass."""
    return int(np.cumsum([1 if operation.way == "F" else -1 for operation in order]).max())
