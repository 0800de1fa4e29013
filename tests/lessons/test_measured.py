"""What a lesson's experiments measured, and which value of a sweep is enough."""

from __future__ import annotations

import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import pytest
from msgspec.structs import replace

from gpulab.analysis.facts import Facts, facts
from gpulab.errors import UsageError
from gpulab.lessons import (
    batch_size,
    capstone,
    compare_each,
    cost,
    fused_kernels,
    measured,
    mixed_precision,
    profile_first,
    utilization,
)
from gpulab.lessons.check import NotMeasured
from gpulab.lessons.guesses import times_between
from gpulab.lessons.measured import (
    Swept,
    check_enough,
    faster_than,
    latest_experiment,
    latest_ranks,
    remeasurement,
    times_faster,
    waiting_share,
)
from gpulab.lessons.training import default_device
from gpulab.options import QUICK_VARIABLE
from gpulab.run import Job, Run, Settings
from gpulab.tuning.record import Block, Comparison, Experiment
from gpulab.verdict import verdict
from gpulab.views.comparison import Compared
from gpulab.views.run_figure import segments
from gpulab.views.wording import PARTS
from tests.support import synthetic
from tests.support.comparisons import a_comparison

Unit = Literal["sample", "step"]
Ran = Callable[[str, Experiment], None]


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> Ran:
    """`ran(name, experiment)`: it was the last to run in this process."""
    known: list[Compared] = []
    monkeypatch.setattr(measured, "experiments", known)
    return lambda name, experiment: known.append(Compared(replace(experiment, name=name)))


def swept(
    times: dict[int, float | None], knob: str = "workers", unit: Unit = "step", spread: float = 1.02
) -> Experiment:
    """A sweep whose values took this many times as long as the baseline; None: it failed."""
    compared = [_of(knob, value, time, unit, spread) for value, time in times.items()]
    return Experiment((compared[0].a, *(c.b for c in compared)), tuple(compared), 1.0)


def _of(knob: str, value: int, time: float | None, unit: Unit, spread: float = 1.02) -> Comparison:
    """The time of the other unit tells the contrary. `spread`: how far the interval reaches, as a factor."""
    made = a_comparison()
    other = None if time is None else 1 / time
    step, sample = (time, other) if unit == "step" else (other, time)
    changed: dict[str, Any] = {"us_per_step": step, "us_per_sample": sample, "failure": "" if time else "out of memory"}
    b = replace(made.b, label=f"{knob}={value}", settings={knob: str(value)}, blocks=(), **changed)
    interval = None if time is None else (time / spread, time * spread)
    said = verdict(time, interval, made.noise_floor, made.pairs)
    a = replace(made.a, us_per_step=1.0, us_per_sample=1.0, blocks=())
    return replace(made, a=a, b=b, ratio=time, interval=interval, verdict=said, unit=unit)


SWEEP = {1: 0.8, 2: 0.44, 4: 0.4, 8: 0.41}


@pytest.mark.parametrize(
    ("answer", "noise", "state", "hint"),
    [
        (2, 0.01, "right", "smallest"),
        (1, 0.01, "wrong", "workers=4 gives a 2.0× speedup over workers=1"),
        (0, 0.01, "wrong", "workers=4 gives a 2.5× speedup"),
        (4, 0.01, "wrong", "workers=2 is smaller"),
        (3, 0.01, "wrong", "3 is not among the values tried: 0, 1, 2, 4, 8"),
        ("2", 0.01, "wrong", "'2' is a text: write the number without quotes."),
        (True, 0.01, "wrong", "True is not among"),
        (0, 0.3, "wrong", "× speedup over"),
        (2, 0.3, "undecided", "It may be "),
        *((answer, 1.5, "undecided", "It may be ") for answer in SWEEP),  # as a busy machine gives them
    ],
)
def test_the_smallest_value_that_is_good_enough(ran: Ran, answer: object, noise: float, state: str, hint: str) -> None:
    ran("how-many", disturbed(SWEEP, noise))
    checked = check_enough(answer, "how-many", "workers", as_written=0)
    assert (checked.state, hint in checked.hint) == (state, True), checked


