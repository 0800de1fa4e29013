"""The climb: which setting is tried next, what is kept, how it ends, what is shown; scripted and real."""

from __future__ import annotations

import functools
import json
import math
import re
import signal
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

import gpulab
from gpulab.api import climb
from gpulab.api.climb import conduct, parsed
from gpulab.diagnosis.finding import Diagnosis, Finding
from gpulab.errors import UsageError
from gpulab.knobs.variables import Plain
from gpulab.prediction.prediction import Prediction
from gpulab.run import Memory
from gpulab.tuning.climb.acceptance import broken_loss, judged
from gpulab.tuning.climb.climb import Climber
from gpulab.tuning.climb.policy import Candidate, ClimbState, Tried, candidates, promising, together, ways_back
from gpulab.tuning.climb.record import Bounds
from gpulab.tuning.compare.blocks import compare_blocks
from gpulab.tuning.compare.sequential import compare_sequential
from gpulab.tuning.function_code import TextCode
from gpulab.tuning.plan import Plan
from gpulab.tuning.record import Experiment, LossComparison
from gpulab.views.climb.climb import Climbed
from gpulab.views.climb.sections import headline, kept_edit
from tests.support.comparisons import PARTS_A, alike, as_written, blocks, facts_with, faster, loss_curve
from tests.support.scripted_climb import DATASET, HEALTHY, SCENE, Machine, Script, finding, nothing_foretold

# -- what is tried next ------------------------------------------------------------------------------------------------


def state(kept: Mapping[str, Plain] | None = None, tried: tuple[Tried, ...] = (), **more: Any) -> ClimbState:
    return ClimbState(facts_with(38.0, PARTS_A), SCENE, kept or {}, tried, **{"cores": 4.0, **more})


def able(findings: list[Finding], on: ClimbState, predict: Any = nothing_foretold) -> list[dict[str, Plain]]:
    return [dict(c.settings) for c in candidates(Diagnosis(tuple(findings)), on, predict)[0]]


def passed(findings: list[Finding], on: ClimbState) -> dict[str, str]:
    return {p.label: p.why for p in candidates(Diagnosis(tuple(findings)), on, nothing_foretold)[1]}


def test_the_cure_that_gives_back_most_comes_first() -> None:
    found = [finding("data_starved", 500.0, workers="2"), finding("unfused_optimizer", 900.0, fused_optimizer="on")]
    assert able(found, state()) == [{"fused_optimizer": True}, {"workers": 2}]


def test_a_prediction_outranks_the_upper_bound() -> None:
    found = [finding("data_starved", 500.0, workers="2"), finding("unfused_optimizer", 900.0, fused_optimizer="on")]

    def predict(settings: Mapping[str, str]) -> Prediction:
        return Prediction(dict(settings), 0.5, (0.4, 0.6), "") if "workers" in settings else nothing_foretold(settings)

    assert able(found, state(), predict)[0] == {"workers": 2}


def test_what_is_predicted_to_bring_nothing_is_passed_over() -> None:
    found = [finding("unfused_optimizer", 900.0, fused_optimizer="on")]

    def predict(settings: Mapping[str, str]) -> Prediction:
        return Prediction(dict(settings), 1.0, (0.99, 1.01), "")

    assert able(found, state(), predict) == []
    assert "bring nothing" in candidates(Diagnosis(tuple(found)), state(), predict)[1][0].why


def test_a_healthy_cell_has_nothing_to_try() -> None:
    assert able(list(HEALTHY.findings), state()) == []


def test_what_is_set_already_is_not_tried() -> None:
    found = [finding("data_starved", 500.0, workers="2")]
    assert {"workers": 2} not in able(found, state({"workers": 2}))


def test_a_knob_that_was_left_out_is_named() -> None:
    found = [finding("data_starved", 500.0, workers="2")]
    on = state(without=frozenset({"workers"}))
    assert all("workers" not in settings for settings in able(found, on))
    assert "--without" in passed(found, on)["workers=2"]


@pytest.mark.parametrize(("knob", "value"), [("batch_size", "64"), ("accumulate", "2")])
def test_what_changes_the_algorithm_is_tried_only_where_allowed(knob: str, value: str) -> None:
    found = [finding("small_batch", 500.0, **{knob: value})]
    assert able(found, state()) == []
    assert f"--allow {knob}" in passed(found, state())[f"{knob}={value}"]
    assert able(found, state(allow=frozenset({knob}))) == [{knob: int(value)}]


def test_a_knob_that_refuses_says_why() -> None:
    found = [finding("data_starved", 500.0, prefetch="4")]
    on = state(without=frozenset({"workers", "cache"}))
    assert able(found, on) == []
    assert "workers" in passed(found, on)["prefetch=4"]
    assert {"prefetch": 4} in able(found, replace(on, kept={"workers": 2}))


