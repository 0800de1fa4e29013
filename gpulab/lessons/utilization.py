"""Lesson 01, what "utilization" means: batches that are waited for in two ways, and a ladder of shares."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from msgspec import Struct

from gpulab.analysis.facts import Facts, facts
from gpulab.api.profile import profile
from gpulab.capture.alerts import alerts_of
from gpulab.formatting import difference, percent, rate
from gpulab.lessons.batch_size import Batch, DigitsInMemory
from gpulab.lessons.check import Checked, NoAnswer, Note, Table, exercise, right, wrong
from gpulab.lessons.figures import GREY, own_style
from gpulab.lessons.guesses import Question, share, times
from gpulab.lessons.measured import experiment_named, facts_named, run_named, working_share
from gpulab.thresholds import DEFAULT
from gpulab.views.waiting import waiting
from gpulab.views.wording import PARTS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from gpulab.run import Run
    from gpulab.tuning.record import Side

Mfu: TypeAlias = Callable[[float, float, float, bool], object]

MATRIX_OPERATORS = ("mm", "addmm", "bmm", "baddbmm", "convolution", "linear")
SPUN_S, SPUN_STEPS = 4.0, 40  # of each kernel on the one SM, where there is a GPU
MATRIX_SIZE = 8192


class LateDigits(DigitsInMemory):
    """The digits of lesson 05 in memory, whose batches are ready only after `late_ms`, as if another machine sent them.

    `waiting`: "sleep" gives the core back meanwhile, "poll" asks again and again whether the batch is there, "none"
    has it at once. Give `collate_fn=whole_batch` to the DataLoader. Raises ValueError for another word, GpulabError
    without scikit-learn.
    """

    def __init__(self, waiting: str, late_ms: float = 10.0) -> None:
        if waiting not in ("sleep", "poll", "none"):
            raise ValueError(f'waiting is "sleep", "poll" or "none", not {waiting!r}')
        super().__init__()
        self.waiting, self.late_s = waiting, late_ms / 1e3

    def __getitems__(self, indices: list[int]) -> Batch:
        ready_s = time.perf_counter() + self.late_s
        if self.waiting == "sleep":
            time.sleep(self.late_s)
        elif self.waiting == "poll":
            while time.perf_counter() < ready_s:
                pass
        return super().__getitems__(indices)


# -- a figure of one SM ------------------------------------------------------------------------------------------------


def draw_sms(sms: int = 8, moments: int = 24) -> Figure:
    """Two kernels on a GPU with so few SMs, a row for each SM: NVML's figure is the same for both. A model."""
    from matplotlib.figure import Figure

    with own_style():
        figure = Figure(figsize=(9, 2.5), dpi=90, layout="constrained")
        for place, filled, title in ((1, 1, "one small kernel after another"), (2, sms, "kernels that fill the GPU")):
            axes = figure.add_subplot(1, 2, place)
            for sm in range(sms):
                for moment in range(moments):
                    colour = PARTS["compute"].colour if sm < filled else "#E7E7E7"
                    axes.broken_barh([(moment, 0.92)], (sm - 0.42, 0.84), facecolors=colour)
            axes.set_yticks(range(sms), [f"SM {sm}" for sm in range(sms)], size=7)
            axes.invert_yaxis()
            axes.set_xticks([])
            axes.tick_params(length=0)
            axes.set_xlabel(f"time    NVML says 100 %, SM active is {percent(filled / sms)}", size=9)
            axes.set_title(title, loc="left", size=9)
            for side in ("top", "right", "left", "bottom"):
                axes.spines[side].set_visible(False)
        figure.suptitle(f"a model of a GPU with {sms} SMs, not a measurement", size=8, color=GREY, x=0.99, ha="right")
    return figure


