"""Calls and pauses that hold up the training beside its own computing: calls by stack samples, pauses by name."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator

import numpy as np
import numpy.typing as npt
from msgspec import Struct
from msgspec.structs import replace

from gpulab.analysis.breakdown import Breakdown
from gpulab.analysis.source_lines import LineCount, backward_share, hot_place, lower_share
from gpulab.intervals import Intervals, clip, covers, intersect, joined, measure, subtract, union, union_of
from gpulab.run import (
    BESIDE_KINDS,
    CALL_KINDS,
    CallKind,
    CallLooks,
    Int32,
    Int64,
    Pause,
    PauseKind,
    Phase,
    Place,
    Run,
    StepFlag,
)

LEAST_LOOKS = 40  # ours, at all calls together: the interval of a share is then 31 points wide at most
_LONG, _MOSTLY_LONG = 2.0, 0.8  # ours: times the median step, and of a call's looks: few steps hold them
_GROWS = 1.5  # times, from the first third of the steps to the last
_ONE_LINE = 0.8  # of a loop's looks, ours: that line is named, else the loop
_LEADS, _MOSTLY_LAYERS = 0.4, 0.5  # of the forward pass, surely; of a part's looks; ours
_ENTRY = re.compile(r"(^|\.)(forward|training_step|__call__)$")
_FORWARD = re.compile(r"(^|\.)forward$")
LOOP = re.compile(r"(async )?(for|while)\b")
_MOSTLY_GARBAGE = 0.5  # of a call's looks, ours: the finding about garbage collection names its line
_ANOTHER = 0.1  # of a call's looks: such a line is worth a mention
MOSTLY_PYTHON = 0.7  # of a function's looks, surely; ours: of many small operators about half of the time is Python's
MOSTLY_BARE = 0.5  # of a function's time, surely, by looks in the traced steps: PyTorch runs nothing; ours

# What a function is there for, by how a user writes it; the first that fits. Whatever fits none is named without it.
_KINDS = tuple(
    (word, re.compile(pattern))
    for word, pattern in (
        ("schedulers", r"\blr_scheduler\."),
        ("metrics", r"^(torchmetrics|sklearn\.metrics|sacrebleu|evaluate)\."),
        ("saving", r"\.to_(csv|parquet|json|pickle|excel|hdf)$|\.write_table$|^(h5py|zarr)\.|^joblib\.dump"),
        ("saving", r"\bsave\w*$|\b(write|dump|on)_?\w*[Cc]heckpoint\w*$|\bModelCheckpoint\.on_"),
        ("serialization", r"^(json|pickle|yaml|msgpack|toml\w*|csv|xml|joblib|pyarrow)\."),
        ("logging", r"^(logging|wandb|mlflow|tensorboard\w*|rich|tqdm|loguru|comet_ml|neptune|aim|tabulate)\."),
        ("logging", r"\.log(_metrics)?$"),
        ("plotting", r"^(matplotlib|seaborn|plotly|bokeh|altair)\."),
        ("tokenizing", r"^tokenizers\.|Tokenizer|^(sentencepiece|tiktoken|spacy|nltk)\."),
        ("environment steps", r"^(gym|gymnasium|pettingzoo|dm_control|pybullet|mujoco)\.|\bEnv\w*\.step$"),
        ("database", r"^(sqlalchemy|sqlite3|pymongo|redis|psycopg\w*|duckdb)\."),
        ("checking data", r"^(jsonschema|pydantic|pandera|great_expectations)\."),
        ("image processing", r"^(PIL|cv2|skimage|imageio|albumentations|torchvision)\."),
        ("evaluation", r"\b(evaluate|validate)$"),
    )
)  # fmt: skip

Rows = npt.NDArray[np.bool_]  # of looks


class Call(Struct, frozen=True):
    """One call, with `others` that are there for the same: of `whole` looks `looks` have met it.

    All in the counted steps and up to the next ones. `line`: of the user's, which calls it most, and `other_lines`.
    `callee`: empty where the line, or the loop that begins there, takes the time itself. `times` up to the looks,
    [n, 2] in ns; `hot`: the line of the user's within it that takes most, None where it is `line` or none surely does.
    `word`: what such a function is there for; empty: not known. `few_steps`: how many of how many steps hold most of
    it, where they take more than twice the median; else None. `growth_us`: per step in the first third
    of the steps and in the last, where it surely grows. A function whose own lines take the time is named by that
    one of them that takes most (`line.function`).
    """

    line: Place
    callee: str
    looks: int
    whole: int
    share: float
    interval: tuple[float, float]
    cost_us: float  # per step, mean
    times: Intervals
    hot: Place | None = None
    word: str = ""
    others: int = 0
    other_lines: int = 0
    few_steps: tuple[int, int] | None = None
    growth_us: tuple[float, float] | None = None
    exact: bool = True
    backward_share: float = 0.0  # of the steps, what autograd evaluates for its operators, as far as it is known

    @property
    def whole_share(self) -> float:
        """With its part of the backward pass."""
        return min(1.0, self.share + self.backward_share)


class _InSteps(Struct, frozen=True):
    """The counted steps, each up to the next, [n, 2] in ns, and each look's `weight`: 0 outside of them."""

    windows: Intervals
    weight: Int64

    @property
    def whole(self) -> int:
        """How many looks lie in them."""
        return int(np.count_nonzero(self.weight))

    def share(self, rows: Rows) -> float:
        """Of the steps' time, what these looks stand for."""
        return float(self.weight[rows].sum() / self.weight.sum())

    def few(self, t_ns: Int64, rows: Rows) -> tuple[int, int] | None:
        """In how many of how many steps these looks are, where most are in few that take more than twice the median."""
        long, step = self._long, self._step(t_ns[rows])
        if not len(step) or 2 * long.sum() >= len(long) or long[step].mean() < _MOSTLY_LONG:
            return None
        return len(np.unique(step[long[step]])), len(long)

    def in_long(self, t_ns: Int64) -> Rows:
        """Which looks are in steps that take more than twice the median."""
        return self._long[self._step(t_ns)]

    @property
    def _long(self) -> Rows:
        took_ns = self.windows[:, 1] - self.windows[:, 0]
        return np.asarray(took_ns > _LONG * np.median(took_ns))

    def _step(self, t_ns: Int64) -> Int64:
        return np.searchsorted(self.windows[:, 0], t_ns, side="right") - 1

    def growth_us(self, t_ns: Int64, rows: Rows) -> tuple[float, float] | None:
        """What these looks stand for per step, in the first third of the steps and in the last, if it surely grows,
        and more than the rest: on a machine that gets busier all steps take longer.
        """
        step = self._step(t_ns)
        third = len(self.windows) // 3
        ends = []
        for some in (slice(0, third), slice(len(self.windows) - third, len(self.windows))):
            there = (self.weight > 0) & (step >= some.start) & (step < some.stop)
            part, whole = int(np.count_nonzero(rows & there)), int(np.count_nonzero(there))
            mean_us = part / max(1, whole) * measure(self.windows[some]) / max(1, third) / 1e3
            ends.append((lower_share(part, whole), 1 - lower_share(whole - part, whole), mean_us))
        (_, high, first_us), (low, _, last_us) = ends
        return (first_us, last_us) if low > high and last_us >= _GROWS * first_us else None


