"""Arbitration: no time counted twice, no contradicted advice, one headline, and silence where all is well."""

from __future__ import annotations

import inspect

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gpulab.analysis.breakdown import PARTS
from gpulab.diagnosis.catalogue import kind_of, kinds, title_of
from gpulab.diagnosis.diagnose import diagnose
from gpulab.diagnosis.finding import BETWEEN, Finding, RuleContext
from gpulab.diagnosis.headline import rank_findings, total_us
from gpulab.diagnosis.loading import data_starved
from gpulab.run import Run
from gpulab.thresholds import DEFAULT
from tests.support.paths import ROOT
from tests.support.rule_cases import STEP_MS, case_of, finding, run_of

STEP_US = STEP_MS * 1e3
GPU = run_of(gpu=True, wait=1.0)
HEALTHY = finding("healthy", None, level="good")

shares = st.lists(st.floats(0, 1), min_size=len(PARTS), max_size=len(PARTS)).map(
    lambda raw: {p: v / (sum(raw) or 1) for p, v in zip(PARTS, raw, strict=True)}
)
claims = st.lists(
    st.sampled_from([*PARTS, "compute/matrix", "compute/pointwise", "launch/optimizer", BETWEEN, f"{BETWEEN}/gc"]),
    min_size=1,
    max_size=4,
    unique=True,
).map(tuple)


@st.composite
def found(draw: st.DrawFn) -> list[Finding]:
    """Findings of different keys, each with some time of some parts."""
    keys = draw(st.lists(st.sampled_from(sorted(k.key for k in kinds() if not k.is_verdict)), max_size=8, unique=True))
    made = []
    for i, key in enumerate(keys):
        us = draw(st.none() | st.floats(0, STEP_US))
        more = {
            "confidence": draw(st.sampled_from(["measured", "likely", "possible"])),
            "only_after": tuple(keys[: draw(st.integers(0, i))][-2:]),
            "between_us_per_step": draw(st.floats(0, STEP_US)),
        }
        made.append(finding(key, us, *draw(claims), **more))
    return made


def times(result: tuple[Finding, ...]) -> dict[str, float | None]:
    return {f.key: f.recoverable_us_per_step for f in result}


def test_full_memory_forbids_advice_that_needs_more() -> None:
    run = run_of(wait=0.5)
    memory = replace(run.memory, peak_rss_bytes=95)
    environment = replace(run.environment, memory_total_bytes=100)
    full = case_of(replace(run, memory=memory, environment=environment), {"data_wait": 0.5})
    starved = data_starved(full)
    assert isinstance(starved, Finding) and starved.settings == () and starved.knob is None
    assert "nearly full" in starved.cure and starved.otherwise and starved.cure.endswith(starved.otherwise)
    with_room = data_starved(case_of(run, {"data_wait": 0.5}))
    assert isinstance(with_room, Finding) and with_room.settings


@given(shares, found())
def test_no_time_is_counted_twice(split: dict[str, float], answers: list[Finding]) -> None:
    case = case_of(GPU, split)
    result = rank_findings(case, [*answers, HEALTHY])
    whole = total_us(case, result)
    given_back = [f.recoverable_us_per_step or 0.0 for f in result]
    assert whole is not None and sum(given_back) <= whole * (1 + 1e-9)
    asked = times(tuple(answers))
    inside = sum(t for f, t in zip(result, given_back, strict=True) if BETWEEN not in {p[:13] for p in f.parts})
    assert inside <= STEP_US * (1 + 1e-9)
    for f in result:
        if f.key in asked and f.recoverable_us_per_step is not None:
            assert f.recoverable_us_per_step <= (asked[f.key] or 0.0) * (1 + 1e-9)
            assert f.recoverable_us_per_step >= DEFAULT.silence * STEP_US * (1 - 1e-9)
    for part in PARTS:  # what claims one part alone cannot give back more than it holds
        alone = [f.recoverable_us_per_step or 0.0 for f in result if {p.partition("/")[0] for p in f.parts} == {part}]
        assert sum(alone) <= case.part_us(part) + 1.0
    assert len({f.key for f in result}) == len(result) >= 1


@given(shares, found())
def test_what_depends_on_a_cure_comes_after_it(split: dict[str, float], answers: list[Finding]) -> None:
    result = rank_findings(case_of(GPU, split), [*answers, HEALTHY])
    place = {f.key: i for i, f in enumerate(result)}
    costly = [f for f in result if f.recoverable_us_per_step is not None]  # hints come last in any case
    known = {f.key for f in costly}
    assert all(place[key] < place[f.key] for f in costly for key in f.only_after if key in known)


