"""Models with sliders: who works on what over time, in lanes. The models explain and measure nothing.

Every model has a field per slider, plays its steps into lanes, and is drawn by `draw`, which labels it as a model.
`turn` shows it with sliders.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from msgspec import Struct, field

from gpulab.formatting import percent, plural
from gpulab.lessons.figures import A_MODEL, BLUE, GREEN, GREY, ORANGE, Bar, ByHand, Row, by_hand, draw_rows, plot
from gpulab.views.wording import PARTS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Kind = Literal["compute", "load", "wait", "launch", "copy", "communicate"]

COLOURS: dict[Kind, str] = {  # same as in the report, if it has the same part
    "compute": BLUE,
    "load": "#6C7A89",
    "wait": ORANGE,
    "launch": PARTS["launch"].colour,
    "copy": PARTS["memcpy"].colour,
    "communicate": GREEN,
}
MEANINGS: dict[Kind, str] = {  # in a figure of steps
    "compute": "computing",
    "load": "loading a batch",
    "wait": "waiting",
    "launch": "launching a kernel",
    "copy": "copying",
    "communicate": "exchanging between devices",
}
STEP_UNITS = ("ms", "µs")  # a figure in another unit is not a figure of steps


class Block(Struct, frozen=True):
    """One piece of work in a lane; all times in the same unit."""

    start: float
    length: float
    kind: Kind
    label: str = ""

    @property
    def end(self) -> float:
        return self.start + self.length


class Lane(Struct):
    """Pieces of work, one after the other. `free`: when the last piece ends."""

    blocks: list[Block] = field(default_factory=list)
    free: float = 0.0

    def add(self, length: float, kind: Kind, label: str = "", ready: float = 0.0) -> float:
        """Add a piece that begins when it is `ready` and the previous piece has ended; returns its end."""
        start = max(ready, self.free)
        self.blocks.append(Block(start, length, kind, label))
        self.free = start + length
        return self.free

    def wait(self, until: float) -> None:
        """Do nothing until then."""
        if until > self.free + 1e-9:
            self.add(until - self.free, "wait")


Lanes = Mapping[str, Sequence[Block]]
Sliders = Mapping[str, tuple[Any, ...]]  # as in `figures.by_hand`


class Played(Struct, frozen=True):
    """The result of a model: its lanes by name, the time of the last step, and a figure for each lane."""

    lanes: dict[str, list[Block]]
    step: float
    each: tuple[float, ...] = ()

    def share(self, kind: Kind, *lanes: str) -> float:
        """The share of the drawn time, in these lanes or in all, that goes to work of that kind."""
        of_kind = [block.length for lane in lanes or self.lanes for block in self.lanes[lane] if block.kind == kind]
        end = max((block.end for lane in self.lanes.values() for block in lane), default=0.0)
        return sum(of_kind) / (len(lanes or self.lanes) * end) if end else 0.0


def draw_lanes(lanes: Lanes, title: str, *, unit: str = "ms", meanings: Mapping[Kind, str] | None = None) -> Figure:
    """A figure with one lane per row, from top to bottom; it says that it is a model, not a measurement.

    `meanings`: the legend's word for each colour; colours without a word are left out. None: the usual words in a
    figure of steps, else no legend.
    """
    words = (MEANINGS if unit in STEP_UNITS else {}) if meanings is None else meanings
    kinds = {block.kind for blocks in lanes.values() for block in blocks}
    rows = [
        Row(
            name,
            [
                Bar(b.start, b.length, COLOURS[b.kind], b.label, "black" if _is_pale(b.kind) else "white")
                for b in blocks
            ],
        )
        for name, blocks in lanes.items()
    ]
    legend = {words[kind]: COLOURS[kind] for kind in COLOURS if kind in kinds & words.keys()}
    return draw_rows(rows, title, unit, note=A_MODEL, legend=legend)


def _is_pale(kind: Kind) -> bool:
    return kind not in ("compute", "load", "communicate")


class Model(Struct, frozen=True):
    """A model of steps. `SLIDERS`: see `figures.by_hand`."""

    SLIDERS: ClassVar[Sliders] = {}
    UNIT: ClassVar[str] = "ms"
    MEANINGS: ClassVar[Mapping[Kind, str] | None] = None

    def play(self) -> Played:
        """Play its steps, one after the other."""
        raise NotImplementedError

    def title(self, played: Played) -> str:
        """The title of the drawing."""
        raise NotImplementedError


def draw(model: Model, title: str = "") -> Figure:
    """The model over time, with `title` in place of its own title."""
    played = model.play()
    lanes = {name: [block for block in blocks if block.length] for name, blocks in played.lanes.items()}
    return draw_lanes(lanes, title or model.title(played), unit=model.UNIT, meanings=model.MEANINGS)


def turn(model: Model) -> ByHand | Figure:
    """Sliders for the model; without ipywidgets the drawing of its first setting."""
    return by_hand(draw, model, model.SLIDERS)


def refuse(is_possible: bool, words: str) -> None:
    """Raises ValueError with these words if the setting is not possible."""
    if not is_possible:
        raise ValueError(words)


# -- a DataLoader ------------------------------------------------------------------------------------------------------


class Loading(Model, frozen=True):
    """A DataLoader: time to load a batch, time to compute on it, and worker processes; 0 workers: in turn.

    Workers have a core each and make whole batches in turn; definitions.md, "Feeding".
    """

    load_ms: float = 30
    compute_ms: float = 10
    workers: int = 2
    steps: int = 6

    SLIDERS: ClassVar[Sliders] = {
        "workers": ("workers", 0, 6, 1),
        "load_ms": ("load ms", 1, 60, 1),
        "compute_ms": ("compute ms", 1, 60, 1),
    }

    @property
    def step_ms(self) -> float:
        """The step, without the hand-over of batches and with enough cores."""
        if not self.workers:
            return self.load_ms + self.compute_ms
        return max(self.compute_ms, self.load_ms / self.workers)

    def play(self) -> Played:
        training, *workers = lanes = [Lane() for _ in range(1 + self.workers)]
        for step in range(self.steps):
            loading = workers[step % self.workers] if workers else training
            training.wait(loading.add(self.load_ms, "load", str(step)))
            training.add(self.compute_ms, "compute", str(step))
        names = ["training", *(f"worker {number}" for number in range(1, 1 + self.workers))]
        return Played({name: lane.blocks for name, lane in zip(names, lanes, strict=True)}, self.step_ms)

    def title(self, played: Played) -> str:
        busy = percent(self.compute_ms / played.step)
        return f"{plural(self.workers, 'worker')}: {played.step:.0f} ms per step, the device computes {busy} of it"


# -- a step on a GPU ---------------------------------------------------------------------------------------------------


class GpuStep(Model, frozen=True):
    """One step: all times in µs. `syncs`: after so many kernels, evenly spread, the host waits for the device.

    The host launches one kernel after the other; the device runs them in order, each after its launch and after the end
    of the previous kernel. definitions.md, "Step on a GPU".
    """

    kernels: int = 20
    kernel_us: float = 5.0
    launch_us: float = 10.0
    syncs: int = 0
    data_us: float = 0.0  # wait of the host for data at the beginning of each step
    graph: bool = False  # all kernels are started by one launch: a CUDA graph
    steps: int = 2

    UNIT: ClassVar[str] = "µs"
    SLIDERS: ClassVar[Sliders] = {
        "kernels": ("kernels", 1, 60, 1),  # more would look like a comb
        "kernel_us": ("kernel µs", 0.5, 60, 0.5),
        "launch_us": ("launch µs", 1, 30, 0.5),
        "syncs": ("syncs", 0, 10, 1),
        "data_us": ("data µs", 0, 500, 10),
        "graph": ("CUDA graph",),
    }

    def __post_init__(self) -> None:
        times = min(self.kernel_us, self.launch_us, self.data_us, self.syncs)
        refuse(self.kernels >= 1 and times >= 0, "a step has at least one kernel, and no time or number is negative")

    def play(self) -> Played:
        host, device, ends = Lane(), Lane(), [0.0]
        every = -(-self.kernels // self.syncs) if self.syncs else 0
        for _ in range(self.steps):
            if self.data_us:
                host.add(self.data_us, "load", "data")
            for kernel in range(1, self.kernels + 1):
                if not self.graph or kernel == 1:
                    host.add(self.launch_us, "launch")
                device.add(self.kernel_us, "compute", ready=host.free)
                if every and (kernel % every == 0 or kernel == self.kernels) and not self.graph:
                    host.wait(device.free)
            ends.append(max(host.free, device.free))
        return Played({"host": host.blocks, "device": device.blocks}, ends[-1] - ends[-2])

    def title(self, played: Played) -> str:
        works = f"the device works {played.share('compute', 'device'):.0%} of the time drawn"
        return f"two steps of {played.step:.0f} µs; {works}"


# -- a data-parallel step ----------------------------------------------------------------------------------------------


class Exchange(Model, frozen=True):
    """One step of one rank. `latency_ms` is the fixed cost of each bucket.

    The backward pass finishes gradients evenly; a bucket is sent when its last gradient is ready and the link is free.
    """

    gradients_mb: float = 40.0
    mb_per_s: float = 1000.0
    latency_ms: float = 2.0
    buckets: int = 1
    backward_ms: float = 60.0
    forward_ms: float = 30.0

    SLIDERS: ClassVar[Sliders] = {
        "gradients_mb": ("gradients MB", 1, 200, 1),
        "mb_per_s": ("link MB/s", 100, 10_000, 100),
        "latency_ms": ("latency ms", 0, 10, 0.1),
        "buckets": ("buckets", 1, 64, 1),
        "backward_ms": ("backward ms", 5, 200, 5),
    }
    MEANINGS: ClassVar[Mapping[Kind, str] | None] = {
        "compute": "forward and backward",
        "communicate": "a bucket on the link",
        "wait": "waiting for the link (exposed)",
    }
    LABELLED_MS: ClassVar[float] = 4.0  # the shortest block of the link with a number

    def __post_init__(self) -> None:
        refuse(self.buckets >= 1 and self.mb_per_s > 0, "there is at least one bucket, and a link that carries")
        amounts = min(self.gradients_mb, self.latency_ms, self.backward_ms, self.forward_ms)
        refuse(amounts >= 0, "no time and no size is negative")

    @property
    def bucket_ms(self) -> float:
        """How long one bucket is on the link."""
        return self.latency_ms + 1e3 * self.gradients_mb / self.buckets / self.mb_per_s

    @property
    def computing_ms(self) -> float:
        return self.forward_ms + self.backward_ms

    def play(self) -> Played:
        rank, link = Lane(), Lane()
        rank.add(self.forward_ms, "compute", "forward")
        rank.add(self.backward_ms, "compute", "backward")
        for number in range(1, self.buckets + 1):
            ready = self.forward_ms + self.backward_ms * number / self.buckets
            label = str(number) if self.bucket_ms >= self.LABELLED_MS else ""
            link.add(self.bucket_ms, "communicate", label, ready)
        rank.wait(link.free)
        return Played({"rank": rank.blocks, "link": link.blocks}, rank.free)

    def title(self, played: Played) -> str:
        exposed = f"{played.step - self.computing_ms:.0f} ms of it exposed"
        return f"{plural(self.buckets, 'bucket')}: a step of {played.step:.0f} ms, {exposed}"


def draw_sweet_spot(latencies_ms: Sequence[float] = (0.5, 2.0), most: int = 64) -> Figure:
    """The time of a step of the model against the number of buckets, one line for each latency."""
    counts = np.unique(np.geomspace(1, most, 40).round().astype(int))
    ticks = [2**n for n in range(int(np.log2(most)) + 1)]
    title = "time of a step against the number of its buckets"
    with plot(7, 2.6, title, "buckets", "ms", note=A_MODEL, log={"x": 2}, ticks=ticks, legend={}) as (figure, axes):
        for latency_ms, colour in zip(latencies_ms, (BLUE, ORANGE, GREEN), strict=False):
            times = [Exchange(latency_ms=latency_ms, buckets=int(count)).play().step for count in counts]
            best = int(np.argmin(times))
            axes.plot(counts, times, color=colour, lw=1.5, label=f"{latency_ms:g} ms for each bucket")
            axes.plot(counts[best], times[best], "o", color=colour, ms=6)
        axes.axhline(Exchange().computing_ms, color=GREY, lw=0.8, ls=":", label="computing alone")
    return figure


ALL_REDUCES: Mapping[str, Callable[[int, float, float], float]] = {  # ms from ranks, latency, and ms of all bytes once
    "one rank adds up": lambda ranks, latency, whole: 2 * latency + 2 * (ranks - 1) * whole,  # through its own link
    "ring": lambda ranks, latency, whole: 2 * (ranks - 1) * (latency + whole / ranks),
    "tree": lambda ranks, latency, whole: 2 * float(np.ceil(np.log2(ranks))) * latency + 2 * whole,  # pipelined
}


def all_reduce_ms(way: str, ranks: int, size_mb: float, latency_ms: float, mb_per_s: float) -> float:
    """The time of one all-reduce in one of the ways of `ALL_REDUCES`; definitions.md, "All-reduce"."""
    return 0.0 if ranks == 1 else ALL_REDUCES[way](ranks, latency_ms, 1e3 * size_mb / mb_per_s)


def draw_topologies(size_mb: float, latency_ms: float = 0.02, mb_per_s: float = 10_000) -> Figure:
    """The three ways of an all-reduce against the number of ranks, in the model."""
    ranks = [2**n for n in range(1, 11)]
    title, log = f"an all-reduce of {size_mb:g} MB", {"x": 2, "y": 10}
    with plot(7, 2.6, title, "ranks", "ms", note=A_MODEL, log=log, ticks=ranks, legend={}) as (figure, axes):
        for way, colour in zip(ALL_REDUCES, (ORANGE, BLUE, GREEN), strict=True):
            times = [all_reduce_ms(way, count, size_mb, latency_ms, mb_per_s) for count in ranks]
            axes.plot(ranks, times, "o-", color=colour, lw=1.5, ms=3, label=way)
    return figure


# -- jobs that share a device ------------------------------------------------------------------------------------------

Way = Literal["time slicing", "MPS", "MIG"]
WAYS: tuple[Way, ...] = ("time slicing", "MPS", "MIG")
STEP_MS, SLICE_MS = 100, 5  # step of a job alone on the device; time slice
FIGURE_STEPS, PLAYED_STEPS = 3, 40
UNCOUNTED_MS = STEP_MS * PLAYED_STEPS // 4  # until the jobs are in a steady state


class Sharing(Model, frozen=True):
    """`jobs` equal jobs: each computes `busy_pct` of its step when alone, with kernels that fill `fills_pct` of the
    device. MIG: the device is split into as many equal parts.
    """

    jobs: int = 2
    busy_pct: int = 30
    fills_pct: int = 100
    way: Way = "time slicing"

    SLIDERS: ClassVar[Sliders] = {
        "jobs": ("jobs", 1, 7, 1),
        "busy_pct": ("busy %", 5, 100, 5),
        "fills_pct": ("fills %", 10, 100, 10),
        "way": ("shared by", *WAYS),
    }
    MEANINGS: ClassVar[Mapping[Kind, str] | None] = {
        "load": "loading a batch on the host",
        "compute": "computing",
        "communicate": "computing more slowly, on a part of the device",
        "wait": "waiting for the device",
    }

    def __post_init__(self) -> None:
        shares = 1 <= self.busy_pct <= 100 and 1 <= self.fills_pct <= 100
        possible = self.jobs >= 1 and shares and self.way in WAYS
        refuse(possible, "there is at least one job, and the shares are from 1 to 100 %")

    def play(self) -> Played:
        """Play the jobs in steps of a millisecond, begun one after the other; the first quarter is not counted.

        Time slicing: one job has the whole device, for 5 ms at a time. MPS: kernels of several jobs run at once while
        the device has room for them. MIG: each job has only its own part. Switching between jobs and sharing the
        memory's bandwidth cost nothing here. `each`: the steps of a job in the time of one step alone.
        """
        count, busy_ms = self.jobs, self.busy_pct * STEP_MS / 100
        begin_ms = [round(job * STEP_MS / count) for job in range(count)]
        host_ms, device_ms = [STEP_MS - busy_ms] * count, [busy_ms] * count  # remaining in the step
        kinds: list[list[Kind]] = [[] for _ in range(count)]
        steps, turn = [0.0] * count, 0
        for now in range(STEP_MS * PLAYED_STEPS):
            ready = [job for job in range(count) if begin_ms[job] <= now and host_ms[job] <= 0]
            if ready and (now % SLICE_MS == 0 or turn not in ready):
                turn = min(ready, key=lambda job: (job - turn - 1) % count)
            for job in range(count):
                if begin_ms[job] > now:
                    continue
                if job not in ready:
                    kinds[job].append("load")
                    host_ms[job] -= 1
                    continue
                speed = self._speed(len(ready), is_its_turn=job == turn)
                kinds[job].append("wait" if speed == 0 else "compute" if speed == 1 else "communicate")
                done = min(device_ms[job], speed)
                steps[job] += done / busy_ms if now >= UNCOUNTED_MS else 0.0
                device_ms[job] -= done
                if device_ms[job] < 1e-9:
                    host_ms[job], device_ms[job] = STEP_MS - busy_ms, busy_ms
        lanes = {}
        for job, begin in enumerate(begin_ms):
            lane = Lane(free=begin)
            for kind, stretch in groupby(kinds[job][: max(0, FIGURE_STEPS * STEP_MS - begin)]):
                lane.add(len([*stretch]), kind)
            lanes[f"job {job + 1}"] = lane.blocks
        measured_steps = PLAYED_STEPS - UNCOUNTED_MS / STEP_MS
        return Played(lanes, STEP_MS, tuple(number / measured_steps for number in steps))

    def _speed(self, ready: int, *, is_its_turn: bool) -> float:
        """The speed of a job's computing, relative to a device of its own, while `ready` jobs compute or wait to."""
        if self.way == "time slicing":
            return float(is_its_turn)
        room = 1 / (ready if self.way == "MPS" else self.jobs)
        return min(1.0, 100 * room / self.fills_pct)

    def title(self, played: Played) -> str:
        speed = f"each at {100 * min(played.each):.0f} % speed"
        return f"{self.way}, {plural(self.jobs, 'job')}: {sum(played.each):.1f} times one alone; {speed}"
