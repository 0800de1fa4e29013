"""What a comparison of two settings, or of many, says in order, as plain strings."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
from msgspec.structs import replace

from gpulab.formatting import NOT_MEASURABLE, capitalized, duration, gib, number, percent, plural, reading, speed_within
from gpulab.tuning.bench import memory_peak_bytes, peak_bytes, rows_of
from gpulab.tuning.compare.blocks import UNPROFILED, judged_by
from gpulab.tuning.compare.cost import SetupCost, cost_of, fastest, spending
from gpulab.tuning.compare.parts import ONE_RUN_EACH, both_us
from gpulab.tuning.compare.statistics import LEAST_FOR_BOOTSTRAP
from gpulab.tuning.compare.verdicts import usable
from gpulab.tuning.record import Comparison, Experiment, Side
from gpulab.verdict import EQUIVALENT, TOO_FEW
from gpulab.views import predictions, wording
from gpulab.views.layout import PAIRS, Column, Section, leading, numbers, present
from gpulab.views.report.run_sections import changes_section
from gpulab.views.report.sections import device
from gpulab.views.side_by_side import drawn
from gpulab.views.wording import plain, shortened

LOSSES_DIFFER = "The losses {how}: check them before you keep it."
SEQUENTIAL = (
    "These runs were sequential, so a change of the machine between them looks like a difference between the runs. "
    "To rule that out, compare interleaved blocks: "
    "gpulab record --ab NAME=VALUE SCRIPT, or %%gpuprofile --ab NAME=VALUE in a notebook."
)


def opening(comparison: Comparison) -> str:
    """What was compared, where and how: one line."""
    words = [f"{name(comparison.b)} vs. {name(comparison.a)}", device_of((comparison.b, comparison.a))]
    if never_ran(comparison):
        return " · ".join(words)
    how = f"{plural(comparison.pairs, 'pair')} of blocks" if comparison.evidence == "interleaved" else "sequential runs"
    return " · ".join([*words, how])


def device_of(sides: Iterable[Side | None]) -> str:
    """The device of the first side that ran."""
    run = next((side.facts.run for side in sides if side is not None and side.facts is not None), None)
    return device(run) if run is not None else "device: unknown"


def never_ran(comparison: Comparison) -> bool:
    """Whether a side could not be run at all: the headline has the reason, and there is nothing to compare."""
    return any(side.failure and side.facts is None for side in (comparison.a, comparison.b))


def sections(
    comparison: Comparison, price_per_hour: float | None = None, notes: Sequence[str] = ()
) -> tuple[Section, ...]:
    """Every section in reading order; none where a side never ran. `notes` are of the experiment as a whole."""
    if never_ran(comparison):
        return ()
    return present(
        leading(first((comparison,))),
        _side_by_side(comparison, price_per_hour),
        predictions.section((comparison,)),
        _parts(comparison),
        _loss(comparison),
        _curves(comparison),
        checks((comparison.a, comparison.b)),
        _measured(comparison, notes),
        keep_faster(comparison),
    )


def first(comparisons: Sequence[Comparison]) -> Section | None:
    """What a reader must know before any figure: runs in sequence are weaker evidence, and how the runs differ.

    Of several settings one that failed has its reason in its own row, and no figure to read with care.
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


def _side_by_side(comparison: Comparison, price_per_hour: float | None) -> Section:
    a, b = rows_of((comparison,))
    drawing = drawn(a, b, comparison.a.facts, comparison.b.facts, b.speed)
    return replace(side_by_side(comparison, price_per_hour), drawing=drawing)


# parts


def _parts(comparison: Comparison) -> Section:
    title = "Breakdown per sample" if comparison.unit == "sample" else "Step breakdown"
    if comparison.parts_left_out:
        return Section(title, lines=(f"Left out: {comparison.parts_left_out}.",), wide=True)
    if not comparison.parts:
        return Section(title, lines=("Not measurable: one side has no traced steps.",), wide=True)
    per_sample = comparison.unit == "sample" and comparison.parts[0].a_us_per_sample is not None
    changed = comparison.verdict in ("faster", "slower")
    ordered = sorted(comparison.parts, key=lambda c: -max(both_us(c, per_sample=per_sample)))
    rows = [
        (c.label, *map(duration, both_us(c, per_sample=per_sample)), *([_DIRECTIONS[c.grew]] if changed else []))
        for c in ordered
    ]
    sums = (sum(us) for us in zip(*(both_us(c, per_sample=per_sample) for c in comparison.parts), strict=True))
    rows.append((f"a {comparison.unit if per_sample else 'step'}", *map(duration, sums), *([""] * changed)))
    columns = (Column(""), *numbers(heading(comparison.a), heading(comparison.b)), *([Column("")] * changed))
    lines = [f"The times above, split as in {ONE_RUN_EACH}."]
    if comparison.unit == "sample" and not per_sample:
        lines.append("Per step: the samples of the traced steps are not known.")
    result = in_one_line(comparison, *rows[0][:3])
    return Section.table(title, columns, rows, lines, wide=True, result=result)


