"""The timeline of the HTML report: every span of the profiled window, to pan and zoom without a server or network.

The spans travel inside the page as one compressed block: a JSON head (names, lanes, steps), then columns in the order
in which they are drawn, lane by lane, level by level, by time. `static/timeline.js` unpacks and draws it. Base64 holds
no markup, so that no name from a trace can end the block; the script may run because its hash stands in the page's
policy, and nothing else may.
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
from gpulab.timeline.labels import CALLS, OPERATORS, WAITS, WORK, What, kind_of, labels
from gpulab.views import wording
from gpulab.views.html import render

MOST_SPANS = 1_000_000  # a page of about 10 MB, which a browser still unpacks in about a second

_NAME_WIDTH, _SHORT_WIDTH, _ALL_NAMES = 400, 80, 16_000_000  # characters: of a name, of a label, of all names together
_ROUNDING_NS = 1_000  # µs traces let one kernel begin before the one before it has ended, by less than this
_PYTHON_LEVELS = 2  # the outermost frames say least
_SHOWN_PARTS = np.array([list(wording.PARTS).index(part) for part in PARTS])  # the accounting's order to the reader's
_LAUNCHED = [c.name.lower() for c in DEVICE_CATEGORIES]


def timeline_section(run: Run, breakdown: Breakdown | None, most_spans: int = MOST_SPANS) -> Markup:
    """The timeline as a section of a page that stands alone; empty where nothing was traced.

    `breakdown` colours the parts of each step. More than `most_spans` spans are thinned out, and the page says so.
    """
    timeline = run.timeline
    if timeline is None or len(timeline) == 0:
        return Markup()
    drawn, left_out = _drawn(timeline, len(run.steps) > 0, most_spans)
    lanes = _lanes(timeline, drawn)
    strip = _Strip.of(timeline, breakdown, most_spans)
    block = base64.b64encode(_packed(run, timeline, strip, lanes, bool(left_out))).decode("ascii")
    what = f"{plural(len(drawn), 'span')} on {plural(len(lanes), 'lane')}."
    about = " ".join(note for note in (what, strip.about(timeline), left_out) if note)
    return render("timeline.html", what=what, about=about, block=block)


class _Drawn(Struct, frozen=True):
    """One lane, its spans (rows of the timeline) by level; `work` is the first level that shows a GPU at work."""

    lane: Lane
    label: str
    levels: list[Int64]
    work: int | None = None
    most_levels: int = 8  # shown until all are asked for


class _Strip(Struct, frozen=True):
    """The parts of the steps as pieces in time; not `in_place`: as shares of each step, one after the other."""

    account: Breakdown | None
    pieces: Pieces
    in_place: bool

    @classmethod
    def of(cls, timeline: Timeline, account: Breakdown | None, most: int) -> _Strip:
        if account is None:
            nothing = np.empty(0, np.int64)
            return cls(None, Pieces(nothing, nothing, nothing), True)
        pieces = placed(account)
        if pieces is not None and len(pieces.part) <= most:
            return cls(account, pieces, True)
        shown = list(wording.PARTS)
        parts_ns = np.array([[step.parts_ns[part] for part in shown] for step in account.steps], dtype=np.int64)
        end = np.array([step.start_ns for step in account.steps], dtype=np.int64)[:, None] + np.cumsum(parts_ns, axis=1)
        step, at = np.nonzero(parts_ns)
        part = np.array([PARTS.index(name) for name in shown], dtype=np.int64)[at]
        return cls(account, Pieces((end - parts_ns)[step, at], end[step, at], part), False)

    @property
    def title(self) -> str:
        return "parts of each step" if self.in_place else "shares of each step"

    def about(self, timeline: Timeline) -> str:
        """What the strip under the steps shows, for which device."""
        if self.account is None:
            return ""
        index = self.account.device_index
        which = f", on GPU {index}" if index is not None and len(labels(timeline).devices) > 1 else ""
        if self.in_place:
            return f"The strip under the steps shows what each moment went to{which}.{_about_cores(self.account)}"
        return f"The strip under the steps splits the time of each{which}: how much each part took, not when."


def _about_cores(account: Breakdown) -> str:
    if not account.share["core_wait"]:
        return ""
    return (
        " When exactly the program waited for a core is not known: this time stands at the end of each piece that it "
        "made longer."
    )


def _drawn(timeline: Timeline, has_steps: bool, most: int) -> tuple[Int64, str]:
    """The spans to draw, by time, and a sentence about those left out: the shortest on the host, then on the GPU.

    Host marks of steps are not among them where the steps stand above the lanes.
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


