"""Lesson 10, search with the meter running: small networks to choose from, trials, and a Pareto front."""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from msgspec import Struct
from torch import nn

from gpulab.analysis.facts import facts
from gpulab.errors import GpulabError
from gpulab.formatting import plural, speedup
from gpulab.lessons.check import Checked, Table, exercise, right, wrong
from gpulab.lessons.digits import Batch, split_digits
from gpulab.lessons.figures import BLUE, GREY, ORANGE, plot
from gpulab.lessons.guesses import Question, share, times
from gpulab.lessons.lanes import Block, Lane
from gpulab.lessons.measured import latest_facts, working_share
from gpulab.options import is_quick
from gpulab.views.waiting import waiting

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from gpulab.run import Run

Kind = Literal["dense", "conv", "depthwise"]
Pair = tuple[float, float]  # time per sample, loss

QUICK_TRIALS, QUICK_BATCHES = 4, 16  # the lesson's rule never stops the first 3, and others after 10 batches


def network(kind: Kind, width: int, depth: int) -> nn.Sequential:
    """A classifier of 8 x 8 images: `depth` layers with `width` channels, and an output layer.

    "dense": fully connected. "conv": 3 x 3 convolutions. "depthwise": from the second layer on, convolutions per
    channel, then 1 x 1 across channels, with about a ninth of the arithmetic.
    """
    if kind == "dense":
        sizes = [64, *[4 * width] * depth]
        hidden = [part for a, b in itertools.pairwise(sizes) for part in (nn.Linear(a, b), nn.ReLU())]
        return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(4 * width, 10))
    layers: list[nn.Module] = [nn.Conv2d(1, width, 3, padding=1), nn.ReLU()]
    for _ in range(depth - 1):
        if kind == "depthwise":
            layers += [nn.Conv2d(width, width, 3, padding=1, groups=width), nn.Conv2d(width, width, 1), nn.ReLU()]
        else:
            layers += [nn.Conv2d(width, width, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*layers, nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16 * width, 10))


def endless(loader: Iterable[Batch]) -> Iterator[Batch]:
    """The loader's batches, epoch after epoch; only a few in quick mode."""
    batches = itertools.chain.from_iterable(itertools.repeat(loader))
    return itertools.islice(batches, QUICK_BATCHES if is_quick() else None)


def validation_loss(model: nn.Module) -> float:
    """The loss on the 357 digits that no trial trains on."""
    device = next(model.parameters()).device
    images, labels = split_digits(training=False)
    model.eval()
    with torch.no_grad():
        loss = float(nn.functional.cross_entropy(model(images.to(device)), labels.to(device)))
    model.train()
    return loss


class Pace(Struct, frozen=True):
    """The first steps of a trial. `share`: the working share of the device, 0 to 1; NaN if not measurable."""

    us_per_sample: float
    share: float


def first_pace(run: Run, batch_size: int) -> Pace:
    """Time per sample and working share of a run of a few steps. Raises GpulabError for a run without steps."""
    step_us, works = facts(run).typical_step_us, working_share(facts(run))
    if step_us is None:
        raise GpulabError("The trial made too few steps to measure: give it at least ten.")
    return Pace(step_us.median / batch_size, math.nan if works is None else works)


class Trial(Struct, frozen=True):
    """One tried choice from the search space. `loss` is None if the trial was stopped, and `stopped` says why."""

    choice: Mapping[str, Any]
    seconds: float  # in total
    us_per_sample: float  # of training; of the first steps if stopped
    loss: float | None = None
    pace: Pace | None = None
    stopped: str = ""

    @property
    def words(self) -> str:
        """The whole choice: "conv, width 32, depth 2, batch 64, rate 0.001, decay 0.1, shift"."""
        parts = (v if isinstance(v, str) else f"{_heading(name)} {_value(v)}" for name, v in self.choice.items())
        return ", ".join(parts)


