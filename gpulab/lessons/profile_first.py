"""Lesson 02, profile first: a trace drawn and read in three ways, and a costly line to find and rewrite."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from gpulab.api.reading import diagnose
from gpulab.api.runs import runs
from gpulab.devices.own_processes import marked
from gpulab.errors import StoreError
from gpulab.formatting import factor, percent, speedup
from gpulab.lessons.check import (
    Checked,
    Mistakes,
    Note,
    NotMeasured,
    Table,
    check_speed,
    exercise,
    fault,
    right,
    wrong,
)
from gpulab.lessons.figures import BLUE, Bar, Row, draw_rows, plot, shortened
from gpulab.lessons.guesses import Question, share, times
from gpulab.lessons.measured import latest_facts, latest_run, notes, times_faster, working_share
from gpulab.run import Int64, Timeline
from gpulab.store import folders
from gpulab.timeline.labels import COLLECTIVES, MARKS, OPERATORS, WORK, CallTree, What, labels
from gpulab.views.waiting import waiting
from gpulab.views.wording import PARTS

if TYPE_CHECKING:
    from matplotlib.figure import Figure


Images: TypeAlias = npt.NDArray[Any]
Shift: TypeAlias = Callable[[Images, Images], object]

_PARTS = {What.LOADER: "data_wait", What.UPDATE: "optimizer", What.ZEROING: "optimizer"}
DEPTH = 3  # rows of nested operators that are drawn
LIMIT_SHARES = (0.1, 0.25, 0.5, 0.75, 0.9)  # shares of a step that are marked on the curve
LABELLED = 0.07  # share of the step: a shorter span has no room for its name
PLUGIN_S = 120.0
LEAST_SPEEDUP = 3.0  # speedup over the given function
SHAPES = ((4, 8, 6), (1, 3, 5), (7, 5, 5))  # images, rows, columns
TIMED_SHAPE = (64, 32, 32)
CULPRIT = "shifted[i, row] = np.roll(images[i, row], offsets[i])"


# -- what a share can bring --------------------------------------------------------------------------------------------


def draw_limit() -> Figure:
    """The largest possible speedup of a step by the share that is removed: Amdahl's law."""
    shares = np.linspace(0, max(LIMIT_SHARES), 200)
    title, x = "the largest speedup of a share: 1 / (1 \u2212 share)", "share of the step that is taken away, %"
    with plot(8, 2.6, title, x, "speedup", note="a formula, not a measurement", bare=("top", "right")) as (
        figure,
        axes,
    ):
        axes.plot(100 * shares, 1 / (1 - shares), color=BLUE)
        for part in LIMIT_SHARES:
            place = 100 * part, 1 / (1 - part)
            axes.plot(*place, "o", color=BLUE, markersize=4)
            axes.annotate(factor(place[1]), place, (-6, 6), textcoords="offset points", ha="right", size=8)
        axes.set(xlim=(0, 100), ylim=(0, 12))
    return figure


@notes
def limit_beside_share(run_name: str, experiment: str) -> Table:
    """The gain promised by the report's share, and that measured without the shift, each as a factor and as a share."""
    diagnosed, most = diagnose(latest_run(run_name)), times_faster(experiment)
    line = next((finding for finding in diagnosed.findings if finding.source_line), None)
    promised = line.cost_us / diagnosed.step_us if line is not None and diagnosed.step_us else 1.0
    if not 0 < promised < 1:
        raise NotMeasured(f"The report of the run {run_name!r} names no line with a share: run that cell again.")
    rows = (
        ("the report's share", percent(promised), f"{factor(1 / (1 - promised))}×"),
        ("measured without the shift", percent(1 - 1 / most.times), f"{factor(most.times)}×"),
    )
    below = []
    if not diagnosed.first.source_line:
        below.append("The report names another cause first, so its share may be far from what the line really takes.")
    if not most.sure:
        below.append("What was measured may be chance: run the comparison again when other programs have ended.")
    return Table.of(("", "of a step", "speedup"), rows, *below)


# -- the trace ---------------------------------------------------------------------------------------------------------


def trace_file(name: str) -> Path:
    """The path of PyTorch's trace of the latest run of that name. Raises StoreError if there is none."""
    path = folders.trace_path(runs.store.find(runs[name].id))
    if path is None:
        raise StoreError(f"The run {name!r} has no trace: run its cell again, without --no-trace.")
    return path