def test_a_value_that_cannot_be_is_passed_over() -> None:
    found = [finding("data_starved", 500.0, workers="many")]
    assert "whole number" in passed(found, state())["workers=many"]


def test_without_a_named_cure_the_formula_tells_the_workers() -> None:
    """38 ms a step, 60 % of it waiting: ⌈22.8 / 15.2⌉ = 2 workers, then 3, then 4; five are one more than the cores."""
    found, tried = [finding("data_starved")], list[Tried]()
    seen, kept = [], dict[str, Plain]()
    for _ in range(5):
        named = [s["workers"] for s in able(found, state(kept, tuple(tried))) if "workers" in s]
        if not named:
            break
        seen.append(named[0])
        tried.append(Tried({"workers": named[0]}, dict(kept), "kept"))
        kept = {"workers": named[0]}
    # with workers the step still waits as long in these facts: each time W·T_load / T_compute workers are needed
    assert seen[0] == 2 and seen == sorted(n for n in seen if isinstance(n, int)) and seen[-1] == 5


def test_the_way_up_ends_where_a_number_was_not_kept() -> None:
    found = [finding("data_starved")]
    lost = (Tried({"workers": 2}, {}, "no gain"),)
    values = [s["workers"] for s in able(found, state(tried=lost)) if "workers" in s]
    assert all(isinstance(v, int) and v < 2 for v in values)


def test_other_knobs_come_when_the_named_ones_are_spent() -> None:
    found = [finding("data_starved", 500.0, workers="2")]
    assert able(found, state()) == [{"workers": 2}]
    spent = (Tried({"workers": 2}, {}, "slower"),)
    assert {"cache": True} in able(found, state(tried=spent))


def test_a_useless_knob_is_tried_again_after_another_was_kept() -> None:
    found = [finding("unfused_optimizer", 900.0, fused_optimizer="on")]
    lost = (Tried({"fused_optimizer": True}, {}, "no gain"),)
    assert able(found, state(tried=lost)) == []
    assert able(found, state({"workers": 2}, lost)) == [{"fused_optimizer": True}]
    assert able(found, state({"workers": 2}, (replace(lost[0], outcome="loss broken"),))) == []


def test_a_cause_hidden_behind_another_waits() -> None:
    behind = replace(finding("small_batch", 900.0, batch_size="64"), only_after=("data_starved",))
    found = [finding("data_starved", 500.0, workers="2"), behind]
    assert able(found, state(allow=frozenset({"batch_size"}))) == [{"workers": 2}]


def test_a_postponed_knob_is_tried_when_the_first_cause_is_done() -> None:
    behind = replace(finding("unfused_optimizer", 90.0, fused_optimizer="on"), only_after=("data_starved",))
    found = [finding("data_starved", 500.0, workers="2"), behind]
    spent = ("workers", "prefetch", "cache")
    assert able(found, state(without=frozenset(spent))) == [{"fused_optimizer": True}]


def test_the_way_back_is_tried_only_for_a_replaceable_option() -> None:
    on = state({"workers": 2, "prefetch": 4, "fused_optimizer": True})
    back = ways_back(HEALTHY, on, nothing_foretold)
    assert [c.back for c in back] == [("workers", "prefetch")]
    cached = state({"workers": 2, "cache": True})
    (one,) = ways_back(HEALTHY, cached, nothing_foretold)
    assert one.on_top_of(cached.kept).settings == {"cache": True} and one.settings == {"workers": DATASET.num_workers}
    tried = replace(cached, tried=(Tried(one.settings, dict(cached.kept), "slower"),))
    assert ways_back(HEALTHY, tried, nothing_foretold) == []


# -- what is kept ------------------------------------------------------------------------------------------------------


def verdict(b: Any, allow: tuple[str, ...] = (), **changes: object) -> tuple[str, str]:
    found = compare_blocks(as_written(), replace(b, **changes))
    said = judged(found, found.loss, ("workers",), allow)
    return said.outcome, said.words


def test_faster_with_the_same_loss_is_kept() -> None:
    assert verdict(faster()) == ("kept", "faster, and the loss is the same")


def test_no_difference_is_not() -> None:
    assert verdict(faster(), blocks=as_written().blocks) == ("no gain", "no measurable difference")
    assert verdict(alike(), blocks=alike().blocks[:2]) == ("unsure", "undecided, too few pairs of blocks (2) to tell")
    assert verdict(faster(), blocks=blocks(1, 36.0, noise=0.5))[0] == "unsure"
    outcome, words = verdict(faster(), blocks=blocks(1, 50.0, noise=0.5))
    assert outcome == "unsure" and re.fullmatch(
        r"undecided, 0\.\d+ times as fast, but the interval goes from 0\.\d+ to 1\.\d+", words
    )
    outcome, words = verdict(faster(), blocks=blocks(1, 80.0, noise=0.5))
    assert outcome in ("no gain", "slower"), "as wide, but no gain is in it"