def _heading(name: str) -> str:
    return name.removesuffix("_size")


def _value(value: object) -> str:
    return f"{value:g}" if isinstance(value, (int, float)) else str(value)


def run_trials(count: int, one: Callable[[list[Trial]], Trial]) -> list[Trial]:
    """`count` trials, each made by `one(trials so far)`; fewer in quick mode. Errors of `one` propagate."""
    trials: list[Trial] = []
    count = min(count, QUICK_TRIALS) if is_quick() else count
    with waiting(f"searching, {plural(count, 'trial')}"):
        for _ in range(count):
            trials.append(one(trials))
    return trials


def is_beaten(one: Pair, by: Pair) -> bool:
    """Whether `by` is at least as good in both objectives and better in one."""
    return by[0] <= one[0] and by[1] <= one[1] and by != one


def front_of(trials: Iterable[Trial]) -> list[Trial]:
    """The completed trials that no other trial beats, the fastest first."""
    pairs = [(t, (t.us_per_sample, t.loss)) for t in trials if t.loss is not None and math.isfinite(t.loss)]
    best = [t for t, pair in pairs if not any(is_beaten(pair, other) for _, other in pairs)]
    return sorted(best, key=lambda t: t.us_per_sample)


def table_of(trials: Sequence[Trial]) -> Table:
    """The trials as lines, the lowest loss first; a star marks trials of the front.

    If their first steps were measured, also with the share in which the device worked.
    """
    front = front_of(trials)
    columns: dict[str, Callable[[Trial], str]] = {
        "": lambda t: "*" if t in front else "",
        "per sample": lambda t: f"{t.us_per_sample:.0f} us",
        "loss": lambda t: "-" if t.loss is None else f"{t.loss:.3f}",
        "seconds": lambda t: f"{t.seconds:.2f}",
    }
    if any(t.pace for t in trials):
        columns["works"] = lambda t: _share_words(t.pace)
    for name in dict.fromkeys(name for t in trials for name in t.choice):
        columns[_heading(name)] = partial(_choice, name)
    if any(t.stopped for t in trials):
        columns["stopped"] = lambda t: t.stopped
    rows = sorted(trials, key=lambda t: (t.loss is None, t.loss or t.us_per_sample))
    return Table.of(list(columns), [[cell(t) for cell in columns.values()] for t in rows], gap=" ")


def _choice(name: str, trial: Trial) -> str:
    return _value(trial.choice.get(name, ""))


def _share_words(pace: Pace | None) -> str:
    """The share with one decimal, rounded down: 19.96 % is less than a fifth, which 20.0 % would hide."""
    return "-" if pace is None or math.isnan(pace.share) else f"{math.floor(1000 * pace.share) / 10:.1f} %"


def compare_searches(full: Sequence[Trial], pruned: Sequence[Trial]) -> Table:
    """What stopping trials saved, and what it lost, for two searches through the same choices."""
    stopped = [i for i, trial in enumerate(pruned) if trial.stopped]
    both = [i for i in range(len(pruned)) if i not in stopped]
    front = front_of(full)
    lost = [full[i] for i in stopped if full[i] in front]
    all_s, some_s = (sum(t.seconds for t in trials) for trials in (full, pruned))
    lines = [
        f"every trial to its end            {all_s:6.1f} s",
        f"hopeless trials stopped           {some_s:6.1f} s   {len(stopped)} of {plural(len(pruned), 'trial')} stopped",
        f"  of that for the stopped ones    {sum(pruned[i].seconds for i in stopped):6.1f} s   "
        f"they took {sum(full[i].seconds for i in stopped):.1f} s to their end",
        f"  of that for the others          {sum(pruned[i].seconds for i in both):6.1f} s   "
        f"they took {sum(full[i].seconds for i in both):.1f} s without a look at their first steps",
        f"the whole search: {speedup(all_s / some_s)}",
        f"on the front of the full search: {plural(len(front), 'trial')}, of which {len(lost)} would have been stopped",
        *(f"  lost: {trial.us_per_sample:.0f} us per sample, loss {trial.loss:.3f}: {trial.words}" for trial in lost),
    ]
    return Table(tuple(lines))


