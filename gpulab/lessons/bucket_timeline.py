"""A model of a data-parallel step to be turned by hand: gradients leave in buckets while the backward pass goes on.

It explains and measures nothing: every drawing says so. The backward pass finishes gradients evenly; a bucket leaves
when its last gradient is there and the link is free. definitions.md, "All-reduce": one of S bytes over n ranks
takes 2(n-1) latencies and 2(n-1)/n S over the bandwidth as a ring.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from msgspec import Struct

from gpulab.formatting import plural
from gpulab.lessons.figures import A_MODEL, GREY, Block, ByHand, Kind, Lane, by_hand, draw_lanes, plot
from gpulab.views.wording import PARTS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_BUCKETS = 64
LABELLED_MS = 4.0  # a block of the link that is long enough for its number
MEANINGS: dict[Kind, str] = {
    "compute": "forward and backward",
    "communicate": "a bucket on the link",
    "wait": "waiting for the link (exposed)",
}


class Exchange(Struct, frozen=True):
    """One step of one rank. `latency_ms` is the price of each bucket, whatever its size."""

    gradients_mb: float = 40.0
    mb_per_s: float = 1000.0
    latency_ms: float = 2.0
    buckets: int = 1
    backward_ms: float = 60.0
    forward_ms: float = 30.0

    def __post_init__(self) -> None:
        if self.buckets < 1 or self.mb_per_s <= 0:
            raise ValueError("there is at least one bucket, and a link that carries something")
        if min(self.gradients_mb, self.latency_ms, self.backward_ms, self.forward_ms) < 0:
            raise ValueError("no time and no size is negative")

    @property
    def bucket_ms(self) -> float:
        """How long one bucket is on the link."""
        return self.latency_ms + 1e3 * self.gradients_mb / self.buckets / self.mb_per_s

    @property
    def computing_ms(self) -> float:
        return self.forward_ms + self.backward_ms


class PlayedExchange(Struct, frozen=True):
    """What happens in the step. `exposed_ms`: exchanging that no computing hides."""

    computing: list[Block]
    link: list[Block]
    step_ms: float
    exposed_ms: float


def play_exchange(setting: Exchange) -> PlayedExchange:
    """One step, from the forward pass to the last bucket."""
    rank, link = Lane(), Lane()
    rank.add(setting.forward_ms, "compute", "forward")
    rank.add(setting.backward_ms, "compute", "backward")
    for number in range(1, setting.buckets + 1):
        ready = setting.forward_ms + setting.backward_ms * number / setting.buckets
        link.add(setting.bucket_ms, "communicate", str(number) if setting.bucket_ms >= LABELLED_MS else "", ready)
    exposed = max(0.0, link.free - setting.computing_ms)
    rank.wait(link.free)
    return PlayedExchange(rank.blocks, link.blocks, rank.free, exposed)


def draw_exchange(setting: Exchange) -> Figure:
    """What a rank computes, and what is on its link, over time."""
    played = play_exchange(setting)
    step = f"a step of {played.step_ms:.0f} ms, {played.exposed_ms:.0f} ms of it exposed"
    lanes = [("rank", [b for b in played.computing if b.length]), ("link", played.link)]
    return draw_lanes(lanes, f"{plural(setting.buckets, 'bucket')}: {step}", meanings=MEANINGS)


def turn_exchange() -> ByHand | Figure:
    """Sliders for the model; without ipywidgets the drawing of the first setting."""
    sliders = {
        "gradients_mb": ("gradients MB", 1, 200, 1),
        "mb_per_s": ("link MB/s", 100, 10_000, 100),
        "latency_ms": ("latency ms", 0, 10, 0.1),
        "buckets": ("buckets", 1, MOST_BUCKETS, 1),
        "backward_ms": ("backward ms", 5, 200, 5),
    }
    return by_hand(draw_exchange, Exchange(buckets=4), sliders)


def draw_sweet_spot(latencies_ms: Sequence[float] = (0.5, 2.0), most: int = MOST_BUCKETS) -> Figure:
    """The time of a step of the model against the number of buckets, one line for each latency."""
    counts = np.unique(np.geomspace(1, most, 40).round().astype(int))
    colours = (PARTS["compute"].colour, PARTS["data_wait"].colour, PARTS["communication"].colour)
    ticks = [2**n for n in range(int(np.log2(most)) + 1)]
    figure, axes = _figure("buckets", ticks, "time of a step against the number of its buckets")
    for latency_ms, colour in zip(latencies_ms, colours, strict=False):
        times = [play_exchange(Exchange(latency_ms=latency_ms, buckets=int(count))).step_ms for count in counts]
        axes.plot(counts, times, color=colour, lw=1.5, label=f"{latency_ms:g} ms for each bucket")
        best = int(np.argmin(times))
        axes.plot(counts[best], times[best], "o", color=colour, ms=6)
    axes.axhline(Exchange().computing_ms, color=GREY, lw=0.8, ls=":", label="computing alone")
    axes.legend(frameon=False, fontsize=8)
    return figure


def all_reduce_ms(way: str, ranks: int, size_mb: float, latency_ms: float, mb_per_s: float) -> float:
    """Of one all-reduce: "one rank adds up" (everything through its link), "ring", or "tree" (pipelined, two ways).

    Raises ValueError for another way.
    """
    whole_ms = 1e3 * size_mb / mb_per_s
    if ranks == 1:
        return 0.0
    if way == "one rank adds up":
        return 2 * latency_ms + 2 * (ranks - 1) * whole_ms
    if way == "ring":
        return 2 * (ranks - 1) * latency_ms + 2 * (ranks - 1) / ranks * whole_ms
    if way == "tree":
        return 2 * float(np.ceil(np.log2(ranks))) * latency_ms + 2 * whole_ms
    raise ValueError(f"no such way: {way}")


def draw_topologies(size_mb: float, latency_ms: float = 0.02, mb_per_s: float = 10_000) -> Figure:
    """The three ways of an all-reduce against the number of ranks, in the model."""
    ranks = [2**n for n in range(1, 11)]
    figure, axes = _figure("ranks", ranks, f"an all-reduce of {size_mb:g} MB")
    ways = ("one rank adds up", "ring", "tree")
    colours = (PARTS["data_wait"].colour, PARTS["compute"].colour, PARTS["communication"].colour)
    for way, colour in zip(ways, colours, strict=True):
        times = [all_reduce_ms(way, count, size_mb, latency_ms, mb_per_s) for count in ranks]
        axes.plot(ranks, times, "o-", color=colour, lw=1.5, ms=3, label=way)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.legend(frameon=False, fontsize=8)
    return figure


def _figure(x: str, ticks: Sequence[int], title: str) -> tuple[Figure, Axes]:
    with plot(7, 2.6, title, x, "ms", note=A_MODEL) as (figure, axes):
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, [str(tick) for tick in ticks])
        axes.grid(color="#DDDDDD", lw=0.6)
    return figure, axes
