"""The timeline of the HTML report: every span of the profiled window, to pan and zoom without a server or network.

The spans travel inside the page as one compressed block: a JSON head (names, lanes, steps), then columns in the order
in which they are drawn, lane by lane, level by level, by time. `static/timeline.js` unpacks and draws it. Base64 holds
no markup, so no name from a trace can end the block. The page's policy contains the hash of this script and so allows
no other.
"""

from __future__ import annotations

import base64
import json
import zlib
from itertools import pairwise

import numpy as np
from markupsafe import Markup
from msgspec import Struct

from gpulab.analysis.breakdown import PARTS, Breakdown, Pieces, placed
from gpulab.formatting import duration, plural
from gpulab.run import DEVICE_CATEGORIES, Category, Int64, Lane, Run, Timeline
from gpulab.timeline.labels import CALLS, OPERATORS, WAITS, WORK, What, labels
from gpulab.views import wording
from gpulab.views.page import render

MOST_SPANS = 1_000_000  # a page of about 10 MB, which a browser still unpacks in about a second

_NAME_WIDTH, _SHORT_WIDTH, _ALL_NAMES = 400, 80, 16_000_000  # characters of a name, a label, all names
_ROUNDING_NS = 1_000  # in traces in µs, kernels overlap by rounding, by less than this
_PYTHON_LEVELS = 2  # the outermost frames are the least useful
_PART_ORDER = np.array([list(wording.PARTS).index(part) for part in PARTS])  # from accounting to display order


def timeline_section(run: Run, breakdown: Breakdown | None, most_spans: int = MOST_SPANS) -> Markup:
    """The timeline as a section of a self-contained page; empty if nothing was traced.

    `breakdown` colours the parts of each step. At most `most_spans` spans are drawn; the page says if some are left
    out.
    """
    timeline = run.timeline
    if timeline is None or len(timeline) == 0:
        return Markup()
    rows, omission = _longest_spans(timeline, len(run.steps) > 0, most_spans)
    lanes, strip = _lanes(timeline, rows), _strip(timeline, breakdown, most_spans)
    block = base64.b64encode(_packed(run, timeline, strip, lanes, bool(omission))).decode("ascii")
    what = f"{plural(len(rows), 'span')} on {plural(len(lanes), 'lane')}."
    about = " ".join(filter(None, (what, strip.about, omission)))
    return render("timeline.html", what=what, about=about, block=block)


class _Stack(Struct, frozen=True):
    """One lane's spans (rows of the timeline) by level; `work` is the first level that shows a GPU at work."""

    label: str
    levels: list[Int64]
    work: int | None = None
    most_levels: int = 8  # visible until the user asks for all


class _Strip(Struct, frozen=True):
    """The strip under the steps: their parts as pieces in time, or as shares, one after the other."""

    account: Breakdown | None
    pieces: Pieces
    in_place: bool = True
    about: str = ""


def _strip(timeline: Timeline, account: Breakdown | None, most: int) -> _Strip:
    if account is None:
        nothing = np.empty(0, np.int64)
        return _Strip(None, Pieces(nothing, nothing, nothing))
    index, pieces = account.device_index, placed(account)
    which = f", on GPU {index}" if index is not None and len(labels(timeline).devices) > 1 else ""
    if pieces is not None and len(pieces.part) <= most:
        about = f"The strip under the steps shows what each moment went to{which}."
        cores = (
            " When exactly the program waited for a core is not known: this time stands at the end of each piece that "
            "it made longer."
        )
        return _Strip(account, pieces, True, f"{about}{cores if account.share['core_wait'] else ''}")
    parts_ns = np.array([[step.parts_ns[part] for part in wording.PARTS] for step in account.steps], dtype=np.int64)
    end = np.array([step.start_ns for step in account.steps], dtype=np.int64)[:, None] + np.cumsum(parts_ns, axis=1)
    step, at = np.nonzero(parts_ns)
    part = np.array([PARTS.index(name) for name in wording.PARTS], dtype=np.int64)[at]
    shares = Pieces((end - parts_ns)[step, at], end[step, at], part)
    about = f"The strip under the steps splits the time of each{which}: how much each part took, not when."
    return _Strip(account, shares, False, about)


