"""Lesson 01, what "utilization" means: one SM or all SMs, and a ladder of shares."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from msgspec import Struct

from gpulab.analysis.facts import Facts, facts
from gpulab.api.profile import profile
from gpulab.capture.alerts import alerts_of
from gpulab.formatting import difference, percent, rate
from gpulab.lessons.check import Checked, Mistakes, Note, Table, exercise, fault, right, wrong
from gpulab.lessons.figures import BLUE, GREY, PALE, Bar, Row, fill_rows, panels, share_row
from gpulab.lessons.guesses import Question, share, times
from gpulab.lessons.measured import latest_experiment, latest_facts, latest_run, notes, product_share, working_share
from gpulab.thresholds import DEFAULT
from gpulab.views.waiting import waiting

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from gpulab.run import Run
    from gpulab.tuning.record import Side

SPUN_S, SPUN_STEPS = 4.0, 40  # for the kernel on one SM, if there is a GPU
MATRIX_SIZE = 8192
WALL = "wall time"


# -- one SM ------------------------------------------------------------------------------------------------------------


def draw_sms(sms: int = 8, moments: int = 24) -> Figure:
    """A model: two kernels on a GPU with `sms` SMs, a row for each SM. NVML's figure is the same for both."""
    with panels(2, 9, 2.5) as (figure, both):
        for axes, filled, title in zip(
            both, (1, sms), ("one small kernel after another", "kernels that fill the GPU"), strict=True
        ):
            colours = [BLUE if sm < filled else "#E7E7E7" for sm in range(sms)]
            rows = [
                Row(f"SM {sm}", [Bar(moment, 0.92, colour) for moment in range(moments)])
                for sm, colour in enumerate(colours)
            ]
            fill_rows(axes, rows, height=0.84)
            axes.tick_params(labelsize=7)
            axes.set_xticks([])
            axes.set_xlabel(f"time    NVML says 100 %, SM active is {percent(filled / sms)}", size=9)
            axes.set_title(title, loc="left", size=9)
            axes.spines[:].set_visible(False)
        figure.suptitle(f"a model of a GPU with {sms} SMs, not a measurement", size=8, color=GREY, x=0.99, ha="right")
    return figure


def measure_one_sm() -> Table | Note:
    """On a GPU, its meters while a kernel spins on one SM, and while matrix products fill the GPU; else a sentence."""
    if not torch.cuda.is_available():
        return Note(
            "No GPU here.",
            "On a machine with one, this cell reads the meters under two loads: a one-thread kernel that only counts "
            "clock cycles, and large matrix products.",
        )
    a = torch.randn(MATRIX_SIZE, MATRIX_SIZE, device="cuda", dtype=torch.bfloat16)
    times = max(1, int(SPUN_S / SPUN_STEPS / (2 * MATRIX_SIZE**3 / 500e12)))
    cycles = int(1.5e9 * SPUN_S / SPUN_STEPS)

    def products() -> None:
        for _ in range(times):
            torch.mm(a, a)

    spin = lambda: torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]  # noqa: E731
    return meters_of([_metered("one-sm", spin), _metered("all-sms", products)])


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
    """The highest reading of each GPU meter during each run; a mean would include the ends of a run."""
    curves = [{curve.name: curve.maximum for curve in facts(run).curves} for run in runs]
    rows = [
        (label, *(percent(c[name] * unit) if name in c else "not measurable" for c in curves))
        for label, name, unit in _METERS
    ]
    return Table.of(("highest reading", *(run.name for run in runs)), rows)


# -- the ladder --------------------------------------------------------------------------------------------------------


class Share(Struct, frozen=True):
    """A rung of the ladder: a share of the wall time, 0 to 1; None is "not measurable", and `why` says so."""

    label: str
    share: float | None
    why: str = ""


_latest: dict[str, list[list[Share]]] = {}  # by the experiment's name: a guess is compared with the drawn ladder