def measure_one_sm() -> Table | Note:
    """On a GPU, the meters while a kernel spins on one SM, and while matrix products fill the GPU; else a sentence."""
    if not torch.cuda.is_available():
        return Note(
            "No GPU here.",
            "On a machine with one, this cell reads the meters under two loads: a one-thread kernel that only counts "
            "clock cycles, and large matrix products.",
        )
    a = torch.randn(MATRIX_SIZE, MATRIX_SIZE, device="cuda", dtype=torch.bfloat16)
    product_s = 2 * MATRIX_SIZE**3 / 500e12
    cycles = int(1.5e9 * SPUN_S / SPUN_STEPS)
    times = max(1, int(SPUN_S / SPUN_STEPS / product_s))

    def products() -> None:
        for _ in range(times):
            torch.mm(a, a)

    runs = [
        _metered("one-sm", lambda: torch.cuda._sleep(cycles)),  # type: ignore[no-untyped-call]
        _metered("all-sms", products),
    ]
    return meters_of(runs)


def _metered(name: str, work: Callable[[], object]) -> Run:
    with profile(name, trace=False, show=False, save=False) as profiled, waiting(f"running the kernels of {name}"):
        for _ in range(SPUN_STEPS):
            work()
            torch.cuda.synchronize()
    return profiled.run


_METERS = (
    ("GPU utilization (NVML)", "gpu_utilization_pct", 0.01),
    ("SM active (NVML GPM)", "sm_active_fraction", 1.0),
    ("SM occupancy (NVML GPM)", "sm_occupancy_fraction", 1.0),
    ("tensor active (NVML GPM)", "tensor_active_fraction", 1.0),
)


def meters_of(runs: Sequence[Run]) -> Table:
    """What the GPU's meters read during each run, the highest reading of each: the ends of a run would blur a mean."""
    curves = [{curve.name: curve.maximum for curve in facts(run).curves} for run in runs]
    lines = [f"{'highest reading':26}" + "".join(f" {run.name:>16}" for run in runs)]
    for label, name, unit in _METERS:
        values = [percent(c[name] * unit) if name in c else "not measurable" for c in curves]
        lines.append(f"{label:26}" + "".join(f" {value:>16}" for value in values))
    return Table(tuple(lines))


# -- the ladder --------------------------------------------------------------------------------------------------------


class Rung(Struct, frozen=True):
    """One share of the wall time, 0 to 1; None is "not measurable", and `why` says so."""

    label: str
    share: float | None
    why: str = ""


class Ladder(Struct, frozen=True):
    """The shares of one setting, from the widest to the narrowest question."""

    label: str
    rungs: tuple[Rung, ...]


_latest: dict[str, tuple[Ladder, ...]] = {}  # by the experiment's name: a guess is held against what was drawn


def top_table(experiment: str) -> Table | Note:
    """What `top` shows of the training thread, what the device does meanwhile, and samples per second, by setting."""
    sides = _sides(experiment)
    if not sides:
        return Note("Not measured.", f"There is no experiment {experiment!r} yet: run that cell first.")
    first = sides[0]
    lines = [f"{'setting':14} {'top shows':>10} {'the device works':>17} {'samples':>16} {'against the first':>18}"]
    for side in sides:
        shown = _thread_share(side.facts)
        works = working_share(side.facts.run) if side.facts is not None else None
        per_s = None if not side.us_per_sample else 1e6 / side.us_per_sample
        change = "–"
        if side is not first and side.us_per_sample and first.us_per_sample:
            change = difference(first.us_per_sample / side.us_per_sample - 1)
        lines.append(
            f"{side.label:14} {percent(shown):>10} {percent(works):>17} {rate(per_s, 'samples'):>16} {change:>18}"
        )
    shared = max((_without_core(side.facts) for side in sides), default=0.0)
    if shared >= DEFAULT.core_wait_notice:
        lines.append(
            f"Other programs took cores: for up to {percent(shared)} of the time the training was ready and had none."
        )
    return Table(tuple(lines))


