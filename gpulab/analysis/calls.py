"""Finds calls and pauses that hold up the training apart from its computing: calls by stack samples, pauses by name."""

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

LEAST_LOOKS = 40  # ours, at all calls together: the interval of a share is then at most 31 points wide
_LONG, _MOSTLY_LONG = 2.0, 0.8  # ours: times the median step, and share of a call's samples in such steps
_GROWS = 1.5  # times, from the first third of the steps to the last third
_ONE_LINE = 0.8  # ours, of a loop's samples: a line with so many is named instead of the loop
_LEADS, _MOSTLY_LAYERS = 0.4, 0.5  # ours: lower end of a share of the forward pass; of a part's samples
_ENTRY = re.compile(r"(^|\.)(forward|training_step|__call__)$")
_FORWARD = re.compile(r"(^|\.)forward$")
LOOP = re.compile(r"(async )?(for|while)\b")
_MOSTLY_GARBAGE = 0.5  # ours, of a call's samples: the finding about garbage collection names its line
_ANOTHER = 0.1  # of a call's samples: such a line is worth a mention
MOSTLY_PYTHON = 0.7  # ours, lower end, of a function's samples; with many small operators Python takes about half
MOSTLY_BARE = 0.5  # ours, lower end, of a function's samples in the traced steps: PyTorch runs nothing

# A function's purpose, by its name as a user writes it; the first match counts. Others are named without a purpose.
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

Rows = npt.NDArray[np.bool_]  # of samples


class Call(Struct, frozen=True):
    """One call, with `others` of the same purpose; `looks` of all `whole` samples are in it.

    Samples count in the counted steps, each up to the next step. `line` is the user's line that calls it most, apart
    from `other_lines`. `callee` is empty if the line, or the loop that begins there, takes the time itself. `times`:
    up to its samples, [n, 2] in ns. `hot`: the user's line within the call that takes most; None if that is `line` or
    unclear. `word`: the purpose of such a function; empty if unknown. `few_steps`: how many of how many steps hold most
    of it, if they take more than twice the median; else None. `growth_us`: its time per step in the first third of the
    steps and in the last, if it clearly grows. A function whose own lines take the time is named by the line that takes
    most (`line.function`).
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
    backward_share: float = 0.0  # share of the steps in which autograd evaluates its operators, if known

    @property
    def whole_share(self) -> float:
        """The share including its part of the backward pass."""
        return min(1.0, self.share + self.backward_share)


class _InSteps(Struct, frozen=True):
    """The counted steps, each up to the next, [n, 2] in ns, and the `weight` of each sample: 0 outside the steps."""

    windows: Intervals
    weight: Int64

    @property
    def whole(self) -> int:
        """How many samples lie in the steps."""
        return int(np.count_nonzero(self.weight))

    def share(self, rows: Rows) -> float:
        """The share of the steps' time that these samples represent."""
        return float(self.weight[rows].sum() / self.weight.sum())

    def few(self, t_ns: Int64, rows: Rows) -> tuple[int, int] | None:
        """In how many of how many steps these samples are, if most are in a few steps longer than twice the median."""
        long, step = self._long, self._step(t_ns[rows])
        if not len(step) or 2 * long.sum() >= len(long) or long[step].mean() < _MOSTLY_LONG:
            return None
        return len(np.unique(step[long[step]])), len(long)

    def in_long(self, t_ns: Int64) -> Rows:
        """Which samples are in steps that take more than twice the median."""
        return self._long[self._step(t_ns)]

    @property
    def _long(self) -> Rows:
        took_ns = self.windows[:, 1] - self.windows[:, 0]
        return np.asarray(took_ns > _LONG * np.median(took_ns))

    def _step(self, t_ns: Int64) -> Int64:
        return np.searchsorted(self.windows[:, 0], t_ns, side="right") - 1

    def growth_us(self, t_ns: Int64, rows: Rows) -> tuple[float, float] | None:
        """The time of these samples per step in the first third of the steps and in the last; None if unclear.

        Their share must grow too: on a machine that gets busier all steps take longer.
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
    """The call of these kinds with most samples in the counted steps; None without enough samples.

    `saving`: only calls that write files; else only all others.

    Pauses are left out, because they are known by name, except those within a call's other work: garbage collection,
    and models that run without gradients. A user's function from which the loss is computed counts only if PyTorch runs
    nothing in most of it, if a few long steps hold most of it, or if it grows with the steps: else it is the training
    itself.
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
    for line, rows in () if saving else _loops(run, looks, mine):  # loops of several calls
        if (best is None or best.looks < _ONE_LINE * rows.sum()) and in_steps.few(looks.t_ns, rows) is not None:
            best = _call(run, looks, in_steps, rows, line, "", is_loop=True)
    return best


def costliest_part(run: Run, account: Breakdown | None) -> Call | None:
    """The user's function, line or loop that takes most of the training's own forward pass; None if none is clear.

    A line outside the model that only calls it and takes nearly all does not count: naming it says nothing.
    """
    looks, in_steps = run.call_looks, _in_steps(run)
    trains = [CALL_KINDS.index(kind) for kind in CALL_KINDS if kind not in BESIDE_KINDS]
    if looks is None or in_steps is None or not np.isin(looks.kind, trains).any():  # version 0.1 stored none
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
    """Whether there are enough samples to show what takes the steps' time."""
    return _in_steps(run) is not None