@notes
def top_table(experiment: str) -> Table:
    """The training thread's share in `top`, the device's activity meanwhile, and samples per second, by setting."""
    sides = _sides(experiment)
    first = sides[0]
    rows = []
    for side in sides:
        works = working_share(side.facts)
        per_s = None if not side.us_per_sample else 1e6 / side.us_per_sample
        change = "–"
        if side is not first and side.us_per_sample and first.us_per_sample:
            change = difference(first.us_per_sample / side.us_per_sample - 1)
        on_core = percent(_thread_share(side.facts))
        rows.append((side.label, on_core, percent(works), rate(per_s, "samples"), change))
    cores = [side.facts.cores for side in sides if side.facts is not None and side.facts.cores is not None]
    without = max((one.thread_wait_fraction or 0.0 for one in cores), default=0.0)
    others = f"Other programs took cores: for up to {percent(without)} of the time the training was ready and had none."
    below = [others] if without >= DEFAULT.core_wait_notice else []
    return Table.of(("setting", "top shows", "the device works", "samples", "against the first"), rows, *below)


@notes
def draw_ladder(experiment: str, flop: float, peak_flops: float) -> Figure:
    """The ladder of each setting of the experiment, one panel each; a share that was not measurable has no bar.

    `flop`: FLOP of one step; `peak_flops`: peak FLOP per second.
    """
    sides = _sides(experiment)
    ladders = _latest[experiment] = [ladder(side, flop, peak_flops) for side in sides]
    with panels(len(sides), 10, 0.36 * max(map(len, ladders)) + 0.75) as (figure, every):
        for place, (axes, side, one) in enumerate(zip(every, sides, ladders, strict=True)):
            rows = []
            for rung in one:
                why = f"not measurable: {rung.why}" if len(sides) == 1 else "not measurable"
                colour = PALE if rung.label == WALL else BLUE
                rows.append(share_row("" if place else rung.label, rung.share, colour, why))
            fill_rows(axes, rows)
            axes.set_xlim(0, 1)
            axes.set_xticks([])
            axes.set_title(side.label, loc="left", size=10)
            axes.spines[["top", "right", "bottom"]].set_visible(False)
    return figure


def ladder(side: Side, flop: float, peak_flops: float) -> list[Share]:
    """The ladder from the profiled run of one side, from the widest to the narrowest question.

    Each rung except the one from top is a share of the time of the same steps.
    """
    figures = side.facts
    on_gpu = figures is not None and figures.run.device.kind != "cpu"
    works = working_share(figures)
    curves = {c.name: c.mean if c.step_mean is None else c.step_mean for c in figures.curves} if figures else {}
    no_counter = "needs a Hopper GPU or newer, or DCGM" if on_gpu else "a GPU's counter: a CPU has none"
    breakdown = figures.breakdown if figures is not None else None
    products = mfu = None
    if figures is not None and breakdown is not None:
        products = product_share(figures) or 0.0
        if breakdown.wall_ns:  # of the mean profiled step, like the rungs above
            mfu = flop * len(breakdown.steps) / (breakdown.wall_ns / 1e9) / peak_flops
    if on_gpu:
        utilization = curves.get("gpu_utilization_pct")
        first = Share("GPU utilization (NVML)", None if utilization is None else utilization / 100, "no reading")
        rungs = [first, Share("busy", works, "no trace")]
    else:
        first = Share("as top shows it", _thread_share(figures), "not counted by this system")
        rungs = [first, Share("computing (busy)", works, "no trace")]
    rungs.append(Share("SM active", curves.get("sm_active_fraction"), no_counter))
    rungs += [] if on_gpu else [Share("in matrix operators", products, "no trace")]
    tensor = Share("tensor active", curves.get("tensor_active_fraction"), no_counter)
    return [Share(WALL, 1.0), *rungs, tensor, Share("MFU", mfu, "no trace")]


def _sides(experiment: str) -> list[Side]:
    return [side for side in latest_experiment(experiment).sides if not side.failure]


