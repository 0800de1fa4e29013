"""A climb as text, page and JSON (docs/climb-json.md), and its ladder while it still runs."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from markupsafe import Markup
from msgspec.structs import replace

from gpulab.analysis.facts import Facts
from gpulab.diagnosis.catalogue import kind_of
from gpulab.diagnosis.finding import Finding
from gpulab.diagnosis.headline import Headline
from gpulab.formatting import (
    decapitalized,
    duration,
    duration_range,
    factor,
    gib,
    percent,
    picked,
    plural,
    speed_within,
)
from gpulab.options import STOPPED_BY
from gpulab.prediction.prediction import Prediction
from gpulab.tuning.bench import Bench, Row, memory_peak_bytes, with_run
from gpulab.tuning.climb_policy import KEEPING
from gpulab.tuning.climb_record import Attempt, Climb
from gpulab.tuning.compare.cost import cost_of, cost_sentence, pays
from gpulab.tuning.compare.headline import comparison_headline
from gpulab.tuning.record import Side
from gpulab.tuning.schedule import Progress
from gpulab.views import bench, page
from gpulab.views.comparison import comparison_document
from gpulab.views.comparison_sections import checks, device_of, how_measured, keep
from gpulab.views.layout import PAIRS, Column, Section, leading, numbers, present
from gpulab.views.progress import Stoppable, words
from gpulab.views.view import View
from gpulab.views.wording import DASH, or_dash, plain

SCHEMA = 1
_NOT_RUN = (DASH, DASH, DASH, DASH)
_OF_EACH = "how busy, how long it waits, memory and loss of each"
_ENDINGS = {
    "nothing left": "There is no other setting to try",
    "rungs": "As many settings were tried as were asked for (--rungs)",
    "stopped": "The climb was stopped",
    "error": "An exception ended the climb",
}


@dataclass(frozen=True, slots=True, repr=False)
class Climbed(View):
    """A climb with its views."""

    result: Climb

    @property
    def kept(self) -> dict[str, str]:
        """The settings that were kept."""
        return self.result.kept

    @property
    def rungs(self) -> tuple[Attempt, ...]:
        """All tries, in order."""
        return self.result.rungs

    @property
    def ratio(self) -> float | None:
        """Time with all kept settings over time of the baseline: below 1 is faster; None if they were not compared."""
        return self.result.whole.ratio if self.result.whole is not None else None

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 95 % interval of the ratio."""
        return self.result.whole.interval if self.result.whole is not None else None

    @property
    def edit(self) -> str:
        """A diff of the cell or a snippet that makes all kept settings permanent; empty if nothing was kept."""
        keep = _edit(self.result)
        return keep.code if keep is not None else ""

    @property
    def headline(self) -> Headline:
        """The sentence, its evidence and its level."""
        return _headline(self.result)

    def _figures(self) -> dict[str, object]:
        climb, edit = self.result, _edit(self.result)
        return {
            "schema": SCHEMA,
            "kind": "climb",
            "headline": self.headline,
            **picked(climb, "ended", "seconds", "kept"),
            "edit": edit.code if edit is not None else None,
            "edit_is_diff": edit is not None and climb.top is not None and climb.top.edit_is_diff,
            "written": _side(climb.baseline),
            "rungs": [_rung(rung) for rung in climb.rungs],
            "whole": comparison_document(climb.whole) if climb.whole is not None else None,
            "left": [_finding(f) for f in climb.diagnosis.findings] if climb.diagnosis is not None else [],
            "not_tried": [{"setting": p.label, "why": p.why} for p in climb.skips],
        }

    def __repr__(self) -> str:
        return f"<climb: {self.headline.sentence}>"

    def _opening(self) -> str:
        climb = self.result
        return " · ".join(["climb", _tries(climb), device_of((climb.baseline,)), duration(climb.seconds * 1e6)])

    def _more(self) -> str:
        return self._more_in_python("climbs[-1]")

    def _picture(self) -> Markup:
        return picture_of(self.result)

    def _sections(self) -> tuple[Section, ...]:
        climb, edit = self.result, _edit(self.result)
        if climb.baseline is None or climb.baseline.facts is None:
            return present(edit)
        skips = [(plain(p.label), plain(p.why)) for p in climb.skips]
        return present(
            leading(replace(_ladder(climb), pictured=True, result=_OF_EACH)),
            _remaining_causes(climb),
            Section.table("Not tried, or not further", PAIRS, skips, wide=True) if skips else None,
            checks((climb.top,)) if climb.kept and climb.top is not None else None,
            _measured(climb),
            edit,
        )