_DIRECTIONS = {True: "grew", False: "shrank", None: "no clear change"}


# loss, curves


def _loss(comparison: Comparison) -> Section | None:
    loss = comparison.loss
    if loss is None:
        return None
    cells = [
        (label, *(_loss_at(curve, step) for curve in (loss.a, loss.b)))
        for label, step in (("first step", 0), ("last step of both", _last(loss.a, loss.b)))
    ]
    columns = (Column(""), *numbers(heading(comparison.a), heading(comparison.b)))
    table = Section.table("Loss", columns, cells, (f"{capitalized(loss.verdict)}. {plain(loss.words)}.",))
    return replace(table, result=capitalized(loss.verdict))


def _last(a: Sequence[float], b: Sequence[float]) -> int:
    """The last step where both have a loss; without one the last of both."""
    common = min(len(a), len(b))
    both = np.flatnonzero(np.isfinite(a[:common]) & np.isfinite(b[:common])) if common else np.empty(0)
    return int(both[-1]) if len(both) else common - 1


def _loss_at(curve: Sequence[float], step: int) -> str:
    if not 0 <= step < len(curve):
        return NOT_MEASURABLE
    value = curve[step]
    return f"{value:.6g}" if np.isfinite(value) else ("none, or NaN" if np.isnan(value) else "infinite")


def _curves(comparison: Comparison) -> Section | None:
    a, b = ({c.name: c for c in side.facts.curves} if side.facts else {} for side in (comparison.a, comparison.b))
    if not a and not b:
        return None
    cells = (
        (
            plain(curve.label),
            *(wording.quantity(c.mean, c.name, c.unit) if c else NOT_MEASURABLE for c in (a.get(name), b.get(name))),
        )
        for name, curve in {**b, **a}.items()
    )
    columns = (Column("mean of", "cut"), *numbers(heading(comparison.a), heading(comparison.b)))
    lines = ("Over all of one traced run each.",)
    return Section.table("Device", columns, cells, lines, aside=True)


# how it was measured, how to keep it


def checks(sides: Sequence[Side]) -> Section | None:
    """Whether each knob did what it was asked to."""
    changes = dict.fromkeys(check for side in sides for check in side.checks)
    return changes_section("Did the change take effect?", tuple(changes))


def _measured(comparison: Comparison, notes: Sequence[str]) -> Section:
    lines = [*map(plain, dict.fromkeys([*notes, *comparison.notes])), " ".join(_interval_sentences(comparison))]
    return Section.table("How it was measured", PAIRS, how_measured(comparison), filter(None, lines))


def how_measured(comparison: Comparison) -> list[tuple[str, str]]:
    """The figures that tell how far a comparison carries."""
    a, b = comparison.a, comparison.b
    pairs = [("evidence", _evidence(comparison)), ("steps counted in a block", _of_both(_steps(a), _steps(b)))]
    pairs.append(("steps left out (warm-up and others)", _of_both(_dropped(a, comparison), _dropped(b, comparison))))
    floor = NOT_MEASURABLE if comparison.noise_floor is None else percent(comparison.noise_floor)
    pairs.append(("run-to-run noise", floor))
    if comparison.evidence == "interleaved":
        pairs.append(("restored before each run", plain(comparison.restored) or "nothing"))
    return pairs


def _evidence(comparison: Comparison) -> str:
    if comparison.evidence == "interleaved":
        few = f" (too few to exclude a difference: {TOO_FEW} are needed)" if comparison.pairs < TOO_FEW else ""
        return f"{plural(comparison.pairs, 'pair')} of interleaved blocks, in random order{few}"
    counts = f"{len(usable(comparison.a))} and {plural(len(usable(comparison.b)), 'block')}"
    return f"{counts} of consecutive steps, of sequential runs"


_BAND = (
    "Faster or slower: the whole interval lies beyond the noise. No measurable difference: it lies within "
    f"{percent(EQUIVALENT)}. Otherwise undecided."
)


