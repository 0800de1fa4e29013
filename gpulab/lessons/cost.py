"""Lesson 14, what idle time costs: the bill of a million samples, and what a faster GPU changes about it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from gpulab.analysis.device_peaks import peaks_of
from gpulab.analysis.facts import facts
from gpulab.formatting import duration, factor, percent
from gpulab.lessons.check import Checked, Note, Table, exercise, is_unanswered, right, unanswered, undecided, wrong
from gpulab.lessons.figures import plot
from gpulab.lessons.fused_kernels import measured_peak
from gpulab.lessons.guesses import CHEAPER, Question, times
from gpulab.lessons.measured import experiment_named, run_named, working_share
from gpulab.tuning.compare.cost import spending
from gpulab.tuning.record import Experiment
from gpulab.verdict import is_decided
from gpulab.views.wording import PARTS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from gpulab.run import Run

GPUS = ("T4", "V100", "A10", "L4", "A100 80", "RTX 3090", "RTX 4090", "L40S", "H100", "H200", "B200")
TWICE = 2.0  # the GPU of the decision has this speedup, and costs as much more
NEAR = 0.03  # two prices that differ by less are the same


# -- the bill ----------------------------------------------------------------------------------------------------------


def bill(experiment: str, price_per_hour: float) -> Table | Note:
    """What a million samples cost with each setting of that experiment, at this price of the machine per hour."""
    record = experiment_named(experiment)
    sides = [] if record is None else [side for side in record.sides if side.us_per_sample]
    if not sides:
        return Note("Not measured.", f"There is no experiment {experiment!r} yet: run that cell first.")
    lines = [f"{'setting':14} {'a million samples take':>23} {'cost':>8} {'energy':>15} {'device works':>13}"]
    for side in sides:
        spent = spending(side, price_per_hour)
        energy = "not measurable" if spent.energy_j is None else f"{spent.energy_j / 3.6e6:.3f} kWh"
        share = working_share(side.facts.run) if side.facts is not None else None
        works = "unknown" if share is None else percent(share)
        long = duration(1e6 * (spent.device_s or 0.0))
        lines.append(f"{side.label:14} {long:>23} {spent.cost or 0.0:8.3f} {energy:>15} {works:>13}")
    if record is not None and not all(is_decided(c.verdict) for c in record.comparisons):
        lines.append("undecided: other programs disturbed it, so the rows may differ by chance")
    lines.append("device works: its share of the steps of one traced run of each")
    why = next((s.why_no_energy for s in (spending(side) for side in sides) if s.why_no_energy), "")
    return Table((*lines, *([f"energy: {why}"] if why else [])))


# -- a newer GPU -------------------------------------------------------------------------------------------------------


def hardware_table() -> Table:
    """Dense peaks by number format, from the makers' data sheets."""
    lines = [f"{'GPU':10} {'fp32':>7} {'TF32':>7} {'bf16':>7}   TFLOP/s {'GB/s':>8}"]
    for name in GPUS:
        peaks = peaks_of(name)
        assert peaks is not None
        tf32, bf16 = (f"{x:g}" if x else "–" for x in (peaks.tf32_tflops, peaks.bf16_tflops))
        lines.append(f"{name:10} {peaks.fp32_tflops:7g} {tf32:>7} {bf16:>7}           {peaks.bandwidth_gb_s:8g}")
    return Table(tuple(lines))


def step_parts_ms(run: Run | None) -> tuple[float, float] | None:
    """Of a typical step: waiting for data, and all the rest, in ms; None where it was not measured."""
    of_run = None if run is None else facts(run)
    step = of_run.typical_step_us if of_run is not None else None
    if of_run is None or step is None or of_run.data_wait_us is None:
        return None
    wait_ms = of_run.data_wait_us.median / 1e3
    return wait_ms, max(step.median / 1e3 - wait_ms, 0.0)