def _lanes(timeline: Timeline, drawn: Int64) -> list[_Drawn]:
    """Host threads first, the training thread on top, autograd's next; then each GPU's streams."""
    by_lane = drawn[np.argsort(timeline.lane_id[drawn], kind="stable")]
    ids, firsts = np.unique(timeline.lane_id[by_lane], return_index=True)
    rows = dict(zip(ids.tolist(), np.split(by_lane, firsts[1:]), strict=True))
    spans = labels(timeline)
    calls = np.bincount(spans.lane_id[spans.of(*OPERATORS, *CALLS)], minlength=max(rows) + 1)
    trainers = np.unique(spans.lane_id[spans.on_training_threads]).tolist()

    def place(lane_id: int) -> tuple[object, ...]:
        lane = timeline.lanes[lane_id]
        if lane.kind == "stream":
            return (1, lane.process, lane.number, 0)
        return (0, lane_id != timeline.training_lane, lane_id not in trainers, -int(calls[lane_id]))

    return [it for lane_id in sorted(rows, key=place) for it in _drawn_lane(timeline, lane_id, rows[lane_id])]


def _drawn_lane(timeline: Timeline, lane_id: int, rows: Int64) -> list[_Drawn]:
    """A host lane by depth of nesting, Python's own stack apart; a stream's work in one row below its annotations."""
    lane = timeline.lanes[lane_id]
    name = lane_name(lane, training=lane_id == timeline.training_lane)
    label = wording.cut(wording.plain(name), _SHORT_WIDTH)
    first = labels(timeline).of(*WORK)[rows]
    if lane.kind == "thread":
        first = timeline.category[rows] != Category.PYTHON_FUNCTION
        stacks = [_Drawn(lane, label, _stacked(timeline, rows[first]))]
        if not first.all():
            stack = _stacked(timeline, rows[~first])
            stacks.append(_Drawn(lane, f"{label}, Python", stack, most_levels=_PYTHON_LEVELS))
        return [it for it in stacks if it.levels]
    work, above = rows[first], _stacked(timeline, rows[~first])
    below = [work] if len(work) and _in_turn(timeline, work) else _stacked(timeline, work)
    return [_Drawn(lane, label, above + below, work=len(above) if below else None)]


def _in_turn(timeline: Timeline, rows: Int64) -> bool:
    """Whether no span begins before the one before it has ended, but for rounding."""
    start, end = timeline.start_ns[rows], timeline.end_ns[rows]
    return bool((start[1:] >= np.maximum.accumulate(end)[:-1] - _ROUNDING_NS).all())


def _stacked(timeline: Timeline, rows: Int64) -> list[Int64]:
    """The spans by how many others are open when each begins; within a level none overlaps another."""
    if len(rows) == 0:
        return []
    start, end = timeline.start_ns[rows], timeline.end_ns[rows]
    end = np.maximum(end, start + 1)
    depth = np.arange(len(rows)) - np.searchsorted(np.sort(end), start, side="right")
    levels = _by_level(depth, rows)
    if all((timeline.start_ns[level][1:] >= timeline.end_ns[level][:-1]).all() for level in levels):
        return levels
    return _by_level(nesting(start, end), rows)


def _by_level(depth: Int64, rows: Int64) -> list[Int64]:
    order = np.argsort(depth, kind="stable")
    return np.split(rows[order], np.searchsorted(depth[order], np.arange(1, int(depth.max()) + 1)))


def _packed(run: Run, timeline: Timeline, strip: _Strip, lanes: list[_Drawn], thinned: bool) -> bytes:
    """The block, compressed: length of the head (4 bytes), head, columns as byte planes, lowest byte first.

    The rows are the lanes' levels, then the strip's pieces.
    """
    levels = [level for lane in lanes for level in lane.levels]
    order = np.concatenate(levels)
    origin = min(timeline.window_ns[0], int(timeline.start_ns[order].min()))
    extent = max(timeline.window_ns[1], int(timeline.end_ns[order].max())) - origin
    names, name = _names(timeline, order)
    kinds, kind = _kinds(timeline, order, run.device.kind)
    counts = [len(level) for level in levels]
    firsts = np.concatenate(([0], np.cumsum(counts)))
    start = np.concatenate((timeline.start_ns[order], strip.pieces.start_ns)) - origin
    nothing = np.zeros(len(strip.pieces.part), np.int64)
    columns = {
        "gap": _gaps(start, firsts[firsts < len(start)]),
        "duration": np.concatenate((timeline.duration_ns[order], strip.pieces.end_ns - strip.pieces.start_ns)),
        "name": np.concatenate((name, nothing)),
        "kind": np.concatenate((kind, len(kinds) + _SHOWN_PARTS[strip.pieces.part])),
        "launch": np.concatenate((_launches(timeline, order, firsts), nothing)),
    }
    planes = {column: _planes(values) for column, values in columns.items()}
    head = {
        "columns": [[column, len(p)] for column, p in planes.items()],
        "count": len(start),
        "spans": len(order),
        **_names_head(names),
        "kinds": kinds,
        "parts": [[part.label, part.meaning_on(run.device.kind), part.colour] for part in wording.PARTS.values()],
        **_lanes_head(lanes, firsts),
        "steps": _bands(run, timeline, strip.account, origin),
        "strip": {"title": strip.title, "inPlace": strip.in_place},
        "window": [t - origin for t in timeline.window_ns],
        "extent": max(extent, 1),
        "launched": _LAUNCHED,
        "noLaunch": f"its launch is not in {'this picture' if thinned else 'the trace'}",
    }
    text = json.dumps(head, separators=(",", ":")).encode("ascii")
    raw = [len(text).to_bytes(4, "little"), text, *(p.tobytes() for p in planes.values())]
    return zlib.compress(b"".join(raw), 6)


