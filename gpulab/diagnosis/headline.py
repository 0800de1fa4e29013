"""The one sentence at the top of a report, with the figure that supports it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from gpulab.analysis.breakdown import Breakdown
from gpulab.analysis.facts import Facts
from gpulab.analysis.steps import Spread

DATA_WAIT_NOTICE = 0.10  # TraceML: warn at 10 %, critical at 20 % of a step
DATA_WAIT_BAD = 0.20
IDLE_NOTICE = 0.15  # definitions.md, Thresholds: idle > 15 %
UNKNOWN_TOO_MUCH = 0.40
OUTSIDE_NOTICE = 0.30
EXPOSED_NOTICE, EXPOSED_BAD = 0.05, 0.15  # definitions.md, Thresholds: exposed communication > 5 %

_HOST_CAUSES = {
    "sync_wait": ("sync_points", "the code makes the GPU and the CPU wait for each other (a synchronization)"),
    "blocking_copy": ("blocking_copy", "the CPU copies data and blocks while it does"),
    "allocator": ("allocator_thrash", "GPU memory is being allocated and freed"),
    "optimizer": ("unfused_optimizer", "the optimizer's Python code cannot keep the GPU busy"),
    "launch": ("launch_bound", "the CPU cannot start operations as fast as the GPU finishes them"),
    "queued": ("launch_bound", "started work waits for the GPU to pick it up"),
    "other": ("logging_or_eval", "named code other than training runs"),
}


@dataclass(frozen=True, slots=True)
class Headline:
    """`sentence` is for a person who knows none of our words; `evidence` is the figure; `key` names the cause.

    `level`: "bad" (a clear bottleneck), "notice", "good" (nothing to report), "unknown" (cannot tell).
    """

    key: str
    sentence: str
    evidence: str
    level: str


def headline(facts: Facts) -> Headline:
    """The first rule that has something to say; the last always has."""
    for rule in _RULES:
        said = rule(facts)
        if said is not None:
            return said
    raise AssertionError("the last rule always answers")


def percent(fraction: float) -> str:
    """A share as the report writes it everywhere."""
    return f"{fraction * 100:.0f} %"


def ms(us: float) -> str:
    """Microseconds as a person reads them."""
    if us >= 1e6:
        return f"{us / 1e6:.2f} s"
    if us >= 1e3:
        return f"{us / 1e3:.3g} ms" if us < 1e5 else f"{us / 1e3:.0f} ms"
    return f"{us:.3g} µs"


def _no_steps(facts: Facts) -> Headline | None:
    if len(facts.run.steps):
        return None
    wall = ms(facts.run.code_wall_ns / 1e3)
    account, loaded = facts.breakdown, facts.run.source == "trace"
    if account is None:
        return Headline(
            "cannot_tell",
            f"No training step was found in {wall}, so nothing can be said about where a step's time goes.",
            "Record the trace with profiler.step() after each step."
            if loaded
            else "Mark steps with gpulab.step(), or profile from the first line with --whole.",
            "unknown",
        )
    if account.busy_fraction is not None:
        return None  # what the GPU waited for can be told without steps
    busiest = max(account.share, key=lambda p: account.share[p])
    return Headline(
        "no_steps",
        f"No training step was found: this is the whole {'trace' if loaded else 'cell'}, {wall}, as one.",
        f"Largest part: {busiest.replace('_', ' ')}, {percent(account.share[busiest])} of the profiled time.",
        "notice",
    )


def _too_few(facts: Facts) -> Headline | None:
    n = len(facts.run.steps)
    if not n or facts.step_us is not None or facts.traced_step_us is not None:
        return None
    return Headline(
        "cannot_tell",
        f"Only {n} step{'s' if n > 1 else ''} ran, too few to name a bottleneck.",
        "Run at least 6 steps.",
        "unknown",
    )


def _unit(facts: Facts) -> str:
    """What the shares of the accounting are shares of."""
    account = facts.breakdown
    return "each step" if account is None or not account.whole_window else "the profiled time"


def _of_unit(facts: Facts, part: str) -> str:
    """Of the typical step: the same step that the shares in the sentence are of."""
    account = facts.breakdown
    assert account is not None
    total_us = float(np.median([s.end_ns - s.start_ns for s in account.steps])) / 1e3
    step = "" if account.whole_window else " per profiled step (median)"
    return f"{ms(account.typical_share(part) * total_us)} of {ms(total_us)}{step}"


def _damaged(facts: Facts) -> Headline | None:
    """The trace cannot carry a conclusion about the device."""
    trust = facts.integrity
    if trust is None or facts.run.device.kind == "cpu":
        return None
    reason = trust.reason("breakdown")
    if reason is not None:
        return Headline(
            "cannot_tell",
            "The trace is damaged, so nothing can be said about what the GPU did.",
            f"{reason[:1].upper()}{reason[1:]}.",
            "unknown",
        )
    reason, account = trust.reason("idle_causes"), facts.breakdown
    idle = account.typical_idle_share if account is not None else None
    if reason is None or idle is None or idle < IDLE_NOTICE:
        return None
    return Headline(
        "cannot_tell",
        f"The GPU has nothing to do for {percent(idle)} of {_unit(facts)}; this trace cannot tell why.",
        f"{reason[:1].upper()}{reason[1:]}.",
        "unknown",
    )


def _data_wait(facts: Facts) -> Headline | None:
    """Waiting for the DataLoader, from the unprofiled steps; on a GPU only what the device does not hide."""
    step, wait = facts.step_us or facts.traced_step_us, facts.data_wait_us
    if step is None or wait is None or step.median <= 0:
        return None
    share = wait.median / step.median
    exposed = _exposed_wait_share(facts)
    if min(share, exposed if exposed is not None else share) < DATA_WAIT_NOTICE:
        return None
    bad = share >= DATA_WAIT_BAD
    what = "spends" if bad else "loses"
    kind = "unprofiled" if facts.step_us is not None else "profiled"
    return Headline(
        "data_starved",
        f"Each training step {what} {percent(share)} of its time waiting for the next batch of data.",
        f"{ms(wait.median)} of every {ms(step.median)} step go to the DataLoader "
        f"(median of {step.count} {kind} step{'s' if step.count > 1 else ''}){_how_loaded(facts)}.",
        "bad" if bad else "notice",
    )


def _how_loaded(facts: Facts) -> str:
    """Who loads the data: as the loader says, else as the iterator's class in a trace tells."""
    loader = facts.run.loader
    if loader is not None:
        return f"; it loads with {loader.num_workers} worker{'s' if loader.num_workers != 1 else ''}"
    names = facts.run.timeline.names if facts.run.timeline is not None else ()
    if any("_SingleProcessDataLoaderIter" in name for name in names):
        return "; the training process loads the data itself (num_workers=0)"
    if any("_MultiProcessingDataLoaderIter" in name for name in names):
        return "; worker processes load the data"
    return ""