def share_of_calls(run: Run, account: Breakdown, kinds: Collection[CallKind]) -> float:
    """Share of the usual steps' time that calls of these kinds take, without what the account holds as data_wait.

    0 without samples.
    """
    looks, in_steps = run.call_looks, _in_steps(run)
    if looks is None or in_steps is None:
        return 0.0
    usual = (in_steps.weight > 0) & ~in_steps.in_long(looks.t_ns)
    counted = [CALL_KINDS.index(kind) for kind in kinds if kind != "batch" or not account.prepared_ns]
    mine = usual & (looks.place >= 0) & np.isin(looks.kind, counted)
    return float(in_steps.weight[mine].sum() / max(1, in_steps.weight[usual].sum()))


def _as_one(run: Run, looks: CallLooks, rows: Rows) -> Iterator[tuple[Place, Rows]]:
    """All lines of the call, named by the line with most samples."""
    numbers, counts = np.unique(looks.place[rows], return_counts=True)
    yield run.places[int(numbers[counts.argmax()])], rows


def _by_line(run: Run, looks: CallLooks, rows: Rows) -> Iterator[tuple[Place, Rows]]:
    """Each line, and each loop, that takes the time itself."""
    numbers = np.unique(looks.place[rows])
    for p in numbers.tolist():
        yield run.places[p], rows & (looks.place == p)
    yield from _loops(run, looks, rows)


def _by_function(run: Run, looks: CallLooks, rows: Rows) -> Iterator[tuple[Place, Rows]]:
    """Each user's function whose lines call operators, named by its costliest line; without entries of models and
    trainers."""
    numbers, counts = np.unique(looks.place[rows], return_counts=True)
    of = {p: (run.places[p].file, run.places[p].function) for p in numbers[np.argsort(-counts)].tolist()}
    for function in dict.fromkeys(of.values()):
        lines = [p for p in of if of[p] == function]
        if len(lines) > 1 and function[1] and not _ENTRY.search(function[1]):
            yield run.places[lines[0]], rows & np.isin(looks.place, lines)


def _loops(run: Run, looks: CallLooks, rows: Rows) -> Iterator[tuple[Place, Rows]]:
    """Each loop in which no single line takes nearly all of the time."""
    numbers, counts = np.unique(looks.place[rows], return_counts=True)
    units = {(run.places[p].file, unit): run.places[p] for p in numbers.tolist() for unit in run.places[p].units}
    for (file, unit), line in units.items():
        inside = np.array([run.places[p].file == file and unit in run.places[p].units for p in numbers.tolist()])
        if counts[inside].max() < _ONE_LINE * counts[inside].sum():
            yield Place(file, unit.first, line.function, unit.text), rows & np.isin(looks.place, numbers[inside])


def _in_steps(run: Run) -> _InSteps | None:
    """The steps without a profiler, including those with rare events; None without enough samples."""
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
    """Whether Python itself runs in most of these samples: PyTorch's operators release the interpreter's lock."""
    holders = looks.holds_lock[rows] if len(looks.holds_lock) else looks.holds_lock
    return lower_share(int(holders.sum()), len(holders)) >= MOSTLY_PYTHON


def _is_bare(run: Run, account: Breakdown | None, within: Int32) -> bool:
    """Whether PyTorch mostly runs nothing while the traced steps are at these lines."""
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


# If one pause lies within another, its time belongs to the earlier kind here: garbage is collected in all of them.
_ORDER: tuple[PauseKind, ...] = ("compile", "checkpoint_save", "evaluation", "logging", "callback", "gc")
_LEAST = 2  # ours: one pause may be chance


class PausedTime(Struct, frozen=True):
    """Pauses of one kind after the warm-up, spread over the steps (µs): within the typical step, and beyond it."""

    pauses: list[Pause]
    times_ns: Intervals  # when, without the time of kinds that take precedence
    within_us: float
    between_us: float
    share: float  # of all time after the warm-up

    @property
    def regular_fraction(self) -> float:
        """The pauses' time if the longest were like the others, divided by their actual time."""
        total, longest = sum(map(length_ns, self.pauses)), max(map(length_ns, self.pauses))
        return (total - longest) / max(1, total) * len(self.pauses) / (len(self.pauses) - 1)


def paused_time(
    run: Run, kind: PauseKind, step_us: float | None, whole_us: float | None, idle: float | None
) -> PausedTime | None:
    """The pauses of a kind; None if there are none, too few to exclude chance, or no steps to spread them over.

    `step_us` is the typical step, `whole_us` a mean step with all that lies between steps, `idle` the GPU's share of
    the typical step: a pause during which the device works holds nothing up.
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
    within_us = min(mean_us, _typical_us(run, times, int(first[0])))  # a step with or without a pause is chance
    between_us = mean_us - within_us
    if idle is not None:
        within_us = min(within_us, idle * step_us)
    share = (within_us + between_us) / max(whole_us or 0.0, step_us + between_us)
    return PausedTime(pauses, times, within_us, between_us, share)


def length_ns(pause: Pause) -> int:
    """How long a pause lasts."""
    return pause.end_ns - pause.start_ns


def _covered(pauses: list[Pause]) -> Intervals:
    return union_of((p.start_ns, p.end_ns) for p in pauses)


def _typical_us(run: Run, times: Intervals, first: int) -> float:
    """Median over the steps of the paused time in a step; 0 if fewer than half of the steps have a pause."""
    windows = np.stack((run.steps.start_ns[first:], run.steps.end_ns[first:]), axis=1)
    inside = intersect(times, union(windows[:, 0], windows[:, 1]))
    at = np.searchsorted(windows[:, 0], inside[:, 0], side="right") - 1
    per_step = np.zeros(len(windows), dtype=np.int64)
    np.add.at(per_step, at, inside[:, 1] - inside[:, 0])
    return float(np.median(per_step)) / 1e3