def _longest_spans(timeline: Timeline, has_steps: bool, most: int) -> tuple[Int64, str]:
    """The spans to draw, by time, and a sentence about omitted spans: first the shortest on the host, then on the GPU.

    Host marks of steps are omitted if the steps are drawn above the lanes.
    """
    rows = np.arange(len(timeline), dtype=np.int64)
    if has_steps:
        rows = rows[~labels(timeline).of(What.STEP)]
    excess = len(rows) - most
    if excess <= 0:
        return rows, ""
    device = labels(timeline).of(*WORK)[rows]
    order = np.lexsort((timeline.duration_ns[rows], device))
    dropped = order[:excess]
    longest_us = timeline.duration_ns[rows[dropped]].max() / 1e3
    work = int(device[dropped].sum())
    of_work = f", {work:,} of them GPU work" if work else ", all of them on the host"
    return rows[np.sort(order[excess:])], (
        f"Not drawn here: the {excess:,} shortest spans, of at most {duration(longest_us)}{of_work}; "
        "the figures of the report count them all."
    )


def _lanes(timeline: Timeline, spans: Int64) -> list[_Stack]:
    """The lanes in order: the training thread, the autograd thread, other host threads, then each GPU's streams."""
    by_lane = spans[np.argsort(timeline.lane_id[spans], kind="stable")]
    ids, firsts = np.unique(timeline.lane_id[by_lane], return_index=True)
    rows = dict(zip(ids.tolist(), np.split(by_lane, firsts[1:]), strict=True))
    labelled = labels(timeline)
    calls = np.bincount(labelled.lane_id[labelled.of(*OPERATORS, *CALLS)], minlength=max(rows) + 1)
    trainers = np.unique(labelled.lane_id[labelled.on_training_threads]).tolist()

    def place(lane_id: int) -> tuple[object, ...]:
        lane = timeline.lanes[lane_id]
        if lane.kind == "stream":
            return (1, lane.process, lane.number, 0)
        return (0, lane_id != timeline.training_lane, lane_id not in trainers, -int(calls[lane_id]))

    return [stack for lane_id in sorted(rows, key=place) for stack in _lane_stacks(timeline, lane_id, rows[lane_id])]


def _lane_stacks(timeline: Timeline, lane_id: int, rows: Int64) -> list[_Stack]:
    """A host lane by depth of nesting, with the Python stack separate; a stream's work below its annotations."""
    lane = timeline.lanes[lane_id]
    name = lane_name(lane, training=lane_id == timeline.training_lane)
    label = wording.cut(wording.plain(name), _SHORT_WIDTH)
    if lane.kind == "stream":
        is_work = labels(timeline).of(*WORK)[rows]
        above = _levels(timeline, rows[~is_work])
        work = _levels(timeline, rows[is_work], _ROUNDING_NS)
        return [_Stack(label, above + work, work=len(above) if work else None)]
    is_python = timeline.category[rows] == Category.PYTHON_FUNCTION
    python = _Stack(f"{label}, Python", _levels(timeline, rows[is_python]), most_levels=_PYTHON_LEVELS)
    return [stack for stack in (_Stack(label, _levels(timeline, rows[~is_python])), python) if stack.levels]


def _levels(timeline: Timeline, rows: Int64, tolerance_ns: int = 0) -> list[Int64]:
    """The spans by how many others are open when each begins; overlaps within the tolerance are ignored."""
    if len(rows) == 0:
        return []
    start, end = timeline.start_ns[rows], timeline.end_ns[rows] - tolerance_ns
    depth = nesting(start, np.maximum(end, start + 1))
    order = np.argsort(depth, kind="stable")
    return np.split(rows[order], np.searchsorted(depth[order], np.arange(1, int(depth.max()) + 1)))


