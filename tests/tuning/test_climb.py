"""The climb: which setting is tried next, what is kept, how it ends, what is shown; scripted and real."""

from __future__ import annotations

import functools
import json
import math
import re
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

import gpulab
from gpulab.api import climb
from gpulab.api.climb import bounds_of, conduct
from gpulab.arguments import command_of
from gpulab.diagnosis.finding import Diagnosis, Finding
from gpulab.errors import UsageError
from gpulab.knobs.variables import Plain
from gpulab.prediction.prediction import Prediction
from gpulab.run import Memory
from gpulab.tuning.climb import Climber
from gpulab.tuning.climb_policy import (
    Candidate,
    ClimbState,
    Trial,
    broken_loss,
    candidates,
    judge,
    promising,
    together,
    ways_back,
)
from gpulab.tuning.climb_record import Bounds
from gpulab.tuning.code import Code
from gpulab.tuning.compare.blocks import compare_blocks, compare_sequential
from gpulab.tuning.record import Experiment, LossComparison, Side
from gpulab.tuning.schedule import Arm, Plan
from gpulab.views.climb import Climbed
from tests.support.comparisons import PARTS_A, alike, as_written, blocks, facts_with, faster, loss_curve
from tests.support.scripted_climb import DATASET, HEALTHY, SCENE, Machine, Script, finding, nothing_foretold
from tests.tuning.cells import CELL, same, weights

# -- what is tried next ------------------------------------------------------------------------------------------------


def state(base: Mapping[str, Plain] | None = None, trials: tuple[Trial, ...] = (), **more: Any) -> ClimbState:
    return ClimbState(facts_with(38.0, PARTS_A), SCENE, base or {}, trials, **{"cores": 4.0, **more})


def able(findings: list[Finding], on: ClimbState, predict: Any = nothing_foretold) -> list[dict[str, Plain]]:
    return [dict(c.settings) for c in candidates(Diagnosis(tuple(findings)), on, predict)[0]]


STARVED, UNFUSED = (
    finding("data_starved", 500.0, workers="2"),
    finding("unfused_optimizer", 900.0, fused_optimizer="on"),
)
FUSED: dict[str, Plain] = {"fused_optimizer": True}
SMALL = finding("small_batch", 500.0, batch_size="64")
SUMMED = finding("small_batch", 500.0, accumulate="2")
PREFETCHED, MANY = finding("data_starved", 500.0, prefetch="4"), finding("data_starved", 500.0, workers="many")
USELESS, BROKEN = (Trial(FUSED, {}, "no gain"),), (Trial(FUSED, {}, "loss broken"),)
LATE, ALL = replace(UNFUSED, only_after=("data_starved",)), "workers cache prefetch"
TWO = {"workers": 2}


@pytest.mark.parametrize(
    ("findings", "on", "tried", "passed"),
    [
        ([STARVED, UNFUSED], {}, "fused_optimizer=on, workers=2", ""),  # what gives back most comes first
        (list(HEALTHY.findings), {}, "", ""),
        ([STARVED], {"base": TWO, "without": "cache prefetch"}, "workers=5", ""),  # 2 are set already
        ([STARVED], {"without": ALL}, "", "workers=2: --without"),
        ([SMALL], {}, "", "batch_size=64: --allow batch_size"),  # another training
        ([SUMMED], {}, "", "accumulate=2: --allow accumulate"),
        ([SMALL], {"allow": "batch_size"}, "batch_size=64", ""),
        ([SUMMED], {"allow": "accumulate"}, "accumulate=2", ""),
        ([PREFETCHED], {"without": "workers cache"}, "", "prefetch=4: workers"),  # the knob says why
        ([PREFETCHED], {"base": TWO, "without": "workers cache"}, "prefetch=4", ""),
        ([MANY], {}, "?", "workers=many: workers must be an integer"),
        ([UNFUSED], {"trials": USELESS}, "", ""),
        ([UNFUSED], {"trials": USELESS, "base": TWO}, "fused_optimizer=on", ""),  # on other ground
        ([UNFUSED], {"trials": BROKEN, "base": TWO}, "", ""),
        ([STARVED, replace(SMALL, only_after=("data_starved",))], {"allow": "batch_size"}, "workers=2", ""),
        ([STARVED, LATE], {"without": ALL}, "fused_optimizer=on", ""),  # the first cause is done
    ],
)
def test_what_is_tried_next(findings: list[Finding], on: dict[str, Any], tried: str, passed: str) -> None:
    given: dict[str, Any] = {
        name: frozenset(value.split()) if isinstance(value, str) else value for name, value in on.items()
    }
    found, over = candidates(Diagnosis(tuple(findings)), state(**given), nothing_foretold)
    assert tried == "?" or ", ".join(Arm(c.settings).label for c in found) == tried
    label, _, words = passed.partition(": ")
    assert not passed or words in {p.label: p.why for p in over}[label]


