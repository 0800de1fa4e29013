"""The words on screen in one place: name, colour and meaning of each part of a step, and readable forms of names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

from msgspec import Struct

from gpulab.formatting import gib, number, percent, plural, reading
from gpulab.run import Change, Job, StepFlag

if TYPE_CHECKING:
    from gpulab.analysis.breakdown import Breakdown

DeviceKind = Literal["cpu", "cuda", "unknown"]


class Part(Struct, frozen=True):
    """How one part of a step is named, drawn and explained to a reader who does not know gpulab's terms.

    The colours follow Okabe and Ito's and Paul Tol's palettes, which stay apart for colour-blind readers.
    """

    label: str
    meaning: str
    colour: str
    on_cpu: str = ""  # the meaning on a CPU, if different
    hatch: str = ""

    def meaning_on(self, kind: DeviceKind) -> str:
        """The meaning for the accounted device, a GPU or the CPU."""
        return self.on_cpu if kind == "cpu" and self.on_cpu else self.meaning


# In stacking order: first the parts of unprofiled steps, so that all bars share a baseline.
PARTS: Mapping[str, Part] = MappingProxyType(
    {
        "data_wait": Part(
            "waiting for the DataLoader",
            "the GPU was idle because the next batch was not ready",
            "#E69F00",
            on_cpu="the loop was blocked because the next batch was not ready",
        ),
        "optimizer": Part(
            "optimizer overhead",
            "the GPU was idle while the program was in the optimizer",
            "#009E73",
            on_cpu="the program was in the optimizer and ran no operator",
        ),
        "compute": Part(
            "computing",
            "the GPU ran the model's kernels",
            "#0072B2",
            on_cpu="the CPU ran the model's operators, forward and backward",
        ),
        "core_wait": Part(
            "waiting for a core",
            "the GPU was idle while the program was runnable but had no CPU core",
            "#D55E00",
            on_cpu="the program was runnable but had no CPU core",
        ),
        "communication": Part(
            "communicating",
            "the GPU exchanged data with other GPUs and computed nothing meanwhile",
            "#882255",
            on_cpu="this process exchanged data with other ranks, or waited for them, and computed nothing meanwhile",
        ),
        "memcpy": Part("copying data", "the GPU copied data and computed nothing meanwhile", "#56B4E9"),
        "memset": Part("clearing memory", "the GPU filled memory with a value", "#7FCDBB"),
        "sync_wait": Part(
            "waiting for results",
            "the GPU was idle around a call that makes the program wait for it, such as .item()",
            "#CC79A7",
        ),
        "blocking_copy": Part(
            "blocked by a copy",
            "the program waited for a copy between host and GPU; the GPU did nothing else",
            "#AA4499",
        ),
        "allocator": Part("allocating memory", "the GPU was idle while memory was allocated or freed", "#999933"),
        "launch": Part(
            "launching",
            "the GPU had nothing queued: the program was still preparing its next operation",
            "#F0E442",
            on_cpu="the program was preparing its next operation",
        ),
        "queued": Part("queued, not started", "work was queued on the GPU but had not begun", "#DDCC77"),
        "start_up": Part(
            "starting up, once", "libraries were loaded, the GPU's context created: in no other share", "#661100"
        ),
        "other": Part(
            "other named work",
            "a recorded pause, or work that the trace names: saving, evaluation, compiling",
            "#9A9A9A",
        ),
        "unknown": Part("unknown", "the trace does not say what happened here", "#4D4D4D", hatch="////"),
    }
)

NOT_PROFILED = Part("no trace", "the rest of a step that ran without the profiler", "#A8A8A8")

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


def flag_names(flags: int) -> list[str]:
    """The names of the set flags, in a fixed order."""
    return [name for flag, name in FLAGS.items() if flags & flag]


def plain(text: str) -> str:
    """Any text as printable characters on one line: control, escape, bidi and surrogate code points are spelled out."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


OWN_BATCHES = Part(
    "making the next batch",
    "the GPU was idle while the program made the next batch",
    PARTS["data_wait"].colour,
    on_cpu="the loop's own code made the next batch",
)


def part_of(name: str, breakdown: Breakdown) -> Part:
    """The display form of a part in this breakdown: without a DataLoader, the loop itself makes its batches."""
    return OWN_BATCHES if name == "data_wait" and breakdown.prepared_ns else PARTS[name]


DASH = "–"


def or_dash(value: float | None, text: Callable[[float], str]) -> str:
    """The text of a figure; a dash if the figure is unknown."""
    return DASH if value is None else text(value)


def cut(text: str, width: int) -> str:
    """At most `width` characters; an ellipsis marks the cut."""
    return text if len(text) <= width else text[: max(width - 1, 0)] + "…"


def shortened(text: str, width: int) -> str:
    """Like `cut`, but leaves out the middle: long names differ at their end, too."""
    if len(text) <= width:
        return text
    end = (width - 1) // 2
    return f"{text[: width - 1 - end]}…{text[len(text) - end :]}"


def operator_name(name: str) -> str:
    """A span's name without the return type and `at::native::`, which C++ kernel names repeat."""
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


def effect(change: Change) -> str:
    """Whether a setting took effect, in the words of the screen."""
    shown = {"no effect": "NO EFFECT", "cannot tell": "could not verify"}
    return shown.get(change.state, plain(change.state))


def quantity(value: float, name: str, unit: str) -> str:
    """A reading in the unit at the end of its curve's name (definitions.md, "Units")."""
    if name.endswith("_bytes"):
        return gib(value)
    if name.endswith("_fraction"):
        return percent(value)
    if name.endswith("_pct"):
        return percent(value / 100)
    if name.endswith("_count"):
        return number(value)
    return reading(value, plain(unit))


def rank_words(job: Job | None, ranks: int = 0) -> str:
    """ "rank 1 of 4"; for several ranks "4 ranks" or "3 of 4 ranks"; empty for a run that is not distributed."""
    if job is None or job.world_size == 1:
        return ""
    if ranks > 1:
        return plural(ranks, "rank") if ranks == (job.world_size or ranks) else f"{ranks} of {job.world_size} ranks"
    return f"rank {job.rank}" + (f" of {job.world_size}" if job.world_size else "")


# The path of a lesson's notebook from the user's notebook, so that a page can link to it.


_WAYS = ("", "notebooks/", "../notebooks/")


def lesson_path(lesson: str, folder: Path | None = None) -> str | None:
    """The path relative to `folder` (the folder of the user's notebook); None if the lesson's notebook is missing."""
    here = folder or Path.cwd()
    if lesson:
        for way in _WAYS:
            with suppress(OSError):
                if (here / way / f"{lesson}.ipynb").is_file():
                    return f"{way}{lesson}.ipynb"
    return None