def _interval_sentences(comparison: Comparison) -> list[str]:
    """What ratio, interval and noise floor are."""
    if comparison.ratio is None:
        return []
    interleaved = comparison.evidence == "interleaved"
    count = comparison.pairs if interleaved else min(len(usable(comparison.a)), len(usable(comparison.b)))
    few = count < LEAST_FOR_BOOTSTRAP
    if interleaved:
        return [
            "The ratio is the median over the pairs.",
            "Its interval is Student's t, because there are few pairs."
            if few
            else "Its interval is a bootstrap over the pairs.",
            "Run-to-run noise: A vs. itself.",
            _BAND,
        ]
    return [
        "The ratio is that of the typical steps in both reports.",
        "Its interval is Student's t on blocks of their steps, because there are few."
        if few
        else "Its interval is a bootstrap over blocks of their steps.",
        "Run-to-run noise: the second half of a run vs. its first.",
        _BAND,
    ]


def _steps(side: Side) -> str:
    return _range([block.step_count for block in usable(side)])


def _dropped(side: Side, comparison: Comparison) -> str:
    """Before each block; of a run that was not made for it, all that are in no block."""
    if comparison.evidence == "interleaved":
        return _range([block.dropped for block in usable(side)])
    if side.facts is None:
        return NOT_MEASURABLE
    return _range([len(side.facts.run.steps) - sum(block.step_count for block in side.blocks)])


def _range(counts: Sequence[int]) -> str:
    if not counts:
        return NOT_MEASURABLE
    low, high = min(counts), max(counts)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def _of_both(a: str, b: str) -> str:
    return a if a == b else f"{a} (A), {b} (B)"


def worth_keeping(side: Side) -> bool:
    """Whether it ran with its setting, and the setting did something."""
    return not side.failure and (not side.checks or any(check.state != "no effect" for check in side.checks))


def keep_faster(comparison: Comparison) -> Section | None:
    """The edit of a setting that is faster for certain: nothing else is worth keeping for its speed."""
    if comparison.verdict != "faster":
        return None
    section, loss = keep(comparison.b, cost_of(comparison)), comparison.loss
    if section is None or loss is None or not loss.moved:
        return section
    how = "cannot be compared" if loss.verdict == "not comparable" else "differ"
    return replace(section, lines=(LOSSES_DIFFER.format(how=how), *section.lines))


def keep(side: Side | None, cost: SetupCost | None) -> Section | None:
    """The edit that makes the setting of a side permanent; None where it has nothing to keep."""
    if side is None or not side.edit or not worth_keeping(side):
        return None
    what = "This edit" if side.edit_is_diff else "This"
    code = "\n".join(plain(line.replace("\t", "    ")) for line in side.edit.strip("\n").split("\n"))
    takes = (f"{capitalized(cost.words)}.",) if cost is not None else ()
    return Section("Keep it", lines=(*takes, f"{what} makes {name(side)} permanent:"), code=code)


_WIDEST = 22  # characters of a column's title
Cells = tuple[str, ...]


def name(side: Side) -> str:
    """What a side is called on screen."""
    return plain(side.label)


def heading(side: Side) -> str:
    """What a side is called above a column."""
    return shortened(name(side), _WIDEST)


def side_by_side(comparison: Comparison, price_per_hour: float | None) -> Section:
    """The figures of both, row by row. The one ratio there is stands below them, with its verdict."""
    a, b = comparison.a, comparison.b
    rows = [
        _row(f"a step, {_judged(comparison)}", a.us_per_step, b.us_per_step, duration),
        _row("a sample", a.us_per_sample, b.us_per_sample, duration),
        _throughput(comparison),
        *_memory_rows(a, b),
        *_spending_rows(a, b, price_per_hour),
    ]
    columns = (Column(""), *numbers(heading(a), heading(b)))
    lines = [verdict_line(comparison), _origin(comparison)]
    absent = [row[0] for row in rows if set(row[1:3]) == {NOT_MEASURABLE}]
    rows = [row for row in rows if row[0] not in absent]
    if absent:
        lines.append(f"Not measurable on either side: {'; '.join(absent)}.")
    if _without_energy(a, b):
        lines.append(f"No energy: {_without_energy(a, b)}.")
    if comparison.unit == "sample":
        lines.append("The batch differs: the two are compared per sample, not per step.")
    whole = next((row for row in rows if row[0].startswith(f"a {comparison.unit}")), None)
    result = in_one_line(comparison, *whole) if whole is not None else ""
    return Section.table("Side by side", columns, rows, lines, wide=True, result=result)


def in_one_line(comparison: Comparison, label: str, a: str, b: str) -> str:
    """A row of the table where the titles of its columns are not shown."""
    return f"{label}: {a} ({heading(comparison.a)}), {b} ({heading(comparison.b)})"