def costliest_call(
    run: Run, account: Breakdown | None, kinds: Collection[CallKind], *, saving: bool = False
) -> Call | None:
    """The call of these kinds that most looks in the counted steps have met; None without enough of them.

    `saving`: of those that write files; else of all others.

    Pauses are left out, for they are known by name, but for what a call does among other work: garbage that is
    collected, a model that runs without gradients. A function of the user's from which the loss is computed counts only
    where PyTorch runs nothing in most of it, where few long steps hold most of it, or where it grows with the steps:
    else it is the training itself.
    """
    looks, in_steps = run.call_looks, _in_steps(run)
    if looks is None or in_steps is None or not run.callees:
        return None
    within = ("gc", "checkpoint_save") if saving else ("gc", "evaluation")
    paused = covers(union_of((p.start_ns, p.end_ns) for p in run.pauses if p.kind not in within), looks.t_ns)
    collecting = covers(union_of((p.start_ns, p.end_ns) for p in run.pauses if p.kind == "gc"), looks.t_ns)
    mine = (in_steps.weight > 0) & ~paused & (looks.place >= 0)
    mine &= np.isin(looks.kind, [CALL_KINDS.index(kind) for kind in kinds])
    words = [next((word for word, pattern in _KINDS if pattern.search(callee)), "") for callee in run.callees]
    group = np.array([words.index(word) if word else i for i, word in enumerate(words)], np.int64)
    keys = looks.kind.astype(np.int64) * len(words) + group[looks.callee]
    best: Call | None = None
    key_values, counts = np.unique(keys[mine], return_counts=True)
    for key in key_values[np.argsort(-counts)].tolist():
        kind, callee = divmod(key, len(words))
        if (words[callee] == "saving") != saving:
            continue
        candidates = _by_line if not run.callees[callee] else _as_one
        for line, rows in candidates(run, looks, mine & (keys == key)):
            if best is not None and best.looks >= rows.sum():
                continue
            if collecting[rows].mean() >= _MOSTLY_GARBAGE:
                continue
            call = _call(run, looks, in_steps, rows, line, words[callee])
            may_train = not saving and CALL_KINDS[kind] == "own" and call.few_steps is None and call.growth_us is None
            if not may_train or _runs_python(looks, rows) or _is_bare(run, account, looks.within[rows]):
                best = call
    for line, rows in () if saving else _loops(run, looks, mine):  # of several calls
        if (best is None or best.looks < _ONE_LINE * rows.sum()) and in_steps.few(looks.t_ns, rows) is not None:
            best = _call(run, looks, in_steps, rows, line, "", is_loop=True)
    return best


