"""Lesson 14, the cost of idle time: the price of a million samples, and how a faster GPU changes it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from gpulab.analysis.device_peaks import Peaks, peaks_of
from gpulab.analysis.facts import facts
from gpulab.formatting import duration, factor, percent
from gpulab.lessons.check import Checked, Note, NotMeasured, Table, exercise, fault, right, undecided, wrong
from gpulab.lessons.figures import BLUE, ORANGE, Row, draw_rows, stacked
from gpulab.lessons.fused_kernels import measured_peak
from gpulab.lessons.guesses import CHEAPER, Question, times
from gpulab.lessons.lanes import Loading
from gpulab.lessons.measured import latest_experiment, latest_run, notes, working_share
from gpulab.lessons.training import default_device
from gpulab.tuning.compare.cost import spending
from gpulab.verdict import is_decided

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from gpulab.run import Run

GPUS = ("T4", "V100", "A10", "L4", "A100 80", "RTX 3090", "RTX 4090", "L40S", "H100", "H200", "B200")
TWICE = 2.0  # speedup of the GPU in the decision, and its price factor
NEAR = 0.03  # two prices that differ by less count as equal


# -- the bill ----------------------------------------------------------------------------------------------------------


@notes
def bill(experiment: str, price_per_hour: float) -> Table:
    """The cost of a million samples with each setting of the experiment, at this price of the machine per hour."""
    record = latest_experiment(experiment)
    rows, why_no_energy = [], ""
    for side in record.sides:
        if not side.us_per_sample:
            continue
        spent = spending(side, price_per_hour)
        why_no_energy = why_no_energy or spent.why_no_energy
        energy = "not measurable" if spent.energy_j is None else f"{spent.energy_j / 3.6e6:.3f} kWh"
        share = working_share(side.facts)
        works = "unknown" if share is None else percent(share)
        long = duration(1e6 * (spent.device_s or 0.0))
        rows.append((side.label, long, f"{spent.cost or 0.0:.3f}", energy, works))
    below = ["device works: its share of the steps of one traced run of each"]
    if not all(is_decided(c.verdict) for c in record.comparisons):
        below.insert(0, "undecided: other programs disturbed it, so the rows may differ by chance")
    below += [f"energy: {why_no_energy}"] if why_no_energy else []
    return Table.of(("setting", "a million samples take", "cost", "energy", "device works"), rows, *below)


@notes
def cost_ratio(experiment: str) -> Note:
    """How many times cheaper a sample is with the best setting that is decidedly faster."""
    comparisons = latest_experiment(experiment).comparisons
    faster = [c for c in comparisons if c.verdict == "faster" and c.ratio]
    if faster:
        best = min(faster, key=lambda comparison: comparison.ratio or math.inf)
        less = factor(1 / (best.ratio or 1))
        return Note("Measured.", f"A sample costs {less}× less with {best.b.label} than in the baseline.")
    if all(is_decided(c.verdict) for c in comparisons):
        return Note("Measured.", "No setting that was tried makes a sample cheaper.")
    return Note("Undecided.", "If other programs are running, run that cell again later.")


# -- a newer GPU -------------------------------------------------------------------------------------------------------


def _peaks() -> dict[str, Peaks]:
    return {name: peaks for name in GPUS if (peaks := peaks_of(name)) is not None}


def hardware_table() -> Table:
    """Dense peaks by number format, from the makers' data sheets."""
    rows = []
    for name, peaks in _peaks().items():
        figures = (peaks.fp32_tflops, peaks.tf32_tflops, peaks.bf16_tflops, peaks.bandwidth_gb_s)
        rows.append((name, *(f"{x:g}" if x else "–" for x in figures)))
    return Table.of(("GPU", "fp32 TFLOP/s", "TF32 TFLOP/s", "bf16 TFLOP/s", "GB/s"), rows)