def draw_ladder(experiment: str, flop: float, peak_flops: float) -> Figure | Note:
    """The ladder of each setting of that experiment: `flop` are those of one step, `peak_flops` per second."""
    sides = _sides(experiment)
    if not sides:
        return Note("Not measured.", f"There is no experiment {experiment!r} yet: run that cell first.")
    ladders = tuple(ladder(side, flop, peak_flops) for side in sides)
    _latest[experiment] = ladders
    return drawn(ladders)


def ladder(side: Side, flop: float, peak_flops: float) -> Ladder:
    """From the profiled run of one side: each rung is a share of the time of the same steps, but what top shows."""
    figures = side.facts
    on_gpu = figures is not None and figures.run.device.kind != "cpu"
    works = working_share(figures.run) if figures is not None else None
    curves = {c.name: c.mean if c.step_mean is None else c.step_mean for c in figures.curves} if figures else {}
    no_counter = "needs a Hopper GPU or newer, or DCGM" if on_gpu else "a GPU's counter: a CPU has none"
    mfu = _mfu_of(figures, flop, peak_flops)
    if on_gpu:
        rungs = (
            Rung("GPU utilization (NVML)", _of(curves, "gpu_utilization_pct", 0.01), "no reading"),
            Rung("busy", works, "no trace"),
        )
    else:
        rungs = (
            Rung("as top shows it", _thread_share(figures), "not counted by this system"),
            Rung("computing (busy)", works, "no trace"),
        )
    return Ladder(
        side.label,
        (
            Rung("wall time", 1.0),
            *rungs,
            Rung("SM active", _of(curves, "sm_active_fraction", 1.0), no_counter),
            *(() if on_gpu else (Rung("in matrix operators", _matrix_share(figures), "no trace"),)),
            Rung("tensor active", _of(curves, "tensor_active_fraction", 1.0), no_counter),
            Rung("MFU", mfu, "no trace"),
        ),
    )


def drawn(ladders: Sequence[Ladder]) -> Figure:
    """One panel per setting, one bar per rung; what was not measurable has no bar."""
    from matplotlib.figure import Figure

    count = max(len(one.rungs) for one in ladders)
    with own_style():
        figure = Figure(figsize=(10, 0.36 * count + 0.75), dpi=90, layout="constrained")
        for place, one in enumerate(ladders):
            axes = figure.add_subplot(1, len(ladders), place + 1)
            for row, rung in enumerate(one.rungs):
                if rung.share is None:
                    words = "not measurable" if len(ladders) > 1 else f"not measurable: {rung.why}"
                    axes.text(0.02, row, words, va="center", size=8, color=GREY, style="italic")
                    continue
                colour = PARTS["compute"].colour if row else "#BBBBBB"
                axes.barh(row, min(rung.share, 1.0), 0.72, color=colour)
                inside = rung.share > 0.8
                axes.text(
                    min(rung.share, 1.0) + (-0.02 if inside else 0.02),
                    row,
                    percent(rung.share),
                    va="center",
                    ha="right" if inside else "left",
                    size=8,
                    color="white" if inside and row else "black",
                )
            axes.set_yticks(range(len(one.rungs)), [r.label if place == 0 else "" for r in one.rungs], size=9)
            axes.set_xlim(0, 1)
            axes.set_xticks([])
            axes.invert_yaxis()
            axes.tick_params(length=0)
            axes.set_title(one.label, loc="left", size=10)
            for side in ("top", "right", "bottom"):
                axes.spines[side].set_visible(False)
    return figure


def _sides(experiment: str) -> list[Side]:
    record = experiment_named(experiment)
    return [] if record is None else [side for side in record.sides if not side.failure]


def _thread_share(figures: Facts | None) -> float | None:
    """Share of the steps' time in which the training thread had a core: what `top -H` shows of it."""
    return figures.cores.thread_cpu_fraction if figures is not None and figures.cores is not None else None


def _without_core(figures: Facts | None) -> float:
    """Share of the steps' time in which the training thread was ready to run and had no core; 0 where not known."""
    cores = figures.cores if figures is not None else None
    return (cores.thread_wait_fraction or 0.0) if cores is not None else 0.0


