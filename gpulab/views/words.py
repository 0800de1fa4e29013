"""One place for what a reader sees: the human name, colour and meaning of each part, and how figures are written."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from gpulab.analysis.steps import Spread
from gpulab.run import StepFlag

NOT_MEASURABLE = "not measurable"

DeviceKind = Literal["cpu", "cuda"]


@dataclass(frozen=True, slots=True)
class Part:
    """How one part of a step is called, drawn and explained to someone who knows none of our words.

    The colours follow Okabe and Ito's and Paul Tol's palettes, which stay apart for colour-blind readers.
    """

    label: str
    meaning: str
    meaning_on_cpu: str
    colour: str
    hatch: str = ""

    def meaning_on(self, kind: DeviceKind) -> str:
        """The meaning where the accounted device is a GPU or the CPU."""
        return self.meaning_on_cpu if kind == "cpu" else self.meaning


def _part(label: str, meaning: str, colour: str, *, on_cpu: str = "", hatch: str = "") -> Part:
    return Part(label, meaning, on_cpu or meaning, colour, hatch)


# In the order in which a bar is stacked: what the unprofiled steps know too comes first, on one common base line.
PARTS: Mapping[str, Part] = MappingProxyType(
    {
        "data_wait": _part(
            "waiting for the DataLoader",
            "the GPU was idle because the next batch was not ready",
            "#E69F00",
            on_cpu="the loop stood still because the next batch was not ready",
        ),
        "optimizer": _part(
            "optimizer",
            "the GPU was idle while the program was in the optimizer",
            "#009E73",
            on_cpu="in the optimizer, between its operators",
        ),
        "compute": _part(
            "computing",
            "the GPU ran the model's kernels",
            "#0072B2",
            on_cpu="the CPU ran the model's operators, forward and backward",
        ),
        "communication": _part(
            "communicating", "the GPU exchanged data with other GPUs and computed nothing meanwhile", "#882255"
        ),
        "memcpy": _part("copying data", "the GPU copied data and computed nothing meanwhile", "#56B4E9"),
        "memset": _part("clearing memory", "the GPU filled memory with a value", "#7FCDBB"),
        "sync_wait": _part(
            "waiting for results",
            "the GPU was idle around a call that makes the program wait for it, such as .item()",
            "#CC79A7",
        ),
        "blocking_copy": _part(
            "blocked by a copy",
            "the program waited for a copy between host and GPU; the GPU did nothing else",
            "#AA4499",
        ),
        "allocator": _part("allocating memory", "the GPU was idle while memory was requested or given back", "#999933"),
        "launch": _part(
            "launching",
            "the GPU had nothing queued: the program was still preparing its next operation",
            "#F0E442",
            on_cpu="the program was preparing its next operation",
        ),
        "queued": _part("queued, not started", "work was queued on the GPU but had not begun", "#DDCC77"),
        "other": _part("other named work", "something else the trace names: saving, logging, compiling", "#9A9A9A"),
        "unknown": _part("unknown", "the trace does not say what happened here", "#4D4D4D", hatch="////"),
    }
)

NOT_PROFILED = _part("not profiled", "the rest of a step that ran without the profiler", "#DADADA")

FLAGS: Mapping[StepFlag, str] = MappingProxyType(
    {
        StepFlag.FIRST: "first",
        StepFlag.LAST: "last",
        StepFlag.EPOCH_START: "epoch start",
        StepFlag.PROFILER_EDGE: "profiler edge",
        StepFlag.COMPILE: "compile",
        StepFlag.PARTIAL: "partial",
    }
)

OUTCOMES: Mapping[str, str] = MappingProxyType(
    {
        "completed": "completed",
        "stopped": "stopped early, at the end of a step",
        "interrupted": "interrupted",
        "failed": "ended by an exception",
    }
)

LEVEL_COLOURS: Mapping[str, str] = MappingProxyType(
    {"bad": "#B8430B", "notice": "#8A6A00", "good": "#00704F", "unknown": "#5A5A5A"}
)


def level_colour(level: str) -> str:
    """The colour of a headline on white."""
    return LEVEL_COLOURS.get(level, LEVEL_COLOURS["unknown"])


def flag_names(flags: int) -> list[str]:
    """The names of the set flags, in a fixed order."""
    return [name for flag, name in FLAGS.items() if flags & flag]


def plain(text: str) -> str:
    """Any text as printable characters on one line: control, escape, bidi and surrogate code points are spelled out."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def cut(text: str, width: int) -> str:
    """At most `width` characters; what is cut off is shown by an ellipsis."""
    return text if len(text) <= width else text[: max(width - 1, 0)] + "…"