def _planes(values: Int64) -> np.ndarray[tuple[int, int], np.dtype[np.uint8]]:
    """The bytes of a column, all lowest ones first: they compress far better than whole numbers."""
    width = max(1, (int(values.max()).bit_length() + 7) // 8)
    return np.ascontiguousarray(values.astype("<u8").view(np.uint8).reshape(-1, 8)[:, :width].T)


def _gaps(start: Int64, firsts: Int64) -> Int64:
    """Each start as the time since the start before it in its row, the first one's since the origin."""
    gaps = np.diff(start, prepend=0)
    gaps[firsts] = start[firsts]
    return gaps


def _launches(timeline: Timeline, order: Int64, firsts: Int64) -> Int64:
    """For the GPU's work where in the order its launch stands: 0 none, else 1 + zigzag of the way from the last one."""
    code = np.zeros(len(order), np.int64)
    position = np.full(len(timeline) + 1, -1, np.int64)  # the last: of no row
    position[order] = np.arange(len(order))
    call = labels(timeline).call[order]
    launched = order[position[call] >= 0]
    launch = labels(timeline).call[launched]
    at, to = position[launched], position[launch]
    row = np.searchsorted(firsts, at, side="right")
    before = np.where(np.diff(row, prepend=-1) == 0, np.concatenate(([0], to[:-1])), 0)
    way = to - before
    code[at] = 1 + np.where(way >= 0, 2 * way, -2 * way - 1)
    return code


def _names(timeline: Timeline, order: Int64) -> tuple[list[str], Int64]:
    used, name = np.unique(timeline.name_id[order], return_inverse=True)
    return [timeline.names[i] for i in used.tolist()], name.astype(np.int64)


def _names_head(names: list[str]) -> dict[str, object]:
    """Whole names, and what is written into a span where that is something else."""
    most = max(_SHORT_WIDTH, min(_NAME_WIDTH, _ALL_NAMES // len(names)))
    whole = [wording.cut(wording.plain(name), most) for name in names]
    short = [wording.cut(wording.short_name(name), _SHORT_WIDTH) for name in names]
    return {"names": whole, "short": [None if s == w else s for s, w in zip(short, whole, strict=True)]}


def _kinds(timeline: Timeline, order: Int64, device_kind: str) -> tuple[list[list[str]], Int64]:
    """[label, category, colour] of each sort of span that occurs, and each span's."""
    sort = kinds_of(timeline, order, device_kind)
    pairs, kind = np.unique(sort * 256 + timeline.category[order], return_inverse=True)
    split = [divmod(pair, 256) for pair in pairs.tolist()]
    called = {int(c): c.name.lower() for c in Category} | {int(Category.UNKNOWN): "unknown category"}
    return [[KINDS[k].label, called[c], KINDS[k].colour] for k, c in split], kind.astype(np.int64)


def _lanes_head(lanes: list[_Drawn], firsts: Int64) -> dict[str, object]:
    """Each lane's rows as [first, count]; the overview draws the GPUs' work, or the first row where there is none."""
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
    """The steps that touch the window, with the parts of those that were accounted; without any, the whole window."""
    if account is not None and account.whole_window:
        (whole,) = account.steps
        return [_band("", "whole window", whole.start_ns - origin, whole.end_ns - origin, 0, whole.parts_ns)]
    accounted = {} if account is None else {step.number: step.parts_ns for step in account.steps}
    s, (window_start, window_end) = run.steps, timeline.window_ns
    touching = np.flatnonzero((s.start_ns < window_end) & (s.end_ns > window_start))
    columns = (s.number[touching], s.start_ns[touching] - origin, s.end_ns[touching] - origin, s.flags[touching])
    return [
        _band(str(number), f"step {number}", start, end, flags, accounted.get(number))
        for number, start, end, flags in zip(*(column.tolist() for column in columns), strict=True)
    ]


def _band(
    number: str, label: str, start_ns: int, end_ns: int, flags: int, parts_ns: dict[str, int] | None
) -> dict[str, object]:
    parts = None if parts_ns is None else [parts_ns[part] for part in wording.PARTS]
    return {
        "number": number,
        "label": label,
        "start": start_ns,
        "end": end_ns,
        "flags": wording.flag_names(flags),
        "parts": parts,
    }


class Key(Struct, frozen=True):
    """A sort of span: what it is called and its colour."""

    label: str
    colour: str


_DATA = Key(wording.PARTS["data_wait"].label, wording.PARTS["data_wait"].colour)
_OPTIMIZER = Key(wording.PARTS["optimizer"].label, wording.PARTS["optimizer"].colour)
_OPERATOR_ON_CPU = Key("operators", wording.PARTS["compute"].colour)
_OPERATOR = Key("operators (host)", "#A6BDDB")
_CALL = Key("CUDA calls", wording.PARTS["launch"].colour)
_SYNC = Key("CUDA calls that wait", wording.PARTS["sync_wait"].colour)
_KERNEL = Key("kernels", wording.PARTS["compute"].colour)
_NCCL = Key("communication kernels", wording.PARTS["communication"].colour)
_COPY = Key("copies", wording.PARTS["memcpy"].colour)
_SET = Key("memsets", wording.PARTS["memset"].colour)
_NOTE = Key("annotations", "#BDBDBD")
_PYTHON = Key("Python functions", "#CBB9A4")
_STREAM_SYNC = Key("streams that wait", "#E3B7D0")
KINDS = (
    _DATA, _OPTIMIZER, _OPERATOR_ON_CPU, _OPERATOR, _CALL, _SYNC, _NOTE, _PYTHON,
    _KERNEL, _NCCL, _COPY, _SET, _STREAM_SYNC,
)  # fmt: skip


def kinds_of(timeline: Timeline, rows: Int64, device_kind: str) -> Int64:
    """The kind of each span, as an index into `KINDS`; decided once per (category, name)."""
    category, name_id = timeline.category[rows].astype(np.int64), timeline.name_id[rows].astype(np.int64)
    pairs, where = np.unique(category * len(timeline.names) + name_id, return_inverse=True)
    split = (divmod(pair, len(timeline.names)) for pair in pairs.tolist())
    decided = [KINDS.index(_kind(Category(c), timeline.names[n], device_kind)) for c, n in split]
    return np.array(decided, dtype=np.int64)[where]


def _kind(category: Category, name: str, device_kind: str) -> Key:
    """A copy of an annotation on the device is as the annotation itself."""
    what = kind_of(Category.USER_ANNOTATION if category == Category.GPU_USER_ANNOTATION else category, name)
    if what in OPERATORS:
        return _OPERATOR_ON_CPU if device_kind == "cpu" else _OPERATOR
    if what in CALLS:
        return _SYNC if what in WAITS else _CALL
    return _STREAM_SYNC if category == Category.CUDA_SYNC else _KEYS.get(what, _NOTE)


_KEYS = {
    What.KERNEL: _KERNEL,
    What.COMMUNICATION: _NCCL,
    What.COPY: _COPY,
    What.MEMSET: _SET,
    What.LOADER: _DATA,
    What.UPDATE: _OPTIMIZER,
    What.ZEROING: _OPTIMIZER,
    What.PYTHON: _PYTHON,
    What.USER_PYTHON: _PYTHON,
}


def lane_name(lane: Lane, *, training: bool) -> str:
    """What a lane is called on screen; `training`: it is the thread that trains."""
    if lane.label:
        return lane.label
    if lane.kind == "stream":
        return f"GPU {lane.process} stream {lane.number}"
    return "training thread" if training else f"thread {lane.number}"


def nesting(start: Int64, end: Int64) -> Int64:
    """How many spans of a lane are open when each begins; `start` is sorted, parents come before their children.

    Where two overlap without one holding the other, the later one stands above the last that is still open.
    """
    depth = np.empty(len(start), np.int64)
    open_ends: list[int] = []
    for i, (begin, finish) in enumerate(zip(start.tolist(), end.tolist(), strict=True)):
        while open_ends and open_ends[-1] <= begin:
            open_ends.pop()
        depth[i] = len(open_ends)
        open_ends.append(finish)
    return depth
