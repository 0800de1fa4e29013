"""A model of jobs that share a device, to be turned by hand: time slicing, MPS and MIG, as a timeline.

It explains and measures nothing: every drawing says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Literal

from msgspec import Struct

from gpulab.formatting import plural
from gpulab.lessons.figures import Block, ByHand, Kind, Lane, by_hand, draw_lanes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Way = Literal["time slicing", "MPS", "MIG"]
WAYS: tuple[Way, ...] = ("time slicing", "MPS", "MIG")
STEP_MS = 100  # of a job that has the device to itself
SLICE_MS = 5
MOST_JOBS = 7
_DRAWN_STEPS, _PLAYED_STEPS = 3, 40
_UNCOUNTED_MS = STEP_MS * _PLAYED_STEPS // 4  # until the jobs have found their places
_MEANINGS: dict[Kind, str] = {
    "load": "loading a batch on the host",
    "compute": "computing",
    "communicate": "computing more slowly, on a part of the device",
    "wait": "waiting for the device",
}


class Setting(Struct, frozen=True):
    """`jobs` alike: each computes `busy_pct` of its step when it is alone, with kernels that fill `fills_pct` of the
    device. MIG: the device in as many equal parts.
    """

    jobs: int = 2
    busy_pct: int = 30
    fills_pct: int = 100
    way: Way = "time slicing"

    def __post_init__(self) -> None:
        if not (self.jobs >= 1 and 1 <= self.busy_pct <= 100 and 1 <= self.fills_pct <= 100 and self.way in WAYS):
            raise ValueError("there is at least one job, and the shares are from 1 to 100 %")


class Played(Struct, frozen=True):
    """What the jobs do over time, and how many steps each makes in the time of one that is alone."""

    lanes: list[list[Block]]
    each: tuple[float, ...]

    @property
    def total(self) -> float:
        """Of all jobs together: times the steps of one job alone."""
        return sum(self.each)


def play(setting: Setting) -> Played:
    """Play the jobs in steps of a millisecond, begun one after the other; the first quarter is not counted.

    Time slicing: one job has the whole device, for 5 ms at a time. MPS: kernels of several jobs run at once while the
    device has room for them. MIG: each job has its part, and only that. Changing from one job to the next, and sharing
    the memory's bandwidth, cost nothing here.
    """
    count, busy_ms = setting.jobs, setting.busy_pct * STEP_MS / 100
    begin_ms = [round(job * STEP_MS / count) for job in range(count)]
    host_ms, device_ms = [STEP_MS - busy_ms] * count, [busy_ms] * count  # that are left of the step
    kinds: list[list[Kind]] = [[] for _ in range(count)]
    steps, turn = [0.0] * count, 0
    for now in range(STEP_MS * _PLAYED_STEPS):
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
            speed = _speed(setting, len(ready), is_its_turn=job == turn)
            kinds[job].append("wait" if speed == 0 else "compute" if speed == 1 else "communicate")
            done = min(device_ms[job], speed)
            steps[job] += done / busy_ms if now >= _UNCOUNTED_MS else 0.0
            device_ms[job] -= done
            if device_ms[job] < 1e-9:
                host_ms[job], device_ms[job] = STEP_MS - busy_ms, busy_ms
    counted = _PLAYED_STEPS - _UNCOUNTED_MS / STEP_MS
    drawn = [_blocks(of_job, begin) for of_job, begin in zip(kinds, begin_ms, strict=True)]
    return Played(drawn, tuple(number / counted for number in steps))


def _speed(setting: Setting, ready: int, *, is_its_turn: bool) -> float:
    """Of a job's computing, against a device of its own, while `ready` jobs compute or want to."""
    if setting.way == "time slicing":
        return float(is_its_turn)
    room = 1 / (ready if setting.way == "MPS" else setting.jobs)
    return min(1.0, 100 * room / setting.fills_pct)


def _blocks(kinds: Sequence[Kind], begin: int) -> list[Block]:
    """What is drawn of a lane: one block for each stretch of the same kind."""
    lane = Lane(free=begin)
    for kind, stretch in groupby(kinds[: max(0, _DRAWN_STEPS * STEP_MS - begin)]):
        lane.add(len([*stretch]), kind)
    return lane.blocks


def draw(setting: Setting) -> Figure:
    """A lane per job, and in the title what all of them and each of them get."""
    played = play(setting)
    title = (
        f"{setting.way}, {plural(setting.jobs, 'job')}: {played.total:.1f} times one alone; "
        f"each at {100 * min(played.each):.0f} % speed"
    )
    lanes = [(f"job {number}", blocks) for number, blocks in enumerate(played.lanes, start=1)]
    return draw_lanes(lanes, title, meanings=_MEANINGS)


def turn_by_hand() -> ByHand | Figure:
    """Sliders for the model; without ipywidgets the drawing of the first setting."""
    sliders = {
        "jobs": ("jobs", 1, MOST_JOBS, 1),
        "busy_pct": ("busy %", 5, 100, 5),
        "fills_pct": ("fills %", 10, 100, 10),
        "way": ("shared by", *WAYS),
    }
    return by_hand(draw, Setting(), sliders)