def operator_name(name: str) -> str:
    """A span's name without what repeats in every C++ kernel name: the return type and `at::native::`."""
    name = name.removeprefix("void ").replace("(anonymous namespace)::", "").replace("at::native::", "")
    return plain(name)


def short_name(name: str) -> str:
    """A span's name for a narrow label: no template arguments, no call arguments."""
    if name.startswith("enumerate(DataLoader)"):
        return PARTS["data_wait"].label
    if name.startswith("Optimizer."):
        return plain(name.split("#")[0])
    name = operator_name(name).removeprefix("aten::").removeprefix("autograd::engine::evaluate_function: ")
    cuts = [i for i in (name.find("<"), name.find("(")) if i > 0]
    return name[: min(cuts)] if cuts else name


def _digits(value: float) -> str:
    """Three significant digits, thousands separated; no exponent."""
    if abs(value) >= 99.95:
        return f"{value:,.0f}"
    if abs(value) >= 9.995:
        return f"{value:.1f}"
    return f"{value:.2f}"


_DURATIONS = ((1e6, "s"), (1e3, "ms"), (1.0, "µs"))


def _scale(us: float) -> tuple[float, str]:
    return next((s for s in _DURATIONS if abs(us) >= 0.9995 * s[0]), _DURATIONS[-1])


def duration(us: float | None) -> str:
    """Microseconds as µs, ms, s or minutes, three significant digits."""
    if us is None or not math.isfinite(us):
        return NOT_MEASURABLE
    if abs(us) >= 119.5e6:
        minutes, seconds = divmod(round(us / 1e6), 60)
        return f"{minutes:,} min {seconds} s"
    scale, unit = _scale(us)
    return f"{_digits(us / scale)} {unit}" if us else "0 µs"


def spread_range(spread: Spread) -> str:
    """p10 – p90 in one unit, e.g. "37.0 – 41.2 ms"."""
    scale, unit = _scale(spread.p90)
    return f"{_digits(spread.p10 / scale)} – {_digits(spread.p90 / scale)} {unit}"


def percent(fraction: float | None) -> str:
    """A share as percent: two digits; small ones are not rounded down to a zero."""
    if fraction is None or not math.isfinite(fraction):
        return NOT_MEASURABLE
    pct = 100 * fraction
    if 0 < pct < 0.1:
        return "< 0.1 %"
    return f"{pct:.0f} %" if pct >= 9.95 or pct == 0 else f"{pct:.1f} %"


def size(count: float | None) -> str:
    """Bytes in GiB (2**30), or MiB and KiB where that is under 1."""
    if count is None or not math.isfinite(count):
        return NOT_MEASURABLE
    for scale, unit in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if abs(count) >= scale:
            return f"{_digits(count / scale)} {unit}"
    return f"{count:.0f} bytes"


def rate(per_s: float | None, what: str) -> str:
    """Something per second, e.g. "1,650 samples/s"."""
    if per_s is None or not math.isfinite(per_s):
        return NOT_MEASURABLE
    return f"{_digits(per_s)} {what}/s"


def number(value: float) -> str:
    """A count or a mean of counts: whole where it is whole."""
    if not math.isfinite(value):
        return NOT_MEASURABLE
    return f"{value:,.0f}" if value == round(value) or value >= 99.95 else f"{value:.3g}"


def quantity(value: float, name: str, unit: str) -> str:
    """A reading in the unit that its curve's name ends with (definitions.md: units in names)."""
    if name.endswith("_bytes"):
        return size(value)
    if name.endswith("_fraction"):
        return percent(value)
    if name.endswith("_pct"):
        return percent(value / 100)
    if name.endswith("_count"):
        return number(value)
    return f"{_digits(value)} {plain(unit)}".rstrip() if math.isfinite(value) else NOT_MEASURABLE


def plural(count: int, noun: str) -> str:
    """ "1 step", "2 steps"."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"