@pytest.mark.parametrize(("ratio", "first"), [(0.5, {"workers": 2}), (1.0, FUSED)])
def test_a_prediction_outranks_the_upper_bound(ratio: float, first: dict[str, Plain]) -> None:
    def predict(settings: Mapping[str, str]) -> Prediction:
        interval = (ratio * 0.99, ratio * 1.01)
        return Prediction(dict(settings), ratio, interval, "") if "workers" in settings else nothing_foretold(settings)

    assert able([STARVED, UNFUSED], state(), predict)[0] == first
    passed = {p.label: p.why for p in candidates(Diagnosis((STARVED, UNFUSED)), state(), predict)[1]}
    assert ("no gain predicted" in passed.get("workers=2", "")) is (ratio == 1.0)


def test_other_knobs_come_when_the_named_ones_are_spent() -> None:
    assert able([STARVED], state()) == [{"workers": 2}]
    assert {"cache": True} in able([STARVED], state(trials=(Trial({"workers": 2}, {}, "slower"),)))


def test_without_a_named_cure_the_formula_tells_the_workers() -> None:
    """38 ms a step, 60 % of it waiting: ⌈22.8 / 15.2⌉ = 2 workers, then 3, then 4; five are one more than the cores."""
    found, tried = [finding("data_starved")], list[Trial]()
    seen, kept = [], dict[str, Plain]()
    for _ in range(5):
        named = [s["workers"] for s in able(found, state(kept, tuple(tried))) if "workers" in s]
        if not named:
            break
        seen.append(named[0])
        tried.append(Trial({"workers": named[0]}, dict(kept), "kept"))
        kept = {"workers": named[0]}
    # with workers the step still waits as long in these facts: each time W·T_load / T_compute workers are needed
    assert seen[0] == 2 and seen == sorted(n for n in seen if isinstance(n, int)) and seen[-1] == 5


def test_the_way_up_ends_where_a_number_was_not_kept() -> None:
    found = [finding("data_starved")]
    lost = (Trial({"workers": 2}, {}, "no gain"),)
    values = [s["workers"] for s in able(found, state(trials=lost)) if "workers" in s]
    assert all(isinstance(v, int) and v < 2 for v in values)


def test_the_way_back_is_tried_only_for_a_replaceable_option() -> None:
    on = state({"workers": 2, "prefetch": 4, "fused_optimizer": True})
    back = ways_back(HEALTHY, on, nothing_foretold)
    assert [c.back for c in back] == [("workers", "prefetch")]
    cached = state({"workers": 2, "cache": True})
    (one,) = ways_back(HEALTHY, cached, nothing_foretold)
    assert one.on_top_of(cached.base).settings == {"cache": True} and one.settings == {"workers": DATASET.num_workers}
    tried = replace(cached, trials=(Trial(one.settings, dict(cached.base), "slower"),))
    assert ways_back(HEALTHY, tried, nothing_foretold) == []


# -- what is kept ------------------------------------------------------------------------------------------------------