def verdict_line(comparison: Comparison) -> str:
    """The verdict and the figures it rests on."""
    if comparison.ratio is None:
        return "No ratio can be given."
    middle, around = speed_within(comparison.ratio, comparison.interval)
    interval = f", 95 % interval {around}" if around else ""
    floor = NOT_MEASURABLE if comparison.noise_floor is None else percent(comparison.noise_floor)
    alone = "by steps alone, " if comparison.verdict == "not comparable" else ""
    figures = f"{alone}B has a {middle}× speedup per {comparison.unit}{interval}; run-to-run noise {floor}"
    return f"{capitalized(comparison.verdict)}: {figures}."


def _origin(comparison: Comparison) -> str:
    """What the rows rest on: two kinds of runs."""
    profiled = "Memory: peak of one traced run each."
    if comparison.ratio is None:
        return profiled
    if comparison.evidence != "interleaved":
        return f"Times: as in each run's own report. {profiled}"
    pairs = "Times: A is the median of its blocks, B is A scaled by the ratio of the pairs."
    return f"{pairs} {profiled}"


def unprofiled_us(side: Side, comparison: Comparison) -> float | None:
    """A step without the profiler, as the blocks of the comparison have it; None where it rests on profiled steps."""
    return side.us_per_step if _judged(comparison) == UNPROFILED else None


def _judged(comparison: Comparison) -> str:
    return UNPROFILED if comparison.evidence == "interleaved" else judged_by(comparison.a.facts, comparison.b.facts)


def profiled_us(side: Side) -> float | None:
    """A step of the traced run, with the profiler."""
    traced = side.facts.traced_step_us if side.facts is not None else None
    return traced.median if traced is not None else None


def _throughput(comparison: Comparison) -> Cells:
    """By the blocks; of runs one after the other the mean that their reports have."""
    a, b = comparison.a, comparison.b
    if comparison.evidence == "interleaved":
        return _row("samples per second", _per_s(a.us_per_sample), _per_s(b.us_per_sample), number)
    of_a, of_b = (side.facts.samples_per_s if side.facts is not None else None for side in (a, b))
    return _row("samples per second, mean", of_a, of_b, number)


def _per_s(us: float | None) -> float | None:
    return 1e6 / us if us else None


def _row(label: str, a: float | None, b: float | None, written_as: Callable[[float], str]) -> Cells:
    written = [NOT_MEASURABLE if value is None else written_as(value) for value in (a, b)]
    return label, *written


def _memory_rows(a: Side, b: Side) -> list[Cells]:
    kinds = {side.facts.run.device.kind for side in (a, b) if side.facts is not None}
    wanted = [("peak memory, pages shared with workers counted in each", "peak_rss_bytes")]
    if "cuda" in kinds:
        wanted = [
            ("peak memory of tensors on the GPU", "peak_allocated_bytes"),
            ("peak memory reserved on the GPU", "peak_reserved_bytes"),
            *wanted,
        ]
    return [_row(label, peak_bytes(a.facts, field), peak_bytes(b.facts, field), gib) for label, field in wanted]


def _spending_rows(a: Side, b: Side, price_per_hour: float | None) -> list[Cells]:
    of_a, of_b = spending(a, price_per_hour), spending(b, price_per_hour)
    if of_a.device_s is None and of_b.device_s is None:
        return []
    on_gpu = any(side.facts is not None and side.facts.run.device.kind == "cuda" for side in (a, b))
    rows = [
        *([_row("device time of a million samples", of_a.device_s, of_b.device_s, _of_seconds)] if on_gpu else []),
        _row("energy of a million samples", _kwh(of_a.energy_j), _kwh(of_b.energy_j), lambda kwh: reading(kwh, "kWh")),
    ]
    if price_per_hour is not None:
        label = f"cost of a million samples, at {price_per_hour:g} an hour"
        rows.append(_row(label, of_a.cost, of_b.cost, number))
    return rows


def _of_seconds(seconds: float) -> str:
    return duration(seconds * 1e6)


def _kwh(energy_j: float | None) -> float | None:
    return None if energy_j is None else energy_j / 3.6e6


def _without_energy(a: Side, b: Side) -> str:
    reasons = dict.fromkeys(spending(side).why_no_energy for side in (a, b))
    return "; ".join(plain(reason) for reason in reasons if reason)


def sweep_opening(experiment: Experiment) -> str:
    """What was tried, where and how long it took: one line."""
    count, time = plural(len(experiment.sides), "setting"), duration(experiment.seconds * 1e6)
    parts = [plain(experiment.name), count, device_of(experiment.sides), time]
    return " · ".join(part for part in parts if part) + (" · stopped early" if experiment.stopped else "")