@notes
def draw_trace(name: str) -> Figure:
    """One profiled step of that run as trace viewers draw it: a row per thread and depth of calls, a bar per span."""
    run = latest_run(name)
    steps = run.traced_rows.tolist()
    if run.timeline is None or not steps:
        raise NotMeasured(f"The run {name!r} has no trace: run its cell again, without --no-trace.")
    step, timeline = steps[len(steps) // 2], run.timeline
    begin, end = int(run.steps.start_ns[step]), int(run.steps.end_ns[step])
    rows = []
    with waiting("drawing a step"):
        for label, spans_ in _tracks(timeline, begin, end):
            bars = []
            for at in spans_.tolist():
                start, stop = max(int(timeline.start_ns[at]), begin), min(int(timeline.end_ns[at]), end)
                room = (stop - start) / max(1, end - begin)
                words = timeline.names[timeline.name_id[at]]
                part = _PARTS.get(labels(timeline).what[at], "compute")
                words = words.removeprefix("aten::").removeprefix("autograd::engine::evaluate_function: ")
                words = shortened(words, max(3, int(130 * room))) if room >= LABELLED else ""
                bars.append(Bar((start - begin) / 1e6, (stop - start) / 1e6, PARTS[part].colour, words))
            rows.append(Row(label, bars))
        title = f"step {int(run.steps.number[step])} of your run, from its trace"
        x = "ms since the step began; where a row is empty, no operator of PyTorch ran"
        return draw_rows(rows, title, x, row_in=0.36, size=7)


def _tracks(timeline: Timeline, begin: int, end: int) -> list[tuple[str, Int64]]:
    """Rows to draw, each with its label and rows of the timeline: threads by depth of calls, then streams of a GPU."""
    inside = (timeline.start_ns < end) & (timeline.end_ns > begin) & (timeline.duration_ns > 0)
    spans = labels(timeline)
    tree = CallTree.of(spans, np.flatnonzero(inside & spans.of(*OPERATORS, *COLLECTIVES, *MARKS)))
    depth = np.zeros(len(tree.parent), dtype=np.int64)  # number of enclosing spans
    for i, above in enumerate(tree.parent.tolist()):  # parents precede their children
        depth[i] = depth[above] + 1 if above >= 0 else 0
    tracks: list[tuple[str, Int64]] = []
    lanes = timeline.lane_id[tree.rows]
    for lane in sorted(set(lanes.tolist()), key=lambda lane: lane != timeline.training_lane):
        label = "training thread" if lane == timeline.training_lane else "another thread"
        for level in range(DEPTH):
            rows = tree.rows[(lanes == lane) & (depth == level)]
            if len(rows):
                tracks.append((label if level == 0 else "called by it", rows))
    device = inside & spans.of(*WORK)
    for lane in sorted(set(timeline.lane_id[device].tolist())):
        tracks.append(("GPU", np.flatnonzero(device & (timeline.lane_id == lane))))
    return tracks


# -- what another tool reads -------------------------------------------------------------------------------------------

_PLUGIN = """
import json, logging, sys
logging.disable(logging.CRITICAL)
from torch_tb_profiler.profiler.data import RunProfileData
from torch_tb_profiler.profiler.event_parser import ProfileRole
_, content = RunProfileData._preprocess_file(sys.argv[1], None)
data = RunProfileData("worker", "0", content)
data.process()
data.analyze()
costs = {role.name: float(data.avg_costs.costs[role]) for role in ProfileRole}
print(json.dumps({"costs": costs, "advice": len(data.recommendations)}))
"""
_ROLES = {  # roles of the plugin, with the equivalent parts of gpulab
    "waiting for the DataLoader": (("DataLoader",), ("data_wait",)),
    "operators on the CPU": (("CpuOp",), ("compute",)),
    "kernels, copies, calls of a GPU": (
        ("Kernel", "Memcpy", "Memset", "Communication", "Runtime"),
        ("communication", "memcpy", "memset", "launch", "queued", "sync_wait", "blocking_copy", "allocator"),
    ),
    "anything else": (("Other",), ("optimizer", "core_wait", "start_up", "other", "unknown")),
}


@notes
def plugin_beside(name: str) -> Table | Note:
    """A profiled step of that run by gpulab's accounting, and by the plugin's own code, run in a separate process."""
    breakdown = latest_facts(name).breakdown
    if breakdown is None:
        raise NotMeasured(f"The run {name!r} has no trace: run its cell again, without --no-trace.")
    with waiting("reading the trace with TensorBoard's plugin"):
        costs = _plugin_costs(trace_file(name))
    if costs is None:
        return Note("Not read.", "TensorBoard's plugin could not read this trace at all.")
    rows = []
    for label, (roles, parts) in _ROLES.items():
        theirs = sum(costs[role] for role in roles) / costs["Total"] if costs["Total"] else None
        ours = sum(breakdown.share[part] for part in parts)
        rows.append((label, percent(ours), percent(theirs)))
    return Table.of((f"a traced step of {name!r}", "gpulab", "plugin"), rows)


def _plugin_costs(path: Path) -> dict[str, float] | None:
    """Microseconds of a mean step by the plugin's roles; None if the plugin fails on the trace."""
    command = [sys.executable, "-c", _PLUGIN, str(path)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PLUGIN_S, check=True, env=marked())
        costs: dict[str, float] = json.loads(done.stdout.splitlines()[-1])["costs"]
    except (subprocess.SubprocessError, ValueError, LookupError):
        return None
    return costs


# -- the exercises -----------------------------------------------------------------------------------------------------

_OTHER_LINES = (  # part of a line, and its hint
    (
        ".item()",
        "The loss is one number, and on the CPU it is there already. (On a GPU this line makes the program wait for "
        "all work that was launched before: lesson 09.)",
    ),
    ("argmax", "That counts errors with one operator on the whole batch: look for what happens once per row."),
    (
        "for row in",
        "Close: that loop is the place. Its own line only counts up to 32. Which line does it run so often?",
    ),
    ("for i in", "Close: but inside this loop is another one. Which line runs for each image and each row?"),
    ("def shift", "That is the function. Which line in it?"),
    ("augment(", "That line calls the function that costs most. Go into it: which line there?"),
    ("backward()", "That is training, and PyTorch does it in its operators: the report counts it as computing."),
    ("model(", "That is training, and PyTorch does it in its operators: the report counts it as computing."),
    ("optimizer.", "That is training. The report has a line for the optimizer: compare it with *unknown*."),
    ("in loader", "The report has a line for waiting for the DataLoader: compare it with *unknown*."),
    ("empty_like", "That asks for memory once per batch. Which line runs for each image and each row?"),
    ("from_numpy", "That makes a tensor of what is there already, once per batch, and copies nothing."),
)


@exercise('Put the text of the line, as "…" in quotes, in place of the dots, then run that cell and this one again.')
def check_costliest(costliest_line: object) -> Checked:
    """Whether the answer is the costliest line in the run "first": its text, a part of the text, or its number."""
    reported, doubt = "", ""
    with suppress(NotMeasured):
        findings = diagnose(latest_run("first")).findings
        reported = next((finding.source_line for finding in findings if finding.source_line), "")
        doubt = " This time the report named no line for certain: other programs may have disturbed it."
    place = reported.partition(":")[0]  # "cell [2], line 33"
    if isinstance(costliest_line, int) and not isinstance(costliest_line, bool):
        if CULPRIT not in reported:
            return wrong("Numbers depend on where one begins to count: copy the text of the line, in quotes.")
        if f"line {costliest_line}" in place.split(", "):
            return right(f"The report says so, too: {reported}.")
        return wrong(f"That is not the number that the report gives ({place}).")
    if not isinstance(costliest_line, str) or len(_plain(costliest_line)) < 4:
        return wrong(f'{costliest_line!r} is not a line of the code above. Copy its text, in quotes: "…".')
    answer, culprit = _plain(costliest_line), _plain(CULPRIT)
    if "np.roll" in answer and (answer in culprit or culprit in answer):
        why = "It runs once for each row of each image: 64 × 32 = 2048 times in a step."
        if CULPRIT in reported:
            return right(f"{why} The report says so, too: {reported}.")
        return right(why + doubt)
    for part, words in _OTHER_LINES:
        if _plain(part) in answer:
            return wrong(words)
    return wrong("That is not a line of the code above, or too little of it. Copy the whole line, in quotes.")


def _plain(text: str) -> str:
    """The line without white space and comment."""
    return "".join(text.partition("#")[0].split())


def rolled(images: Images, offsets: Images) -> Images:
    """Each image's rows, shifted to the right by its offset, with wrap-around."""
    columns = (np.arange(images.shape[2]) - np.asarray(offsets)[:, None]) % images.shape[2]
    moved: Images = np.take_along_axis(images, columns[:, None, :], axis=2)
    return moved


def _cut_off(images: Images, offsets: Images) -> Images:
    source = (np.arange(images.shape[2]) - offsets[:, None])[:, None, :]
    return np.where((source >= 0) & (source < images.shape[2]), rolled(images, offsets), 0)


def _as_one_row(images: Images, offsets: Images) -> Images:
    flat = images.reshape(len(images), -1)
    return np.stack([np.roll(row, offset) for row, offset in zip(flat, offsets, strict=True)]).reshape(images.shape)


SHIFT_MISTAKES: Mistakes = (
    (
        "It shifts to the wrong side: a positive offset moves an image to the right.",
        lambda images, offsets: rolled(images, -offsets),
    ),
    ("It gives the images back as they were: nothing is shifted.", lambda images, offsets: images),
    (
        "It moves rows up or down: a shift to the side is along the last axis.",
        lambda images, offsets: np.stack([np.roll(i, o, axis=0) for i, o in zip(images, offsets, strict=True)]),
    ),
    (
        "It shifts all images by the first one's offset, and each has its own.",
        lambda images, offsets: rolled(images, np.full_like(offsets, offsets[0])),
    ),
    (
        "It shifts each image as one long row: what leaves a row at its end comes back in the next row. Give "
        "np.roll an axis.",
        _as_one_row,
    ),
    ("What leaves at one side is lost, and comes back at the other side with shift.", _cut_off),
)


@exercise()
def check_rewrite(my_shift: Shift, shift: Shift) -> Checked:
    """Whether `my_shift(images, offsets)` returns the same as `shift`, and is faster."""
    if my_shift is shift:
        return wrong("That is the function you were given: it cannot be faster than itself.")
    cases = [_example(shape) for shape in SHAPES]
    before = [(images.copy(), offsets.copy()) for images, offsets in cases]
    otherwise = "Its images differ from those of shift. Try both functions on one small image, and print both results."
    mistakes = [(words, lambda i, o, give=give: give(*before[_at(i)])) for words, give in SHIFT_MISTAKES]
    if words := fault(
        my_shift,
        lambda i, _: rolled(*before[_at(i)]),
        cases,
        mistakes,
        otherwise=otherwise,
        form=_form,
        same=np.array_equal,
    ):
        return wrong(words)
    for now, then in zip(cases, before, strict=True):
        for what, changed, was in zip(("images", "offsets"), now, then, strict=True):
            if not np.array_equal(changed, was):
                return wrong(
                    f"The result is right, but the function changes `{what}` itself: the next epoch would shift again."
                )
    images, offsets = _example(TIMED_SHAPE)
    more = "Now put it into the training, and measure again."
    with suppress(NotMeasured):
        most = times_faster("limit")
        if most.sure:
            limit = f"Without any shifting: {speedup(most.times)}, the limit for this line."
            more = f"{limit} Put it in, and measure again."
    return check_speed(
        lambda: shift(images, offsets),
        lambda: my_shift(images, offsets),
        LEAST_SPEEDUP,
        good=f"The images are the same. {more}",
        hint="The images are right. Is there still a loop that runs for each row? NumPy can move all rows of an image, "
        "or of all images, in one call.",
        pairs=9,
    )


def _at(images: Images) -> int:
    return SHAPES.index(images.shape)


def _form(got: object, expected: Images) -> str:
    if not isinstance(got, np.ndarray):
        return f"It gives a {type(got).__name__}; expected a NumPy array, as shift gives."
    if got.shape != expected.shape:
        return f"Its result has the shape {list(got.shape)} and should have {list(expected.shape)}, as images has."
    if np.array_equal(got, expected) and got.dtype != expected.dtype:
        return f"The numbers are right, but their type is {got.dtype} instead of {expected.dtype}."
    return ""


def _example(shape: tuple[int, int, int]) -> tuple[Images, Images]:
    """Images [n, rows, columns] of distinct numbers, and offsets [n] in both directions.

    With the first shape each mistake gives other images; with the others, offsets may be 0 or longer than a row.
    """
    random = np.random.default_rng(sum(shape))
    images = random.random(shape, dtype=np.float32)
    if shape == SHAPES[0]:
        return images, np.array([2, -1, 1, -2])
    return images, random.integers(-shape[2] - 2, shape[2] + 3, shape[0])


# -- what the notebook asks --------------------------------------------------------------------------------------------


QUESTIONS: Mapping[str, Question] = {
    "training": share(
        "What share of each step is training?", lambda: working_share(latest_facts("first")), "of each step is training"
    ),
    "limit": times("What speedup does dropping the shift give?", "limit", "without the shift"),
}