def _headline(climb: Climb) -> Headline:
    """How much faster all kept settings are together, or that nothing helped."""
    settings, ending = climb.kept, f"{_ended_words(climb)}."
    words = _listed([f"{plain(name)}={plain(value)}" for name, value in settings.items()])
    count = sum(rung.kept for rung in climb.rungs)
    tries = f"{count} of {_tries(climb)} {'was' if count == 1 else 'were'} kept."
    if not settings:
        return _no_gain(climb, ending)
    whole = climb.whole
    if whole is None:
        ratios = [rung.comparison and rung.comparison.times_as_fast for rung in climb.rungs if rung.kept]
        gains = _listed([f"{factor(times)}×" if times else "unknown" for times in ratios])
        sentence = f"{words}: faster when tried, but not yet confirmed against the baseline."
        return Headline("climbed", sentence, f"Speedups, one on top of the other: {gains}. {ending}", "notice")
    if whole.verdict != "faster" or whole.ratio is None or whole.interval is None:
        return Headline("not_faster", comparison_headline(whole).sentence, f"{tries} {ending}", "unknown")
    middle, around = speed_within(whole.ratio, whole.interval)
    moved = _loss_moved(climb)
    if moved:
        sentence = f"{middle}× speedup with {words}, but the loss is no longer the same."
        return Headline("loss_moved", sentence, f"{moved}. {tries} {ending}", "notice")
    sentence = f"Faster: {middle}× speedup with {words} (95 % interval {around}).{cost_sentence(whole)}"
    closing = f"Final check per {whole.unit}: {plural(whole.pairs, 'pair')} of blocks vs. baseline"
    evidence = f"{closing}. {tries} {ending}"
    return Headline("climbed", sentence, evidence, "good" if pays(whole) else "unknown")


def _no_gain(climb: Climb, ending: str) -> Headline:
    doubtful = [rung for rung in climb.rungs if rung.outcome == "unsure"]
    if doubtful and climb.ended not in ("stopped", "error"):
        why = "; ".join(f"{plain(rung.label)}: {plain(rung.words)}" for rung in doubtful) + "."
        cure = "Climb again on a quiet machine, or with a larger --budget."
        return Headline("unsure", "Undecided: nothing made this cell faster for certain.", f"{why} {cure}", "unknown")
    if climb.ended in ("stopped", "error", "budget", "rungs"):
        count = f"After {_tries(climb)} nothing made the cell faster for certain."
        return Headline("nothing_kept", count if climb.rungs else "Nothing was tried.", ending, "unknown")
    cause = next(iter(_causes(climb)), None)
    sentence = "No setting that gpulab tried makes this cell faster."
    if cause is None:
        first = climb.diagnosis.first if climb.diagnosis is not None else None
        if first is not None and kind_of(first.key).role == "open question":
            sentence = "Where this cell spends its time is unknown, so there is nothing to try."
            return Headline(first.key, sentence, plain(first.summary), "unknown")
        return Headline("nothing_kept", sentence, plain(first.summary) if first is not None else "", "good")
    return Headline("nothing_kept", sentence, f"What is left: {decapitalized(plain(cause.summary))}", "notice")


def _causes(climb: Climb) -> list[Finding]:
    """The causes that remain with all kept settings, the costliest first."""
    findings = climb.diagnosis.findings if climb.diagnosis is not None else ()
    return [f for f in findings if not kind_of(f.key).is_verdict]