def costliest_part(run: Run, account: Breakdown | None) -> Call | None:
    """Of the training's own forward pass the function, line or loop of the user's that takes most.

    A line outside of the model that only calls it, and takes nearly all, is none: it says nothing.
    """
    looks, in_steps = run.call_looks, _in_steps(run)
    trains = [CALL_KINDS.index(kind) for kind in CALL_KINDS if kind not in BESIDE_KINDS]
    if looks is None or in_steps is None or not np.isin(looks.kind, trains).any():  # runs of 0.1 keep none of these
        return None
    mine = (in_steps.weight > 0) & (looks.place >= 0) & np.isin(looks.kind, [CALL_KINDS.index("own"), *trains])
    with_callee = mine & np.array([bool(name) for name in run.callees], bool)[looks.callee]
    parts = [
        part
        for c in np.unique(looks.callee[with_callee])
        for part in _as_one(run, looks, with_callee & (looks.callee == c))
    ]
    parts += [*_by_line(run, looks, mine & ~with_callee), *_by_function(run, looks, mine & ~with_callee)]
    line, rows = max(parts, key=lambda part: int(part[1].sum()), default=(None, mine))
    count, whole = int(rows.sum()), int(mine.sum())
    calls_modules = bool((looks.kind[rows] == CALL_KINDS.index("layer")).mean() >= _MOSTLY_LAYERS) if count else True
    several = len(np.unique(looks.place[rows])) > 1
    is_entry = line is not None and not (several or line.units or _FORWARD.search(line.function))
    says_nothing = calls_modules and count >= _ONE_LINE * whole and is_entry
    if line is None or says_nothing or lower_share(count, whole) < _LEADS:
        return None
    call = _call(run, looks, in_steps, rows, line, "", is_loop=several and not with_callee[rows].any())
    places = {run.places[p] for p in np.unique(looks.within[rows]).tolist() if p >= 0}
    is_function = several and not call.callee and not LOOP.match(line.text)
    return replace(
        call,
        callee=line.function if is_function else call.callee,
        hot=None if is_function else call.hot,
        backward_share=backward_share(run, account, places),
    )


def has_looks(run: Run) -> bool:
    """Whether there are enough to tell who takes the steps' time."""
    return _in_steps(run) is not None


def share_of_calls(run: Run, account: Breakdown, kinds: Collection[CallKind]) -> float:
    """Of the usual steps' time, what goes to calls of these kinds, as far as the account does not hold it as data_wait;
    0 where nobody has looked.
    """
    looks, in_steps = run.call_looks, _in_steps(run)
    if looks is None or in_steps is None:
        return 0.0
    usual = (in_steps.weight > 0) & ~in_steps.in_long(looks.t_ns)
    counted = [CALL_KINDS.index(kind) for kind in kinds if kind != "batch" or not account.prepared_ns]
    mine = usual & (looks.place >= 0) & np.isin(looks.kind, counted)
    return float(in_steps.weight[mine].sum() / max(1, in_steps.weight[usual].sum()))


def _as_one(run: Run, looks: CallLooks, rows: Rows) -> Iterator[tuple[Place, Rows]]:
    """All lines that call it, named by the one that most looks have met."""
    numbers, counts = np.unique(looks.place[rows], return_counts=True)
    yield run.places[int(numbers[counts.argmax()])], rows


