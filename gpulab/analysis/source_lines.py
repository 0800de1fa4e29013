"""Finds the line of the user's code that a stretch of time belongs to, from samples of the training thread's stack.

Samples taken by another process (`StackSamples.exact`) are random draws: each represents only the instant it was taken
at. A sampling thread of this process has to wait while a long call holds Python's interpreter lock, and then finds the
line of that call, so each of its samples represents the time since the previous one. It counts for a stretch of time if
it was taken in the stretch, or if it came late and most of the time it represents lies in the stretch. A trace recorded
with stacks (torch's `with_stack`) names functions only: the line is then the first line of the function.

A line is named if it has at least half of all samples and its lead over the next line is more than chance. If no single
line qualifies, the innermost statement or loop whose lines together qualify is named by its first line. Otherwise no
line is named.

Time of the backward pass is attributed to lines of the forward pass, by the operator's name: ConvolutionBackward0
belongs to aten::convolution. If several lines call an operator, they share its backward time in proportion to their
samples within the operator.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from gpulab.analysis.breakdown import Breakdown
from gpulab.intervals import Intervals, covers, intersect, measure, subtract, union
from gpulab.run import Excerpt, Int64, Place, Run, StackSamples, Timeline, Unit
from gpulab.timeline.labels import EVALUATING, FUNCTION, NODES, OPERATOR_OF_NODE, labels, plain_name

# Ours, for stack samples every few milliseconds.
LEAST_LOOKS = 2  # a single one may be chance
LATE = 2.0  # times the usual time between two samples: the sampling thread had to wait
TELLING = 3.0  # times the usual time: a single such sample suffices if NEARLY_ALL of its time lies in the stretch
NEARLY_ALL = 0.8  # of the time that a late sample represents


class LineShare(Struct, frozen=True):
    """One line, its share of the sampled time, and its number of samples (0: from the trace's stacks)."""

    place: Place
    share: float
    looks: int


def sees_python(run: Run) -> bool:
    """Whether samples can hit pure Python code. Those of gpulab's own thread cannot: it gets Python's interpreter lock
    only when the lock is free, at the call after a loop and not in the loop."""
    return run.stack is None or run.stack.exact


def line_of(run: Run, times: Intervals) -> Place | None:
    """The line that takes at least half of the sampled part of these times; None if none clearly does."""
    lines = lines_of(run, times)
    if run.stack is not None and run.stack.exact:
        return hot_place(lines, looks_within(run.stack, times))
    if not lines or lines[0].share < LEAST_SHARE:
        return None
    if run.stack is not None and 0 < lines[0].looks < LEAST_LOOKS and not _weights(run.stack, times).telling:
        return None
    return lines[0].place


def line_only_at(run: Run, times: Intervals, beside: Intervals) -> LineShare | None:
    """`line_of`, only for functions that do not occur in the times `beside`; `share` is the sum over their lines."""
    elsewhere = {(line.place.file, line.place.function) for line in lines_of(run, beside)}
    lines = [line for line in lines_of(run, times) if (line.place.file, line.place.function) not in elsewhere]
    place = line_of(run, times) if sees_python(run) else None
    hot = next((line for line in lines if line.place == place), None)
    return None if hot is None else LineShare(hot.place, sum(line.share for line in lines), hot.looks)


def lines_of(run: Run, times: Intervals) -> tuple[LineShare, ...]:
    """Every line that was found within these times, the largest share first. Shares sum to at most 1."""
    if run.stack is None or not len(run.stack.t_ns):
        return _from_functions(run.timeline, times) if run.timeline is not None else ()
    weights = _weights(run.stack, times)
    places = run.stack.place[weights.rows]
    total = int(weights.weight_ns.sum())
    lines = [
        LineShare(run.places[p], float(weights.weight_ns[places == p].sum() / max(1, total)), int((places == p).sum()))
        for p in np.unique(places).tolist()
        if p >= 0
    ]
    return tuple(sorted(lines, key=lambda line: -line.share))


def looks_within(stack: StackSamples, times: Intervals) -> int:
    """How many samples count for these times, including samples at no line of the user's code."""
    return len(_weights(stack, times).rows)


class _Weights(Struct, frozen=True):
    """The samples that count for some times, and the time each represents. `telling`: one of them alone suffices."""

    rows: npt.NDArray[np.intp]
    weight_ns: Int64
    telling: bool


def _weights(stack: StackSamples, times: Intervals) -> _Weights:
    if stack.exact:  # each is an independent draw, even if the sampler had to wait
        rows = np.flatnonzero(covers(times, stack.t_ns - 1))  # times may be built from samples, and end at one
        return _Weights(rows, np.ones(len(rows), np.int64), telling=False)
    since = stack.since_ns
    waited = stack.t_ns - since
    usual = float(np.median(waited))
    within = _overlap(since, stack.t_ns, times)
    late = (waited > LATE * usual) & (2 * within > waited)
    rows = np.flatnonzero((covers(times, stack.t_ns) | late) & (within > 0))
    alone = (waited[rows] > TELLING * usual) & (within[rows] >= NEARLY_ALL * waited[rows])
    return _Weights(rows, within[rows], bool(alone.any()))


def _overlap(start: Int64, end: Int64, times: Intervals) -> Int64:
    """How much of each [start, end) lies in `times`."""
    lengths = np.concatenate(([0], np.cumsum(times[:, 1] - times[:, 0])))

    def before(at: Int64) -> Int64:
        row = np.searchsorted(times[:, 0], at, side="right")
        open_ns = np.where(row > 0, np.minimum(at, times[row - 1, 1]) - times[row - 1, 0], 0) if len(times) else at * 0
        result: Int64 = lengths[np.maximum(row - 1, 0)] + open_ns
        return result

    return before(end) - before(start)


def _from_functions(timeline: Timeline, times: Intervals) -> tuple[LineShare, ...]:
    """From the stacks in the trace: the innermost function of the user's own code at each moment."""
    functions, total = labels(timeline).user_functions, max(1, measure(times))
    lines = [
        LineShare(_place(timeline.names[name]), measure(intersect(functions.times(name), times)) / total, 0)
        for name in np.unique(functions.name_id).tolist()
    ]
    return tuple(sorted((line for line in lines if line.share > 0), key=lambda line: -line.share))


def _place(name: str) -> Place:
    match = FUNCTION.fullmatch(name)
    assert match is not None
    return Place(match["file"], int(match["line"]), match["function"])


AROUND = 3  # lines shown above and below the hot line


class SourceLine(Struct, frozen=True):
    """One line as it was when it ran, with its `share` of the time; None if no sample has hit the line."""

    number: int
    text: str
    share: float | None


def lines_beside_cost(run: Run, hot: Place, counts: Sequence[Counted], total: int) -> tuple[SourceLine, ...]:
    """The lines around `hot`; empty if its source was not recorded. `counts`: samples by line; `total`: all samples."""
    looks = {line.place.line: 0 for line in counts}
    for line in counts:
        if line.place.file == hot.file:
            looks[line.place.line] += line.looks
    window = range(hot.line - AROUND, hot.line + AROUND + 1)
    excerpt = next((e for e in run.excerpts if e.file == hot.file and _holds(e, hot.line)), None)
    if excerpt is None or not total:
        return ()
    numbered = enumerate(excerpt.lines, start=excerpt.first)
    excerpt_lines = [(number, text) for number, text in numbered if number in window]
    return tuple(SourceLine(n, text, looks[n] / total if looks.get(n) else None) for n, text in _trimmed(excerpt_lines))


def _holds(excerpt: Excerpt, line: int) -> bool:
    return excerpt.first <= line < excerpt.first + len(excerpt.lines)


def _trimmed(lines: Sequence[tuple[int, str]]) -> list[tuple[int, str]]:
    """The lines without empty ones at both ends and without their common indent."""
    filled = [i for i, (_, text) in enumerate(lines) if text.strip()]
    inner = lines[filled[0] : filled[-1] + 1] if filled else ()
    indent = min((len(text) - len(text.lstrip()) for _, text in inner if text.strip()), default=0)
    return [(number, text[indent:]) for number, text in inner]


LEAST_SHARE = 0.5  # ours, of the sampled time: below it no single line is to blame
FEWEST_LOOKS = 4  # if 4 of 4 samples hit one line, its share is above a half in 95 of 100 cases
FEWEST_IN_LEAD = 20  # ours: samples that a line needs if it has less than half of all
_Z = 1.96


class Counted(Protocol):
    """A line of the user's code and its number of samples."""

    @property
    def place(self) -> Place: ...

    @property
    def looks(self) -> int: ...


class LineCount(Struct, frozen=True):
    """A `Counted` of two plain fields."""

    place: Place
    looks: int


def hot_place(lines: Sequence[Counted], total: int) -> Place | None:
    """The line, else the statement or loop, that clearly has at least half of the `total` samples; None if none has."""
    counts = sorted(_joined(lines), key=lambda line: -line.looks)
    if not counts:
        return None
    second = counts[1].looks if len(counts) > 1 else 0
    if is_clear(counts[0].looks, second, total):
        return counts[0].place
    return _hot_unit(counts, total)


def _joined(lines: Iterable[Counted]) -> Iterable[Counted]:
    """Merge a line with the comprehensions and lambdas in it, under the place that has most samples."""
    joined: dict[tuple[str, int], LineCount] = {}
    for line in sorted(lines, key=lambda line: -line.looks):
        at = line.place.file, line.place.line
        before = joined.get(at, LineCount(line.place, 0))
        joined[at] = LineCount(before.place, before.looks + line.looks)
    return joined.values()


def is_clear(first: int, second: int, total: int) -> bool:
    """Whether `first` samples are at least half of `total`, and clearly more than the `second` of the next line."""
    return first >= FEWEST_LOOKS and first >= LEAST_SHARE * total and lower_share(first, first + second) > LEAST_SHARE


def lower_share(part: int, whole: int) -> float:
    """The lower end of the 95 % Wilson interval of the share `part / whole`."""
    if not whole:
        return 0.0
    p, z2 = part / whole, _Z * _Z
    spread = _Z * math.sqrt(p * (1 - p) / whole + z2 / (4 * whole * whole))
    return (p + z2 / (2 * whole) - spread) / (1 + z2 / whole)


def _hot_unit(counts: Sequence[Counted], total: int) -> Place | None:
    """The smallest statement or loop whose lines together pass `is_clear`."""
    for (file, unit), members in sorted(_units(counts).items(), key=lambda item: item[0][1].last - item[0][1].first):
        inside = sum(line.looks for line in members)
        beside = max((line.looks for line in counts if line not in members), default=0)
        if is_clear(inside, beside, total):
            return Place(file, unit.first, members[0].place.function, unit.text)
    return None


def _units(counts: Iterable[Counted]) -> Mapping[tuple[str, Unit], list[Counted]]:
    units: dict[tuple[str, Unit], list[Counted]] = defaultdict(list)
    for line in counts:
        for unit in line.place.units:
            units[line.place.file, unit].append(line)
    return units


# Which line takes the time to make batches, from samples of the threads that make them.


def loading_lines(run: Run, *, collating: bool = False) -> tuple[tuple[LineCount, ...], int]:
    """The lines of the user's code with samples, most samples first, and the number of all samples.

    `collating`: only within `collate_fn`.
    """
    looks = run.loading_looks
    if looks is None:
        return (), 0
    of_kind = looks.collating == 1 if collating else np.ones(len(looks), bool)
    lines = [
        LineCount(run.places[place], int(looks.count[of_kind & (looks.place == place)].sum()))
        for place in np.unique(looks.place[of_kind]).tolist()
        if place >= 0
    ]
    return tuple(sorted(lines, key=lambda line: -line.looks)), int(looks.count[of_kind].sum())


def hot_line_of_loading(run: Run, *, collating: bool = False) -> Place | None:
    """The line or loop that clearly takes at least half of the time to make batches; None if none does.

    A third suffices for a line that clearly leads: if other programs take cores, all lines but a sleeping one take
    longer.
    """
    lines, total = loading_lines(run, collating=collating)
    hot = hot_place(lines, total)
    if hot is not None or not lines:
        return hot
    first, second = lines[0].looks, lines[1].looks if len(lines) > 1 else 0
    leads = first >= FEWEST_IN_LEAD and 3 * first >= total and lower_share(first, first + second) > LEAST_SHARE
    return lines[0].place if leads else None


_FEWEST = 3  # ours: with fewer samples within an operator, the line that called it is chance


def backward_share(run: Run, account: Breakdown | None, places: Collection[Place]) -> float:
    """Share of the traced steps that the backward of these places takes; 0 without exact samples or traced steps."""
    timeline, stack = run.timeline, run.stack
    windows = None if account is None else account.step_host_windows
    if timeline is None or stack is None or not stack.exact or windows is None or not len(windows):
        return 0.0
    steps = union(windows[:, 0], windows[:, 1])
    operators = defaultdict[str, list[int]](list)
    for i, name in enumerate(timeline.names):
        operators[plain_name(name)].append(i)
    spans = labels(timeline)
    backward = spans.times(spans.of(*NODES))
    mine = np.isin(stack.place, [i for i, place in enumerate(run.places) if place in places])
    total = 0.0
    for i, name in enumerate(timeline.names):
        node = OPERATOR_OF_NODE.search(name) if name.startswith(EVALUATING) else None
        if node is None:
            continue
        within = spans.times(np.isin(spans.name_id, operators[plain_name(node[1])]))
        hits = covers(subtract(within, backward), stack.t_ns)
        if hits.sum() >= _FEWEST:
            evaluated = spans.times(spans.name_id == i)
            total += measure(intersect(evaluated, steps)) * float(mine[hits].mean())
    return total / measure(steps)