def _ended_words(climb: Climb) -> str:
    """Why the climb ended, without a full stop."""
    if climb.ended == "budget":
        return f"The budget of {climb.bounds.budget_s:g} s is spent (--budget)"
    return _ENDINGS[climb.ended]


def _edit(climb: Climb) -> Section | None:
    """The edit that makes all kept settings permanent; None if together they gain nothing or change the loss."""
    useless = (climb.whole is not None and climb.whole.verdict != "faster") or bool(_loss_moved(climb))
    cost = cost_of(climb.whole) if climb.whole is not None else None
    return keep(climb.top, cost) if climb.kept and not useless else None


def _loss_moved(climb: Climb) -> str:
    """How all kept settings together change the loss, though none alone did; empty if such a change is allowed."""
    loss = climb.whole.loss if climb.whole is not None else None
    if loss is None or loss.verdict in (*KEEPING, "not measurable") or set(climb.kept) & set(climb.bounds.allow):
        return ""
    return plain(loss.words).rstrip(".")


def _remaining_causes(climb: Climb) -> Section | None:
    """The diagnosis of the cell with all kept settings."""
    if climb.diagnosis is None:
        return None
    causes, title = _causes(climb), "What is left"
    if not causes:
        return Section(title, lines=(plain(climb.diagnosis.first.summary),), wide=True)
    cells = []
    for f in causes:
        cure = " ".join(filter(None, (f.cure, f"({f.source_line})" if f.source_line else "")))
        cells.append((plain(f.summary), or_dash(f.recoverable_us_per_step, duration), plain(cure) or DASH))
    columns = (Column("", "wrap"), *numbers("potential saving"), Column("fix by hand", "wrap"))
    lines = ("Potential saving: at most, per step.",)
    return Section.table(title, columns, cells, lines, wide=True, result=plain(causes[0].summary).rstrip("."))


def _measured(climb: Climb) -> Section:
    whole = climb.whole
    rows = how_measured(whole) if whole is not None else []
    lines = [
        "Each setting ran against all that was kept before, in short interleaved blocks. It is kept only if the whole "
        "95 % interval lies beyond the noise and the gain is at least 2 %. Its loss may move no further than with "
        "another seed.",
        f"{_ended_words(climb)}.",
    ]
    if whole is not None and whole.loss is not None:
        lines.append(f"Loss of all kept settings together: {whole.loss.verdict}. {plain(whole.loss.words)}.")
    notes = dict.fromkeys(plain(note) for note in (whole.notes if whole is not None else ()))
    return Section.table("How it was measured", PAIRS if rows else (), rows, (*lines, *notes), aside=True)


def _tries(climb: Climb) -> str:
    count = len(climb.rungs)
    return f"{count} {'try' if count == 1 else 'tries'}"


def _listed(texts: Sequence[str]) -> str:
    return f"{', '.join(texts[:-1])} and {texts[-1]}" if len(texts) > 1 else "".join(texts)


# the ladder


def _ladder(climb: Climb) -> Section:
    """A row for the baseline and for each try, in order."""
    assert climb.baseline is not None
    first = climb.rungs[0].comparison if climb.rungs else None
    baseline = climb.baseline if first is None else first.a
    ran = [baseline, *(rung.comparison.b for rung in climb.rungs if rung.comparison is not None)]
    per_sample = all(_us(side, per_sample=True) for side in ran if _us(side, per_sample=False))
    step = _common_loss(ran)
    time = or_dash(_us(baseline, per_sample=per_sample), duration)
    rows = [("baseline", time, *_figures(baseline, step), DASH, "reference")]
    for rung in climb.rungs:
        label, time, figures, gain = plain(rung.label), DASH, _NOT_RUN, DASH
        if (comparison := rung.comparison) is not None:
            figures = _figures(comparison.b, step)
            if comparison.evidence == "interleaved" and comparison.interval and comparison.times_as_fast:
                gain = factor(comparison.times_as_fast)
                before, after = (_us(side, per_sample=per_sample) for side in (comparison.a, comparison.b))
                if before and after:  # from the same blocks
                    time = duration_range(before, after).replace("–", " → ")
        rows.append((label if rung.back else f"+ {label}", time, *figures, gain, result(rung)))
    time_title = "a sample" if per_sample else "a step"
    figures_titles = numbers(time_title, "busy", "data wait", "memory", "loss", "speedup")
    columns = (Column("setting"), *figures_titles, Column("", "wrap"))
    return Section.table("The ladder", columns, rows, _notes(climb.baseline, step), wide=True)