def test_runs_one_after_the_other_keep_nothing() -> None:
    found = compare_sequential(as_written(), faster(), same_start=True)
    assert (found.evidence, found.verdict) == ("sequential", "faster")
    said = judge(found, found.loss, ("workers",), ())
    assert (said.outcome, said.words) == ("unsure", "undecided, the budget left no time for interleaved blocks")


def full_memory() -> Side:
    b = faster()
    assert b.facts is not None
    full = replace(b.facts.run, memory=Memory(15 * 2**30, 15 * 2**30, 2**30, 16 * 2**30))
    return replace(b, facts=replace(b.facts, run=full))


MOVED = loss_curve(seed=9)
NAN, INFINITE = ((*loss_curve()[:5], *[value] * 35) for value in (math.nan, math.inf))


@pytest.mark.parametrize(
    ("b", "allow", "outcome", "words"),
    [
        (faster(), "", "kept", "^faster, and the loss is the same$"),
        (faster(blocks=as_written().blocks), "", "no gain", "^no measurable difference$"),
        (alike(blocks=alike().blocks[:2]), "", "unsure", r"^undecided, too few pairs of blocks \(2\) to tell$"),
        (faster(blocks=blocks(1, 36.0, noise=0.5)), "", "unsure", ""),
        (
            faster(blocks=blocks(1, 50.0, noise=0.5)),
            "",
            "unsure",
            r"^undecided: 0\.\d+× .* 0\.\d+–1\.\d+$",
        ),
        (faster(blocks=blocks(1, 80.0, noise=0.5)), "", "no gain|slower", ""),  # as wide, but no gain is in it
        (faster(losses=MOVED), "", "loss moved", "--allow workers"),
        (faster(losses=MOVED), "workers", "kept", ""),
        (faster(losses=NAN), "workers", "loss broken", "NaN.*step 6|step 6.*NaN"),
        (faster(losses=INFINITE), "workers", "loss broken", "infinite.*step 6|step 6.*infinite"),
        (full_memory(), "", "memory", "94 %"),
    ],
)
def test_what_is_kept(b: Side, allow: str, outcome: str, words: str) -> None:
    found = compare_blocks(as_written(), b)
    said = judge(found, found.loss, ("workers",), tuple(allow.split()))
    assert re.fullmatch(outcome, said.outcome) and re.search(words, said.words), said.words


def test_a_step_without_loss_on_both_sides_is_no_break() -> None:
    assert broken_loss((1.0, math.nan, 2.0), (1.0, math.nan, 2.0)) == ""
    assert broken_loss((1.0, 2.0), (1.0, math.nan)) == "", "the last step may have been cut off"


@pytest.mark.parametrize(
    ("knobs", "allowed", "outcome", "words"),
    [
        (("workers",), (), "kept", "could not be compared"),
        (("workers", "amp"), (), "loss moved", "could not be measured; --allow amp keeps it"),
        (("workers", "amp"), ("amp",), "kept", "--allow says so"),
    ],
)
def test_a_loss_that_is_not_known_is_said(
    knobs: tuple[str, ...], allowed: tuple[str, ...], outcome: str, words: str
) -> None:
    found = compare_blocks(as_written(losses=()), faster(losses=()))
    said = judge(found, found.loss, knobs, allowed)
    assert said.outcome == outcome and words in said.words


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
    climbed = conduct(Code.of_text("workers = 0\n", {}), Bounds(rungs=1, save=False), show=False)
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


HIGHER = LossComparison((), (), verdict="different", words="It ends 3 % higher.")


