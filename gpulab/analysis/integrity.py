"""Checks whether a trace supports the figures computed from it: each check with its count, and what it withholds.

Damaged traces are common (CUPTI loses kernels, clocks drift apart, files are cut) and look like any other. A check
withholds exactly the figures that depend on the damage it found; all others stay.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import numpy as np
from msgspec import Struct

from gpulab.formatting import duration
from gpulab.run import Int64, Run, Timeline
from gpulab.timeline.labels import WORK, Labels, Rows, What, labels, matched
from gpulab.timeline.launches import device_windows, host_steps
from gpulab.timeline.trace_steps import FoundSteps, find_steps

State = Literal["ok", "degraded", "unusable"]
STATES: tuple[State, ...] = ("ok", "degraded", "unusable")

# A launch whose kernel is missing leaves a gap that looks like idle time. Up to 0.1 % changes no displayed figure;
# above 2 % the busy share is wrong in its second digit. Ours: no published source.
LOST_NOTICE, LOST_LIMIT = 0.001, 0.02
# A kernel cannot start before the call that launches it; CUPTI's clocks agree to about a microsecond.
CLOCK_TOLERANCE_NS = 1_000
EARLY_NOTICE = 0.001

# Ours: the CPU is ahead if it is ahead by more than 1 ms and by more than this fraction of a step.
HOST_AHEAD_NS, HOST_AHEAD_STEPS = 1_000_000, 0.05

LOST_EVENTS = ("unreadable events", "missing ts", "broken times")  # as the reader names them
BROKEN_DURATIONS = ("missing dur", "negative dur")
DEVICE_FIGURES = ("breakdown", "busy_fraction", "kernel_busy_fraction", "kernels")
HOST_AGAINST_DEVICE = ("idle_causes", "launch_statistics")
ALL_OF_THE_DEVICE = (*DEVICE_FIGURES, *HOST_AGAINST_DEVICE, "tensor_core_fraction")


SUMS_OVER_A_STEP = ("data_wait", "optimizer", "operators", "memory")  # too small if events are missing


class Check(Struct, frozen=True):
    """One kind of damage. `count` is how often it was found; `withholds` names the figures it makes unreliable."""

    name: str
    count: int
    state: State
    withholds: tuple[str, ...]
    meaning: str  # for a person who knows no terms of gpulab; empty if nothing was found


def check_of_count(name: str, count: int, state: State, meaning: str, withholds: tuple[str, ...] = ()) -> Check:
    """The check in this `state` with its `meaning` if something was found; else "ok" without words."""
    return Check(name, count, state, withholds, meaning) if count else Check(name, 0, "ok", (), "")


class Integrity(Struct, frozen=True):
    """The verdict on one trace: as bad as its worst check."""

    checks: tuple[Check, ...]

    @property
    def state(self) -> State:
        return max((c.state for c in self.checks), key=STATES.index, default="ok")

    @property
    def withheld(self) -> frozenset[str]:
        return frozenset(figure for c in self.checks for figure in c.withholds)

    def reason(self, figure: str) -> str | None:
        """Why a figure is withheld; None if it is not."""
        return next((c.meaning for c in self.checks if figure in c.withholds), None)


def integrity(run: Run) -> Integrity | None:
    """Every check on the run's trace; None without one."""
    if run.timeline is None:
        return None
    evidence = _Evidence.of(run, run.timeline)
    return Integrity(tuple(check(evidence) for check in _CHECKS))


class _Evidence(Struct, frozen=True):
    """Parts of a trace that several checks read."""

    run: Run
    timeline: Labels
    launch: Int64  # rows of calls that start kernels, from the first step on
    device: Int64  # rows of kernels, copies and memsets
    starts_work: Int64  # rows of calls that start a kernel, a copy or a memset, likewise
    pairs: tuple[Rows, Rows]  # each device row with such a call, and the call

    @classmethod
    def of(cls, run: Run, timeline: Timeline) -> _Evidence:
        spans = labels(timeline)
        begun = spans.start_ns >= host_steps(run, timeline)[1][0, 0]  # CUPTI may lose the first kernels of a session
        launch = np.flatnonzero(spans.of(What.KERNEL_LAUNCH) & begun)
        device = spans.rows(*WORK)
        starts_work = np.flatnonzero(spans.of(What.KERNEL_LAUNCH, What.COPY_CALL, What.MEMSET_CALL) & begun)
        return cls(run, spans, launch, device, starts_work, matched(spans, device, starts_work))

    def damaged(self, *names: str) -> int:
        """How often the reader found these kinds of damage; 0 for a trace that gpulab recorded."""
        return sum(self.run.origin.damaged(name) for name in names) if self.run.origin is not None else 0


