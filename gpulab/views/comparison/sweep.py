"""Several settings of a cell against the baseline: one line per setting, and what all have in common."""

from __future__ import annotations

from msgspec.structs import replace

from gpulab.formatting import duration, gib, plural, speed_within
from gpulab.tuning.bench import memory_peak_bytes
from gpulab.tuning.compare.cost import fastest
from gpulab.tuning.record import Comparison, Experiment, Side
from gpulab.views.comparison import prediction
from gpulab.views.comparison.sections import checks, device_of, first, how_measured, keep_faster, never_ran
from gpulab.views.comparison.table import name
from gpulab.views.layout import PAIRS, Column, Section, leading, numbers, present
from gpulab.views.wording import plain


def opening(experiment: Experiment) -> str:
    """What was tried, where and how long it took: one line."""
    count, time = plural(len(experiment.sides), "setting"), duration(experiment.seconds * 1e6)
    parts = [plain(experiment.name), count, device_of(experiment.sides), time]
    return " · ".join(part for part in parts if part) + (" · stopped early" if experiment.stopped else "")


def sections(experiment: Experiment) -> tuple[Section, ...]:
    """Every section in reading order; none where no setting could be run."""
    if none_ran(experiment):
        return ()
    return present(
        leading(first(experiment.comparisons)),
        leading(_lines(experiment)),
        leading(_to_decide(experiment)),
        prediction.section(experiment.comparisons),
        _losses(experiment),
        checks(experiment.sides),
        _measured(experiment),
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


def _measured(experiment: Experiment) -> Section:
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