def _by_line(run: Run, looks: CallLooks, rows: Rows) -> Iterator[tuple[Place, Rows]]:
    """Each line that takes the time itself, and each such loop."""
    numbers = np.unique(looks.place[rows])
    for p in numbers.tolist():
        yield run.places[p], rows & (looks.place == p)
    yield from _loops(run, looks, rows)


def _by_function(run: Run, looks: CallLooks, rows: Rows) -> Iterator[tuple[Place, Rows]]:
    """Each function of the user's whose lines call operators, but what is a model's or a trainer's entry; by its line
    that takes most."""
    numbers, counts = np.unique(looks.place[rows], return_counts=True)
    of = {p: (run.places[p].file, run.places[p].function) for p in numbers[np.argsort(-counts)].tolist()}
    for function in dict.fromkeys(of.values()):
        lines = [p for p in of if of[p] == function]
        if len(lines) > 1 and function[1] and not _ENTRY.search(function[1]):
            yield run.places[lines[0]], rows & np.isin(looks.place, lines)


def _loops(run: Run, looks: CallLooks, rows: Rows) -> Iterator[tuple[Place, Rows]]:
    """Each loop of which no single line takes nearly all."""
    numbers, counts = np.unique(looks.place[rows], return_counts=True)
    units = {(run.places[p].file, unit): run.places[p] for p in numbers.tolist() for unit in run.places[p].units}
    for (file, unit), line in units.items():
        inside = np.array([run.places[p].file == file and unit in run.places[p].units for p in numbers.tolist()])
        if counts[inside].max() < _ONE_LINE * counts[inside].sum():
            yield Place(file, unit.first, line.function, unit.text), rows & np.isin(looks.place, numbers[inside])


def _in_steps(run: Run) -> _InSteps | None:
    """Of the steps without a profiler, those too in which something rare happens; None without looks enough."""
    looks = run.call_looks
    if looks is None or not len(looks):
        return None
    odd = StepFlag.PROFILER_EDGE | StepFlag.FIRST
    counted = (run.steps.phase == Phase.MEASURED) & (run.steps.flags & odd == 0)
    goes_on = np.append(counted[1:], False)
    end_ns = np.where(goes_on, np.append(run.steps.start_ns[1:], 0), run.steps.end_ns)
    windows = np.stack((run.steps.start_ns[counted], end_ns[counted]), axis=1)
    inside = covers(windows, looks.t_ns)
    since_ns = np.concatenate((looks.t_ns[:1], looks.t_ns[:-1]))
    weight = np.where(inside, 1 if looks.exact else looks.t_ns - since_ns, 0)
    return _InSteps(windows, weight) if inside.sum() >= LEAST_LOOKS and weight.sum() > 0 else None


def _call(
    run: Run,
    looks: CallLooks,
    in_steps: _InSteps,
    rows: Rows,
    line: Place,
    word: str,
    *,
    is_loop: bool = False,
) -> Call:
    part, whole = in_steps.share(rows), in_steps.whole
    steps, callees = union(in_steps.windows[:, 0], in_steps.windows[:, 1]), np.bincount(looks.callee[rows])
    by_line = np.unique(looks.place[rows], return_counts=True)[1]
    since_ns = np.concatenate((looks.t_ns[:1], looks.t_ns[:-1]))
    callee = "" if is_loop else run.callees[int(callees.argmax())]
    return Call(
        line=line,
        callee=callee,
        looks=int(rows.sum()),
        whole=whole,
        share=part,
        interval=(lower_share(round(part * whole), whole), 1 - lower_share(round((1 - part) * whole), whole)),
        cost_us=part * measure(steps) / len(in_steps.windows) / 1e3,
        times=intersect(union(since_ns[rows], looks.t_ns[rows]), steps),
        hot=_hot(run, looks.within[rows], line) if callee or is_loop else None,
        word=word,
        others=0 if is_loop else int(np.count_nonzero(callees)) - 1,
        other_lines=int((by_line >= _ANOTHER * rows.sum()).sum()) - 1 if callee else 0,
        few_steps=in_steps.few(looks.t_ns, rows),
        growth_us=in_steps.growth_us(looks.t_ns, rows),
        exact=looks.exact,
    )


def _hot(run: Run, within: Int32, line: Place) -> Place | None:
    places, counts = np.unique(within[within >= 0], return_counts=True)
    lines = [LineCount(run.places[p], int(n)) for p, n in zip(places.tolist(), counts.tolist(), strict=True)]
    hot = hot_place(lines, len(within))
    return None if hot == line else hot