def _thread_share(figures: Facts | None) -> float | None:
    """Share of the steps' time in which the training thread had a core, as shown by `top -H`."""
    return figures.cores.thread_cpu_fraction if figures is not None and figures.cores is not None else None


@notes
def alerts_with(name: str, **limits: float) -> Note | Table:
    """The alerts that the live view would have shown during that run with these thresholds, from its record.

    Raises UsageError for a name that is not a threshold, or a value out of range.
    """
    thresholds = DEFAULT.changed(limits)
    run = latest_run(name)
    alerts = alerts_of(run.steps, run.samples, run.wall_ns, thresholds)
    changed = ", ".join(f"{limit}={value:g}" for limit, value in limits.items()) or "the default thresholds"
    if not alerts:
        return Note("No alert.", f"Nothing lasted long enough during the run {name!r} with {changed}.")
    return Table((f"With {changed}:", *(f"{alert.since_ns / 1e9:5.1f} s  {alert.words}" for alert in alerts)))


# -- the exercises -----------------------------------------------------------------------------------------------------

LADDER = ("wall", "busy", "SM active", "tensor active", "MFU")
_STEPS_DOWN = (  # why the first of two neighbours is never smaller than the second
    "the GPU can be busy for the whole time at most",
    "an SM is active only while a kernel runs, and the GPU is busy while any kernel runs",
    "tensor cores are a part of the SMs, so an SM is active while they are",
    "matrix FLOP are done by tensor cores, and hardly ever at their full rate while active",
)


@exercise("Put the names into a list, the largest share first, then run that cell and this one again.")
def check_ladder(my_ladder: object) -> Checked:
    """Whether the answer is the ladder from the largest to the smallest share, without the share that is not a rung."""
    if isinstance(my_ladder, str) or not isinstance(my_ladder, Iterable):
        return wrong('Expected a list of names: ["wall", …].')
    every = {name.lower(): name for name in (*LADDER, "SM occupancy")}
    names = [" ".join(str(name).split()) for name in my_ladder]
    order = [every.get(name.lower(), "") for name in names]
    if "" in order:
        strange = names[order.index("")]
        return wrong(f"{strange!r} is not among the names. They are: {', '.join(every.values())}.")
    if "SM occupancy" in order:
        return wrong(
            "SM occupancy is no rung: it counts how many warps wait on an SM, of the most that fit. A fast kernel may "
            "have few, and a slow one many, so it is neither above nor below the others."
        )
    if missing := [name for name in LADDER if name not in order]:
        return wrong(f"{missing[0]} is missing.")
    if len(order) > len(LADDER):
        return wrong("One of the names is there twice.")
    for (above, below), why in zip(itertools.pairwise(LADDER), _STEPS_DOWN, strict=True):
        if order.index(above) > order.index(below):
            return wrong(f"{above} comes before {below}: {why}.")
    return right("Each is at most the one above it. What is lost between two rungs is what to ask about next.")