def _no_device_events(evidence: _Evidence) -> Check:
    """CUDA work was launched but the trace has none of it: CUPTI is denied, or in use by another tool."""
    device, count = evidence.run.device, len(evidence.starts_work) if len(evidence.device) == 0 else 0
    if device.kind == "unknown" and evidence.run.origin is not None and not evidence.run.origin.is_cut_short:
        meaning = f"this trace shows no work of {device.name}: record kernels, and the calls that start them"
        return check_of_count("no_device_events", 1, "unusable", meaning, (*ALL_OF_THE_DEVICE, "operators"))
    meaning = (
        f"{count:,} calls started GPU work, and the trace has none of it: CUPTI was refused or in use by another tool "
        "(see gpulab doctor)"
    )
    return check_of_count("no_device_events", count, "unusable", meaning, ALL_OF_THE_DEVICE)


def _launches_without_kernels(evidence: _Evidence) -> Check:
    t = evidence.timeline
    launched = int((t.correlation[evidence.launch] > 0).sum())
    lost = launched - len(matched(t, evidence.launch, evidence.device)[0]) if len(evidence.device) else 0
    share = lost / max(1, len(evidence.launch))
    state: State = "ok" if share <= LOST_NOTICE else "degraded" if share <= LOST_LIMIT else "unusable"
    meaning = (
        f"{lost:,} of {len(evidence.launch):,} kernel launches have no kernel in the trace: the GPU was busier than "
        "shown"
    )
    withholds = {"ok": (), "degraded": ("launch_statistics",), "unusable": (*DEVICE_FIGURES, *HOST_AGAINST_DEVICE)}
    return check_of_count("launches_without_kernels", lost, state, meaning, withholds[state])


def _kernels_before_launch(evidence: _Evidence) -> Check:
    of_device, of_launch = evidence.pairs
    early_ns = evidence.timeline.start_ns[of_launch] - evidence.timeline.start_ns[of_device]
    early = int((early_ns > CLOCK_TOLERANCE_NS).sum())
    bad = early > EARLY_NOTICE * len(early_ns)
    meaning = (
        f"{early:,} kernels or copies begin before their launch (CPU and GPU clocks disagree), so the causes of GPU "
        "idle time are unknown"
    )
    state: State = "degraded" if bad else "ok"
    return check_of_count("kernels_before_launch", early, state, meaning, HOST_AGAINST_DEVICE if bad else ())


def _clock_shift(evidence: _Evidence) -> Check:
    """Device work that ends after the return of a call that waited for it: its times are shifted."""
    t = evidence.timeline
    waits = t.rows(What.DEVICE_WAIT)
    of_device, of_launch = evidence.pairs
    shifted = 0
    if len(waits) and len(of_device) and len({lane.process for lane in t.lanes if lane.kind == "stream"}) == 1:
        order = np.argsort(t.start_ns[of_launch], kind="stable")
        latest = np.maximum.accumulate(t.end_ns[of_device][order])
        before = np.searchsorted(t.start_ns[of_launch][order], t.start_ns[waits], side="left") - 1
        begun = before >= 0
        shifted = int((latest[before[begun]] > t.end_ns[waits[begun]] + CLOCK_TOLERANCE_NS).sum())
    meaning = (
        f"after {shifted:,} calls that wait for the GPU, its work goes on (GPU times are shifted), so the causes of "
        "GPU idle time are unknown"
    )
    return check_of_count("clock_shift", shifted, "degraded", meaning, HOST_AGAINST_DEVICE)


def _host_ahead(evidence: _Evidence) -> Check:
    """A loop that never waits for the GPU is normal. Its steps are counted on the GPU, and the report says so."""
    t = evidence.timeline
    _, host, _ = host_steps(evidence.run, t)
    ahead_ns = [int((device_windows(t, host, i) - host)[:, 1].max()) for i in t.devices]
    wall_ns = float(np.median(host[:, 1] - host[:, 0]))
    count = sum(ns > max(HOST_AHEAD_NS, HOST_AHEAD_STEPS * wall_ns) for ns in ahead_ns)
    meaning = (
        f"the CPU runs up to {duration(max(ahead_ns, default=0) / 1e3)} ahead of the GPU: a step begins when the GPU "
        "has finished the previous one"
    )
    return check_of_count("host_ahead", count, "ok", meaning)


def _graph_replays(evidence: _Evidence) -> Check:
    """One launch starts many kernels: the number of launches says nothing about such a trace."""
    t = evidence.timeline
    count = len(t.rows(What.GRAPH_LAUNCH))
    meaning = f"{count:,} CUDA graph launches, each of many kernels: kernels per launch are not counted"
    return check_of_count("graph_replays", count, "ok", meaning, ("launch_statistics",))