def _matrix_share(figures: Facts | None) -> float | None:
    """Share of the profiled steps in operators that multiply matrices."""
    if figures is None or figures.breakdown is None:
        return None
    return math.fsum(row.share for row in figures.operators if _is_matrix(row.name))


def _mfu_of(figures: Facts | None, flop: float, peak_flops: float) -> float | None:
    """Of the mean profiled step, so that it is a share of the same time as the rungs above it."""
    breakdown = figures.breakdown if figures is not None else None
    if breakdown is None or not breakdown.wall_ns:
        return None
    return flop * len(breakdown.steps) / (breakdown.wall_ns / 1e9) / peak_flops


def _is_matrix(name: str) -> bool:
    words = name.removeprefix("aten::").removeprefix("mkldnn_")
    return words.removesuffix("_backward").lstrip("_") in MATRIX_OPERATORS


def _of(curves: Mapping[str, float], name: str, unit: float) -> float | None:
    return curves[name] * unit if name in curves else None


# -- alerts ------------------------------------------------------------------------------------------------------------


def alerts_with(name: str, **limits: float) -> Note | Table:
    """What the live view would have said during that run with these thresholds, from its record.

    Raises UsageError for a name that is no threshold, or a value out of range.
    """
    thresholds = DEFAULT.changed(limits)
    run = run_named(name)
    if run is None:
        return Note("Not measured.", f"There is no run {name!r} yet: run that cell first.")
    alerts = alerts_of(run.steps, run.samples, run.wall_ns, thresholds)
    changed = ", ".join(f"{limit}={value:g}" for limit, value in limits.items()) or "the default thresholds"
    if not alerts:
        return Note("No alert.", f"Nothing lasted long enough during the run {name!r} with {changed}.")
    return Table((f"With {changed}:", *(f"{alert.since_ns / 1e9:5.1f} s  {alert.words}" for alert in alerts)))


# -- the exercises -----------------------------------------------------------------------------------------------------

LADDER = ("wall", "busy", "SM active", "tensor active", "MFU")
_STEPS_DOWN = {  # why the first of two neighbours is never less than the second
    ("wall", "busy"): "the GPU can be busy for the whole time at most",
    ("busy", "SM active"): "an SM is active only while a kernel runs, and the GPU is busy while any kernel runs",
    ("SM active", "tensor active"): "tensor cores are a part of the SMs, so an SM is active while they are",
    ("tensor active", "MFU"): "matrix FLOP are done by tensor cores, and hardly ever at their full rate while active",
}


@exercise("Put the names into a list, the largest share first, then run that cell and this one again.")
def check_ladder(my_ladder: object) -> Checked:
    """Whether that is the ladder from the largest to the smallest share, without the one that is no rung."""
    if isinstance(my_ladder, str) or not isinstance(my_ladder, Iterable):
        return wrong('Expected a list of names: ["wall", …].')
    names = [" ".join(str(name).split()) for name in my_ladder]
    every = {name.lower(): name for name in (*LADDER, "SM occupancy")}
    strange = [name for name in names if name.lower() not in every]
    if strange:
        return wrong(f"{strange[0]!r} is not among the names. They are: {', '.join(every.values())}.")
    order = [every[name.lower()] for name in names]
    if "SM occupancy" in order:
        return wrong(
            "SM occupancy is no rung: it counts how many warps wait on an SM, of the most that fit. A fast kernel may "
            "have few, and a slow one many, so it is neither above nor below the others."
        )
    missing = [name for name in LADDER if name not in order]
    if missing:
        return wrong(f"{missing[0]} is missing.")
    if len(order) > len(LADDER):
        return wrong("One of the names is there twice.")
    for above, below in itertools.pairwise(LADDER):
        if order.index(above) > order.index(below):
            return wrong(f"{above} comes before {below}: {_STEPS_DOWN[above, below]}.")
    return right("Each is at most the one above it. What is lost between two rungs is what to ask about next.")