def test_runs_one_after_the_other_keep_nothing() -> None:
    found = compare_sequential(as_written(), faster(), same_start=True)
    assert (found.evidence, found.verdict) == ("sequential", "faster")
    said = judged(found, found.loss, ("workers",), ())
    assert (said.outcome, said.words) == ("unsure", "undecided, the budget left no time for blocks in turn")


def test_a_loss_that_moved_is_not_unless_allowed() -> None:
    moved = loss_curve(seed=9)
    outcome, words = verdict(faster(), losses=moved)
    assert outcome == "loss moved" and "--allow workers" in words
    assert verdict(faster(), ("workers",), losses=moved)[0] == "kept"


@pytest.mark.parametrize(("value", "words"), [(math.nan, "NaN"), (math.inf, "infinite")])
def test_a_broken_loss_is_never_kept(value: float, words: str) -> None:
    broken = (*loss_curve()[:5], *[value] * 35)
    outcome, said = verdict(faster(), ("workers",), losses=broken)
    assert outcome == "loss broken" and words in said and "step 6" in said


def test_a_step_without_loss_on_both_sides_is_no_break() -> None:
    assert broken_loss((1.0, math.nan, 2.0), (1.0, math.nan, 2.0)) == ""
    assert broken_loss((1.0, 2.0), (1.0, math.nan)) == "", "the last step may have been cut off"


def test_a_loss_that_is_not_known_is_said() -> None:
    found = compare_blocks(as_written(losses=()), faster(losses=()))
    said = judged(found, found.loss, ("workers",), ())
    assert said.outcome == "kept" and "could not be compared" in said.words
    said = judged(found, found.loss, ("workers", "amp"), ())
    assert said.outcome == "loss moved" and "could not be measured; --allow amp keeps it" in said.words
    said = judged(found, found.loss, ("workers", "amp"), ("amp",))
    assert said.outcome == "kept" and "--allow says so" in said.words


def test_nearly_all_memory_is_too_much() -> None:
    b = faster()
    assert b.facts is not None
    full = replace(b.facts.run, memory=Memory(15 * 2**30, 15 * 2**30, 2**30, 16 * 2**30))
    outcome, words = verdict(b, facts=replace(b.facts, run=full))
    assert outcome == "memory" and "94 %" in words