COMPUTING = run_of(wait=0.0)
UNCLEAR = finding("cannot_tell", None, "unknown", level="unknown")


def _share(key: str, share: float, *parts: str, **more: str) -> Finding:
    return finding(key, share * STEP_US, *(parts or ("compute",)), **more)


@pytest.mark.parametrize(
    ("run", "answers", "first"),
    [
        (COMPUTING, [_share("layout", 0.14, confidence="likely")], "healthy"),
        (COMPUTING, [_share("layout", 0.16, confidence="likely")], "layout"),
        (GPU, [_share("layout", 0.14, confidence="likely")], "layout"),
        (COMPUTING, [_share("padding", 0.14, confidence="likely")], "padding"),  # no bound of other kernels
        (COMPUTING, [_share("layout", 0.14, confidence="likely"), _share("gc_pause", 0.06)], "gc_pause"),
    ],
)
def test_small_bounds_follow_the_verdict_on_a_cpu(run: Run, answers: list[Finding], first: str) -> None:
    result = rank_findings(case_of(run, {"compute": 1.0}), [*answers, HEALTHY])
    assert result[0].key == first and {f.key for f in answers} <= {f.key for f in result}


@pytest.mark.parametrize(
    ("answer", "first"),
    [
        (_share("unfused_optimizer", 0.1), "cannot_tell"),
        (_share("unfused_optimizer", 0.2), "unfused_optimizer"),
        (_share("logging_or_eval", 0.1, "unknown"), "logging_or_eval"),  # it explains some of that time
    ],
)
def test_a_small_cost_beside_much_unknown_time_does_not_lead(answer: Finding, first: str) -> None:
    result = rank_findings(case_of(GPU, {"compute": 0.55, "unknown": 0.45}), [answer, UNCLEAR])
    assert result[0].key == first


WAITING_GPU = run_of(gpu=True, wait=0.5)
RUNS = [run_of(gpu=gpu, wait=w, workers=n) for gpu in (False, True) for w in (0.0, 0.08, 0.5) for n in (0, 3)]


@given(shares, st.sampled_from(RUNS))
def test_the_rules_never_promise_more_than_the_step(split: dict[str, float], run: Run) -> None:
    case = case_of(run, split)
    found_out = diagnose(case.facts, predict_cures=False)
    assert found_out.total_us is not None
    assert sum(f.recoverable_us_per_step or 0.0 for f in found_out.findings) <= found_out.total_us * (1 + 1e-9)
    assert not [u for u in found_out.untold if "fault" in u.record]


def test_two_cures_of_the_very_same_time_count_once() -> None:
    case = case_of(GPU, {"compute": 1.0})
    mixed = finding("no_mixed_precision", 8_000.0, "compute/matrix")
    tf32 = finding("no_tf32", 6_000.0, "compute/matrix")
    fewer = finding("memory_bound_ops", 2_000.0, "compute/pointwise")
    result = rank_findings(case, [tf32, mixed, fewer, HEALTHY])
    assert times(result) == {"no_mixed_precision": 8_000.0, "memory_bound_ops": 2_000.0}


def test_a_part_that_is_wholly_claimed_is_taken_first() -> None:
    case = case_of(run_of(wait=0.5), {"core_wait": 0.25, "data_wait": 0.5})
    cores = finding("cpu_oversubscribed", 7_000.0, "core_wait", "data_wait/cores")
    loads = finding("data_starved", 8_000.0, "data_wait")
    result = rank_findings(case, [cores, loads, HEALTHY])
    assert times(result) == {"data_starved": 8_000.0, "cpu_oversubscribed": 7_000.0}


def test_competition_stands_behind_every_cause_and_for_itself() -> None:
    case, shared = case_of(run_of()), finding("cpu_shared", 0.9 * STEP_US)
    small = finding("unfused_optimizer", 0.1 * STEP_US, "compute")
    open_question = finding("cannot_tell", None, level="unknown")
    hint = finding("memory_underused", None, confidence="possible")
    assert times(rank_findings(case, [shared, small, hint, HEALTHY])) == {
        "unfused_optimizer": 0.1 * STEP_US, "cpu_shared": None, "memory_underused": None,
    }  # fmt: skip
    assert [*times(rank_findings(case, [shared, open_question]))] == ["cannot_tell", "cpu_shared"]
    assert times(rank_findings(case, [shared, HEALTHY])) == {"cpu_shared": 0.9 * STEP_US}