def test_up_to_where_nothing_is_left() -> None:
    machine = Machine(two_knobs, starving)
    found = machine.climb(without=WITHOUT)
    assert found.kept == {"workers": "2", "fused_optimizer": "on"} and found.ended == "nothing left"
    assert [rung.outcome for rung in found.rungs] == ["kept", "kept"]
    assert found.whole is not None and found.whole.ratio == pytest.approx(11 / 38, rel=0.02)
    assert found.whole.a.label == "baseline" and found.top is not None
    bases = [plan.base.label for plan in machine.plans]
    together = "workers=2, fused_optimizer=on"  # on top of which all other knobs are screened, in short blocks
    assert bases == ["baseline"] * 3 + ["workers=2"] * 2 + [together, "baseline"]
    runs = [run.settings.knobs for script in machine.scripts for run in (full_run.run for full_run in script.full_runs)]
    assert runs == [{}, {"workers": "2"}, found.kept], "nothing is run in full twice"


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


def test_a_stop_in_the_middle_keeps_what_there_is() -> None:
    def on_run(plan: Plan, script: Script) -> None:
        if plan.base.settings:
            climber.stop()

    climber = Machine(two_knobs, starving, on_run=on_run).climber()
    found = climber.run()
    assert found.ended == "stopped" and [r.outcome for r in found.rungs] == ["kept", "stopped"]
    assert found.kept == {"workers": "2"} and "The climb was stopped" in Climbed(found).text(full=True)

    def stop(plan: Plan, script: Script) -> None:
        script.stopped = plan.screening

    found = Machine(lambda s: 38.0, lambda s: HEALTHY, on_run=stop).climb()
    assert found.ended == "stopped" and not found.rungs, "while it screens"


@pytest.mark.usefixtures("interrupts_come")
@pytest.mark.parametrize("when", ["in a run", "swallowed", "between two runs"])
def test_an_interrupt_ends_it_with_what_there_is(when: str) -> None:
    before = signal.getsignal(signal.SIGINT)

    def on_run(plan: Plan, script: Script) -> None:
        if plan.base.settings and when == "in a run":
            script.error = KeyboardInterrupt()
        elif plan.base.settings and when == "swallowed":
            with suppress(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)

    def diagnosis(settings: Mapping[str, str]) -> Diagnosis:
        if settings and when == "between two runs":
            raise KeyboardInterrupt
        return starving(settings)

    climber = Machine(two_knobs, diagnosis, on_run=on_run).climber()
    found = climber.run()
    assert isinstance(climber.error, KeyboardInterrupt)
    assert found.ended == "error" and found.kept == {"workers": "2"}
    assert [rung.outcome for rung in found.rungs] == ["kept", "stopped"][: 1 if when == "between two runs" else 2]
    assert signal.getsignal(signal.SIGINT) is before


def test_a_rung_shows_its_own_blocks_beside_the_prediction() -> None:
    """The machine is half as fast from the first try on: 9 ms as written, 19 → 15 ms in the blocks of the try."""
    machine: Machine

    def step_ms(settings: Mapping[str, str]) -> float:
        busy = 2.1 if machine.plans and machine.plans[-1].arms else 1.0
        return busy * (7.0 if settings else 9.0)

    machine = Machine(step_ms, starving, predicted=lambda s: Prediction(dict(s), 0.4, (0.3, 0.5), "by a formula"))
    climbed = Climbed(machine.climb(rungs=1))
    told = " ".join(climbed.text(full=True).split())
    assert "×, predicted 2.0–3.3×)" in told
    assert "The rest is from one traced run each." in told
    rung = climbed.json()["rungs"][0]  # type: ignore[index]
    assert rung["prediction"] == {"ratio": 0.4, "interval": [0.3, 0.5], "refused": None}
    assert rung["ratio"] == pytest.approx(7 / 9, rel=0.02)
    before, after, gain = rung["us_per_step_before"], rung["us_per_step"], rung["times_as_fast"]
    assert before / after == pytest.approx(gain) and gain > 1.2
    line = next(line for line in climbed.text().splitlines() if line.startswith("  + workers=2"))
    times = re.findall(r"([\d.]+) → ([\d.]+) (?:ms|µs)", line)[0]
    assert float(times[0]) / float(times[1]) == pytest.approx(gain, rel=0.02) and f"{gain:.2f}" in line