STATEMENTS: Mapping[str, tuple[bool, str]] = {  # whether it is true, and the hint for the opposite answer
    "A": (True, "100 % says just that: in the last sampling period there was a kernel at each moment, or nearly."),
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
    if strange := sorted(letters - set(STATEMENTS)):
        return wrong(f"There is no statement {strange[0]}: they are {', '.join(STATEMENTS)}.")
    if not letters:
        return wrong("At least one is true.")
    for letter, (is_true, words) in STATEMENTS.items():
        if is_true != (letter in letters):
            return wrong(f"{letter} is {'true' if is_true else 'not true'}. {words}")
    return right("The table shows that the GPU always had a kernel, but not what the kernels achieved.")


TRAININGS = (  # FLOP of one sample forward, samples per second, TFLOP/s of a data sheet, with sparsity
    (8.2e9, 2500.0, 312.0, False),
    (8.2e9, 2500.0, 624.0, True),
    (2.9e11, 610.0, 1979.0, True),
    (1.1e9, 900.0, 65.0, False),
)


def mfu(forward_flop: float, samples_per_s: float, sheet_tflops: float, with_sparsity: bool) -> float:
    """Model FLOP/s over the dense peak. Backward costs twice the forward pass; recomputation does not count."""
    return 3 * forward_flop * samples_per_s / (sheet_tflops * 1e12 / (2 if with_sparsity else 1))


MFU_MISTAKES: Mistakes = (
    (
        "A third of it: the backward pass is missing. It computes the gradients of inputs and of weights, twice as "
        "much as the forward pass.",
        lambda *training: mfu(*training) / 3,
    ),
    (
        "Two thirds of it: forward *and* backward count, one part and two parts.",
        lambda *training: mfu(*training) * 2 / 3,
    ),
    (
        "Four thirds of it: recomputation (checkpointing) is work, but not the model's. MFU counts 3 times the forward "
        "pass.",
        lambda *training: mfu(*training) * 4 / 3,
    ),
    (
        "Half of it where the sheet's figure is with sparsity: such a figure is twice the dense peak, and a training "
        "has dense matrices.",
        lambda flop, rate, peak, _: mfu(flop, rate, peak, False),
    ),
    (
        "The dense peak is *half* of the figure with sparsity, not twice as much.",
        lambda *training: mfu(*training) / (4 if training[3] else 1),
    ),
    (
        "It halves the peak always. Only a figure with sparsity has to be halved.",
        lambda flop, rate, peak, _: mfu(flop, rate, peak, True),
    ),
    (
        "The backward pass is missing, and a figure with sparsity is twice the dense peak.",
        lambda flop, rate, peak, _: mfu(flop, rate, peak, False) / 3,
    ),
    ("That is in percent; expected a fraction from 0 to 1.", lambda *training: 100 * mfu(*training)),
    ("The peak is in TFLOP/s, the rest in FLOP: 1 TFLOP is 1e12 FLOP.", lambda *training: 1e12 * mfu(*training)),
    ("That is the peak over what is reached. MFU is the other way round.", lambda *training: 1 / mfu(*training)),
    (
        "The FLOP per second are missing: forward_flop belongs to one sample, so multiply by samples_per_s.",
        lambda *training: mfu(*training) / training[1],
    ),
    (
        "samples_per_s is how many samples a second has: multiply by it, do not divide.",
        lambda *training: mfu(*training) / training[1] ** 2,
    ),
)


@exercise()
def check_mfu(my_mfu: Callable[..., object]) -> Checked:
    """Whether `my_mfu(forward_flop, samples_per_s, sheet_tflops, with_sparsity)` is right for some trainings."""
    otherwise = "Which of the four figures goes into it in which way?"
    if words := fault(my_mfu, mfu, TRAININGS, MFU_MISTAKES, otherwise=otherwise, same=_is_near, name="my_mfu"):
        return wrong(words)
    reached = percent(mfu(*TRAININGS[2]))
    return right(f"One of the cases tried has a peak with sparsity: it reaches {reached} of the dense one.")


def _is_near(got: float, expected: float) -> bool:
    return math.isclose(got, expected, rel_tol=1e-3)


# -- what the notebook asks --------------------------------------------------------------------------------------------


def _best_mfu() -> float | None:
    """The largest MFU of the drawn ladders: that of the setting which never waits."""
    shares = [rungs[-1].share for rungs in _latest.get("three-ways", ())]
    return max((one for one in shares if one is not None), default=None)


QUESTIONS: Mapping[str, Question] = {
    "without-waiting": times(
        "What speedup is there when each batch is ready at once?",
        "three-ways",
        "with each batch there at once",
        setting=("waiting", "none"),
    ),
    "top": share(
        "What does top show for it, in % of a core?",
        lambda: _thread_share(latest_facts("polled")),
        "of the time the training has a core",
    ),
    "mfu": share("What is its MFU?", _best_mfu, "of the measured peak is what the traced steps reach (MFU)"),
}
