"""A model of a pipeline to be turned by hand: which stage works on which micro-batch when, and how long it has nothing.

It explains and measures nothing: every drawing says so. A stage runs its operations in the order that it is given, each
when what it needs is there: a forward pass the one of the stage before, a backward pass the one of the stage after.
Messages take no time. definitions.md, "Bubble of a pipeline".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

from msgspec import Struct

from gpulab.formatting import percent
from gpulab.lessons.figures import Block, ByHand, Kind, Lane, by_hand, draw_lanes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORWARD_MS, BACKWARD_MS = 10.0, 20.0  # of a whole batch in one stage: the backward pass has about twice the arithmetic
MOST_LABELLED = 12  # micro-batches: more numbers would cover each other
_KINDS: dict[str, Kind] = {"F": "compute", "B": "copy"}
_MEANINGS: dict[Kind, str] = {"compute": "forward", "copy": "backward", "wait": "nothing to do: the bubble"}

Schedule = Literal["GPipe", "1F1B"]


class Operation(NamedTuple):
    """One pass of one micro-batch through a stage: ("F", 0) is the forward pass of the first."""

    way: Literal["F", "B"]
    micro_batch: int

    def __repr__(self) -> str:
        return f"{self.way}{self.micro_batch}"


Order = Sequence[Operation]
Orders = Callable[[int, int, int], Order]  # stage, stages, micro-batches → what that stage runs, one after the other


class Deadlock(Exception):
    """Each stage waits for another; `waiting` has the operation at which each of them stands."""

    def __init__(self, waiting: dict[int, Operation]) -> None:
        super().__init__(", ".join(f"stage {stage} waits at {operation}" for stage, operation in waiting.items()))
        self.waiting = waiting


def gpipe(stage: int, stages: int, micro_batches: int) -> Order:
    """All forward passes, then all backward passes, on every stage."""
    every = range(micro_batches)
    return [*(Operation("F", i) for i in every), *(Operation("B", i) for i in every)]


def one_forward_one_backward(stage: int, stages: int, micro_batches: int) -> Order:
    """As few forward passes ahead as fill the pipeline, then one backward pass after each forward pass."""
    ahead = min(stages - stage - 1, micro_batches)
    order = [Operation("F", i) for i in range(ahead)]
    for i in range(micro_batches - ahead):
        order += [Operation("F", ahead + i), Operation("B", i)]
    return [*order, *(Operation("B", i) for i in range(micro_batches - ahead, micro_batches))]


SCHEDULES: dict[Schedule, Orders] = {"GPipe": gpipe, "1F1B": one_forward_one_backward}


class Pipeline(Struct, frozen=True):
    """`slowest` is how many times as long the last stage takes as each of the others."""

    stages: int = 4
    micro_batches: int = 4
    schedule: Schedule = "GPipe"
    slowest: float = 1.0

    def __post_init__(self) -> None:
        if min(self.stages, self.micro_batches) < 1 or self.slowest <= 0:
            raise ValueError("a pipeline has at least one stage and one micro-batch, and each takes some time")

    @property
    def played(self) -> PlayedPipeline:
        """One batch, forward and backward."""
        return play_pipeline(SCHEDULES[self.schedule], self.stages, self.micro_batches, self.slowest)


class PlayedPipeline(Struct, frozen=True):
    """What each stage does for one batch, in ms; `kept`: the most micro-batches whose activations it holds at once."""

    lanes: tuple[list[Block], ...]
    kept: tuple[int, ...]

    @property
    def step_ms(self) -> float:
        """From the first forward to the last backward pass."""
        return self.lanes[0][-1].end

    @property
    def bubble_fraction(self) -> float:
        """The share of the step in which a stage has nothing to do, mean over the stages."""
        idle_ms = sum(block.length for lane in self.lanes for block in lane if block.kind == "wait")
        return idle_ms / (len(self.lanes) * self.step_ms)


def batches(count: int) -> str:
    """ "1 micro-batch", "8 micro-batches"."""
    return "1 micro-batch" if count == 1 else f"{count} micro-batches"


def bubble(stages: int, micro_batches: int) -> float:
    """The share of a step, 0 to 1, in which each of `stages` equal stages has nothing to do: (p - 1) / (m + p - 1)."""
    return (stages - 1) / (micro_batches + stages - 1)


def play_pipeline(orders: Orders, stages: int, micro_batches: int, slowest: float = 1.0) -> PlayedPipeline:
    """Play one batch. Raises Deadlock where the stages wait for each other, or for what nobody runs."""
    given = [[Operation(*operation) for operation in orders(stage, stages, micro_batches)] for stage in range(stages)]
    waiting = [list(order) for order in given]
    ends: dict[tuple[int, Operation], float] = {}
    lanes = [Lane() for _ in range(stages)]
    moved = True
    while moved:
        moved = False
        for stage, (lane, order) in enumerate(zip(lanes, waiting, strict=True)):
            while order and (ready := _ready(order[0], stage, stages, ends)) is not None:
                operation = order.pop(0)
                whole = FORWARD_MS if operation.way == "F" else BACKWARD_MS
                length = whole / micro_batches * (slowest if stage == stages - 1 else 1)
                label = str(operation.micro_batch) if micro_batches <= MOST_LABELLED else ""
                lane.wait(ready)
                ends[stage, operation] = lane.add(length, _KINDS[operation.way], label, ready)
                moved = True
    if any(waiting):
        raise Deadlock({stage: order[0] for stage, order in enumerate(waiting) if order})
    for lane in lanes:
        lane.wait(max(ends.values()))
    return PlayedPipeline(tuple(lane.blocks for lane in lanes), tuple(_kept(order) for order in given))


def draw_pipeline(pipeline: Pipeline) -> Figure:
    """The stages over time, and in the title what they lose."""
    return _drawn(pipeline.played, pipeline.schedule)


def draw_orders(orders: Orders, stages: int, micro_batches: int, name: str) -> Figure:
    """The same of a schedule of one's own. Raises Deadlock."""
    return _drawn(play_pipeline(orders, stages, micro_batches), name)


def _drawn(played: PlayedPipeline, name: str) -> Figure:
    title = f"{name}: bubble {percent(played.bubble_fraction)}; stage 1 keeps {batches(played.kept[0])}"
    lanes = [(f"stage {n}", lane) for n, lane in enumerate(played.lanes, start=1)]
    return draw_lanes(lanes, title, meanings=_MEANINGS)


def _ready(operation: Operation, stage: int, stages: int, ends: dict[tuple[int, Operation], float]) -> float | None:
    """When what an operation needs is there; None while it is not."""
    if operation.way == "F":
        return 0.0 if stage == 0 else ends.get((stage - 1, operation))
    own = ends.get((stage, Operation("F", operation.micro_batch)))
    after = own if stage == stages - 1 else ends.get((stage + 1, operation))
    return None if own is None or after is None else max(own, after)


def _kept(order: Order) -> int:
    """A forward pass keeps its activations until the backward pass of the same micro-batch."""
    most = now = 0
    for operation in order:
        now += 1 if operation.way == "F" else -1
        most = max(most, now)
    return most


def turn_pipeline() -> ByHand | Figure:
    """Sliders for the model; without ipywidgets the drawing of the first setting."""
    sliders = {
        "stages": ("stages", 1, 8, 1),
        "micro_batches": ("micro-batches", 1, 32, 1),
        "schedule": ("schedule", *SCHEDULES),
        "slowest": ("last stage ×", 0.5, 3, 0.25),
    }
    return by_hand(draw_pipeline, Pipeline(), sliders)