def result(rung: Attempt) -> str:
    """Whether the setting was kept, why, and how certain the two gains are."""
    comparison, prediction = rung.comparison, rung.prediction
    ranges = []
    if comparison is not None and comparison.evidence == "interleaved" and comparison.interval is not None:
        ranges.append(f"measured {_range(comparison.interval)}×")
    if prediction is not None and prediction.interval is not None and prediction.interval[0] > 0:
        ranges.append(f"predicted {_range(prediction.interval)}×")
    words = plain(f"{'kept' if rung.kept else 'not kept'}: {rung.words}")
    return f"{words} ({', '.join(ranges)})" if ranges else words


def _range(interval: tuple[float, float]) -> str:
    """The interval as a speedup, with enough decimals to keep both ends apart."""
    low, high = interval
    return speed_within((low * high) ** 0.5, interval)[1]


def origin(rung: Attempt) -> str:
    """The note of a try that was taken from a row of a bench."""
    return f"rung {rung.number} of a climb, {result(rung)}"


def busy_fraction(facts: Facts | None) -> float | None:
    """Share of the typical step in which the device works; for a CPU, in which it computes for the training."""
    if facts is None or facts.breakdown is None or facts.shares is None:
        return None
    return facts.shares.of("compute") if facts.breakdown.busy_fraction is None else 1 - facts.shares.idle


def data_wait_fraction(facts: Facts | None) -> float | None:
    """Share of the typical step spent waiting for the next batch; on a GPU, only the wait that work does not hide."""
    shares = facts.shares if facts is not None else None
    return None if shares is None else shares.share["data_wait"]


def _notes(baseline: Side, step: int | None) -> tuple[str, ...]:
    on_gpu = baseline.facts is not None and baseline.facts.run.device.kind == "cuda"
    busy = "in which the GPU works" if on_gpu else "that is spent on computing"
    notes = (
        "Each line adds its own setting to everything kept so far. Its times: without and with that setting, in "
        "interleaved blocks. In brackets: the 95 % interval of the speedup, and the predicted one.",
        f"The rest is from one traced run each. Busy: share of the step {busy}; data wait: share of the step; "
        "memory: the peak.",
    )
    return notes if step is None else (*notes, f"Loss: that of step {step + 1}, from the same start.")


def _figures(side: Side, step: int | None) -> tuple[str, str, str, str]:
    """Figures of the side's traced run: busy, data wait, memory, loss."""
    facts = side.facts if side.facts is not None and side.facts.few_steps is None else None
    loss = side.losses[step] if step is not None and step < len(side.losses) else None
    return (
        or_dash(busy_fraction(facts), percent),
        or_dash(data_wait_fraction(facts), percent),
        or_dash(memory_peak_bytes(side.facts), gib),
        or_dash(loss, _loss_text),
    )


def _loss_text(loss: float) -> str:
    return f"{loss:.4g}" if math.isfinite(loss) else "NaN" if math.isnan(loss) else "infinite"


def _us(side: Side, *, per_sample: bool) -> float | None:
    """The time of a step or sample in the side's blocks; without blocks, in its traced run."""
    facts = side.facts
    blocks = side.us_per_sample if per_sample else side.us_per_step
    if blocks is not None or facts is None or side.blocks:
        return blocks
    if per_sample:
        return 1e6 / facts.samples_per_s if facts.samples_per_s else None
    return facts.step_us.median if facts.step_us is not None else None