def _packed(run: Run, timeline: Timeline, strip: _Strip, lanes: list[_Stack], thinned: bool) -> bytes:
    """The block, compressed: length of the head (4 bytes), head, columns as byte planes, lowest byte first.

    The rows are the lanes' levels, then the strip's pieces.
    """
    levels = [level for lane in lanes for level in lane.levels]
    order = np.concatenate(levels)
    origin = min(timeline.window_ns[0], int(timeline.start_ns[order].min()))
    extent = max(timeline.window_ns[1], int(timeline.end_ns[order].max())) - origin
    used, name = np.unique(timeline.name_id[order], return_inverse=True)
    names = [timeline.names[i] for i in used.tolist()]
    longest = max(_SHORT_WIDTH, min(_NAME_WIDTH, _ALL_NAMES // len(names)))
    whole = [wording.cut(wording.plain(name), longest) for name in names]
    short = [wording.cut(wording.short_name(name), _SHORT_WIDTH) for name in names]
    kinds, kind = _kinds(timeline, order, run.device.kind)
    firsts = np.concatenate(([0], np.cumsum([len(level) for level in levels])))
    start = np.concatenate((timeline.start_ns[order], strip.pieces.start_ns)) - origin
    gap = np.diff(start, prepend=0)
    row_starts = firsts[firsts < len(start)]
    gap[row_starts] = start[row_starts]
    nothing = np.zeros(len(strip.pieces.part), np.int64)
    columns = {
        "gap": gap,  # each start relative to the previous start in its row, the first relative to the origin
        "duration": np.concatenate((timeline.duration_ns[order], strip.pieces.end_ns - strip.pieces.start_ns)),
        "name": np.concatenate((name, nothing)),
        "kind": np.concatenate((kind, len(kinds) + _PART_ORDER[strip.pieces.part])),
        "launch": np.concatenate((_launches(timeline, order), nothing)),
    }
    planes = {column: _planes(values) for column, values in columns.items()}
    head = {
        "columns": [[column, len(p)] for column, p in planes.items()],
        "count": len(start),
        "spans": len(order),
        "names": whole,
        "short": [None if s == w else s for s, w in zip(short, whole, strict=True)],  # the label inside a span
        "kinds": kinds,
        "parts": [[part.label, part.meaning_on(run.device.kind), part.colour] for part in wording.PARTS.values()],
        **_lanes_head(lanes, firsts),
        "steps": _bands(run, timeline, strip.account, origin),
        "strip": {"title": f"{'parts' if strip.in_place else 'shares'} of each step", "inPlace": strip.in_place},
        "window": [t - origin for t in timeline.window_ns],
        "extent": max(extent, 1),
        "launched": [category.name.lower() for category in DEVICE_CATEGORIES],
        "noLaunch": f"its launch is not in {'this picture' if thinned else 'the trace'}",
    }
    text = json.dumps(head, separators=(",", ":")).encode("ascii")
    raw = [len(text).to_bytes(4, "little"), text, *(p.tobytes() for p in planes.values())]
    return zlib.compress(b"".join(raw), 6)


def _planes(values: Int64) -> np.ndarray[tuple[int, int], np.dtype[np.uint8]]:
    """The bytes of a column, all lowest ones first: they compress far better than whole numbers."""
    width = max(1, (int(values.max()).bit_length() + 7) // 8)
    return np.ascontiguousarray(values.astype("<u8").view(np.uint8).reshape(-1, 8)[:, :width].T)


def _launches(timeline: Timeline, order: Int64) -> Int64:
    """For each span of GPU work, 1 + the position of its launch in the order; 0: no launch."""
    position = np.full(len(timeline) + 1, -1, np.int64)  # the last: for no row
    position[order] = np.arange(len(order))
    return position[labels(timeline).call[order]] + 1


def _kinds(timeline: Timeline, order: Int64, device_kind: str) -> tuple[list[list[str]], Int64]:
    """[label, category, colour] of each kind of span that occurs, and the kind's index for each span."""
    sorts = labels(timeline).what[order].astype(np.int64) * 256 + timeline.category[order]
    pairs, kind = np.unique(sorts, return_inverse=True)
    kinds = []
    for what, number in (divmod(pair, 256) for pair in pairs.tolist()):
        category = Category(number)
        label, colour = _STYLES.get(What(what), ("annotations", "#BDBDBD"))
        if device_kind == "cpu" and what in OPERATORS:
            label, colour = "operators", wording.PARTS["compute"].colour
        elif category == Category.CUDA_SYNC:
            label, colour = "streams that wait", "#E3B7D0"
        kinds.append([label, "unknown category" if category == Category.UNKNOWN else category.name.lower(), colour])
    return kinds, kind.astype(np.int64)


def _lanes_head(lanes: list[_Stack], firsts: Int64) -> dict[str, object]:
    """Each lane's rows as [first, count]; the overview draws the GPUs' work, or the first row if there is none."""
    rows = [[a, b - a] for a, b in pairwise(firsts.tolist())]
    heads: list[dict[str, object]] = []
    overview: list[list[int]] = []
    at = 0
    for lane in lanes:
        mine = rows[at : at + len(lane.levels)]
        heads.append({"label": lane.label, "rows": mine, "most": lane.most_levels})
        overview += [] if lane.work is None else mine[lane.work :]
        at += len(mine)
    return {"lanes": heads, "overview": overview or rows[:1]}


def _bands(run: Run, timeline: Timeline, account: Breakdown | None, origin: int) -> list[dict[str, object]]:
    """The steps that overlap the window, with the parts of accounted steps; without steps, the whole window."""
    if account is not None and account.whole_window:
        (whole,) = account.steps
        bands = [("", "whole window", whole.start_ns, whole.end_ns, 0, dict(whole.parts_ns))]
    else:
        accounted = {} if account is None else {step.number: dict(step.parts_ns) for step in account.steps}
        s, (window_start, window_end) = run.steps, timeline.window_ns
        touching = np.flatnonzero((s.start_ns < window_end) & (s.end_ns > window_start))
        columns = (column[touching].tolist() for column in (s.number, s.start_ns, s.end_ns, s.flags))
        bands = [
            (str(number), f"step {number}", start_ns, end_ns, flags, accounted.get(number, {}))
            for number, start_ns, end_ns, flags in zip(*columns, strict=True)
        ]
    return [
        {
            "number": number,
            "label": label,
            "start": start_ns - origin,
            "end": end_ns - origin,
            "flags": wording.flag_names(flags),
            "parts": [parts_ns[part] for part in wording.PARTS] if parts_ns else None,
        }
        for number, label, start_ns, end_ns, flags, parts_ns in bands
    ]


def _part_style(name: str, label: str = "") -> tuple[str, str]:
    """Name and colour of the spans whose time is that part of a step."""
    part = wording.PARTS[name]
    return label or part.label, part.colour


_STYLES = {
    **dict.fromkeys(OPERATORS, ("operators (host)", "#A6BDDB")),
    **dict.fromkeys(CALLS, _part_style("launch", "CUDA calls")),
    **dict.fromkeys(WAITS, _part_style("sync_wait", "CUDA calls that wait")),
    **dict.fromkeys((What.PYTHON, What.USER_PYTHON), ("Python functions", "#CBB9A4")),
    What.LOADER: _part_style("data_wait"),
    What.UPDATE: _part_style("optimizer"),
    What.ZEROING: _part_style("optimizer"),
    What.KERNEL: _part_style("compute", "kernels"),
    What.COMMUNICATION: _part_style("communication", "communication kernels"),
    What.COPY: _part_style("memcpy", "copies"),
    What.MEMSET: _part_style("memset", "memsets"),
}


def lane_name(lane: Lane, *, training: bool) -> str:
    """The name of a lane on screen; `training`: whether it is the training thread."""
    if lane.label:
        return lane.label
    if lane.kind == "stream":
        return f"GPU {lane.process} stream {lane.number}"
    return "training thread" if training else f"thread {lane.number}"


def nesting(start: Int64, end: Int64) -> Int64:
    """How many spans of a lane are open when each begins; `start` is sorted, parents come before their children.

    If two spans overlap without nesting, the later span is placed one level above the last span that is still open.
    """
    depth = np.empty(len(start), np.int64)
    open_ends: list[int] = []
    for i, (begin, finish) in enumerate(zip(start.tolist(), end.tolist(), strict=True)):
        while open_ends and open_ends[-1] <= begin:
            open_ends.pop()
        depth[i] = len(open_ends)
        open_ends.append(finish)
    return depth
