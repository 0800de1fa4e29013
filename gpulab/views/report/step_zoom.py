"""Panel: one profiled step of median length, host lanes above device lanes, true to scale down to less than a pixel."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

import numpy as np
from msgspec import Struct

from gpulab.analysis.breakdown import Breakdown, StepParts
from gpulab.formatting import duration, plural, time_unit
from gpulab.run import Category, Float64, Int64, Lane, Timeline
from gpulab.timeline import spans
from gpulab.views import wording
from gpulab.views.drawing import SMALL_PT, Key, frame, ink, legend_beside, rectangles
from gpulab.views.report.span_kinds import KINDS, kinds_of, lane_name, nesting

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TRAINING_ROWS, OTHER_ROWS = 4, 2
MOST_THREADS, MOST_STREAMS = 2, 4
MOST_LABELS = 48
_GROUND = "#EFEFEF"
_ROW = 0.92  # height of a row; the rest separates it from the next
_DEVICE = (Category.KERNEL, Category.GPU_MEMCPY, Category.GPU_MEMSET)
_SHOWN_HOST = (
    Category.CPU_OP,
    Category.USER_ANNOTATION,
    Category.CUDA_RUNTIME,
    Category.CUDA_DRIVER,
    Category.OVERHEAD,
)
_BROAD_PX = 1.5  # spans at least this wide are drawn as they are, narrower ones as the share of each pixel they cover
_LABEL_PT, _CHARACTER_PX = 8.5, 7.1
_WORTH_CUTTING = 9  # characters: a name cut shorter than this says nothing


class Track(Struct, frozen=True):
    """The spans of one lane inside the step, as columns: row of nesting, kind, time clipped to the step."""

    lane: Lane
    training: bool
    start_ns: Int64
    end_ns: Int64
    row: Int64
    kind: Int64  # index into KINDS
    name_id: Int64
    rows: int


class _Scale(Struct, frozen=True):
    """From nanoseconds to the axis: its zero, its unit, and how many units a pixel is wide."""

    origin_ns: int
    unit_ns: float
    pixel: float

    def at(self, t_ns: Int64) -> Float64:
        return (t_ns - self.origin_ns) / self.unit_ns


class _Label(Struct, frozen=True):
    """A name that may be written into its span."""

    left: float
    right: float
    middle: float
    name: str
    colour: str


class Zoom(Struct, frozen=True):
    """The step to look into, with its lanes laid out in rows."""

    timeline: Timeline
    step: StepParts
    title: str
    tracks: list[Track]
    on_gpu: bool

    @classmethod
    def into(cls, timeline: Timeline, account: Breakdown, device_kind: str) -> Zoom:
        """The profiled step of median length; where steps wait by turns, of those that do."""
        step = next(s for s in account.steps if s.number == account.median_step)
        tracks, hidden = _tracks(timeline, step, device_kind)
        more = f", {plural(hidden, 'more lane')} not shown" if hidden else ""
        return cls(timeline, step, f"{_which(account)}, {_length(step)}{more}", tracks, device_kind == "cuda")

    @property
    def rows(self) -> int:
        """How many rows there are to draw: the layout gives them room."""
        return sum(track.rows for track in self.tracks)

    def draw(self, axes: Axes, width_px: float) -> None:
        """The panel, drawn for a width of `width_px` pixels."""
        wall_ns = max(self.step.end_ns - self.step.start_ns, 1)
        unit_us, unit = time_unit(wall_ns / 1e3)
        unit_ns = 1e3 * unit_us
        scale = _Scale(self.step.start_ns, unit_ns, wall_ns / unit_ns / width_px)
        axes.set_xlim(0, wall_ns / unit_ns)
        middles, labels, y = [], [], 0.0
        for track in self.tracks:
            _ground(axes, wall_ns / unit_ns, y, track.rows)
            labels += _paint(axes, track, self.timeline, scale, y)
            middles.append(y + track.rows / 2)
            y += track.rows + 0.45
        _write(axes, labels, scale)
        axes.set_ylim(max(y - 0.35, 1), -0.1)
        axes.set_yticks(middles, [_lane_label(track) for track in self.tracks], fontsize=SMALL_PT)
        frame(axes, self.title)
        axes.tick_params(axis="y", length=0)
        axes.spines["left"].set_visible(False)
        axes.set_xlabel(f"time in the step ({unit})", fontsize=SMALL_PT)
        _legend(axes, self.tracks, self.on_gpu, _BROAD_PX * scale.pixel * unit_ns)


def _which(account: Breakdown) -> str:
    if account.whole_window:
        return "Inside the profiled window"
    one = "the profiled step" if len(account.steps) == 1 else "a profiled step of median length"
    if account.round_steps > 1 and len(account.steps) > 1:
        one = "a profiled step that waits its turn for data"
    return f"Inside {one}: step {account.median_step}"


def _length(step: StepParts) -> str:
    return duration((step.end_ns - step.start_ns) / 1e3)


def _tracks(timeline: Timeline, step: StepParts, device_kind: str) -> tuple[list[Track], int]:
    """The lanes to show, host first, the busiest of each sort, and how many others had spans in the step."""
    shown = np.isin(timeline.category, [int(c) for c in _SHOWN_HOST + _DEVICE])
    inside = np.flatnonzero(shown & (timeline.start_ns < step.end_ns) & (timeline.end_ns > step.start_ns))
    inside = inside[~spans.named(timeline, spans.is_step)[inside]]
    kinds = kinds_of(timeline, inside, device_kind)
    threads: list[Track] = []
    streams: list[Track] = []
    training: list[Track] = []
    for lane_id in np.unique(timeline.lane_id[inside]):
        mine = timeline.lane_id[inside] == lane_id
        lane, is_training = timeline.lanes[lane_id], lane_id == timeline.training_lane
        track = _track(timeline, lane, is_training, inside[mine], kinds[mine], step)
        (training if is_training else streams if lane.kind == "stream" else threads).append(track)
    for group in (threads, streams):
        group.sort(key=_outer_ns, reverse=True)
    hidden = max(len(threads) - MOST_THREADS, 0) + max(len(streams) - MOST_STREAMS, 0)
    return training + threads[:MOST_THREADS] + streams[:MOST_STREAMS], hidden


def _outer_ns(track: Track) -> int:
    outer = track.row == 0
    return int((track.end_ns[outer] - track.start_ns[outer]).sum())


def _track(timeline: Timeline, lane: Lane, training: bool, rows: Int64, kinds: Int64, step: StepParts) -> Track:
    start, end = timeline.start_ns[rows], timeline.end_ns[rows]
    stream = lane.kind == "stream"
    row = np.zeros(len(rows), np.int64) if stream else nesting(start, end)
    kept = row < (1 if stream else TRAINING_ROWS if training else OTHER_ROWS)
    return Track(
        lane=lane,
        training=training,
        start_ns=np.maximum(start, step.start_ns)[kept],
        end_ns=np.minimum(end, step.end_ns)[kept],
        row=row[kept],
        kind=kinds[kept],
        name_id=timeline.name_id[rows][kept].astype(np.int64),
        rows=int(row[kept].max()) + 1,
    )


def _ground(axes: Axes, span: float, y: float, rows: int) -> None:
    """The empty row behind the spans: what stays visible of it is idle."""
    bottoms: Float64 = y + np.arange(rows, dtype=np.float64)
    rectangles(axes, np.zeros(rows), np.full(rows, span), bottoms + _ROW, bottoms, _GROUND)


def _paint(axes: Axes, track: Track, timeline: Timeline, scale: _Scale, y: float) -> list[_Label]:
    """Draws a lane; returns what might be written into it."""
    left, right = scale.at(track.start_ns), scale.at(track.end_ns)
    broad = right - left >= _BROAD_PX * scale.pixel
    for k in np.unique(track.kind[broad]):
        chosen = broad & (track.kind == k)
        top = y + track.row[chosen]
        rectangles(axes, left[chosen], right[chosen], top + _ROW, top, KINDS[k].colour, edge=0.4)
    for row in range(track.rows):
        narrow = ~broad & (track.row == row)
        if narrow.any():
            _paint_narrow(axes, left[narrow], right[narrow], track.kind[narrow], y + row, scale.pixel)
    labels = [
        _Label(
            float(left[i]), float(right[i]), y + float(track.row[i]) + _ROW / 2,
            wording.short_name(timeline.names[track.name_id[i]]), KINDS[track.kind[i]].colour,
        )
        for i in np.flatnonzero(right - left > 3 * _CHARACTER_PX * scale.pixel)
    ]  # fmt: skip
    return labels + _idle_labels(track, scale, y)


def _paint_narrow(axes: Axes, left: Float64, right: Float64, kind: Int64, top: float, pixel: float) -> None:
    """Spans under a pixel: in each pixel column a bar as high as the share of it they cover, kinds on one another."""
    columns: Float64 = np.arange(np.floor(left.min() / pixel), np.ceil(right.max() / pixel) + 1) * pixel
    base = np.zeros(len(columns) - 1)
    for k in np.unique(kind):
        chosen = kind == k
        share = np.minimum(coverage(left[chosen], right[chosen], columns) / pixel, 1 - base)
        drawn = share > 0.004
        bottom: Float64 = top + _ROW * (1 - base[drawn])
        height: Float64 = _ROW * share[drawn]
        rectangles(axes, columns[:-1][drawn], columns[1:][drawn], bottom, bottom - height, KINDS[k].colour)
        base = base + share


def coverage(left: Float64, right: Float64, edges: Float64) -> Float64:
    """How much of each interval between neighbouring `edges` the spans cover, overlaps counted twice."""
    covered: Float64 = np.diff(_covered_before(np.sort(left), edges) - _covered_before(np.sort(right), edges))
    return covered


def _covered_before(points: Float64, x: Float64) -> Float64:
    """For each x the sum of `x - p` over the points p before it; `points` is sorted."""
    count = np.searchsorted(points, x)
    sums: Float64 = count * x - np.concatenate([[0.0], np.cumsum(points)])[count]
    return sums


def _idle_labels(track: Track, scale: _Scale, y: float) -> list[_Label]:
    """ "idle" in the wide gaps of a device stream."""
    if track.lane.kind != "stream":
        return []
    ends = np.maximum.accumulate(np.concatenate([[scale.origin_ns], track.end_ns[:-1]]))
    left, right = scale.at(ends), scale.at(track.start_ns)
    wide = np.flatnonzero(right - left > 8 * _CHARACTER_PX * scale.pixel)
    return [_Label(float(left[i]), float(right[i]), y + _ROW / 2, "idle", _GROUND) for i in wide]


def _write(axes: Axes, labels: list[_Label], scale: _Scale) -> None:
    """Names into the widest spans, as far as they fit."""
    for label in sorted(labels, key=lambda it: it.left - it.right)[:MOST_LABELS]:
        room = int((label.right - label.left) / scale.pixel / _CHARACTER_PX - 0.8)
        if len(label.name) > room < _WORTH_CUTTING:
            continue
        axes.text(
            (label.left + label.right) / 2, label.middle, ink(wording.cut(label.name, room)),
            ha="center", va="center_baseline", fontsize=_LABEL_PT, color=_contrast(label.colour),
        )  # fmt: skip


def _contrast(colour: str) -> str:
    """Black or white, whichever reads better on the colour (relative luminance of WCAG 2, threshold 0.3)."""
    red, green, blue = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    return "white" if 0.2126 * red**2.2 + 0.7152 * green**2.2 + 0.0722 * blue**2.2 < 0.3 else "black"


def _lane_label(track: Track) -> str:
    name = lane_name(track.lane, training=track.training)
    return "\n".join(ink(line) for line in textwrap.wrap(wording.plain(name), 16, max_lines=2, placeholder="…"))


def _legend(axes: Axes, tracks: list[Track], on_gpu: bool, broad_ns: float) -> None:
    seen = sorted({int(k) for track in tracks for k in np.unique(track.kind)})
    keys = [KINDS[k] for k in seen]
    keys.append(Key("idle" if on_gpu else "nothing recorded", _GROUND))
    if any((track.end_ns - track.start_ns < broad_ns).any() for track in tracks):
        keys.append(Key("low bar: spans under a pixel,\nas high as the time they cover"))
    legend_beside(axes, keys, offset_in=0.18, spare_in=0.5)
