"""What a comparison says, in order, as plain strings: the text, the page and the notebook tables only lay it out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from msgspec.structs import replace

from gpulab.formatting import NOT_MEASURABLE, capitalized, duration, percent, plural
from gpulab.tuning.bench import rows_of
from gpulab.tuning.compare.cost import SetupCost, cost_of
from gpulab.tuning.compare.parts import ONE_RUN_EACH, both_us
from gpulab.tuning.compare.statistics import LEAST_FOR_BOOTSTRAP
from gpulab.tuning.compare.verdicts import usable
from gpulab.tuning.record import Comparison, Side
from gpulab.verdict import EQUIVALENT, TOO_FEW
from gpulab.views import wording
from gpulab.views.comparison import prediction
from gpulab.views.comparison.table import heading, in_one_line, name, side_by_side
from gpulab.views.layout import PAIRS, Column, Section, leading, numbers, present
from gpulab.views.report.sections import changes_section, device
from gpulab.views.side_by_side import drawn
from gpulab.views.wording import plain

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
        prediction.section((comparison,)),
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