# -- figures -----------------------------------------------------------------------------------------------------------

_MARKS = {"dense": "s", "conv": "o", "depthwise": "^"}
_BEATEN = "#A9B4C0"


def draw_front(trials: Sequence[Trial], title: str = "") -> Figure:
    """Loss against time per sample; a line through the front, and a mark at the top for each trial that was stopped."""
    from matplotlib.ticker import LogLocator, NullFormatter

    front = front_of(trials)
    ended = [t for t in trials if t.loss is not None and math.isfinite(t.loss)]
    stopped = [t.us_per_sample for t in trials if t.stopped]
    title = title or f"{plural(len(trials), 'trial')}, the front in blue"
    legend = {"ncols": 5, "loc": "upper center", "bbox_to_anchor": (0.5, -0.16)}
    labels = "time per sample, us (measured)", "validation loss"
    with plot(8, 3.6, title, *labels, log={"x": 10, "y": 10}, legend=legend) as (figure, axes):
        for kind, mark in _MARKS.items():
            for t in ended:
                if t.choice["kind"] == kind:
                    axes.scatter(
                        [t.us_per_sample], [t.loss or 0.0], s=42, marker=mark, c=BLUE if t in front else _BEATEN
                    )
            axes.scatter([], [], s=42, marker=mark, c=_BEATEN, label=kind)
        line = [(t.us_per_sample, t.loss or 0.0) for t in front]
        axes.step([x for x, _ in line], [y for _, y in line], where="post", color=BLUE, lw=1.3, label="the front")
        if stopped:
            top = [1.25 * max((t.loss or 0.0 for t in ended), default=1.0)] * len(stopped)
            axes.scatter(stopped, top, marker="x", s=42, c=ORANGE, label="stopped, no loss")
        if not ended and not stopped:
            axes.set(xlim=(1, 1000), ylim=(0.1, 10))  # a logarithmic axis must have some limits
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_minor_formatter(NullFormatter())
    return figure


def search_lanes(stop_after: float = math.inf) -> list[Block]:
    """Seconds of six trials one after the other, three of which are slow and stopped after `stop_after` seconds."""
    lane = Lane()
    for number, length in enumerate((2.0, 9.0, 2.5, 8.0, 2.0, 9.0), 1):
        is_slow = length > 4
        lane.add(min(length, stop_after) if is_slow else length, "wait" if is_slow else "compute", str(number))
    return lane.blocks


# -- exercises ---------------------------------------------------------------------------------------------------------

TRIALS: tuple[Pair, ...] = (  # with ties, a duplicate pair, and a training that diverged
    (40.0, 0.31),
    (25.0, 0.42),
    (90.0, 0.22),
    (25.0, 0.55),
    (60.0, 0.31),
    (40.0, 0.31),
    (15.0, 2.10),
    (200.0, 0.21),
    (12.0, math.nan),
    (120.0, 0.35),
)


def _random_trials(chance: random.Random, count: int) -> list[Pair]:
    """Random pairs with many ties."""
    return [(float(chance.randint(1, 6)), float(chance.randint(1, 6))) for _ in range(count)]


def _tables() -> Iterator[list[Pair]]:
    """The notebook's table first, then tables with one pitfall each, then random ones."""
    yield list(TRIALS)
    yield [(10.0, 1.0)]
    yield []
    yield [(10.0, 1.0), (10.0, 2.0), (20.0, 1.0)]
    yield [(30.0, 1.0), (20.0, 2.0), (10.0, 3.0), (30.0, 1.0)]
    yield [(10.0, math.nan), (20.0, 1.0)]
    chance = random.Random(0)
    yield from (_random_trials(chance, count) for count in (3, 5, 8, 13, 21) for _ in range(10))