def _duplicated_steps(evidence: _Evidence) -> Check:
    """Marks of a step that has a mark already. Their copies on the device are Kineto's and never count as steps."""
    count = _marks(evidence).duplicate_marks
    meaning = f"{count:,} duplicate step marks; each step counts once"
    return check_of_count("duplicated_steps", count, "degraded", meaning)


def _missing_steps(evidence: _Evidence) -> Check:
    count = _marks(evidence).missing_numbers
    meaning = f"{count:,} step numbers are missing between the first and the last: nothing is known of those steps"
    return check_of_count("missing_steps", count, "degraded", meaning)


def _marks(evidence: _Evidence) -> FoundSteps:
    """The marks of a trace from another tool; gpulab's own steps do not depend on marks."""
    loaded = evidence.run.origin is not None
    return find_steps(evidence.timeline) if loaded else FoundSteps(evidence.run.steps, evidence.run.step_source, ())


def _truncated_tail(evidence: _Evidence) -> Check:
    """PyTorch writes the host's events first: a truncated file lacks an unknown part of the GPU's work."""
    count = min(1, evidence.damaged("truncated tail"))
    meaning = "the file is truncated: an unknown part is missing, the GPU's work first"
    return check_of_count("truncated_tail", count, "unusable", meaning, (*ALL_OF_THE_DEVICE, *SUMS_OVER_A_STEP))


def _broken_gzip(evidence: _Evidence) -> Check:
    """A damaged gzip file; `truncated_tail` checks whether text is missing."""
    count = min(1, evidence.damaged("broken gzip"))
    meaning = "the gzip file is damaged or has trailing data; the figures use all that could be read"
    return check_of_count("broken_gzip", count, "degraded", meaning)


def _broken_durations(evidence: _Evidence) -> Check:
    """A span without a duration, or with a negative one, counts as no time."""
    on_device = evidence.damaged(*(f"{name} on the device" for name in BROKEN_DURATIONS))
    on_host = evidence.damaged(*BROKEN_DURATIONS)
    bad_device = on_device > LOST_NOTICE * max(1, len(evidence.device))
    bad_host = on_host > LOST_LIMIT * max(1, len(evidence.timeline) - len(evidence.device))
    withholds: tuple[str, ...] = ()
    if bad_device or (bad_host and not len(evidence.device)):
        withholds = ALL_OF_THE_DEVICE
    elif bad_host:
        withholds = HOST_AGAINST_DEVICE
    count = on_device + on_host
    state: State = "unusable" if "breakdown" in withholds else "degraded"
    meaning = f"{count:,} spans have no duration, or a negative one ({on_device:,} on the GPU): their time is unknown"
    return check_of_count("broken_durations", count, state, meaning, withholds)


def _empty_window(evidence: _Evidence) -> Check:
    start, end = evidence.timeline.window_ns
    meaning = "no event of this trace has a duration"
    return check_of_count("empty_window", int(end <= start), "unusable", meaning, ALL_OF_THE_DEVICE)


def _dropped_events(evidence: _Evidence) -> Check:
    """Events that the profiler reports as dropped, and events that could not be read."""
    origin, count = evidence.run.origin, evidence.damaged(*LOST_EVENTS)
    lost = [f"{d.count:,} {d.name}" for d in origin.damage if d.name in LOST_EVENTS] if origin is not None else []
    bad = origin is not None and count > LOST_LIMIT * max(1, origin.events_read)
    withholds = (*DEVICE_FIGURES, *HOST_AGAINST_DEVICE) if bad else ()
    state: State = "unusable" if bad else "degraded"
    return check_of_count("dropped_events", count, state, f"not in these figures: {', '.join(lost)}", withholds)


def _missing_device_properties(evidence: _Evidence) -> Check:
    """Without these properties, nothing can be compared with the GPU's peaks."""
    origin = evidence.run.origin
    count = len(evidence.timeline.devices) if origin is not None and not origin.device_properties else 0
    meaning = "the trace does not name its GPU: its memory is not known"
    return check_of_count("missing_device_properties", count, "degraded", meaning, ("device_memory",))


def _zero_duration_kernels(evidence: _Evidence) -> Check:
    t = evidence.timeline
    count = int((t.duration_ns[evidence.device] == 0).sum())
    meaning = f"{count:,} kernels or copies are shorter than the clock resolution and count as no time"
    return check_of_count("zero_duration_kernels", count, "ok", meaning)


_CHECKS: tuple[Callable[[_Evidence], Check], ...] = (
    _no_device_events,
    _launches_without_kernels,
    _kernels_before_launch,
    _clock_shift,
    _host_ahead,
    _duplicated_steps,
    _missing_steps,
    _truncated_tail,
    _broken_gzip,
    _broken_durations,
    _empty_window,
    _dropped_events,
    _missing_device_properties,
    _graph_replays,
    _zero_duration_kernels,
)