def _exposed_wait_share(facts: Facts) -> float | None:
    account = facts.breakdown
    if account is None or account.busy_fraction is None:
        return None
    return account.typical_share("data_wait")


def _communication(facts: Facts) -> Headline | None:
    """Data exchanged with other GPUs while nothing else runs, where that costs more than any cause of idleness."""
    account = facts.breakdown
    if account is None:
        return None
    share = account.typical_share("communication")
    if share <= EXPOSED_NOTICE or share < max(account.typical_share(p) for p in (*_HOST_CAUSES, "data_wait")):
        return None
    return Headline(
        "exposed_communication",
        f"For {percent(share)} of {_unit(facts)} the GPU exchanges data with other GPUs and computes nothing.",
        f"{_of_unit(facts, 'communication')} are communication that no computing hides.",
        "bad" if share > EXPOSED_BAD else "notice",
    )


def _idle_gpu(facts: Facts) -> Headline | None:
    """The largest cause of an idle GPU, where it idles enough to matter."""
    account = facts.breakdown
    idle = account.typical_idle_share if account is not None else None
    if account is None or idle is None:
        return None
    causes = {p: account.typical_share(p) for p in _HOST_CAUSES}
    part = max(causes, key=lambda p: causes[p])
    if idle < IDLE_NOTICE or causes[part] < idle / 4:
        return None
    key, meaning = _HOST_CAUSES[part]
    return Headline(
        key,
        f"The GPU has nothing to do for {percent(idle)} of {_unit(facts)}, mostly because {meaning}.",
        f"{_of_unit(facts, part)} go to that.",
        "bad" if idle >= 2 * IDLE_NOTICE else "notice",
    )


def _unexplained(facts: Facts) -> Headline | None:
    account = facts.breakdown
    if account is None or account.typical_share("unknown") < UNKNOWN_TOO_MUCH:
        return None
    return Headline(
        "cannot_tell",
        f"For {percent(account.typical_share('unknown'))} of {_unit(facts)} PyTorch ran nothing: "
        "the time goes to Python code that the trace does not name.",
        f"{_of_unit(facts, 'unknown')} without an operator.",
        "notice",
    )


def _outside(facts: Facts) -> Headline | None:
    share = facts.outside_steps_fraction
    if share is None or share < OUTSIDE_NOTICE or facts.run.code_wall_ns < 5e9:
        return None
    return Headline(
        "logging_or_eval",
        f"{percent(share)} of the cell's time belongs to no training step (set-up, evaluation, saving).",
        f"{ms(share * facts.run.code_wall_ns / 1e3)} of {ms(facts.run.code_wall_ns / 1e3)}.",
        "notice",
    )


def _healthy(facts: Facts) -> Headline | None:
    account, step = facts.breakdown, facts.step_us or facts.traced_step_us
    if account is None:
        assert step is not None, "without steps and accounting `_no_steps` has answered"
        return Headline(
            "cannot_tell",
            f"A training step takes {ms(step.median)}; it was not profiled, so what it is spent on is not known.",
            f"Median of {_steps(step)}; time waiting for data is below {percent(DATA_WAIT_NOTICE)} of it.",
            "unknown",
        )
    idle = account.typical_idle_share
    device = "CPU" if idle is None else "GPU"
    working = account.typical_share("compute") if idle is None else 1 - idle
    basis = f"Median step {ms(step.median)} over {_steps(step)}" if step else f"From {ms(_window_us(account))}"
    if working < 1 - IDLE_NOTICE:
        return Headline(
            "cannot_tell",
            f"The {device} computes for {percent(working)} of {_unit(facts)}; no single cause explains the rest.",
            f"{basis}; unknown: {percent(account.typical_share('unknown'))}.",
            "unknown",
        )
    return Headline(
        "healthy",
        f"The {device} computes for {percent(working)} of {_unit(facts)}: nothing outside it holds training back much.",
        f"{basis}.",
        "good",
    )


def _window_us(account: Breakdown) -> float:
    return (account.steps[-1].end_ns - account.steps[0].start_ns) / 1e3


def _steps(step: Spread) -> str:
    return f"{step.count} step{'s' if step.count > 1 else ''}"


_RULES: tuple[Callable[[Facts], Headline | None], ...] = (
    _no_steps,
    _too_few,
    _damaged,
    _data_wait,
    _communication,
    _idle_gpu,
    _unexplained,
    _outside,
    _healthy,
)