@pytest.mark.parametrize(("table", "outcome"), [("", "kept"), ("[thresholds]\nmemory_full = 0.6\n", "memory")])
def test_the_users_file_says_what_full_memory_is(
    table: str, outcome: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GPULAB_DIR", str(tmp_path / "own"))
    (tmp_path / "gpulab.toml").write_text(table)
    machine = Machine(two_knobs, starving, peak_bytes=lambda s: 7 * 2**34 // 10)
    scripted = functools.partial(Climber, engine=machine._engine)  # type: ignore[arg-type]
    monkeypatch.setattr(climb, "Climber", scripted)
    monkeypatch.setattr(climb, "_diagnosed", machine._diagnosed)
    climbed = conduct(TextCode.parsed("workers = 0\n", {}), Bounds(rungs=1, save=False), show=False)
    assert [rung.outcome for rung in climbed.rungs] == [outcome]


# -- the course, on a scripted machine ---------------------------------------------------------------------------------


def starving(settings: Mapping[str, str]) -> Diagnosis:
    """Data first, then the optimizer, then nothing."""
    if settings.get("workers") != "2":
        return Diagnosis((finding("data_starved", 20_000.0, workers="2"),))
    if "fused_optimizer" not in settings:
        return Diagnosis((finding("unfused_optimizer", 2_000.0, fused_optimizer="on"),))
    return HEALTHY


def two_knobs(settings: Mapping[str, str]) -> float:
    return (14.0 if settings.get("workers") == "2" else 38.0) - (3.0 if "fused_optimizer" in settings else 0.0)


WITHOUT = frozenset({"cache", "compile"})  # compiling is tried wherever a model is called


def test_up_to_where_nothing_is_left() -> None:
    machine = Machine(two_knobs, starving)
    found = machine.climb(without=WITHOUT)
    assert found.kept == {"workers": "2", "fused_optimizer": "on"} and found.ended == "nothing left"
    assert [rung.outcome for rung in found.rungs] == ["kept", "kept"]
    assert found.whole is not None and found.whole.ratio == pytest.approx(11 / 38, rel=0.02)
    assert found.whole.a.label == "as written" and found.top is not None
    bases = [plan.base.label for plan in machine.plans]
    together = "workers=2, fused_optimizer=on"  # on top of which all other knobs are screened, in short blocks
    assert bases == ["as written"] * 3 + ["workers=2"] * 2 + [together, "as written"]
    runs = [run.settings.knobs for script in machine.scripts for run in (trial.run for trial in script.trials)]
    assert runs == [{}, {"workers": "2"}, found.kept], "nothing is run in full twice"


def test_nothing_that_helps_is_said_plainly() -> None:
    machine = Machine(lambda s: 38.0, lambda s: Diagnosis((finding("unfused_optimizer", 1.0, fused_optimizer="on"),)))
    found = machine.climb(without=frozenset({"compile"}))
    assert not found.kept and found.whole is None and [r.outcome for r in found.rungs] == ["no gain"]
    text = Climbed(found).text(full=True)
    assert "No setting that gpulab tried makes this cell faster." in text and "Cure unfused_optimizer by hand" in text
    assert "Keep it" not in text


def test_a_try_that_fails_is_one_line_and_the_climb_goes_on() -> None:
    def diagnosis(settings: Mapping[str, str]) -> Diagnosis:
        big = finding("small_batch", 30_000.0, batch_size="64")
        return Diagnosis((big, *starving(settings).findings))

    machine = Machine(two_knobs, diagnosis, fails=lambda s: "out of memory" if "batch_size" in s else "")
    found = machine.climb(allow=frozenset({"batch_size"}), without=frozenset({"cache"}))
    assert found.rungs[0].outcome == "failed" and found.rungs[0].words == "out of memory"
    assert found.kept == {"workers": "2", "fused_optimizer": "on"}
    assert "not kept: out of memory" in Climbed(found).text(full=True)


def test_the_band_of_the_seeds_decides_where_the_loss_moves() -> None:
    def losses(settings: Mapping[str, str]) -> tuple[float, ...]:
        return loss_curve(seed=int(settings.get("seed", 0)) + 7 * ("workers" in settings))

    machine = Machine(two_knobs, starving, losses=losses)
    found = machine.climb(rungs=1)
    assert found.rungs[0].kept and found.rungs[0].loss is not None
    assert found.rungs[0].loss.verdict == "within the band" and "another seed" in found.rungs[0].words
    assert [plan.seeds for plan in machine.plans] == [0, 0, 0, 3, 0], "they run only once the loss is seen to move"

    def apart(settings: Mapping[str, str]) -> tuple[float, ...]:
        return tuple(x + 5 * ("workers" in settings) for x in losses(settings))

    found = Machine(two_knobs, starving, losses=apart).climb(rungs=1)
    assert found.rungs[0].outcome == "loss moved" and not found.kept
    found = Machine(two_knobs, starving, losses=losses).climb(rungs=1, seeds=0)
    assert found.rungs[0].outcome == "loss moved", "without seeds no difference is excused"


def test_settings_that_move_the_loss_only_together_are_no_edit() -> None:
    found = Machine(two_knobs, starving).climb(without=frozenset({"cache"}))
    assert found.whole is not None and headline(found).key == "climbed" and kept_edit(found) is not None
    moved = replace(found.whole, loss=LossComparison((), (), verdict="different", words="It ends 3 % higher."))
    together = replace(found, whole=moved)
    said = headline(together)
    assert said.key == "loss_moved" and said.level == "notice" and "3 % higher" in said.evidence
    assert "no longer the same" in said.sentence and kept_edit(together) is None
    allowed = replace(together, bounds=replace(together.bounds, allow=frozenset({"fused_optimizer"})))
    assert headline(allowed).key == "climbed" and kept_edit(allowed) is not None


def test_a_later_cache_makes_the_workers_needless() -> None:
    def step_ms(settings: Mapping[str, str]) -> float:
        if "cache" in settings:
            return 9.0 if "workers" in settings else 5.0
        return 14.0 if "workers" in settings else 38.0

    def diagnosis(settings: Mapping[str, str]) -> Diagnosis:
        if "workers" not in settings and "cache" not in settings:
            return Diagnosis((finding("data_starved", 20_000.0, workers="2"),))
        return Diagnosis((finding("data_starved", 900.0, cache="on"),)) if "cache" not in settings else HEALTHY

    found = Machine(step_ms, diagnosis).climb(without=frozenset({"compile"}))
    assert [rung.label for rung in found.rungs] == ["workers=2", "cache=on", "workers=0 again"]
    assert found.kept == {"cache": "on"} and found.top is not None and found.top.label == "cache=on"
    assert found.whole is not None and found.whole.b.label == "cache=on"


def test_a_second_look_is_taken_where_the_first_cannot_tell() -> None:
    machine = Machine(lambda s: 33.0 if s else 38.0, lambda s: HEALTHY if s else starving(s), noise=0.5)
    found = machine.climb(rungs=1)
    assert found.rungs[0].outcome == "unsure" and found.rungs[0].comparison is not None
    first, second = (plan.budget_s for plan in machine.plans if plan.interleaved and plan.arms)
    assert first is not None and second == 2 * first and found.rungs[0].comparison.pairs == 20, "only the second counts"
    assert "Undecided: nothing made this cell faster for certain." in Climbed(found).text(full=True)


def test_what_one_run_spoils_needs_no_blocks() -> None:
    def losses(settings: Mapping[str, str]) -> tuple[float, ...]:
        return (*loss_curve()[:5], *[math.nan] * 35) if "workers" in settings else loss_curve()

    machine = Machine(two_knobs, starving, losses=losses)
    found = machine.climb(without=frozenset({"cache"}), rungs=1)
    assert found.rungs[0].outcome == "loss broken" and not found.kept
    assert [plan.interleaved for plan in machine.plans if plan.arms] == [False]


def test_bounds() -> None:
    assert Machine(two_knobs, starving).climb(rungs=1).ended == "rungs"
    found = Machine(two_knobs, starving).climb(budget_s=1.0)
    assert found.ended == "budget" and not found.rungs
    assert "The budget of 1 s is spent" in Climbed(found).text(full=True)


def test_a_stop_in_the_middle_keeps_what_there_is() -> None:
    def on_run(plan: Plan, script: Script) -> None:
        if plan.base.settings:
            climber.stop()

    machine = Machine(two_knobs, starving, on_run=on_run)
    climber = machine.climber()
    found = climber.run()
    assert found.ended == "stopped" and [r.outcome for r in found.rungs] == ["kept", "stopped"]
    assert found.kept == {"workers": "2"} and "The climb was stopped" in Climbed(found).text(full=True)


def test_a_stop_before_anything_ran() -> None:
    machine = Machine(two_knobs, starving, on_run=lambda plan, script: script.stop())
    found = machine.climb()
    assert found.ended == "stopped" and not found.rungs and "Nothing was tried" in Climbed(found).text(full=True)


def test_an_interrupt_ends_it_with_what_there_is() -> None:
    def on_run(plan: Plan, script: Script) -> None:
        if plan.base.settings:
            script.error = KeyboardInterrupt()

    climber = Machine(two_knobs, starving, on_run=on_run).climber()
    found = climber.run()
    assert isinstance(climber.error, KeyboardInterrupt)
    assert found.ended == "error" and found.kept == {"workers": "2"} and len(found.rungs) == 2


@pytest.fixture
def heeds_interrupts() -> Iterator[None]:
    """A process that a script has begun in the background ignores them."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("heeds_interrupts")
def test_a_swallowed_interrupt_ends_the_climb() -> None:
    before = signal.getsignal(signal.SIGINT)

    def on_run(plan: Plan, script: Script) -> None:
        if plan.base.settings:
            with suppress(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)

    climber = Machine(two_knobs, starving, on_run=on_run).climber()
    found = climber.run()
    assert isinstance(climber.error, KeyboardInterrupt) and found.ended == "error"
    assert len(found.rungs) == 2 and found.rungs[1].outcome == "stopped"
    assert signal.getsignal(signal.SIGINT) is before


def test_an_interrupt_between_two_runs_loses_no_rung() -> None:
    def diagnosis(settings: Mapping[str, str]) -> Diagnosis:
        if settings:
            raise KeyboardInterrupt
        return starving(settings)

    climber = Machine(two_knobs, diagnosis).climber()
    found = climber.run()
    assert isinstance(climber.error, KeyboardInterrupt) and found.kept == {"workers": "2"} and found.ended == "error"


def test_predictions_stand_beside_what_was_measured() -> None:
    machine = Machine(two_knobs, starving, predicted=lambda s: Prediction(dict(s), 0.4, (0.3, 0.5), "by a formula"))
    climbed = Climbed(machine.climb(rungs=1))
    told = " ".join(climbed.text(full=True).split())
    assert " times as fast, predicted 2.0–3.3)" in told and "×" not in told
    rung = climbed.json()["rungs"][0]  # type: ignore[index]
    assert rung["prediction"] == {"ratio": 0.4, "interval": [0.3, 0.5], "refused": None}
    assert rung["ratio"] == pytest.approx(14 / 38, rel=0.02)


def test_a_rung_shows_the_times_of_its_own_blocks() -> None:
    """The machine is half as fast from the first try on: 9 ms as written, 19 → 15 ms in the blocks of the try."""
    machine: Machine

    def step_ms(settings: Mapping[str, str]) -> float:
        busy = 2.1 if machine.plans and machine.plans[-1].arms else 1.0
        return busy * (7.0 if settings else 9.0)

    machine = Machine(step_ms, starving)
    climbed = Climbed(machine.climb(rungs=1))
    rung = climbed.json()["rungs"][0]  # type: ignore[index]
    before, after = rung["us_per_step_before"], rung["us_per_step"]
    assert before / after == pytest.approx(rung["times_as_fast"]) and rung["times_as_fast"] > 1.2
    line = next(line for line in climbed.text().splitlines() if line.startswith("  + workers=2"))
    times, gain = re.findall(r"([\d.]+) → ([\d.]+) (?:ms|µs)", line)[0], rung["times_as_fast"]
    assert float(times[0]) / float(times[1]) == pytest.approx(gain, rel=0.02) and f"{gain:.2f}" in line
    assert "The rest is of one profiled run of each." in " ".join(climbed.text(full=True).split())


def test_a_climb_that_ends_undecided_says_so() -> None:
    """Kept in its try, and not confirmed at the end: no edit, and not "no difference"."""
    found = Machine(two_knobs, starving).climb(rungs=1)
    assert found.whole is not None
    wide = replace(found.whole, verdict="undecided", ratio=0.9, interval=(0.5, 1.3))
    climbed = Climbed(replace(found, whole=wide))
    assert climbed.headline.sentence.startswith("Undecided: workers=2 is 1.1") and climbed.edit == ""
    assert "KEEP IT" not in climbed.text()


@pytest.mark.parametrize("bounds", [{}, {"rungs": 1}, {"budget_s": 1.0}])
def test_every_view_of_every_ending(bounds: dict[str, Any]) -> None:
    climbed = Climbed(Machine(two_knobs, starving).climb(**bounds))
    json.dumps(climbed.json(), allow_nan=False)
    assert climbed.json()["kind"] == "climb" and climbed.json()["kept"] == climbed.kept
    assert all(len(line) <= 80 for line in climbed.text(80).split("KEEP IT")[0].splitlines())
    assert "<script" not in climbed.fragment()
    assert climbed.html().startswith("<!doctype html>")


def test_text_of_others_is_escaped() -> None:
    def diagnosis(settings: Mapping[str, str]) -> Diagnosis:
        return Diagnosis((replace(finding("unfused_optimizer", 5.0), summary="<b>bold</b>", cure="<i>x</i>"),))

    climbed = Climbed(Machine(two_knobs, diagnosis).climb(without=frozenset({"fused_optimizer"})))
    assert "<b>bold" not in climbed.fragment() and "&lt;i&gt;x" in climbed.html()


# -- the line ----------------------------------------------------------------------------------------------------------


def test_the_line() -> None:
    bounds = parsed(
        ["--budget", "90", "--rungs", "3", "--without", "cache,amp", "--allow", "batch_size", "--seeds", "0"]
    )
    assert (bounds.budget_s, bounds.rungs, bounds.seeds) == (90.0, 3, 0)
    assert bounds.without == {"cache", "amp"} and bounds.allow == {"batch_size"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--budget", "soon"], "number of seconds"),
        (["--rungs", "few"], "whole number"),
        (["--without", "wrkers"], "Did you mean workers?"),
        (["--alow", "amp"], "--allow"),
        (["workers"], "one word too many"),
    ],
)
def test_bad_lines_are_one_sentence(words: list[str], said: str) -> None:
    with pytest.raises(UsageError, match=said.replace("?", r"\?")) as caught:
        parsed(words)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"rungs": 0}, "--rungs"),
        ({"budget_s": 0}, "--budget"),
        ({"seeds": -1}, "--seeds"),
        ({"allow": ["amp"], "without": ["amp"]}, "contradict"),
        ({"without": ["none"]}, "no such knob"),
    ],
)
def test_bad_bounds_run_nothing(given: dict[str, Any], said: str) -> None:
    names: dict[str, Any] = {}
    with pytest.raises(UsageError, match=said):
        gpulab.climb("ran = True", namespace=names, show=False, **given)
    assert "ran" not in names


# -- real cells --------------------------------------------------------------------------------------------------------

SETUP = """
import math
import torch
from torch import nn
from torch.utils.data import DataLoader
from planted.datasets import Stored

torch.manual_seed(0)
data = Stored(400, 0.01)
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scale = 1.0
"""
CELL = """
loader = DataLoader(data, batch_size=4, shuffle=True)
for x, y in loader:
    loss = scale * nn.functional.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


@pytest.fixture
def names() -> dict[str, Any]:
    namespace: dict[str, Any] = {"__name__": "__main__"}
    exec(SETUP, namespace)
    return namespace


def weights(names: dict[str, Any]) -> list[torch.Tensor]:
    return [t.clone() for t in names["model"].state_dict().values()]


def same(before: list[torch.Tensor], names: dict[str, Any]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(before, weights(names), strict=True))


def test_a_cell_whose_loader_sleeps_ends_with_workers(
    names: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    before, random = weights(names), torch.get_rng_state()
    climbed = gpulab.climb(
        CELL, namespace=names, budget_s=600, rungs=1, pairs=8, steps=6, save=False, without=["cache", "prefetch"]
    )
    assert list(climbed.kept) == ["workers"] and climbed.ratio is not None and climbed.ratio < 0.9
    assert same(before, names) and torch.equal(random, torch.get_rng_state())
    assert (
        f"+loader = DataLoader(data, batch_size=4, shuffle=True, num_workers={climbed.kept['workers']})" in climbed.edit
    )
    shown = capsys.readouterr().out
    assert "THE LADDER" in shown and "num_workers" in shown and "times as fast (95 % interval" in shown
    assert gpulab.climbs[-1] is climbed
    made = [run.settings.knobs for run in gpulab.runs.own[-2:]]
    assert made == [{}, climbed.kept]


def climb_with(
    diagnosis: Diagnosis, names: dict[str, Any], monkeypatch: pytest.MonkeyPatch, cell: str = CELL, **bounds: Any
) -> Climbed:
    """A real climb after a diagnosis that was made up."""
    monkeypatch.setattr(climb, "_diagnosed", lambda known: diagnosis)
    given = Bounds(**{"rungs": 1, "pairs": 5, "steps": 4, "budget_s": 1200.0, "save": False, **bounds})
    return conduct(TextCode.parsed(cell, names), given, show=False)


def test_a_setting_that_breaks_the_loss_is_rejected(names: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    names["data"].wait_s = 0.0
    before = weights(names)
    found = Diagnosis((finding("data_starved", 1_000.0, scale="float('nan')"),))
    unfit = climb_with(found, names, monkeypatch).rungs
    assert unfit[0].outcome == "failed" and "takes a number" in unfit[0].words, "nothing ran for it"
    huge = Diagnosis(
        (finding("data_starved", 1_000.0, scale="1e39"),)
    )  # infinite in float32: NaN from the next step on
    climbed = climb_with(huge, names, monkeypatch)
    assert climbed.rungs[0].outcome == "loss broken", climbed.rungs[0].words
    assert not climbed.kept and same(before, names) and names["scale"] == 1.0
    assert "the loss is" in climbed.text(full=True)


def test_the_cell_as_written_may_fail(names: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    before = weights(names)
    with pytest.raises(ZeroDivisionError):
        gpulab.climb(f"{CELL}    if len(loader) and scale: 1 / 0", namespace=names, save=False)
    with pytest.raises(ZeroDivisionError):
        gpulab.climb("1 / 0", namespace=names, save=False)
    assert same(before, names) and "nothing was tried" not in capsys.readouterr().out.lower()


def test_a_cell_without_steps_has_nothing_to_climb(names: dict[str, Any]) -> None:
    climbed = gpulab.climb("x = 1", namespace=names, save=False, show=False)
    assert not climbed.rungs and "step" in climbed.text(full=True)


def test_a_budget_that_is_over_before_the_first_step(names: dict[str, Any]) -> None:
    climbed = gpulab.climb(f"import time; time.sleep(2)\n{CELL}", namespace=names, budget_s=1.0, save=False, show=False)
    assert climbed.headline.sentence == "Nothing was tried."
    assert "The budget of 1 s is spent (--budget)." in climbed.headline.evidence


def test_what_comes_before_the_first_step_takes_no_time_from_it() -> None:
    machine = Machine(two_knobs, starving)
    machine.climb(budget_s=100.0)
    first = machine.plans[0]
    assert not first.arms and (first.budget_s, first.full_run_s) == (100.0, 30.0)


def test_a_real_stop_in_the_middle_loses_nothing(names: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    from gpulab.tuning.plan import Progress

    before = weights(names)
    found = Diagnosis((finding("data_starved", 1_000.0, workers="1"),))
    climber = Climber(
        TextCode.parsed(CELL, names),
        Bounds(save=False, steps=4),
        lambda known: found,
        lambda known, s: nothing_foretold(s),
    )

    def tell(progress: Progress) -> None:
        if progress.what.startswith("block 4"):
            climber.stop()

    climber.tell = tell
    ladder = climber.run()
    assert ladder.ended == "stopped" and ladder.rungs[0].outcome == "stopped"
    assert same(before, names) and not ladder.kept
    assert Climbed(ladder).text(full=True)


# -- screening: what no finding names ----------------------------------------------------------------------------------


def test_a_knob_that_no_finding_names_is_found_by_short_blocks(torch_without_a_space: None) -> None:
    """nanoGPT on two cores: nothing is wrong with the cell, and a fused optimizer makes it faster all the same."""
    machine = Machine(lambda s: 38.0 if "fused_optimizer" not in s else 35.0, lambda s: HEALTHY)
    found = machine.climb()
    assert found.kept == {"fused_optimizer": "on"} and found.ended == "nothing left"
    shown = json.loads(json.dumps(Climbed(found).json()))
    assert found.rungs[0].finding is None and shown["rungs"][0]["finding"] == "screening"
    screening = [plan for plan in machine.plans if plan.screening]
    assert len(screening) == 2, "on the cell as written, and on top of what was kept"
    labels = {arm.label for arm in screening[0].arms}
    assert any("fused_optimizer" in label for label in labels) and not any("batch_size" in label for label in labels)
    assert sum("workers" in label for label in labels) == 2, "of numbers two values"
    assert not any("compile" in label for label in labels), "blocks of it would be nothing but compiling"
    assert any("compile" in plan.arms[0].settings for plan in machine.plans if len(plan.arms) == 1)
    shown = {p.label: p.why for p in found.passed}
    assert any("screened: 1.0" in why and "short block" in why for why in shown.values())
    assert any("--allow batch_size" in why for why in shown.values())


def test_what_screening_does_not_show_is_not_said() -> None:
    machine = Machine(lambda s: 38.0, lambda s: HEALTHY)
    found = machine.climb(without=WITHOUT)
    assert not found.kept and not found.rungs
    assert headline(found).sentence == "No setting that gpulab tried makes this cell faster."
    assert "left out as asked" in {p.label: p.why for p in found.passed}["cache=on"]
    assert sum(plan.screening for plan in machine.plans) == 1


def test_a_screened_setting_that_fails_is_named() -> None:
    machine = Machine(lambda s: 38.0, lambda s: HEALTHY, fails=lambda s: "out of memory" if "workers" in s else "")
    found = machine.climb()
    assert any("screened: out of memory" in p.why for p in found.passed)


def test_what_screening_had_no_time_for_is_tried_all_the_same() -> None:
    """A script that builds everything anew in each block: the time is over before the compiled one has a pair."""
    measured = compare_blocks(as_written(), replace(faster(), facts=None))
    unmeasured = compare_blocks(as_written(), replace(alike(), facts=None, blocks=()))
    settings: tuple[dict[str, Plain], ...] = ({"compile": "default"}, {"workers": 2})
    arms = [Candidate(chosen, None, None, 0.0) for chosen in settings]
    looked = Experiment((), (unmeasured, measured), 1.0)
    able, passed_over = promising(looked, arms)
    assert [c.settings for c in able] == [{"workers": 2}, {"compile": "default"}] and not passed_over


@pytest.mark.parametrize(("step_ms", "tried"), [(37.0, True), (38.5, True), (50.0, False)])
def test_one_pair_drops_only_what_is_clearly_slower(step_ms: float, tried: bool) -> None:
    """One pair of short blocks lies apart by more than the gains that are looked for."""
    a, b = as_written(blocks=blocks(0, 38.0, turns=1, per_turn=2, noise=0)), blocks(1, step_ms, turns=1, noise=0)
    once = compare_blocks(a, faster(facts=None, blocks=b))
    able, passed_over = promising(Experiment((), (once,), 1.0), [Candidate({"workers": 2}, None, None, 0.0)])
    assert once.pairs == 1 and bool(able) is tried and bool(passed_over) is not tried


def test_small_gains_are_tried_together() -> None:
    """Each too small to be told from the noise; both at once not."""
    worth = {"fused_optimizer": 0.96, "workers": 0.96}
    machine = Machine(lambda s: 38.0 * math.prod(worth.get(name, 1.0) for name in s), lambda s: HEALTHY, noise=0.03)
    found = machine.climb(without=WITHOUT)
    outcomes = {rung.label: rung.outcome for rung in found.rungs}
    assert "unsure" in outcomes.values(), outcomes
    assert set(found.kept) == set(worth) and any(rung.kept and len(rung.settings) > 1 for rung in found.rungs), outcomes


def test_what_was_unsure_is_tried_again_on_other_ground() -> None:
    unsure = Tried({"fused_optimizer": True}, {}, "unsure", 0.95)
    assert [c.settings for c in together(state(tried=(unsure,)), nothing_foretold)] == []
    again = together(state(kept={"workers": 2}, tried=(unsure,)), nothing_foretold)
    assert [c.settings for c in again] == [{"fused_optimizer": True}]
    worse = replace(unsure, ratio=0.99)
    assert not together(state(kept={"workers": 2}, tried=(worse,)), nothing_foretold)
    assert not together(state(kept={"fused_optimizer": True}, tried=(unsure,)), nothing_foretold)


def test_a_stop_while_screening_ends_the_climb() -> None:
    def stop(plan: Plan, script: Script) -> None:
        script.stopped = plan.screening

    found = Machine(lambda s: 38.0, lambda s: HEALTHY, on_run=stop).climb()
    assert found.ended == "stopped" and not found.rungs