@pytest.mark.parametrize(
    ("changes", "allow", "key", "words"),
    [
        ({"setup_s": 18.0}, (), "climbed", r"One-time cost 18\.0 s,? pays off"),
        ({"verdict": "undecided", "ratio": 0.9, "interval": (0.5, 1.3)}, (), "not_faster", "^Undecided: workers=2"),
        ({"loss": HIGHER}, (), "loss_moved", "no longer the same"),
        ({"loss": HIGHER}, ("fused_optimizer",), "climbed", ""),
    ],
)
def test_what_its_last_comparison_does_not_confirm_is_no_edit(
    changes: dict[str, Any], allow: tuple[str, ...], key: str, words: str
) -> None:
    """Each was kept in its own try: together they may be no gain, or move the loss."""
    found = Machine(two_knobs, starving).climb(without=frozenset({"cache"}))
    assert found.whole is not None
    bounds = replace(found.bounds, allow=frozenset(allow))
    climbed = Climbed(replace(found, whole=replace(found.whole, **changes), bounds=bounds))
    assert climbed.headline.key == key and re.search(words, climbed.headline.sentence)
    assert ("KEEP IT" in climbed.text()) is bool(climbed.edit) is (key == "climbed")
    assert ("3 % higher" in climbed.headline.evidence) is (key == "loss_moved")


@pytest.mark.parametrize(
    ("bounds", "ended", "words"),
    [
        ({}, "nothing left", "speedup"),
        ({"rungs": 1}, "rungs", "--rungs"),
        ({"budget_s": 1.0}, "budget", "The budget of 1 s is spent"),
        ({"stopped": True}, "stopped", "Nothing was tried"),
    ],
)
def test_every_ending_is_said(bounds: dict[str, Any], ended: str, words: str) -> None:
    stopped = bounds.pop("stopped", False)
    machine = Machine(two_knobs, starving, on_run=lambda plan, script: script.stop() if stopped else None)
    found = machine.climb(**bounds)
    assert found.ended == ended and words in " ".join(Climbed(found).text(full=True).split())
    assert bool(found.rungs) is (ended in ("nothing left", "rungs"))


# -- the line ----------------------------------------------------------------------------------------------------------


def bounds_in(words: Sequence[str]) -> Bounds:
    """What a line after `%gpulab climb` asks for."""
    _, parser, rest = command_of(["climb", *words], "notebook")
    return bounds_of(parser.read(rest))


def test_the_line() -> None:
    words = "--budget 90 --rungs 3 --without cache,amp --allow batch_size --seeds 0"
    bounds = bounds_in(words.split())
    assert (bounds.budget_s, bounds.rungs, bounds.seeds) == (90.0, 3, 0)
    assert bounds.without == {"cache", "amp"} and bounds.allow == {"batch_size"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--budget", "soon"], "number of seconds"),
        (["--rungs", "few"], "integer"),
        (["--without", "wrkers"], r"Did you mean workers\?"),
        (["--alow", "amp"], "--allow"),
        (["workers"], "Unexpected argument"),
    ],
)
def test_bad_lines_are_one_sentence(words: list[str], said: str) -> None:
    with pytest.raises(UsageError, match=said) as caught:
        bounds_in(words)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"rungs": 0}, "--rungs"),
        ({"budget_s": 0}, "--budget"),
        ({"seeds": -1}, "--seeds"),
        ({"allow": ["amp"], "without": ["amp"]}, "both name amp"),
        ({"without": ["none"]}, "no such setting"),
    ],
)
def test_bad_bounds_run_nothing(given: dict[str, Any], said: str) -> None:
    names: dict[str, Any] = {}
    with pytest.raises(UsageError, match=said):
        gpulab.climb("ran = True", namespace=names, show=False, **given)
    assert "ran" not in names


# -- real cells --------------------------------------------------------------------------------------------------------