def _words(trials: Sequence[Pair]) -> str:
    return f"[{', '.join(f'({t:g}, {loss:g})' for t, loss in trials)}]" if len(trials) <= 8 else "of the notebook"


@exercise()
def check_pareto(pareto: Callable[..., object]) -> Checked:
    """Whether `pareto(trials)` returns exactly the pairs that no other pair beats, also with ties and duplicates."""
    for trials in _tables():
        if hint := _front_hint(trials, pareto(list(trials))):
            return wrong(hint)
    return right("The same as comparing each trial with every other, also with ties, duplicates and a diverged trial.")


def _front_hint(trials: Sequence[Pair], front: Any) -> str:
    """What is wrong with a front; empty if nothing."""
    try:
        mine = Counter((float(t), float(loss)) for t, loss in front)
    except (TypeError, ValueError):
        return f"It returns {front!r} for {_words(trials)}; expected a list of pairs (time, loss) of the table."
    if any(math.isnan(loss) for _, loss in mine):
        return (
            "A trial whose training diverged (its loss is nan) is on your front. Every comparison with nan is False, "
            "so nothing seems to beat it: leave such trials out first (math.isnan)."
        )
    ended = [t for t in trials if not math.isnan(t[1])]
    expected = Counter(t for t in ended if not any(is_beaten(t, other) for other in ended))
    for trial in mine:
        if trial not in trials:
            return f"{trial} is on your front and not in the table {_words(trials)}."
        better = next((t for t in trials if is_beaten(trial, t)), None)
        if better is not None:
            same = "time" if better[0] == trial[0] else "loss" if better[1] == trial[1] else ""
            tie = f", with the same {same}" if same else ""
            return f"{trial} is on your front, but {better} beats it{tie}. The table was {_words(trials)}."
    for trial in expected - mine:
        if trial in mine:
            return (
                f"{trial} is in the table {expected[trial]} times and on your front {mine[trial]} times. Two trials "
                "that are equal do not beat each other: both stay."
            )
        return f"{trial} is missing from your front, and nothing in the table beats it: {_words(trials)}."
    extra = next(iter(mine - expected), None)
    return f"{extra} is on your front more often than in the table {_words(trials)}." if extra else ""


def _budgets() -> Iterator[tuple[list[Pair], float]]:
    for most_us in (50.0, 25.0, 1000.0, 10.0, 12.0):
        yield list(TRIALS), most_us
    chance = random.Random(1)
    for count in (1, 4, 9, 16):
        for most_us in (1.0, 3.0, 5.0):
            yield _random_trials(chance, count), most_us


@exercise()
def check_choice(choose: Callable[..., object]) -> Checked:
    """Whether `choose(trials, most_us)` is the trial with the lowest loss that keeps to the budget, or None."""
    for trials, most_us in _budgets():
        case = f"choose({_words(trials)}, {most_us:g})"
        try:
            choice = choose(list(trials), most_us)
        except Exception as e:
            if any(t <= most_us for t, _ in trials):
                raise
            return wrong(
                f"With {case} no trial keeps to the budget; expected None. {type(e).__name__}: {e} "
                "(min() takes default=None.)"
            )
        hint = _choice_hint(trials, most_us, choice)
        if hint:
            return wrong(f"{case} gives {choice}. {hint}")
    return right("The lowest loss that the budget allows, and of two with the same loss the faster one.")