def draw_gpus(run: str) -> Figure | Note:
    """The measured step of that run, and what it would be at best on each GPU: the loading stays what it was.

    An estimate from peaks: the rest of the step is divided by the GPU's 32-bit peak over what this device reached in
    one large product. No GPU reaches its peak, so each bar is the least that its step could take.
    """
    parts = step_parts_ms(run_named(run))
    if parts is None:
        return Note("Not measured.", f"There is no run {run!r} yet: run that cell first.")
    wait_ms, work_ms = parts
    here = measured_peak(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    names, works = ["here, measured"], [work_ms]
    for name in GPUS:
        peaks = peaks_of(name)
        assert peaks is not None
        names.append(name)
        works.append(work_ms / max(peaks.fp32_tflops * 1e12 / here.flops, 1.0))
    return _bars(names, wait_ms, works)


def _bars(names: Sequence[str], wait_ms: float, works_ms: Sequence[float]) -> Figure:
    title, note = "the step with another GPU: an estimate from peaks, at best", "a model, but for the first bar"
    with plot(8, 0.3 * len(names) + 1.3, title, "ms of a step", note=note) as (figure, axes):
        rows = range(len(names))
        axes.barh(rows, [wait_ms] * len(names), color=PARTS["data_wait"].colour, label="waiting for data, as measured")
        axes.barh(rows, works_ms, left=wait_ms, color=PARTS["compute"].colour, label="the rest")
        axes.set_yticks(rows, names)
        axes.invert_yaxis()
        figure.legend(loc="outside lower center", ncols=2, fontsize=8, frameon=False)
    return figure


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
    lines = [f"{'gradients (fp32) of':24} {'MB':>8}" + "".join(f"{link:>18}" for link in LINKS)]
    for model, parameters in MODELS.items():
        times = (duration(1e3 * exchange_ms(parameters, gpus, rate)) for rate in LINKS.values())
        lines.append(f"{model:24} {_megabytes(4 * parameters):>8}" + "".join(f"{time:>18}" for time in times))
    return Table((*lines, f"ring all-reduce over {gpus} GPUs at the links' peaks: a model, not a measurement"))


def _megabytes(count: float) -> str:
    return f"{count / 1e6:,.0f}" if count >= 1e7 else f"{count / 1e6:.2g}"


# -- the exercises -----------------------------------------------------------------------------------------------------


@exercise(given=(1000.0, 3.6))
def check_cost(cost_per_million: Any) -> Checked:
    """Whether `cost_per_million(samples_per_s, price_per_hour)` is the price of a million samples."""
    for rate, price in ((250.0, 2.0), (1000.0, 3.6), (1e6, 7.2)):
        wanted = price * 1e6 / rate / 3600
        got = cost_per_million(rate, price)
        if not isinstance(got, (int, float)) or isinstance(got, bool):
            return wrong(f"It gives {got!r} for {rate:g} samples per second; expected a number.")
        if math.isclose(got, wanted, rel_tol=1e-6):
            continue
        hint = _cost_mistake(got / wanted, rate)
        return wrong(
            f"{rate:g} samples per second at {price:g} per hour: it gives {got:.6g}; expected {wanted:.6g}. {hint}"
        )
    return right("A million samples take 1,000,000 ÷ rate seconds, and an hour has 3,600 of them.")


def _cost_mistake(times: float, rate: float) -> str:
    if math.isclose(times, 3600, rel_tol=1e-6):
        return "The price is per hour, and the time is in seconds."
    if math.isclose(times, 1e-6, rel_tol=1e-6):
        return "That is the price of one sample."
    if math.isclose(times, 60, rel_tol=1e-6):
        return "An hour has 60 minutes of 60 seconds."
    if math.isclose(times, rate**2 / 1e12, rel_tol=1e-6):
        return "More samples per second must cost less, not more: divide by the rate."
    return "How many seconds do a million samples take?"


def step_time(load_ms: float, compute_ms: float, workers: int, gpu_times: float) -> float:
    """The model of lesson 03, ms: without workers one after the other, with them the slower of both."""
    compute = compute_ms / gpu_times
    return load_ms + compute if workers == 0 else max(load_ms / workers, compute)


CASES = ((30.0, 10.0, 0, 1.0), (30.0, 10.0, 0, 2.0), (30.0, 10.0, 2, 1.0), (30.0, 10.0, 4, 1.0), (30.0, 10.0, 4, 2.0))


@exercise(given=CASES[0])
def check_step(step_ms: Any) -> Checked:
    """Whether `step_ms(load_ms, compute_ms, workers, gpu_times)` follows the model of lesson 03."""
    for case in CASES:
        load, compute, workers, gpu = case
        wanted, got = step_time(load, compute, workers, gpu), step_ms(*case)
        if not isinstance(got, (int, float)) or isinstance(got, bool):
            return wrong(f"step_ms{case} gives {got!r}; expected a number.")
        if not math.isclose(got, wanted, rel_tol=1e-6):
            return wrong(f"step_ms{case} gives {got:g}; expected {wanted:g}. {_step_mistake(case, got)}")
    slow = step_time(30.0, 10.0, 0, 1000.0)
    return right(f"With a GPU 1000× faster and no workers the step still takes {slow:.0f} of its 40 ms.")


def _step_mistake(case: tuple[float, float, int, float], got: float) -> str:
    load, compute, workers, gpu = case
    if workers == 0 and math.isclose(got, max(load, compute / gpu)):
        return "Without workers nothing happens at the same time: loading and computing add up."
    if workers and math.isclose(got, load / workers + compute / gpu):
        return "With workers both happen at the same time: the step takes as long as the slower of the two."
    if workers and math.isclose(got, max(load, compute / gpu)):
        return "Several workers share the loading: together they deliver a batch sooner."
    if math.isclose(got, step_time(load, compute * gpu * gpu, workers, gpu)):
        return "A GPU with a 2× speedup takes half the time: divide by gpu_times."
    if gpu != 1 and math.isclose(got, step_time(load / gpu, compute, workers, gpu)):
        return "A faster GPU loads nothing: only computing gets shorter."
    return "Without workers: load + compute. With workers: the longer of load ÷ workers and compute."


def check_cheaper(cheaper: object) -> Checked:
    """Whether "workers" or "gpu" is cheaper per sample, by the learner's own figures."""
    experiment = experiment_named("two-workers")
    parts = step_parts_ms(run_named("idle"))
    if experiment is None or not experiment.comparisons or parts is None:
        return unanswered("The cells idle and two-workers measure what this needs: run them first.")
    if is_unanswered(cheaper):
        return unanswered('Put "workers" or "gpu" in place of the dots, then run that cell and this one again.')
    if cheaper not in ("workers", "gpu"):
        return wrong(f'{cheaper!r} is neither "workers" nor "gpu".')
    return _judged_cheaper(str(cheaper), experiment, parts)


def _judged_cheaper(cheaper: str, experiment: Experiment, parts: tuple[float, float]) -> Checked:
    wait_ms, work_ms = parts
    gpu_cost = TWICE * (wait_ms + work_ms / TWICE) / (wait_ms + work_ms)  # of today's
    comparison = experiment.comparisons[0]
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


def cost_ratio(experiment: str) -> Note:
    """How many times less a sample costs with the best setting that is faster for certain."""
    record = experiment_named(experiment)
    if record is None or not record.comparisons:
        return Note("Not measured.", f"There is no experiment {experiment!r} yet: run that cell first.")
    faster = [c for c in record.comparisons if c.verdict == "faster" and c.ratio]
    if faster:
        best = min(faster, key=lambda comparison: comparison.ratio or math.inf)
        return Note(
            "Measured.",
            f"A sample costs {factor(1 / (best.ratio or 1))}× less with {best.b.label} than in the baseline.",
        )
    if all(is_decided(c.verdict) for c in record.comparisons):
        return Note("Measured.", "No setting that was tried makes a sample cheaper.")
    return Note("Undecided.", "If other programs are running, run that cell again later.")


QUESTIONS: Mapping[str, Question] = {
    "workers": times(
        "How much cheaper is a sample with two workers, on the same machine? (2: half the price)",
        "two-workers",
        "with two workers",
        CHEAPER,
    ),
}
EXERCISES: Mapping[str, Callable[..., Checked]] = {
    "cost": check_cost,
    "step": check_step,
    "cheaper": check_cheaper,
}