STATEMENTS: Mapping[str, tuple[bool, str]] = {  # whether it is true, and what is to be said to who thinks otherwise
    "A": (
        True,
        "100 % says just that: in the last sampling period there was a kernel at each moment, or nearly.",
    ),
    "B": (False, "One kernel on one SM is enough for 100 %: how many SMs worked is another figure (SM active)."),
    "C": (
        False,
        "Memory-Usage is what the programs hold. PyTorch keeps freed memory for later, so it needs less than that: "
        "torch.cuda.max_memory_allocated() says how much.",
    ),
    "D": (
        True,
        "Power follows what the whole chip does. Far below its cap at 100 % is a sign that little of it works.",
    ),
    "E": (
        False,
        "The CUDA version up there is the newest that the driver can serve. torch.version.cuda says what PyTorch uses.",
    ),
    "F": (
        False,
        "Utilization counts time with a kernel, not arithmetic. A kernel that only copies counts as much as a matrix "
        "product.",
    ),
}


@exercise('Put the letters of the true statements in place of the dots, as "AB".')
def check_statements(true_statements: object) -> Checked:
    """Whether these are the true statements about the table of nvidia-smi: letters, in a string, list or set."""
    if not isinstance(true_statements, Iterable):
        return wrong('Expected letters, e.g. "AB".')
    letters = {letter for part in true_statements for letter in str(part).upper() if letter.isalnum()}
    strange = sorted(letters - set(STATEMENTS))
    if strange:
        return wrong(f"There is no statement {strange[0]}: they are {', '.join(STATEMENTS)}.")
    if not letters:
        return wrong("At least one is true.")
    for letter, (is_true, words) in STATEMENTS.items():
        if is_true != (letter in letters):
            return wrong(f"{letter} is {'true' if is_true else 'not true'}. {words}")
    return right("The table shows that the GPU always had a kernel, but not what the kernels achieved.")


class Given(Struct, frozen=True):
    """The figures of one training: FLOP of one sample forward, samples per second, TFLOP/s of a data sheet."""

    forward_flop: float
    samples_per_s: float
    sheet_tflops: float
    with_sparsity: bool


CASES = (
    Given(8.2e9, 2500.0, 312.0, False),
    Given(8.2e9, 2500.0, 624.0, True),
    Given(2.9e11, 610.0, 1979.0, True),
    Given(1.1e9, 900.0, 65.0, False),
)
_TOLERANCE = 1e-3


def mfu(given: Given) -> float:
    """Model FLOP/s over the dense peak. Backward costs twice the forward pass; recomputation does not count."""
    dense = given.sheet_tflops * 1e12 / (2 if given.with_sparsity else 1)
    return 3 * given.forward_flop * given.samples_per_s / dense


_MISTAKES: tuple[tuple[str, Callable[[Given], float]], ...] = (
    (
        "A third of it: the backward pass is missing. It computes the gradients of inputs and of weights, twice as "
        "much as the forward pass.",
        lambda given: mfu(given) / 3,
    ),
    (
        "Two thirds of it: forward *and* backward count, one part and two parts.",
        lambda given: mfu(given) * 2 / 3,
    ),
    (
        "Four thirds of it: recomputation (checkpointing) is work, but not the model's. MFU counts 3 times the forward "
        "pass.",
        lambda given: mfu(given) * 4 / 3,
    ),
    (
        "Half of it where the sheet's figure is with sparsity: such a figure is twice the dense peak, and a training "
        "has dense matrices.",
        lambda given: mfu(given) / (2 if given.with_sparsity else 1),
    ),
    (
        "The dense peak is *half* of the figure with sparsity, not twice as much.",
        lambda given: mfu(given) / (4 if given.with_sparsity else 1),
    ),
    (
        "It halves the peak always. Only a figure with sparsity has to be halved.",
        lambda given: mfu(given) * (1 if given.with_sparsity else 2),
    ),
    (
        "The backward pass is missing, and a figure with sparsity is twice the dense peak.",
        lambda given: mfu(given) / 3 / (2 if given.with_sparsity else 1),
    ),
    ("That is in percent; expected a fraction from 0 to 1.", lambda given: 100 * mfu(given)),
    ("The peak is in TFLOP/s, the rest in FLOP: 1 TFLOP is 1e12 FLOP.", lambda given: 1e12 * mfu(given)),
    ("That is the peak over what is reached. MFU is the other way round.", lambda given: 1 / mfu(given)),
    (
        "The FLOP per second are missing: forward_flop belongs to one sample, so multiply by samples_per_s.",
        lambda given: mfu(given) / given.samples_per_s,
    ),
    (
        "samples_per_s is how many samples a second has: multiply by it, do not divide.",
        lambda given: mfu(given) / given.samples_per_s**2,
    ),
)