def _choice_hint(trials: Sequence[Pair], most_us: float, choice: object) -> str:
    affordable = [t for t in trials if t[0] <= most_us and not math.isnan(t[1])]
    expected = min(affordable, key=lambda t: (t[1], t[0]), default=None)
    if choice == expected:
        return ""
    if expected is None:
        return "No trial with a loss keeps to that budget: expected None."
    if choice is None:
        return f"{expected} keeps to the budget."
    mine = next((t for t in trials if t == choice), (math.nan, math.inf))
    if math.isinf(mine[1]):
        return "That is not a trial of the table: return the pair (time, loss) itself."
    if mine[0] > most_us:
        return f"It takes {mine[0]:g} us per sample, more than the budget."
    if math.isnan(mine[1]):
        return "That training diverged: its loss is nan. Leave such trials out first."
    if mine[1] == expected[1]:
        return f"{expected} has the same loss and is faster."
    if expected[0] == most_us:
        return f"{expected} has a lower loss, and taking exactly as long as the budget keeps to it."
    return f"{expected} has a lower loss and keeps to the budget as well."


HOPELESS, WORTHWHILE = 4.0, 2.5  # times as long as the best: stopped from the first on, never up to the second
LATEST = 8  # steps: later there is little left to save
MOST_MISSED = 0.2  # of the hopeless ones
BEST = "depthwise, width 32, batch 32, shift"
# the median time per sample over a whole trial, and that of each of its first steps, in us; recorded on two cores,
# torch 2.13, without the profiler, some while other programs ran
CURVES: Mapping[str, tuple[int, tuple[int, ...]]] = {
    "depthwise, width 32, batch 32, shift": (56, (161, 74, 64, 64, 61, 65, 61, 62, 58, 59, 60, 59, 56, 57)),
    "conv, width 16, batch 16, none": (58, (219, 74, 69, 63, 61, 59, 64, 62, 59, 58, 61, 58, 57, 57)),
    "depthwise, width 128, batch 64, none": (114, (116, 97, 107, 97, 105, 433, 152, 142, 97, 73, 111, 98, 432, 191)),
    "dense, width 32, batch 128, shift": (23, (29, 29, 23, 23, 23, 23, 22, 22, 22, 60, 16, 755, 781, 750)),
    "dense, width 32, batch 128, none": (7, (81, 15, 10, 9, 8, 8, 8, 8, 7, 7, 8, 10, 7, 7)),
    "dense, width 128, batch 16, shift": (155, (318, 212, 176, 163, 159, 165, 170, 161, 161, 163, 163, 154, 155, 155)),
    "depthwise, width 128, batch 32, none": (
        245,
        (371, 260, 237, 219, 249, 248, 243, 247, 242, 239, 245, 243, 247, 259),
    ),
    "conv, width 64, batch 128, none": (251, (215, 236, 230, 234, 264, 245, 262, 266, 265, 234, 235, 270, 268, 265)),
    "conv, width 128, batch 128, none": (437, (511, 428, 464, 460, 438, 422, 464, 517, 403, 437, 463, 449, 459, 423)),
    "dense, width 32, batch 64, turn": (918, (910, 913, 904, 920, 923, 923, 920, 913, 927, 922, 919, 911, 920, 923)),
    "depthwise, width 64, batch 64, turn": (
        1318,
        (3624, 1070, 962, 999, 1066, 998, 994, 3350, 3748, 2187, 3500, 2116, 3554, 2163),
    ),
    "conv, width 128, batch 16, turn": (
        1700,
        (1740, 1712, 1690, 1694, 1751, 1702, 1712, 1738, 1727, 1724, 1714, 1712, 1703, 1676),
    ),
}


def _times_as_long(trial: str) -> float:
    """The trial's time over that of the best trial, both over the whole trial."""
    return CURVES[trial][0] / CURVES[BEST][0]


