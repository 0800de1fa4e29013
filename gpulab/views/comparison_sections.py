"""The sections of a report that compares two or more settings, in reading order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
from msgspec.structs import replace

from gpulab.formatting import NOT_MEASURABLE, capitalized, duration, gib, number, percent, plural, reading, speed_within
from gpulab.tuning.bench import memory_peak_bytes, peak_bytes, rows_of
from gpulab.tuning.compare.blocks import UNPROFILED, kind_of_steps
from gpulab.tuning.compare.cost import SetupCost, cost_of, fastest, spending
from gpulab.tuning.compare.parts import ONE_RUN_EACH, both_us
from gpulab.tuning.compare.statistics import LEAST_FOR_BOOTSTRAP
from gpulab.tuning.compare.verdicts import usable
from gpulab.tuning.record import Comparison, Experiment, Side
from gpulab.verdict import EQUIVALENT, TOO_FEW
from gpulab.views import predictions
from gpulab.views.layout import PAIRS, Column, Section, leading, numbers, present
from gpulab.views.report.run_sections import changes_section
from gpulab.views.report.sections import device
from gpulab.views.side_by_side import picture
from gpulab.views.wording import plain, quantity, shortened

_WIDEST = 22  # characters of a column's title
LOSSES_DIFFER = "The losses {how}: check them before you keep it."
SEQUENTIAL = (
    "These runs were sequential, so a change of the machine between them looks like a difference between the runs. "
    "To rule that out, compare interleaved blocks: "
    "gpulab record --ab NAME=VALUE SCRIPT, or %%gpuprofile --ab NAME=VALUE in a notebook."
)


def opening(experiment: Experiment) -> str:
    """What was compared, where and how: one line."""
    sides, comparisons = experiment.sides, experiment.comparisons
    if len(comparisons) == 1:
        (only,) = comparisons
        pairs = f"{plural(only.pairs, 'pair')} of blocks"
        how = pairs if only.evidence == "interleaved" else "sequential runs"
        parts = [f"{name(only.b)} vs. {name(only.a)}", device_of((only.b, only.a)), "" if never_ran(only) else how]
    else:
        time, ended = duration(experiment.seconds * 1e6), "stopped early" if experiment.stopped else ""
        parts = [plain(experiment.name), plural(len(sides), "setting"), device_of(sides), time, ended]
    return " · ".join(filter(None, parts))


def device_of(sides: Iterable[Side | None]) -> str:
    """The device of the first side that ran."""
    run = next((side.facts.run for side in sides if side is not None and side.facts is not None), None)
    return device(run) if run is not None else "device: unknown"


def name(side: Side) -> str:
    """The name of a side on screen."""
    return plain(side.label)


def heading(side: Side) -> str:
    """The name of a side above a column."""
    return shortened(name(side), _WIDEST)


def never_ran(comparison: Comparison) -> bool:
    """Whether a side could not be run at all: the headline has the reason, and there is nothing to compare."""
    return any(side.failure and side.facts is None for side in (comparison.a, comparison.b))


def sections(experiment: Experiment, price_per_hour: float | None = None) -> tuple[Section, ...]:
    """Every section in reading order; none if no setting could be run."""
    comparisons = experiment.comparisons
    if comparisons and all(never_ran(c) for c in comparisons):
        return ()
    only = comparisons[0] if len(comparisons) == 1 else None
    best = fastest(comparisons)
    figures: tuple[Section | None, ...] = (leading(_settings(experiment)), leading(_to_decide(experiment)))
    details: tuple[Section | None, ...] = (_losses(comparisons),)
    if only is not None:
        figures = (_with_picture(only, price_per_hour),)
        details = (_parts(only), _loss(only), _curves(only))
    return present(
        leading(_cautions(comparisons)),
        *figures,
        predictions.section(comparisons),
        *details,
        checks(experiment.sides),
        _measured(experiment),
        keep_faster(best) if best is not None else None,
    )


def _cautions(comparisons: Sequence[Comparison]) -> Section | None:
    """What a reader must know before any figure: runs in sequence are weaker evidence, and how the runs differ.

    Among several settings, one that failed needs no caution: its row has the reason and no figures.
    """
    comparisons = [c for c in comparisons if not c.b.failure]
    sequential = (
        f"{c.ended_early}. These runs were sequential. A larger --budget compares interleaved blocks."
        if c.ended_early
        else SEQUENTIAL
        for c in comparisons
        if c.evidence == "sequential" and c.ratio is not None
    )
    differences = (plain(line) for c in comparisons for line in c.differences)
    lines = tuple(dict.fromkeys((*sequential, *differences)))
    return Section("Before you rely on this", lines=lines, wide=True) if lines else None


# two settings

_MEMORY = (
    ("peak memory of tensors on the GPU", "peak_allocated_bytes"),
    ("peak memory reserved on the GPU", "peak_reserved_bytes"),
    ("peak memory, pages shared with workers counted in each", "peak_rss_bytes"),
)
_DIRECTIONS = {True: "grew", False: "shrank", None: "no clear change"}


def _of_both(comparison: Comparison, first: Column = PAIRS[0]) -> tuple[Column, ...]:
    """The columns of a table that has one figure per row for both sides."""
    return (first, *numbers(heading(comparison.a), heading(comparison.b)))


def _in_one_line(comparison: Comparison, label: str, a: str, b: str) -> str:
    """A row of such a table, for a view that does not show the column titles."""
    return f"{label}: {a} ({heading(comparison.a)}), {b} ({heading(comparison.b)})"


def _with_picture(comparison: Comparison, price_per_hour: float | None) -> Section:
    a, b = rows_of((comparison,))
    drawing = picture(a, b, comparison.a.facts, comparison.b.facts, b.speed)
    return replace(side_by_side(comparison, price_per_hour), drawing=drawing)


def side_by_side(comparison: Comparison, price_per_hour: float | None) -> Section:
    """The figures of both, row by row. The only ratio is below them, with its verdict."""
    sides = (comparison.a, comparison.b)
    of_a, of_b = (_figures(side, comparison, price_per_hour) for side in sides)
    rows = [(label, of_a[label], of_b[label]) for label in of_a]
    lines = [_verdict_line(comparison), _origin(comparison)]
    if absent := [label for label, *both in rows if set(both) == {NOT_MEASURABLE}]:
        lines.append(f"Not measurable on either side: {'; '.join(absent)}.")
    reasons = dict.fromkeys(plain(spending(side).why_no_energy) for side in sides)
    if why := "; ".join(filter(None, reasons)):
        lines.append(f"No energy: {why}.")
    if comparison.unit == "sample":
        lines.append("The batch differs: the two are compared per sample, not per step.")
    rows = [row for row in rows if row[0] not in absent]
    result = next((_in_one_line(comparison, *row) for row in rows if row[0].startswith(f"a {comparison.unit}")), "")
    return Section.table("Side by side", _of_both(comparison), rows, lines, wide=True, result=result)


def _figures(side: Side, comparison: Comparison, price_per_hour: float | None) -> dict[str, str]:
    """The figures of one side by their labels, which are the same for both sides."""
    sides = (comparison.a, comparison.b)
    on_gpu = any(one.facts is not None and one.facts.run.device.kind == "cuda" for one in sides)
    figures = {
        f"a step, {_steps_of(comparison)}": duration(side.us_per_step),
        "a sample": duration(side.us_per_sample),
    }
    if comparison.evidence == "interleaved":
        figures["samples per second"] = number(1e6 / side.us_per_sample if side.us_per_sample else None)
    else:
        figures["samples per second, mean"] = number(side.facts.samples_per_s if side.facts is not None else None)
    for label, field in _MEMORY if on_gpu else _MEMORY[-1:]:
        figures[label] = gib(peak_bytes(side.facts, field))
    if any(spending(one).device_s is not None for one in sides):
        spent = spending(side, price_per_hour)
        if on_gpu:
            figures["device time of a million samples"] = duration(spent.device_s and spent.device_s * 1e6)
        figures["energy of a million samples"] = reading(spent.energy_j and spent.energy_j / 3.6e6, "kWh")
        if price_per_hour is not None:
            figures[f"cost of a million samples, at {price_per_hour:g} an hour"] = number(spent.cost)
    return figures


def _steps_of(comparison: Comparison) -> str:
    return UNPROFILED if comparison.evidence == "interleaved" else kind_of_steps(comparison.a.facts, comparison.b.facts)


def unprofiled_us(side: Side, comparison: Comparison) -> float | None:
    """The step time without the profiler, from the blocks of the comparison; None if it rests on profiled steps."""
    return side.us_per_step if _steps_of(comparison) == UNPROFILED else None


def _verdict_line(comparison: Comparison) -> str:
    """The verdict and the figures behind it."""
    if comparison.ratio is None:
        return "No ratio can be given."
    middle, around = speed_within(comparison.ratio, comparison.interval)
    interval = f", 95 % interval {around}" if around else ""
    floor = NOT_MEASURABLE if comparison.noise_floor is None else percent(comparison.noise_floor)
    alone = "by steps alone, " if comparison.verdict == "not comparable" else ""
    figures = f"{alone}B has a {middle}× speedup per {comparison.unit}{interval}; run-to-run noise {floor}"
    return f"{capitalized(comparison.verdict)}: {figures}."


def _origin(comparison: Comparison) -> str:
    """Which runs the times and the memory come from."""
    profiled = "Memory: peak of one traced run each."
    if comparison.ratio is None:
        return profiled
    if comparison.evidence != "interleaved":
        return f"Times: as in each run's own report. {profiled}"
    pairs = "Times: A is the median of its blocks, B is A scaled by the ratio of the pairs."
    return f"{pairs} {profiled}"


def _parts(comparison: Comparison) -> Section:
    title = "Breakdown per sample" if comparison.unit == "sample" else "Step breakdown"
    if comparison.no_parts_reason or not comparison.parts:
        reason = f"Left out: {comparison.no_parts_reason}." if comparison.no_parts_reason else ""
        return Section(title, lines=(reason or "Not measurable: one side has no traced steps.",), wide=True)
    per_sample = comparison.unit == "sample" and comparison.parts[0].a_us_per_sample is not None
    both = {part: both_us(part, per_sample=per_sample) for part in comparison.parts}
    largest_first = sorted(comparison.parts, key=lambda part: -max(both[part]))
    rows = [(part.label, *map(duration, both[part]), _DIRECTIONS[part.grew]) for part in largest_first]
    a_us, b_us = (sum(us) for us in zip(*both.values(), strict=True))
    rows.append((f"a {comparison.unit if per_sample else 'step'}", duration(a_us), duration(b_us), ""))
    lines = [f"The times above, split as in {ONE_RUN_EACH}."]
    if comparison.unit == "sample" and not per_sample:
        lines.append("Per step: the samples of the traced steps are not known.")
    columns = (*_of_both(comparison), Column(""))[: 4 if comparison.verdict in ("faster", "slower") else 3]
    cells = (row[: len(columns)] for row in rows)
    return Section.table(title, columns, cells, lines, wide=True, result=_in_one_line(comparison, *rows[0][:3]))


def _loss(comparison: Comparison) -> Section | None:
    loss = comparison.loss
    if loss is None:
        return None
    count = min(len(loss.a), len(loss.b))
    finite = np.flatnonzero(np.isfinite(loss.a[:count]) & np.isfinite(loss.b[:count]))
    steps = {"first step": 0, "last step of both": int(finite[-1]) if len(finite) else count - 1}
    cells = ((label, _loss_at(loss.a, step), _loss_at(loss.b, step)) for label, step in steps.items())
    verdict = capitalized(loss.verdict)
    return Section.table("Loss", _of_both(comparison), cells, (f"{verdict}. {plain(loss.words)}.",), result=verdict)


def _loss_at(curve: Sequence[float], step: int) -> str:
    if not 0 <= step < len(curve):
        return NOT_MEASURABLE
    value = curve[step]
    return f"{value:.6g}" if np.isfinite(value) else ("none, or NaN" if np.isnan(value) else "infinite")


def _curves(comparison: Comparison) -> Section | None:
    """The readings of the meters over one whole traced run of each side."""
    a, b = ({c.name: c for c in side.facts.curves} if side.facts else {} for side in (comparison.a, comparison.b))
    cells = []
    for key, curve in {**b, **a}.items():
        both = (quantity(c.mean, c.name, c.unit) if c else NOT_MEASURABLE for c in (a.get(key), b.get(key)))
        cells.append((plain(curve.label), *both))
    columns, lines = _of_both(comparison, Column("mean of", "cut")), ("Over all of one traced run each.",)
    return Section.table("Device", columns, cells, lines, aside=True) if cells else None


# several settings


def _to_decide(experiment: Experiment) -> Section | None:
    """How to measure the fastest undecided setting again; None if a setting is faster, or none is undecided."""
    if fastest(experiment.comparisons) is not None:
        return None
    open_ones = [c for c in experiment.comparisons if c.verdict == "undecided" and c.b.settings and c.ratio]
    if not open_ones:
        return None
    quickest = min(open_ones, key=lambda c: c.ratio or 1.0).b
    settings = plain(",".join(f"{knob}={value}" for knob, value in quickest.settings.items()))
    line = f"Compare {name(quickest)} alone, so that more blocks run: %%gpuprofile --ab {settings} --budget 120"
    return Section("What to do", lines=(line,))


def _settings(experiment: Experiment) -> Section:
    """A row for each setting."""
    unit, baseline = "sample" if per_sample(experiment) else "step", experiment.sides[0]
    rows = []
    for side, compared in zip(experiment.sides, (None, *experiment.comparisons), strict=True):
        speed, interval = "–", ""
        if compared is not None and compared.ratio is not None:
            speed, interval = speed_within(compared.ratio, compared.interval)
        figures = (duration(us(side, experiment)), speed, interval or "–", gib(memory_peak_bytes(side.facts)))
        verdict = compared.verdict if compared is not None else "reference"
        rows.append((name(side), *(("–",) * 4 if side.failure else figures), plain(side.failure) or verdict))
    columns = (Column("setting"), *numbers(f"per {unit}", "speedup", "95 % interval", "memory"), Column("", "wrap"))
    lines = [f"Speedup vs. {name(baseline)}, per {unit}, by the blocks. Memory: peak of one traced run each."]
    table = Section.table("All settings", columns, rows, lines, wide=True)
    return replace(table, pictured=True, result=f"time per {unit} of each")


def per_sample(experiment: Experiment) -> bool:
    """Whether times are per sample: if batches differ and the samples of every setting are known."""
    ran = [side for side in experiment.sides if not side.failure]
    return any(c.unit == "sample" for c in experiment.comparisons) and all(side.us_per_sample for side in ran)


def us(side: Side, experiment: Experiment) -> float | None:
    """The time of a side in the unit of the experiment."""
    return side.us_per_sample if per_sample(experiment) else side.us_per_step


def _losses(comparisons: Sequence[Comparison]) -> Section | None:
    alike: dict[tuple[str, str], list[str]] = {}
    for c in comparisons:
        if c.loss is not None and not c.b.failure:
            alike.setdefault((c.loss.verdict, plain(c.loss.words)), []).append(name(c.b))
    if not alike:
        return None
    columns = (Column("", "wrap"), Column("loss"), Column("", "wrap"))
    cells = [(", ".join(sides), *loss) for loss, sides in alike.items()]
    verdicts = "; ".join(f"{sides}: {verdict}" for sides, verdict, _ in cells)
    return Section.table("Loss", columns, cells, wide=True, result=verdicts)


# how it was measured, how to keep it

_BAND = (
    "Faster or slower: the whole interval lies beyond the noise. No measurable difference: it lies within "
    f"{percent(EQUIVALENT)}. Otherwise undecided."
)
_METHODS = {  # what the ratio is, how its interval follows from few and from many blocks, and the noise
    "interleaved": (
        "The ratio is the median over the pairs.",
        "Its interval is Student's t, because there are few pairs.",
        "Its interval is a bootstrap over the pairs.",
        "Run-to-run noise: A vs. itself.",
    ),
    "sequential": (
        "The ratio is that of the typical steps in both reports.",
        "Its interval is Student's t on blocks of their steps, because there are few.",
        "Its interval is a bootstrap over blocks of their steps.",
        "Run-to-run noise: the second half of a run vs. its first.",
    ),
}


def checks(sides: Sequence[Side]) -> Section | None:
    """Whether each knob took effect."""
    changes = dict.fromkeys(check for side in sides for check in side.checks)
    return changes_section("Did the change take effect?", tuple(changes))


def _measured(experiment: Experiment) -> Section:
    """How the comparisons were measured; a figure that differs between settings names its setting."""
    comparisons = [c for c in experiment.comparisons if not c.b.failure] or experiment.comparisons
    rows: dict[tuple[str, str], list[str]] = {}
    for c in comparisons:
        for pair in how_measured(c):
            rows.setdefault(pair, []).append(name(c.b))
    labels = [label for label, _ in rows]
    cells = (
        (label if labels.count(label) == 1 else f"{label} ({', '.join(sides)})", value)
        for (label, value), sides in rows.items()
    )
    notes = dict.fromkeys([*experiment.notes, *(note for c in comparisons for note in c.notes)])
    lines = [*map(plain, notes), *(map(_method, experiment.comparisons) if len(experiment.comparisons) == 1 else ())]
    return Section.table("How it was measured", PAIRS, cells, filter(None, lines))


def _method(comparison: Comparison) -> str:
    """How ratio, interval and noise were computed; empty without a ratio."""
    if comparison.ratio is None:
        return ""
    ratio, by_few, by_many, noise = _METHODS[comparison.evidence]
    blocks = min(len(usable(comparison.a)), len(usable(comparison.b)))
    count = comparison.pairs if comparison.evidence == "interleaved" else blocks
    return " ".join((ratio, by_few if count < LEAST_FOR_BOOTSTRAP else by_many, noise, _BAND))


def how_measured(comparison: Comparison) -> list[tuple[str, str]]:
    """The figures that show how reliable a comparison is."""
    interleaved, a, b = comparison.evidence == "interleaved", usable(comparison.a), usable(comparison.b)
    if interleaved:
        few = f" (too few to exclude a difference: {TOO_FEW} are needed)" if comparison.pairs < TOO_FEW else ""
        evidence = f"{plural(comparison.pairs, 'pair')} of interleaved blocks, in random order{few}"
    else:
        evidence = f"{len(a)} and {plural(len(b), 'block')} of consecutive steps, of sequential runs"
    floor = NOT_MEASURABLE if comparison.noise_floor is None else percent(comparison.noise_floor)
    rows = [
        ("evidence", evidence),
        ("steps counted in a block", _counts(comparison, lambda side: [block.step_count for block in usable(side)])),
        ("steps left out (warm-up and others)", _counts(comparison, _dropped if interleaved else _in_no_block)),
        ("run-to-run noise", floor),
    ]
    return [*rows, ("restored before each run", plain(comparison.restored) or "nothing")] if interleaved else rows


def _dropped(side: Side) -> list[int]:
    return [block.dropped for block in usable(side)]


def _in_no_block(side: Side) -> list[int]:
    """The steps outside the blocks, for a run that was not made for the comparison."""
    return [len(side.facts.run.steps) - sum(block.step_count for block in side.blocks)] if side.facts else []


def _counts(comparison: Comparison, of: Callable[[Side], Sequence[int]]) -> str:
    """Lowest and highest count of each side; once if both sides are equal."""
    a, b = (
        " to ".join(f"{count:,}" for count in sorted({min(counts), max(counts)})) if counts else NOT_MEASURABLE
        for counts in map(of, (comparison.a, comparison.b))
    )
    return a if a == b else f"{a} (A), {b} (B)"


def _worth_keeping(side: Side) -> bool:
    """Whether the side ran and its setting took effect."""
    return not side.failure and (not side.checks or any(check.state != "no effect" for check in side.checks))


def keep_faster(comparison: Comparison) -> Section | None:
    """The edit that keeps a setting whose verdict is "faster"; no other is worth keeping for its speed."""
    if comparison.verdict != "faster":
        return None
    section, loss = keep(comparison.b, cost_of(comparison)), comparison.loss
    if section is None or loss is None or not loss.moved:
        return section
    how = "cannot be compared" if loss.verdict == "not comparable" else "differ"
    return replace(section, lines=(LOSSES_DIFFER.format(how=how), *section.lines))


def keep(side: Side | None, cost: SetupCost | None) -> Section | None:
    """The edit that makes the setting of a side permanent; None if there is nothing to keep."""
    if side is None or not side.edit or not _worth_keeping(side):
        return None
    what = "This edit" if side.edit_is_diff else "This"
    code = "\n".join(plain(line.replace("\t", "    ")) for line in side.edit.strip("\n").split("\n"))
    takes = (f"{capitalized(cost.words)}.",) if cost is not None else ()
    return Section("Keep it", lines=(*takes, f"{what} makes {name(side)} permanent:"), code=code)
