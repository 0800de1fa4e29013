"""The report on how much faster a cell would be with a perfect DataLoader, as text, page and JSON."""

from __future__ import annotations

from dataclasses import dataclass

from markupsafe import Markup
from msgspec.structs import replace

from gpulab.diagnosis.headline import Headline
from gpulab.formatting import NOT_MEASURABLE, duration, factor_within, percent, picked, plural
from gpulab.tuning.headspace import Headspace
from gpulab.tuning.record import BASELINE
from gpulab.verdict import EQUIVALENT, TOO_FEW, is_decided
from gpulab.views.bars import BarRow, Segment, bar_rows
from gpulab.views.layout import Column, Row, Section, leading, numbers, present
from gpulab.views.report.sections import device
from gpulab.views.view import View
from gpulab.views.wording import Part, plain

SCHEMA = 1
_LEAVE_IT = "Leave the DataLoader as it is: %%gpuprofile shows where else the step time goes."
_AGAIN = "Try again on a quiet machine, or with a larger --budget for more blocks."
_PREPARE = "Use more workers, or make items cheaper to load."
_COST = (
    "Second row minus first: what training waits for while a batch is prepared (read from memory, decode, transform, "
    "collate, copy to the device)."
)
_READ = "Use a faster disk, fewer and larger files, or more workers. Third row minus second: reading."
_RESULT = "what each row is"
_OF_A_STEP = "Step time, median of the blocks"

_IDEAL = Part("a perfect DataLoader", "a few batches, already on the device, reused", "#0072B2")
_BASELINE = Part(
    BASELINE,
    "the cell unchanged, with its files in the page cache as far as they fit",
    "#E69F00",
)
_COLD = Part("read from the disk", "page cache dropped before, as in a first epoch", "#CC79A7")