def _common_loss(sides: Sequence[Side]) -> int | None:
    """The last step for which all sides that ran have a loss: the very last loss of a run may be missing."""
    last = min((len(side.losses) for side in sides if side.losses), default=0) - 2
    return last if last >= 0 else None


# the JSON document


def _rung(rung: Attempt) -> dict[str, object]:
    comparison = rung.comparison
    return {
        "number": rung.number,
        "settings": dict(rung.settings),
        "back": list(rung.back),
        "finding": rung.finding.key if rung.finding is not None else "screening",
        **picked(rung, "kept", "outcome", "words"),
        "prediction": _prediction(rung.prediction),
        **picked(comparison, "verdict", "times_as_fast", "times_as_fast_interval", "ratio", "interval"),
        "us_per_step_before": comparison.a.us_per_step if comparison is not None else None,
        "us_per_sample_before": comparison.a.us_per_sample if comparison is not None else None,
        "loss": rung.loss.verdict if rung.loss is not None else None,
        "seconds": rung.seconds,
        **_side(comparison.b if comparison is not None else None),
    }


def _side(side: Side | None) -> dict[str, object]:
    facts = side.facts if side is not None else None
    return {
        "run": facts.run.id if facts is not None else None,
        **picked(side, "us_per_step", "us_per_sample"),
        "busy_fraction": busy_fraction(facts),
        "data_wait_fraction": data_wait_fraction(facts),
        "memory_bytes": memory_peak_bytes(facts),
    }


def _prediction(prediction: Prediction | None) -> dict[str, object] | None:
    if prediction is None:
        return None
    return {**picked(prediction, "ratio", "interval"), "refused": prediction.refused or None}


def _finding(finding: Finding) -> dict[str, object]:
    return {
        **picked(finding, "key", "summary", "recoverable_us_per_step"),
        "cure": finding.cure or None,
        "source_line": finding.source_line or None,
    }


# while it runs

HINT = "End the climb at the next step; what was kept so far is shown"


class Climbing(Stoppable):
    """Shows the ladder while the `with` block runs, then the result in its place."""

    def __init__(self, stop: Callable[[], None], *, show: bool = True) -> None:
        super().__init__(stop, HINT, show=show)
        self._climb: Climb | None = None
        self._reported_rungs = 0

    def show_ladder(self, climb: Climb) -> None:
        """Show the ladder so far; in a terminal a line for each new try."""
        if not self._show or climb.baseline is None:
            return
        with suppress(Exception):  # a view that fails must not end the climb
            self._climb = climb
            if self._output:
                self._draw_ladder("…")
                return
            self._line.clear()
            for rung in climb.rungs[self._reported_rungs :]:
                sys.stdout.write(f"gpulab: {rung.label}: {result(rung)}\n")
            self._reported_rungs = len(climb.rungs)

    def _draw(self, progress: Progress) -> None:
        self._draw_ladder(words(progress))

    def _draw_ladder(self, line: str) -> None:
        climb = self._climb
        what = f"Climbing, try {len(climb.rungs) + 1}: {line}" if climb else f"Measuring the baseline: {line}"
        picture = picture_of(climb) if climb else Markup()
        fragment = page.fragment(Headline("climbing", what, STOPPED_BY, "unknown"), (), picture)
        self._output.show({"text/html": fragment, "text/plain": what})


def picture_of(climb: Climb) -> Markup:
    """Each try as a row, as on the bench; empty until the baseline is measured."""
    if climb.baseline is None or climb.baseline.facts is None:
        return Markup()
    rows = Bench("", (with_run(Row("0"), climb.baseline),))
    for rung in climb.rungs:
        rows = rows.with_attempt(rung, str(rung.number), origin(rung))
    return bench.picture(bench.ordered(rows.with_climb(climb)))