def disturbed(times: dict[int, float], noise: float) -> Experiment:
    """A sweep in which each turn met another load, which all its blocks shared, and each block a little of its own."""
    random = np.random.default_rng(3)
    load = random.uniform(1, 3, 8)

    def ran(arm: int, ms: float) -> tuple[Block, ...]:
        own = np.exp(random.normal(0, noise, len(load)))
        return tuple(
            Block(arm, turn, 10 * turn + arm, 10, 3, 320, int(1e7 * ms * load[turn] * own[turn]))
            for turn in range(len(load))
        )

    made = swept(dict(times), spread=2.0)
    sides = [replace(made.sides[arm], blocks=ran(arm, ms)) for arm, ms in enumerate((1.0, *times.values()))]
    compared = [replace(c, a=sides[0], b=b) for c, b in zip(made.comparisons, sides[1:], strict=True)]
    return replace(made, sides=tuple(sides), comparisons=tuple(compared))


def test_blocks_of_the_same_turns_decide(ran: Ran) -> None:
    ran("how-many", disturbed(SWEEP, noise=0.01))
    states = [check_enough(answer, "how-many", "workers", as_written=0).state for answer in (0, 1, 2, 4, 8)]
    assert states == ["wrong", "wrong", "right", "wrong", "wrong"]
    ran("how-many", disturbed(SWEEP, noise=0.4))
    assert check_enough(2, "how-many", "workers", as_written=0).state == "undecided"


def test_a_factor_of_an_undecided_experiment_is_not_sure(ran: Ran) -> None:
    for ratio, spread, sure in ((0.5, 1.02, True), (1.0, 1.01, True), (0.5, 3.0, False), (1.0, 1.3, False)):
        ran("two-workers", swept({2: ratio}, spread=spread))
        measured_here = times_faster("two-workers")
        assert (measured_here.times, measured_here.sure) == (1 / ratio, sure)