@exercise()
def check_mfu(my_mfu: Any) -> Checked:
    """Whether `my_mfu(forward_flop, samples_per_s, sheet_tflops, with_sparsity)` is right for some trainings."""
    if not callable(my_mfu):
        return wrong(f"That is a {type(my_mfu).__name__}; expected a function.")
    got = [_asked(my_mfu, given) for given in CASES]
    if all(answer is None for answer in got):
        raise NoAnswer
    for answer in got:
        if isinstance(answer, bool) or not isinstance(answer, (int, float)):
            return wrong(f"It gives {answer!r}; expected a number: does the function return its result?")
    numbers = [float(answer) for answer in got if isinstance(answer, (int, float))]
    if _agree(numbers, mfu):
        return right(
            f"One of the cases tried has a peak with sparsity: it reaches {percent(mfu(CASES[2]))} of the dense one."
        )
    for words, mistake in _MISTAKES:
        if _agree(numbers, mistake):
            return wrong(words)
    worst = next(i for i, number in enumerate(numbers) if not _near(number, mfu(CASES[i])))
    given = CASES[worst]
    return wrong(
        f"For forward_flop={given.forward_flop:g}, samples_per_s={given.samples_per_s:g}, "
        f"sheet_tflops={given.sheet_tflops:g}, with_sparsity={given.with_sparsity} it gives {numbers[worst]:.4g}, and "
        f"{mfu(given):.4g} is right. Which of the four figures goes into it in which way?"
    )


def _asked(function: Mfu, given: Given) -> object:
    answer = function(given.forward_flop, given.samples_per_s, given.sheet_tflops, given.with_sparsity)
    return answer.item() if hasattr(answer, "item") else answer


def _agree(numbers: Sequence[float], formula: Callable[[Given], float]) -> bool:
    return all(_near(number, formula(given)) for number, given in zip(numbers, CASES, strict=True))


def _near(number: float, wanted: float) -> bool:
    return math.isclose(number, wanted, rel_tol=_TOLERANCE)


# -- what the notebook asks --------------------------------------------------------------------------------------------


def _best_mfu() -> float | None:
    """The largest of the ladders that were drawn: that of the setting which never waits."""
    shares = [one.rungs[-1].share for one in _latest.get("three-ways", ())]
    return max((share for share in shares if share is not None), default=None)


QUESTIONS: Mapping[str, Question] = {
    "without-waiting": times(
        "What speedup is there when each batch is ready at once?",
        "three-ways",
        "with each batch there at once",
        setting=("waiting", "none"),
    ),
    "top": share(
        "What does top show for it, in % of a core?",
        lambda: _thread_share(facts_named("polled")),
        "of the time the training has a core",
    ),
    "mfu": share("What is its MFU?", _best_mfu, "of the measured peak is what the traced steps reach (MFU)"),
}
EXERCISES: Mapping[str, Callable[..., Checked]] = {
    "statements": check_statements,
    "ladder": check_ladder,
    "mfu": check_mfu,
}
