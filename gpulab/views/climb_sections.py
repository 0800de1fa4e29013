"""What a climb says, in order, as plain strings, with the ladder of its tries."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from msgspec.structs import replace

from gpulab.analysis.facts import Facts
from gpulab.diagnosis.catalogue import kind_of
from gpulab.diagnosis.diagnose import Headline
from gpulab.diagnosis.finding import Finding
from gpulab.formatting import decapitalized, duration, duration_range, factor, gib, percent, plural, speed_within
from gpulab.tuning.bench import memory_peak_bytes
from gpulab.tuning.climb_policy import KEEPING
from gpulab.tuning.climb_record import Attempt, Climb
from gpulab.tuning.compare.cost import cost_of, cost_sentence, pays
from gpulab.tuning.compare.headline import comparison_headline
from gpulab.tuning.record import Side
from gpulab.views.comparison_sections import checks, device_of, how_measured, keep
from gpulab.views.layout import PAIRS, Column, Section, leading, numbers, present
from gpulab.views.wording import plain

_OF_EACH = "how busy, how long it waits, memory and loss of each"
_ENDINGS = {
    "nothing left": "There is no other setting to try",
    "rungs": "As many settings were tried as were asked for (--rungs)",
    "stopped": "The climb was stopped",
    "error": "An exception ended the climb",
}


def opening(climb: Climb) -> str:
    """What was tried, where and how long it took: one line."""
    return " · ".join(["climb", _tries(climb), device_of((climb.baseline,)), duration(climb.seconds * 1e6)])


def headline(climb: Climb) -> Headline:
    """How much faster all kept settings are together; that nothing helped, where nothing did."""
    kept, ending = climb.kept, f"{ended_words(climb)}."
    named = _listed([f"{plain(name)}={plain(value)}" for name, value in kept.items()])
    count = sum(rung.kept for rung in climb.rungs)
    tries = f"{count} of {_tries(climb)} {'was' if count == 1 else 'were'} kept."
    if not kept:
        return _nothing_kept(climb, ending)
    whole = climb.whole
    if whole is None:
        ratios = [rung.comparison and rung.comparison.times_as_fast for rung in climb.rungs if rung.kept]
        gains = _listed([f"{factor(times)}×" if times else "unknown" for times in ratios])
        sentence = f"{named}: faster when tried, but not yet confirmed against the baseline."
        return Headline("climbed", sentence, f"Speedups, one on top of the other: {gains}. {ending}", "notice")
    if whole.verdict != "faster" or whole.ratio is None or whole.interval is None:
        return Headline("not_faster", comparison_headline(whole).sentence, f"{tries} {ending}", "unknown")
    middle, around = speed_within(whole.ratio, whole.interval)
    moved = _loss_moved(climb)
    if moved:
        sentence = f"{middle}× speedup with {named}, but the loss is no longer the same."
        return Headline("loss_moved", sentence, f"{moved}. {tries} {ending}", "notice")
    sentence = f"Faster: {middle}× speedup with {named} (95 % interval {around}).{cost_sentence(whole)}"
    closing = f"Final check per {whole.unit}: {plural(whole.pairs, 'pair')} of blocks vs. baseline"
    evidence = f"{closing}. {tries} {ending}"
    return Headline("climbed", sentence, evidence, "good" if pays(whole) else "unknown")


def _nothing_kept(climb: Climb, ending: str) -> Headline:
    doubtful = [rung for rung in climb.rungs if rung.outcome == "unsure"]
    if doubtful and climb.ended not in ("stopped", "error"):
        why = "; ".join(f"{plain(rung.label)}: {plain(rung.words)}" for rung in doubtful) + "."
        cure = "Climb again on a quiet machine, or with a larger --budget."
        return Headline("unsure", "Undecided: nothing made this cell faster for certain.", f"{why} {cure}", "unknown")
    if climb.ended in ("stopped", "error", "budget", "rungs"):
        count = f"After {_tries(climb)} nothing made the cell faster for certain."
        return Headline("nothing_kept", count if climb.rungs else "Nothing was tried.", ending, "unknown")
    left = first_left(climb)
    sentence = "No setting that gpulab tried makes this cell faster."
    if left is None:
        first = climb.diagnosis.first if climb.diagnosis is not None else None
        if first is not None and kind_of(first.key).role == "open question":
            sentence = "Where this cell spends its time is unknown, so there is nothing to try."
            return Headline(first.key, sentence, plain(first.summary), "unknown")
        return Headline("nothing_kept", sentence, plain(first.summary) if first is not None else "", "good")
    return Headline("nothing_kept", sentence, f"What is left: {decapitalized(plain(left.summary))}", "notice")


def ended_words(climb: Climb) -> str:
    """Why it ended, without a full stop."""
    if climb.ended == "budget":
        return f"The budget of {climb.bounds.budget_s:g} s is spent (--budget)"
    return _ENDINGS[climb.ended]


def first_left(climb: Climb) -> Finding | None:
    """The costliest cause at the top of the ladder."""
    findings = climb.diagnosis.findings if climb.diagnosis is not None else ()
    return next((f for f in findings if not kind_of(f.key).is_verdict), None)


def sections(climb: Climb) -> tuple[Section, ...]:
    """Every section in reading order."""
    if climb.baseline is None or climb.baseline.facts is None:
        return present(kept_edit(climb))
    skips = [(plain(s.label), plain(s.why)) for s in climb.skips]
    return present(
        leading(replace(ladder(climb), pictured=True, result=_OF_EACH)),
        _left(climb),
        Section.table("Not tried, or not further", PAIRS, skips, wide=True) if skips else None,
        checks((climb.top,)) if climb.kept and climb.top is not None else None,
        _measured(climb),
        kept_edit(climb),
    )


def kept_edit(climb: Climb) -> Section | None:
    """The edit of the cell that keeps all kept settings; None where they bring nothing together, or move the loss."""
    useless = (climb.whole is not None and climb.whole.verdict != "faster") or bool(_loss_moved(climb))
    cost = cost_of(climb.whole) if climb.whole is not None else None
    return keep(climb.top, cost) if climb.kept and not useless else None


def _loss_moved(climb: Climb) -> str:
    """How the loss of all kept settings together differs, though each alone left it the same; empty where it may."""
    loss = climb.whole.loss if climb.whole is not None else None
    if loss is None or loss.verdict in (*KEEPING, "not measurable") or set(climb.kept) & set(climb.bounds.allow):
        return ""
    return plain(loss.words).rstrip(".")


NONE = "–"
_NOT_RUN = (NONE, NONE, NONE, NONE)


def _known(value: float | None, text: Callable[[float], str]) -> str:
    return NONE if value is None else text(value)


def _left(climb: Climb) -> Section | None:
    """What the diagnosis says of the cell with all that was kept."""
    if climb.diagnosis is None:
        return None
    causes = [f for f in climb.diagnosis.findings if not kind_of(f.key).is_verdict]
    title = "What is left"
    if not causes:
        return Section(title, lines=(plain(climb.diagnosis.first.summary),), wide=True)
    cells = []
    for f in causes:
        cure = " ".join(filter(None, (f.cure, f"({f.source_line})" if f.source_line else "")))
        cells.append((plain(f.summary), _known(f.recoverable_us_per_step, duration), plain(cure) or NONE))
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
        f"{ended_words(climb)}.",
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


def ladder(climb: Climb) -> Section:
    """From the baseline on."""
    assert climb.baseline is not None
    first = climb.rungs[0].comparison if climb.rungs else None
    baseline = climb.baseline if first is None else first.a
    ran = [baseline, *(rung.comparison.b for rung in climb.rungs if rung.comparison is not None)]
    per_sample = all(_us(side, per_sample=True) for side in ran if _us(side, per_sample=False))
    step = _common_loss(ran)
    time = _known(_us(baseline, per_sample=per_sample), duration)
    rows = [("baseline", time, *_figures(baseline, step), NONE, "reference")]
    for rung in climb.rungs:
        label, time, figures, gain = plain(rung.label), NONE, _NOT_RUN, NONE
        if (comparison := rung.comparison) is not None:
            figures = _figures(comparison.b, step)
            if comparison.evidence == "interleaved" and comparison.interval and comparison.times_as_fast:
                gain = factor(comparison.times_as_fast)
                before, after = (_us(side, per_sample=per_sample) for side in (comparison.a, comparison.b))
                if before and after:  # of the same blocks
                    time = duration_range(before, after).replace("–", " → ")
        rows.append((label if rung.back else f"+ {label}", time, *figures, gain, result(rung)))
    time_title = "a sample" if per_sample else "a step"
    figures_titles = numbers(time_title, "busy", "data wait", "memory", "loss", "speedup")
    columns = (Column("setting"), *figures_titles, Column("", "wrap"))
    return Section.table("The ladder", columns, rows, _notes(climb.baseline, step), wide=True)


def result(rung: Attempt) -> str:
    """Whether it was kept, why, and how sure the two gains are."""
    comparison, prediction = rung.comparison, rung.prediction
    ranges = []
    if comparison is not None and comparison.evidence == "interleaved" and comparison.interval is not None:
        ranges.append(f"measured {_range(comparison.interval)}×")
    if prediction is not None and prediction.interval is not None and prediction.interval[0] > 0:
        ranges.append(f"predicted {_range(prediction.interval)}×")
    words = plain(f"{'kept' if rung.kept else 'not kept'}: {rung.words}")
    return f"{words} ({', '.join(ranges)})" if ranges else words


def _range(interval: tuple[float, float]) -> str:
    """As times as fast, with as many decimals as keep both ends apart."""
    low, high = interval
    return speed_within((low * high) ** 0.5, interval)[1]


def origin(rung: Attempt) -> str:
    """What stands below a try where it is a row among others."""
    return f"rung {rung.number} of a climb, {result(rung)}"


def busy_fraction(facts: Facts | None) -> float | None:
    """Share of the typical step in which the device works; of a CPU, in which it computes for the training."""
    if facts is None or facts.breakdown is None or facts.shares is None:
        return None
    return facts.shares.of("compute") if facts.breakdown.busy_fraction is None else 1 - facts.shares.idle


def data_wait_fraction(facts: Facts | None) -> float | None:
    """Share of the typical step in which it waits for the next batch; on a GPU only what its work does not hide."""
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
    """Of its profiled run."""
    facts = side.facts if side.facts is not None and side.facts.few_steps is None else None
    loss = side.losses[step] if step is not None and step < len(side.losses) else None
    return (
        _known(busy_fraction(facts), percent),
        _known(data_wait_fraction(facts), percent),
        _known(memory_peak_bytes(side.facts), gib),
        _known(loss, _loss_text),
    )


def _loss_text(loss: float) -> str:
    return f"{loss:.4g}" if math.isfinite(loss) else "NaN" if math.isnan(loss) else "infinite"


def _us(side: Side, *, per_sample: bool) -> float | None:
    """By its blocks; of a side without any, by its run with the trace."""
    facts = side.facts
    blocks = side.us_per_sample if per_sample else side.us_per_step
    if blocks is not None or facts is None or side.blocks:
        return blocks
    if per_sample:
        return 1e6 / facts.samples_per_s if facts.samples_per_s else None
    return facts.step_us.median if facts.step_us is not None else None


def _common_loss(sides: Sequence[Side]) -> int | None:
    """The last step of which all sides that ran have a loss; the very last of a run may have been cut off."""
    last = min((len(side.losses) for side in sides if side.losses), default=0) - 2
    return last if last >= 0 else None