@dataclass(frozen=True, slots=True, repr=False)
class HeadspaceReport(View):
    """The differential test with its views."""

    result: Headspace

    @property
    def ceiling(self) -> float | None:
        """Speedup of the cell with a perfect DataLoader; None if it was not measured."""
        return self.result.ceiling

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 95 % interval of `ceiling`."""
        return self.result.interval

    @property
    def headline(self) -> Headline:
        """The sentence, its evidence and its level."""
        test = self.result
        if test.ceiling is None:
            why = test.reasons.get("ideal", "no pair of blocks was measured")
            return Headline("cannot_tell", "The gain of a perfect DataLoader was not measured.", why, "unknown")
        evidence = _evidence(test)
        times, around = factor_within(test.ceiling, test.interval)
        if excludes_gain(test):
            sentence = f"The DataLoader is no bottleneck: no change to it would gain {percent(EQUIVALENT)} or more."
            return Headline("no_headspace", sentence, evidence, "good")
        if "ideal" not in test.certain:
            but = f"the 95 % interval is {around}" if around else "too few blocks ran to tell"
            sentence = f"Undecided: a perfect DataLoader gave a {times}× speedup, but {but}."
            return Headline("undecided", sentence, evidence, "unknown")
        sentence = f"A perfect DataLoader would give a {times}× speedup; no DataLoader can give more."
        return Headline("headspace", sentence, evidence, "bad" if test.ceiling >= 1.25 else "notice")

    def _figures(self) -> dict[str, object]:
        test = self.result
        return {
            "schema": SCHEMA,
            "step_us": test.step_us,
            "ideal_step_us": test.ideal_us,
            "cold_step_us": test.cold_us,
            **picked(test, "ceiling", "interval"),
            "preparation_stall_us": test.preparation_us,
            "fetch_stall_us": test.fetch_us,
            **picked(test, "preparation_share", "fetch_share"),
            "certain": sorted(test.certain),
            "verdicts": test.verdicts,
            "stopped": test.experiment.stopped,
            **picked(test, "reasons", "notes"),
        }

    def __repr__(self) -> str:
        return f"<gpulab headspace: {self.headline.sentence}>"

    def _opening(self) -> str:
        run, experiment = self.result.run, self.result.experiment
        ended = " · stopped early" if experiment.stopped else ""
        return f"what the DataLoader costs · {device(run)} · {duration(experiment.seconds * 1e6)}{ended}"

    def _more(self) -> str:
        return self._more_in_python("headspaces[-1]")

    def _sections(self) -> tuple[Section, ...]:
        steps = replace(_steps(self.result), pictured=True)
        return present(leading(steps), leading(_to_do(self.result)), _notes(self.result))

    def _picture(self) -> Markup:
        return bar_rows(_OF_A_STEP, [_bar(line) for line in _steps(self.result).rows if line.bar])


def excludes_gain(headspace: Headspace) -> bool:
    """Whether the whole interval lies below the least gain that counts; "slower" also excludes a gain."""
    if headspace.verdicts.get("ideal") in ("slower", "no measurable difference"):
        return True
    few = any(c.ratio is not None and c.pairs < TOO_FEW for c in headspace.experiment.comparisons)
    return not few and headspace.interval is not None and headspace.interval[1] <= 1 + EQUIVALENT


def _evidence(headspace: Headspace) -> str:
    pairs = next((c.pairs for c in headspace.experiment.comparisons if c.ratio is not None), 0)
    times, around = factor_within(headspace.ceiling or 1.0, headspace.interval)
    sure = f" (95 % interval {around})" if around else ""
    return (
        f"A step takes {duration(headspace.step_us)}; {duration(headspace.ideal_us)} with batches already on the "
        f"device. That is a {times}× speedup{sure}, by {plural(pairs, 'pair')} of short interleaved runs."
    )


def _steps(headspace: Headspace) -> Section:
    longest = max((us for us in (headspace.ideal_us, headspace.step_us, headspace.cold_us) if us), default=1.0)
    preparing = _adds(headspace, "ideal", headspace.preparation_us, headspace.preparation_share)
    fetching = _adds(headspace, "cold", headspace.fetch_us, headspace.fetch_share)
    rows = (
        _row(_IDEAL, headspace.ideal_us, longest, "", headspace.reasons.get("ideal")),
        _row(_BASELINE, headspace.step_us, longest, preparing, None),
        _row(_COLD, headspace.cold_us, longest, fetching, headspace.reasons.get("cold")),
    )
    columns = (Column(""), *numbers("step time", "adds"), Column("what it is", "wrap"))
    return Section(
        "What data loading costs per step",
        columns,
        rows,
        tuple(filter(None, _lines(headspace))),
        wide=True,
        result=_RESULT,
    )


def _bar(line: Row) -> BarRow:
    """A line of the table as a bar with its figures above and its meaning below."""
    label, time, adds, meaning = line.cells
    figures = " · ".join(filter(None, (time, f"adds {adds}" if adds[:1].isdigit() else adds)))
    return BarRow(label, figures, meaning, [Segment(label, line.bar or 0, line.colour, time)])


def _row(part: Part, us: float | None, longest: float, adds: str, reason: str | None) -> Row:
    if us is None:
        why = f"{NOT_MEASURABLE}: {plain(reason)}" if reason else NOT_MEASURABLE
        return Row((part.label, "–", "", why), bar=0.0, colour=part.colour)
    return Row((part.label, duration(us), adds, part.meaning), bar=us / longest, colour=part.colour)


def _adds(headspace: Headspace, name: str, us: float | None, share: float | None) -> str:
    if us is None:
        return ""
    if name in headspace.certain:
        return f"{duration(us)} ({percent(share)})"
    verdict = headspace.verdicts.get(name)
    return "nothing measurable" if verdict is not None and is_decided(verdict) else "undecided"


def _lines(headspace: Headspace) -> list[str]:
    is_certain = is_decided(headspace.verdicts.get("ideal", "not comparable"))
    return [
        "First row: the step when loading costs nothing."
        + (" No change to the DataLoader can beat that." if is_certain else ""),
        _COST if "ideal" in headspace.certain else "",
    ]


def _to_do(headspace: Headspace) -> Section | None:
    """The advice that follows from the rows; None if nothing was measured."""
    if headspace.ceiling is None:
        return None
    if excludes_gain(headspace):
        return Section("What to do", lines=(_LEAVE_IT,))
    if "ideal" not in headspace.certain:
        return Section("What to do", lines=(_AGAIN,))
    return Section("What to do", lines=(_PREPARE,) + ((_READ,) if "cold" in headspace.certain else ()))


def _notes(headspace: Headspace) -> Section | None:
    lines = tuple(plain(note) for note in headspace.notes)
    return Section("Beside that", lines=lines, aside=True) if lines else None