def step_parts_ms(run: Run) -> tuple[float, float]:
    """The parts of a typical step, in ms: waiting for data, and the rest. Raises NotMeasured."""
    of_run = facts(run)
    if of_run.typical_step_us is None or of_run.data_wait_us is None:
        raise NotMeasured(f"The run {run.name!r} has too few steps: run that cell again.")
    wait_ms = of_run.data_wait_us.median / 1e3
    return wait_ms, max(of_run.typical_step_us.median / 1e3 - wait_ms, 0.0)


@notes
def draw_gpus(run: str) -> Figure:
    """The measured step of the run, and the best possible step on each GPU with unchanged loading.

    An estimate from peaks: the rest of the step is divided by the GPU's 32-bit peak over what this device reached in
    one large product. No GPU reaches its peak, so each bar is a lower bound of its step.
    """
    wait_ms, work_ms = step_parts_ms(latest_run(run))
    here = measured_peak(default_device())
    works = {"here, measured": work_ms}
    works |= {name: work_ms / max(peaks.fp32_tflops * 1e12 / here.flops, 1.0) for name, peaks in _peaks().items()}
    rows = [Row(name, stacked(((wait_ms, ORANGE), (work, BLUE)))) for name, work in works.items()]
    title, note = "the step with another GPU: an estimate from peaks, at best", "a model, but for the first bar"
    legend = {"waiting for data, as measured": ORANGE, "the rest": BLUE}
    return draw_rows(rows, title, "ms of a step", note=note, legend=legend, row_in=0.3)


# -- NVLink ------------------------------------------------------------------------------------------------------------

LINKS = {"PCIe 4.0 x16": 32.0, "PCIe 5.0 x16": 64.0, "NVLink 4 (H100)": 450.0}  # GB/s in each direction, at best
MODELS = {"this lesson's network": 0.03e6, "ResNet-50": 25.6e6, "GPT-2 small": 124e6, "a model with 7 billion": 7e9}


def exchange_ms(parameters: float, gpus: int, link_gb_s: float, bytes_each: int = 4) -> float:
    """A ring all-reduce of all gradients, without its latency: 2 (n - 1) / n times their bytes over the link's rate.

    Source: Patarasuk and Yuan 2009. A model: no link reaches its peak, and starting costs time, too.
    """
    return 2 * (gpus - 1) / gpus * parameters * bytes_each / (link_gb_s * 1e9) * 1e3


def exchange_table(gpus: int = 8) -> Table:
    """How long the gradients of some models take over each link, in ms per step, at best."""
    rows = []
    for model, parameters in MODELS.items():
        times = (duration(1e3 * exchange_ms(parameters, gpus, rate)) for rate in LINKS.values())
        megabytes = 4 * parameters / 1e6
        amount = f"{megabytes:,.0f}" if megabytes >= 10 else f"{megabytes:.2g}"
        rows.append((model, amount, *times))
    below = f"ring all-reduce over {gpus} GPUs at the links' peaks: a model, not a measurement"
    return Table.of(("gradients (fp32) of", "MB", *LINKS), rows, below)


# -- the exercises -----------------------------------------------------------------------------------------------------


def price_of_a_million(samples_per_s: float, price_per_hour: float) -> float:
    """The cost of a million samples, in the currency of the price."""
    return price_per_hour * 1e6 / samples_per_s / 3600


@exercise()
def check_cost(cost_per_million: Callable[..., object]) -> Checked:
    """Whether `cost_per_million(samples_per_s, price_per_hour)` is the price of a million samples."""
    words = fault(
        cost_per_million,
        price_of_a_million,
        ((250.0, 2.0), (1000.0, 3.6), (1e6, 7.2)),
        (
            ("The price is per hour, and the time is in seconds.", lambda *of: 3600 * price_of_a_million(*of)),
            ("That is the price of one sample.", lambda *of: price_of_a_million(*of) / 1e6),
            ("An hour has 60 minutes of 60 seconds.", lambda *of: 60 * price_of_a_million(*of)),
            (
                "More samples per second must cost less, not more: divide by the rate.",
                lambda rate, price: price * rate / 1e6 / 3600,
            ),
        ),
        otherwise="How many seconds do a million samples take?",
        name="cost_per_million",
    )
    return (
        wrong(words) if words else right("A million samples take 1,000,000 ÷ rate seconds, an hour has 3,600 of them.")
    )