def test_a_cell_that_fails_or_has_no_steps_or_no_time(
    names: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    before = weights(names)
    with pytest.raises(ZeroDivisionError):
        gpulab.climb(f"{CELL}    if len(loader) and factor: 1 / 0", namespace=names, save=False)
    with pytest.raises(ZeroDivisionError):
        gpulab.climb("1 / 0", namespace=names, save=False)
    assert same(before, names) and "nothing was tried" not in capsys.readouterr().out.lower()
    climbed = gpulab.climb("x = 1", namespace=names, save=False)
    assert gpulab.climbs[-1] is climbed and not climbed.rungs and "step" in climbed.text(full=True)
    assert climbed.headline.sentence in " ".join(capsys.readouterr().out.split()), "in a terminal it is text"
    late = gpulab.climb(f"import time; time.sleep(2)\n{CELL}", namespace=names, budget_s=1.0, save=False, show=False)
    assert late.headline.sentence == "Nothing was tried."
    assert "The budget of 1 s is spent (--budget)." in late.headline.evidence


def test_what_comes_before_the_first_step_takes_no_time_from_it() -> None:
    machine = Machine(two_knobs, starving)
    machine.climb(budget_s=100.0)
    first = machine.plans[0]
    assert not first.arms and (first.budget_s, first.full_run_s) == (100.0, 30.0)


# -- screening: what no finding names ----------------------------------------------------------------------------------


def test_a_knob_that_no_finding_names_is_found_by_short_blocks(torch_without_a_space: None) -> None:
    """nanoGPT on two cores: nothing is wrong with the cell, and a fused optimizer makes it faster all the same."""
    machine = Machine(lambda s: 38.0 if "fused_optimizer" not in s else 35.0, lambda s: HEALTHY)
    found = machine.climb()
    assert found.kept == {"fused_optimizer": "on"} and found.ended == "nothing left"
    shown = json.loads(json.dumps(Climbed(found).json()))
    assert found.rungs[0].finding is None and shown["rungs"][0]["finding"] == "screening"
    screening = [plan for plan in machine.plans if plan.screening]
    assert len(screening) == 2, "on the baseline, and on top of what was kept"
    labels = {arm.label for arm in screening[0].arms}
    assert any("fused_optimizer" in label for label in labels) and not any("batch_size" in label for label in labels)
    assert sum("workers" in label for label in labels) == 2, "of numbers two values"
    assert not any("compile" in label for label in labels), "blocks of it would be nothing but compiling"
    assert any("compile" in plan.arms[0].settings for plan in machine.plans if len(plan.arms) == 1)
    shown = {p.label: p.why for p in found.skips}
    assert any("screened: 1.0" in why and "short block" in why for why in shown.values())
    assert any("--allow batch_size" in why for why in shown.values())


def test_what_screening_does_not_show_is_not_said() -> None:
    machine = Machine(lambda s: 38.0, lambda s: HEALTHY, fails=lambda s: "out of memory" if "workers" in s else "")
    found = machine.climb(without=WITHOUT)
    assert not found.kept and not found.rungs
    assert Climbed(found).headline.sentence == "No setting that gpulab tried makes this cell faster."
    assert "left out as asked" in {p.label: p.why for p in found.skips}["cache=on"]
    assert any("screened: out of memory" in p.why for p in found.skips)
    assert sum(plan.screening for plan in machine.plans) == 1


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
    unsure = Trial({"fused_optimizer": True}, {}, "unsure", 0.95)
    assert [c.settings for c in together(state(trials=(unsure,)), nothing_foretold)] == []
    again = together(state(base={"workers": 2}, trials=(unsure,)), nothing_foretold)
    assert [c.settings for c in again] == [{"fused_optimizer": True}]
    worse = replace(unsure, ratio=0.99)
    assert not together(state(base={"workers": 2}, trials=(worse,)), nothing_foretold)
    assert not together(state(base={"fused_optimizer": True}, trials=(unsure,)), nothing_foretold)