def test_what_is_open_is_measured_again_once(ran: Ran, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the pairs that would decide it, where these fit into a minute; then the guess is held against that."""
    monkeypatch.delenv(QUICK_VARIABLE, raising=False)
    open_, requests = in_a_cell(swept({2: 0.5, 4: 0.25}, spread=2.3)), []
    ran("two-workers", open_)
    of_four = times_faster("two-workers", "workers", "4")
    again = remeasurement("two-workers")
    assert again is not None and again.pairs > open_.comparisons[0].pairs
    assert f"about {again.pairs} may decide it" in again.words

    def conduct(code: Any, plan: Any) -> None:
        requests.append((code.text, [arm.texts for arm in plan.arms], plan.block_steps, plan.budget_s))
        ran(plan.name, swept({2: 0.55}, spread=1.1))

    monkeypatch.setattr(measured, "conduct", conduct)
    again.run()
    assert requests == [("train()", [{"workers": "2"}], 10, measured.AGAIN_S)]
    now = times_faster("two-workers")
    assert now.sure and now.times == pytest.approx(1 / 0.55)
    assert times_faster("two-workers", "workers", "4") == of_four, "not measured again"
    latest = latest_experiment("two-workers")
    assert latest.comparisons == open_.comparisons, "a table of the sweep is still of the sweep"
    ran("two-workers again", open_)
    assert remeasurement("two-workers") is None, "once"
    ran("two-workers", in_a_cell(swept({2: 0.5}, spread=2.3), job=Job("a", 0, "torchrun", 2)))
    again = remeasurement("two-workers")
    assert again is not None
    asked: list[tuple[str, ...]] = []
    shell = SimpleNamespace(run_cell_magic=lambda *words: asked.append(words))
    monkeypatch.setattr("gpulab.tuning.cell_code.shell", lambda: shell)
    again.run()
    line = "'two-workers again' --ab workers=2 --ranks 2 --steps 10 --budget 60"
    assert asked == [("gpuprofile", line, "train()")]
    few = in_a_cell(replace(open_, comparisons=(replace(open_.comparisons[0], pairs=2, interval=(0.01, 30.0)),)))
    ran("two-workers", few)
    again = remeasurement("two-workers")
    assert again is not None and again.pairs == 10, "two pairs do not tell how many it takes"


@pytest.mark.parametrize(
    "experiment",
    [
        lambda: in_a_cell(swept({2: 0.5}, spread=1.05)),  # decided
        lambda: in_a_cell(swept({2: 0.9}, spread=6.0)),  # as good as never
        lambda: in_a_cell(swept({2: 0.5}, spread=2.3), block_s=20.0),  # too long
        lambda: swept({2: None}),
    ],
)
def test_what_more_pairs_cannot_decide_is_left(
    ran: Ran, monkeypatch: pytest.MonkeyPatch, experiment: Callable[[], Experiment]
) -> None:
    monkeypatch.delenv(QUICK_VARIABLE, raising=False)
    ran("two-workers", experiment())
    assert remeasurement("two-workers") is None and remeasurement("another") is None


def in_a_cell(made: Experiment, block_s: float = 0.5, job: Job | None = None) -> Experiment:
    """With the cell that was run, and with blocks of this length."""
    blocks = tuple(Block(0, turn, turn, 10, 0, 320, int(block_s * 1e9)) for turn in range(made.comparisons[0].pairs))
    figures = made.sides[0].facts
    assert figures is not None
    run = replace(figures.run, code="train()", source="cell", job=job)
    a = replace(made.comparisons[0].a, facts=replace(figures, run=run), blocks=blocks)
    return replace(made, comparisons=(replace(made.comparisons[0], a=a), *made.comparisons[1:]))


@pytest.mark.parametrize("traced", [True, False])
def test_a_share_is_the_one_of_the_picture(traced: bool) -> None:
    case = synthetic.cpu_case().run
    run = case if traced else replace(case, timeline=None)
    shown = {part.label: part.share for part in segments(facts(run))}
    assert measured.data_wait_share(facts(run)) == shown[PARTS["data_wait"].label]
    works = measured.working_share(facts(run))
    assert works == (shown[PARTS["compute"].label] + shown[PARTS["optimizer"].label] if traced else None)


def test_a_setting_that_failed_is_no_value_of_the_sweep() -> None:
    found = Swept.of(swept({16: 0.5, 32: None}, "batch_size", "sample"), "batch_size", as_written=8)
    assert found.times_us == {8: 1.0, 16: 0.5}


def test_another_experiment_is_not_taken_for_the_sweep(ran: Ran) -> None:
    for name, knob in (("other", "workers"), ("how-many", "accumulate")):
        ran(name, swept({4: 0.5}, knob))
        with pytest.raises(NotMeasured, match="run that cell first"):
            check_enough(2, "how-many", "workers", as_written=0)


def test_what_was_measured_is_known_by_its_name(ran: Ran) -> None:
    for_nothing = pytest.raises(NotMeasured, match="run ")
    with for_nothing:
        times_faster("two-workers")
    ran("two-workers", swept({2: 0.5}))
    ran("two-workers", swept({2: 0.4}))
    ran("cache", swept({1: 0.1}))
    latest = times_faster("two-workers")
    assert (latest.times, latest.sure) == (2.5, True), "the latest of the name"
    assert latest.interval == pytest.approx((2.45, 2.55), abs=0.01)
    ran("two-workers", swept({2: None}))
    with for_nothing:
        times_faster("two-workers")  # it failed
    ran("ways", swept({2: 0.5, 4: 0.2}))
    fourth = times_faster("ways", "workers", "4")
    assert (fourth.times, fourth.sure) == (5.0, True)
    for name, workers in (("ways", "8"), ("other", "4")):
        with for_nothing:
            times_faster(name, "workers", workers)


@pytest.mark.parametrize(
    "shown",
    [
        lambda: batch_size.draw_sweep("none", as_written=8),
        lambda: capstone.Ladder().add("none"),
        lambda: cost.bill("none", 2.5),
        lambda: cost.draw_gpus("none"),
        lambda: cost.cost_ratio("none"),
        lambda: cost.check_cheaper("workers"),
        lambda: fused_kernels.swaps_table({"none": "a swap"}),
        lambda: mixed_precision.draw_gains({"none": "a step"}, default_device()),
        lambda: profile_first.draw_trace("none"),
        lambda: profile_first.plugin_beside("none"),
        lambda: utilization.alerts_with("none"),
        lambda: utilization.draw_ladder("none", 1.0, 1.0),
        lambda: utilization.top_table("none"),
    ],
)
def test_without_a_measurement_there_is_no_figure(shown: Callable[[], object]) -> None:
    assert re.search(r"(measured|no experiment).* run .*first", repr(shown()), re.DOTALL)


def test_of_too_few_blocks_no_factor_is_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for spread, pairs, shows_factor in ((9.0, 2, False), (9.0, 5, True), (1.01, 2, True)):
        sweep = swept({4: 0.27}, knob="prefetch", spread=spread)
        result = replace(sweep, comparisons=(replace(sweep.comparisons[0], pairs=pairs),))
        monkeypatch.setattr(measured, "experiment", lambda *a, result=result, **k: Compared(result))
        compare_each(lambda: None, [{"prefetch": 4}], steps=4, pairs=5)
        said = capsys.readouterr().out
        assert ("speedup" in said) is shows_factor, said
        assert ("prefetch=4: only 2 of 5 pairs of blocks" in said) is not shows_factor


def test_each_setting_gets_its_verdict_or_why_it_has_none(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def experiment(code: object, setting: dict[str, object], **options: object) -> Compared:
        if "pin_memory" in setting:
            raise UsageError("there is no GPU to pin memory for")
        return Compared(swept({2: 0.5}))

    monkeypatch.setattr(measured, "experiment", experiment)
    compare_each(lambda: None, [{"pin_memory": True}, {"workers": 2}], steps=4, pairs=5)
    first, second = capsys.readouterr().out.split("\n\n")[:2]
    assert first == "there is no GPU to pin memory for" and second.startswith("Faster: workers=2")


# -- of ranks ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> list[Run]:
    """The runs of this process, the last one last, to be filled in."""
    mine: list[Run] = []
    monkeypatch.setattr(measured, "runs", SimpleNamespace(own=mine))
    return mine


def stepping(name: str, ms: float, id: str, rank: int = 0, job: str = "") -> Run:
    """A rank's run of forty steps of about so many ms; `job` alone if it is another than the name's."""
    wall = ms * np.exp(np.random.default_rng(len(id)).normal(0, 0.01, 60))
    steps = synthetic.steps(wall, np.zeros(60), synthetic.phases(5, 40, 6, 9))
    of = Job(job or f"job of {name}", rank, "torchrun", 2)
    return replace(synthetic.cpu_case().run, id=id, steps=steps, job=of, settings=Settings(name=name))


def test_the_ranks_of_a_name_are_those_of_its_latest_job(own: list[Run]) -> None:
    own += [stepping("pipeline", 30, f"{job}-{rank}", rank, job) for job in ("first", "second") for rank in (1, 0)]
    own += [replace(stepping("alone", 30, "alone"), job=None)]
    assert [run.id for run in latest_ranks("pipeline")] == ["second-0", "second-1"]
    for name in ("alone", "another"):
        with pytest.raises(NotMeasured, match=name):
            latest_ranks(name)


def test_a_run_is_compared_with_another_by_their_names(own: list[Run]) -> None:
    own += [stepping("before", 30, "a"), stepping("after", 15, "b"), stepping("again", 30.1, "c")]
    faster, slower = faster_than("before", "after"), faster_than("after", "before")
    between = faster_than("before", "again")
    assert faster.sure and faster.times == pytest.approx(2, rel=0.03)
    assert slower.times == pytest.approx(0.5, rel=0.03)
    assert between.times == pytest.approx(1, abs=0.03)
    question = times_between("How many?", "before", "again", "with several")
    assert question.measure() == between and question.unit == "times"
    with pytest.raises(NotMeasured, match="another"):
        faster_than("before", "another")


def test_how_long_a_rank_waits_for_the_others(own: list[Run], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NotMeasured, match="uneven"):
        waiting_share("uneven", rank=0)
    given: list[list[int]] = []

    def compare(ranks: dict[int, Facts], **_: object) -> SimpleNamespace:
        given.append(list(ranks))
        return SimpleNamespace(
            ranks=[SimpleNamespace(rank=r, waiting_us=w, step_us=1000.0) for r, w in ((0, 470.0), (1, 0.0), (2, None))]
        )

    monkeypatch.setattr(measured, "compare_ranks", compare)
    own += [stepping("uneven", 30, "e"), stepping("other", 30, "f"), stepping("uneven", 30, "g", rank=1)]
    own += [stepping("uneven", 30, "h")]
    assert waiting_share("uneven", rank=0) == pytest.approx(0.47)
    assert given == [[0, 1]], "the ranks of that job alone, in order"
    assert waiting_share("uneven", rank=1) == 0
    assert waiting_share("uneven", rank=2) is None and waiting_share("uneven", rank=3) is None
    own += [replace(stepping("alone", 30, "i"), job=None)]
    with pytest.raises(NotMeasured, match="not run in ranks"):
        waiting_share("alone", rank=0)