def step_time(load_ms: float, compute_ms: float, workers: int, gpu_times: float) -> float:
    """The model of lesson 03, in ms: without workers the sum of both, with workers the slower of both."""
    return Loading(load_ms, compute_ms / gpu_times, workers).step_ms


@exercise()
def check_step(step_ms: Callable[..., object]) -> Checked:
    """Whether `step_ms(load_ms, compute_ms, workers, gpu_times)` follows the model of lesson 03."""
    words = fault(
        step_ms,
        step_time,
        ((30.0, 10.0, 0, 1.0), (30.0, 10.0, 0, 2.0), (30.0, 10.0, 2, 1.0), (30.0, 10.0, 4, 1.0), (30.0, 10.0, 4, 2.0)),
        (
            (
                "Without workers nothing happens at the same time: loading and computing add up.",
                lambda load, compute, workers, gpu: max(load / max(workers, 1), compute / gpu),
            ),
            (
                "With workers both happen at the same time: the step takes as long as the slower of the two.",
                lambda load, compute, workers, gpu: load / max(workers, 1) + compute / gpu,
            ),
            (
                "Several workers share the loading: together they deliver a batch sooner.",
                lambda load, compute, workers, gpu: max(load, compute / gpu) if workers else load + compute / gpu,
            ),
            (
                "A GPU with a 2× speedup takes half the time: divide by gpu_times.",
                lambda load, compute, workers, gpu: step_time(load, compute, workers, 1 / gpu),
            ),
            (
                "A faster GPU loads nothing: only computing gets shorter.",
                lambda load, compute, workers, gpu: step_time(load / gpu, compute, workers, gpu),
            ),
        ),
        otherwise="Without workers: load + compute. With workers: the longer of load ÷ workers and compute.",
        name="step_ms",
    )
    slow = step_time(30.0, 10.0, 0, 1000.0)
    good = f"With a GPU 1000× faster and no workers the step still takes {slow:.0f} of its 40 ms."
    return wrong(words) if words else right(good)


@exercise('Put "workers" or "gpu" in place of the dots, then run that cell and this one again.')
def check_cheaper(cheaper: object) -> Checked:
    """Whether "workers" or "gpu" is cheaper per sample, by the learner's own figures."""
    if cheaper not in ("workers", "gpu"):
        return wrong(f'{cheaper!r} is neither "workers" nor "gpu".')
    comparison = latest_experiment("two-workers").comparisons[0]
    wait_ms, work_ms = step_parts_ms(latest_run("idle"))
    gpu_cost = TWICE * (wait_ms + work_ms / TWICE) / (wait_ms + work_ms)  # as a multiple of the current cost
    if comparison.ratio is None or comparison.interval is None:
        return undecided("Two workers could not be measured: run the cell two-workers again.")
    low, high = comparison.interval
    words = (
        f"Two workers cost {factor(comparison.ratio)} of today's price per sample ({factor(low)}–{factor(high)}) "
        f"on the same machine. A GPU with a {TWICE:g}× speedup at {TWICE:g}× the price costs "
        f"{factor(gpu_cost)}: waiting for data is {wait_ms / (wait_ms + work_ms):.0%} of each step, and only its price "
        "grows."
    )
    if low * (1 - NEAR) <= gpu_cost <= high * (1 + NEAR):
        return undecided(f"{words} The two are too close to decide.")
    better = "workers" if high < gpu_cost else "gpu"
    return right(words) if cheaper == better else wrong(words)


QUESTIONS: Mapping[str, Question] = {
    "workers": times(
        "How much cheaper is a sample with two workers, on the same machine? (2: half the price)",
        "two-workers",
        "with two workers",
        CHEAPER,
    ),
}