def draw_curves() -> Figure:
    """The recorded first steps of trials worth finishing, of hopeless trials, and of those in between."""
    title = "recorded: time per sample of the first steps of 12 trials"
    steps = range(1, len(CURVES[BEST][1]) + 1)
    legend, labels = {"loc": "outside lower center", "ncols": 4}, set[str]()
    with plot(8, 3.6, title, "step", "us per sample", log={"y": 10}, ticks=steps, legend=legend) as (figure, axes):
        for trial, (_, times_us) in CURVES.items():
            ratio, width, above = _times_as_long(trial), 1.3, 2
            if trial == BEST:  # on top: another trial takes nearly the same times
                label, colour, width, above = "the best so far", "#000000", 2.2, 3
            elif ratio >= HOPELESS:
                label, colour = f"hopeless: at least {HOPELESS:g} times", ORANGE
            elif ratio <= WORTHWHILE:
                label, colour = f"never to stop: faster, or up to {WORTHWHILE:g} times", "#56B4E9"
            else:
                label, colour = "in between: either is right", GREY
            once = None if label in labels else label
            axes.plot(steps, times_us, color=colour, lw=width, zorder=above, label=once)
            labels.add(label)
    return figure


@exercise()
def check_should_stop(should_stop: Callable[..., object]) -> Checked:
    """Whether `should_stop(step_times, best)` lets good trials of the recorded curves run and stops hopeless ones."""
    hopeless = [trial for trial in CURVES if _times_as_long(trial) >= HOPELESS]
    for scale, machine in ((1.0, ""), (0.04, "On a machine 25× faster: "), (30.0, "On one 30× slower: ")):
        best_us = CURVES[BEST][0] * scale
        ends: dict[str, int | None] = {}  # the number of the step after which it ended a trial; None: never
        for trial, (_, curve) in CURVES.items():
            times_us = [scale * us for us in curve]
            counts = range(1, len(times_us) + 1)
            ends[trial] = next((n for n in counts if should_stop(times_us[:n], best_us)), None)
        if hint := _stopping_hint(ends, hopeless):
            return wrong(machine + hint)
        stopped = [after for trial in hopeless if (after := ends[trial]) is not None]
    return right(
        f"{len(stopped)} of {len(hopeless)} hopeless trials are stopped, after {statistics.mean(stopped):.1f} steps on "
        "average, and none that is worth finishing. On a faster and on a slower machine, too."
    )


def _stopping_hint(ends: Mapping[str, int | None], hopeless: Sequence[str]) -> str:
    """What is wrong with these ends; empty if nothing."""
    for trial, after in ends.items():
        if after is None or _times_as_long(trial) > WORTHWHILE:
            continue
        later_us, curve = CURVES[trial]
        who = "the best trial itself" if trial == BEST else f"{trial!r}, which is worth its rest,"
        took = f"{curve[after - 1] / later_us:.0f}× the time of its later ones"
        if after == 1:
            return (
                f"It stops {who} after the first step, which took {took}. The first step of every training is slow "
                "(memory is allocated, code is loaded): leave it out."
            )
        return (
            f"It stops {who} after step {after}. Some of its steps were disturbed by another program (step {after} "
            f"took {took}). A mean or a single step follows such a disturbance; a median of several steps does not."
        )
    missed = [trial for trial in hopeless if ends[trial] is None]
    if len(missed) > MOST_MISSED * len(hopeless):
        worst = max(missed, key=_times_as_long)
        return (
            f"It lets {len(missed)} of {len(hopeless)} hopeless trials run to their end, such as {worst!r}, "
            f"which takes {_times_as_long(worst):.0f}× the time of the best."
        )
    late = next((trial for trial in hopeless if (ends[trial] or 0) > LATEST), None)
    return f"It stops {late!r} only after step {ends[late]}: by step {LATEST} it was clear." if late else ""


# -- what the notebook asks --------------------------------------------------------------------------------------------


QUESTIONS: Mapping[str, Question] = {
    "works": share(
        "In what share of each step does the device work?",
        lambda: working_share(latest_facts("one-trial")),
        "of each step is the device's own work",
    ),
    "narrow": times("What speedup does a quarter of the width give?", "narrow", "with a quarter of the width"),
    "narrow-fed": times(
        "And with images that cost nothing?",
        "narrow-fed",
        "with a quarter of the width, when no image is turned",
    ),
}