def _runs_python(looks: CallLooks, rows: Rows) -> bool:
    """Whether Python itself runs in most of these looks: PyTorch's operators give up the interpreter's lock."""
    holders = looks.holds_lock[rows] if len(looks.holds_lock) else looks.holds_lock
    return lower_share(int(holders.sum()), len(holders)) >= MOSTLY_PYTHON


def _is_bare(run: Run, account: Breakdown | None, within: Int32) -> bool:
    """Whether PyTorch mostly runs nothing where the traced steps are at these lines."""
    stack = run.stack
    if run.timeline is None or stack is None or account is None or account.step_host_windows is None:
        return False
    windows = account.step_host_windows
    steps = union(windows[:, 0], windows[:, 1])
    bare = subtract(steps, joined(*account.claims.values()))
    places = {run.places[p] for p in np.unique(within).tolist() if p >= 0}
    rows = np.isin(stack.place, [i for i, place in enumerate(run.places) if place in places]) & covers(
        steps, stack.t_ns
    )
    return lower_share(int(covers(bare, stack.t_ns[rows]).sum()), int(rows.sum())) >= MOSTLY_BARE


# Where one lies within another its time belongs to the first of these: garbage is collected in all of them.
_ORDER: tuple[PauseKind, ...] = ("compile", "checkpoint_save", "evaluation", "logging", "callback", "gc")
_LEAST = 2  # ours: one pause may be chance


class PausedTime(Struct, frozen=True):
    """Pauses of one kind after the warm-up, spread over the steps (µs): in the typical step, and besides it."""

    pauses: list[Pause]
    times_ns: Intervals  # when, without other kinds that count before it
    within_us: float
    between_us: float
    share: float  # of all time from the warm-up on

    @property
    def regular_fraction(self) -> float:
        """Their time if the longest of them were like the others, over the time that they took."""
        total, longest = sum(map(length_ns, self.pauses)), max(map(length_ns, self.pauses))
        return (total - longest) / max(1, total) * len(self.pauses) / (len(self.pauses) - 1)


def paused_time(
    run: Run, kind: PauseKind, step_us: float | None, whole_us: float | None, idle: float | None
) -> PausedTime | None:
    """None where there were none, too few to tell from chance, or no steps to spread them over.

    `step_us` is the typical step, `whole_us` a mean step with all that lies between steps, `idle` the GPU's share of
    the typical step: a pause that the device works through holds nothing up.
    """
    first = np.flatnonzero(run.steps.phase != Phase.WARMUP)
    if not step_us or not len(first):
        return None
    since, until = int(run.steps.start_ns[first[0]]), int(run.steps.end_ns[-1])
    pauses = [p for p in run.pauses if p.kind == kind and since <= p.start_ns < until]
    if len(pauses) < _LEAST:
        return None
    outer = [p for p in run.pauses if _ORDER.index(p.kind) < _ORDER.index(kind)]
    times = clip(subtract(_covered(pauses), _covered(outer)), since, until)
    count = len(run.steps) - int(first[0])
    mean_us = measure(times) / count / 1e3
    within_us = min(mean_us, _typical_us(run, times, int(first[0])))  # of steps with and without one chance picks
    between_us = mean_us - within_us
    if idle is not None:
        within_us = min(within_us, idle * step_us)
    share = (within_us + between_us) / max(whole_us or 0.0, step_us + between_us)
    return PausedTime(pauses, times, within_us, between_us, share)


def length_ns(pause: Pause) -> int:
    """How long it lasts."""
    return pause.end_ns - pause.start_ns


def _covered(pauses: list[Pause]) -> Intervals:
    return union_of((p.start_ns, p.end_ns) for p in pauses)


def _typical_us(run: Run, times: Intervals, first: int) -> float:
    """Median over the steps of how long one stands still; 0 where fewer than half of them do."""
    windows = np.stack((run.steps.start_ns[first:], run.steps.end_ns[first:]), axis=1)
    inside = intersect(times, union(windows[:, 0], windows[:, 1]))
    at = np.searchsorted(windows[:, 0], inside[:, 0], side="right") - 1
    per_step = np.zeros(len(windows), dtype=np.int64)
    np.add.at(per_step, at, inside[:, 1] - inside[:, 0])
    return float(np.median(per_step)) / 1e3