def sweep_sections(experiment: Experiment) -> tuple[Section, ...]:
    """Every section in reading order; none where no setting could be run."""
    if none_ran(experiment):
        return ()
    return present(
        leading(first(experiment.comparisons)),
        leading(_lines(experiment)),
        leading(_to_decide(experiment)),
        predictions.section(experiment.comparisons),
        _losses(experiment),
        checks(experiment.sides),
        _sweep_measured(experiment),
        keep_faster(best) if (best := fastest(experiment.comparisons)) is not None else None,
    )


def none_ran(experiment: Experiment) -> bool:
    """Whether there were settings and not one of them could be run: the headline has the reasons."""
    return bool(experiment.comparisons) and all(never_ran(c) for c in experiment.comparisons)


def _to_decide(experiment: Experiment) -> Section | None:
    """How to look again at the quickest that may be faster; None where something is, or nothing may be."""
    if fastest(experiment.comparisons) is not None:
        return None
    open_ones = [c for c in experiment.comparisons if c.verdict == "undecided" and c.b.settings and c.ratio]
    if not open_ones:
        return None
    quickest = min(open_ones, key=lambda c: c.ratio or 1.0).b
    settings = plain(",".join(f"{knob}={value}" for knob, value in quickest.settings.items()))
    line = f"Compare {name(quickest)} alone, so that more blocks run: %%gpuprofile --ab {settings} --budget 120"
    return Section("What to do", lines=(line,))


def _lines(experiment: Experiment) -> Section:
    unit = "sample" if per_sample(experiment) else "step"
    columns = (
        Column("setting"),
        *numbers(f"per {unit}", "speedup", "95 % interval", "memory"),
        Column("", "wrap"),
    )
    rows = [_line(experiment.sides[0], None, experiment)]
    rows += [_line(c.b, c, experiment) for c in experiment.comparisons]
    lines = [
        f"Speedup vs. {name(experiment.sides[0])}, per {unit}, by the blocks. Memory: peak of one traced run each."
    ]
    table = Section.table("All settings", columns, rows, lines, wide=True)
    return replace(table, pictured=True, result=f"time per {unit} of each")


def per_sample(experiment: Experiment) -> bool:
    """Whether all settings are told per sample: some have another batch, and the samples of all are known."""
    ran = [side for side in experiment.sides if not side.failure]
    return any(c.unit == "sample" for c in experiment.comparisons) and all(side.us_per_sample for side in ran)


def us(side: Side, experiment: Experiment) -> float | None:
    """The time of a side in the unit of the experiment."""
    return side.us_per_sample if per_sample(experiment) else side.us_per_step


def _line(side: Side, compared: Comparison | None, experiment: Experiment) -> tuple[str, ...]:
    if side.failure:
        return name(side), "–", "–", "–", "–", plain(side.failure)
    ratio, interval = "–", ""
    if compared is not None and compared.ratio is not None:
        ratio, interval = speed_within(compared.ratio, compared.interval)
    verdict = compared.verdict if compared is not None else "reference"
    return (
        name(side),
        duration(us(side, experiment)),
        ratio,
        interval or "–",
        gib(memory_peak_bytes(side.facts)),
        verdict,
    )


def _losses(experiment: Experiment) -> Section | None:
    alike: dict[tuple[str, str], list[str]] = {}
    for c in experiment.comparisons:
        if c.loss is not None and not c.b.failure:
            alike.setdefault((c.loss.verdict, c.loss.words), []).append(name(c.b))
    if not alike:
        return None
    columns = (Column("", "wrap"), Column("loss"), Column("", "wrap"))
    cells = ((", ".join(sides), verdict, plain(words)) for (verdict, words), sides in alike.items())
    verdicts = "; ".join(f"{', '.join(sides)}: {verdict}" for (verdict, _), sides in alike.items())
    return Section.table("Loss", columns, cells, wide=True, result=verdicts)


def _sweep_measured(experiment: Experiment) -> Section:
    """Once where all comparisons were measured alike, else per setting."""
    rows: dict[tuple[str, str], list[str]] = {}
    for c in experiment.comparisons:
        for pair in how_measured(c) if not c.b.failure else ():
            rows.setdefault(pair, []).append(name(c.b))
    counts = {label: sum(pair[0] == label for pair in rows) for label, _ in rows}
    cells = (
        (label if counts[label] == 1 else f"{label} ({', '.join(sides)})", value)
        for (label, value), sides in rows.items()
    )
    notes = dict.fromkeys(
        [*experiment.notes, *(note for c in experiment.comparisons if not c.b.failure for note in c.notes)]
    )
    return Section.table("How it was measured", PAIRS, cells, map(plain, notes))