def test_a_finding_that_lost_a_part_of_its_time_says_to_whom() -> None:
    case = case_of(GPU, {"launch": 0.5, "compute": 0.5})
    first, second = finding("launch_bound", 8_000.0, "launch"), finding("unfused_optimizer", 4_000.0, "launch")
    result = rank_findings(case, [second, first, HEALTHY])
    assert times(result) == {"launch_bound": 8_000.0, "unfused_optimizer": pytest.approx(2_000.0)}
    assert result[1].shares_with == ("launch_bound",)


def test_a_cause_takes_the_place_of_its_symptom() -> None:
    case = case_of(WAITING_GPU, {"data_wait": 0.5})
    symptom = finding("data_starved", 0.5 * STEP_US, "data_wait")
    cause = finding("storage_bound", 0.5 * STEP_US, "data_wait")
    assert times(rank_findings(case, [symptom, cause, HEALTHY])) == {"storage_bound": 0.5 * STEP_US}


def test_what_comes_next_and_how_much_that_would_bring() -> None:
    case = case_of(WAITING_GPU, {"data_wait": 0.5, "launch": 0.2})
    result = rank_findings(
        case, [finding("launch_bound", 0.2 * STEP_US, "launch"), finding("data_starved", 0.5 * STEP_US, "data_wait")]
    )
    assert [f.key for f in result] == ["data_starved", "launch_bound"]
    assert title_of("launch_bound") in result[0].after and "at most 1.7×" in result[0].after  # 50 of 100, then 30
    assert result[1].after.startswith("No other known cause")


def test_pauses_count_besides_the_step() -> None:
    case = case_of(GPU, {"launch": 0.5})
    result = rank_findings(
        case,
        [finding("checkpoint_save", 3 * STEP_US, BETWEEN), finding("launch_bound", 0.5 * STEP_US, "launch"), HEALTHY],
    )
    assert times(result) == {"checkpoint_save": 3 * STEP_US, "launch_bound": 0.5 * STEP_US}
    assert total_us(case, result) == pytest.approx(4 * STEP_US)
    assert "at most 1.33×" not in result[1].after and "at most 2.0×" in result[0].after


def test_what_is_below_the_silence_is_not_told() -> None:
    small = finding("launch_bound", 0.02 * STEP_US, "launch")
    assert [f.key for f in rank_findings(case_of(GPU, {"launch": 0.02}), [small, HEALTHY])] == ["healthy"]
    loud = case_of(GPU, {"launch": 0.02}, thresholds=replace(DEFAULT, silence=0.01))
    assert [f.key for f in rank_findings(loud, [small, HEALTHY])] == ["launch_bound"]


def test_a_hint_does_not_take_the_headline_from_a_healthy_run() -> None:
    hint = finding("memory_underused", None, confidence="possible")
    shared = finding("gpu_shared", None, confidence="measured")
    assert [f.key for f in rank_findings(case_of(GPU), [hint, HEALTHY])] == ["healthy", "memory_underused"]
    assert [f.key for f in rank_findings(case_of(GPU), [hint, shared, HEALTHY])] == ["gpu_shared", "memory_underused"]


def test_a_measured_saving_comes_before_an_equal_upper_bound() -> None:
    case: RuleContext = case_of(WAITING_GPU, {"data_wait": 0.4, "compute": 0.6})
    bound = finding("no_mixed_precision", 0.5 * STEP_US, "compute/matrix", confidence="likely")
    waits = finding("data_starved", 0.4 * STEP_US, "data_wait")
    assert [f.key for f in rank_findings(case, [bound, waits, HEALTHY])] == ["data_starved", "no_mixed_precision"]


def test_each_kind_is_declared_once_in_its_rules_module() -> None:
    keys = [kind.key for kind in kinds()]
    assert len(set(keys)) == len(keys)
    for kind in kinds():
        if kind.rule is not None:
            module = inspect.getmodule(kind.rule)
            assert module is not None and kind in module.FINDINGS and kind.rule.__name__ == kind.key
        assert kind.title, kind.key
        assert set(kind.explains) <= {*keys} - {kind.key}, kind.key
        assert not kind.lesson or (ROOT / "notebooks" / f"{kind.lesson}.ipynb").is_file(), kind.key


def test_an_unknown_key_is_spelled_out() -> None:
    assert title_of("too_many_cooks") == "too many cooks"
    assert not kind_of("too_many_cooks").is_verdict
