"""The call that takes most of the counted steps, from looks during the whole run."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec.structs import replace

from gpulab.analysis.calls import costliest_call, costliest_part
from gpulab.diagnosis import no_cause
from gpulab.diagnosis.finding import Finding
from gpulab.diagnosis.own_code import leading_part, with_part
from gpulab.run import CALL_KINDS, CallLooks, Pause, PauseKind, Phase, Place, Run, Unit
from tests.support import synthetic
from tests.support.rule_cases import case_of, run_of

CHAINS = Finding("memory_bound_ops", "Memory-bound.", (), 1.0, "likely")


def looked(kind: str, met: int, count: int = 100) -> Run:
    """Looks spread over the counted steps of a run, so many of them at one call."""
    run = synthetic.cpu_case().run
    rows = np.flatnonzero((run.steps.phase == Phase.MEASURED) & (run.steps.flags == 0))
    inside = run.steps.start_ns[rows][:, None] + run.steps.wall_ns[rows][:, None] * np.linspace(0.1, 0.9, count)
    t_ns = np.sort(inside.ravel())[:: len(rows)][:count].astype(np.int64)
    place = np.where(np.arange(count) < met, 0, -1).astype(np.int32)
    number = np.full(count, CALL_KINDS.index(kind), np.uint8)
    looks = CallLooks(t_ns, place, place.copy(), place.copy(), number)
    return replace(run, call_looks=looks, callees=("json.dumps",), places=(Place("cell", 7, "", "json.dumps(x)"),))


def test_its_share_of_the_looks_in_counted_steps() -> None:
    call = costliest_call(looked("library", 40), None, CALL_KINDS)
    assert call is not None and (call.line.line, call.callee, call.word) == (7, "json.dumps", "serialization")
    assert call.share == 0.4 and call.interval[0] < 0.4 < call.interval[1] and len(call.times)


def test_few_looks_other_kinds_and_known_pauses_say_nothing() -> None:
    run = looked("library", 40)
    assert costliest_call(looked("library", 20, 30), None, CALL_KINDS) is None
    assert costliest_call(run, None, ["batch"]) is None
    kinds: tuple[tuple[PauseKind, bool], ...] = (("logging", True), ("evaluation", False))
    for kind, is_left_out in kinds:
        paused = replace(run, pauses=(Pause(kind, 0, int(run.steps.end_ns[-1]) + 1),))
        assert (costliest_call(paused, None, CALL_KINDS) is None) is is_left_out
    assert costliest_call(looked("own", 40), None, CALL_KINDS) is None, "it may be the training: no trace tells"
    assert costliest_call(looked("aside", 40), None, CALL_KINDS) is not None


@pytest.mark.parametrize("kind", ["own", "operator", "layer"])
def test_what_takes_most_of_the_forward_pass(kind: str) -> None:
    run = looked(kind, 60)
    assert run.call_looks is not None
    kinds = run.call_looks.kind.copy()
    kinds[-1] = CALL_KINDS.index("operator")
    run = replace(run, call_looks=replace(run.call_looks, kind=kinds))
    if kind != "own":
        run = replace(run, callees=("",))
    part = costliest_part(run, None)
    if kind == "layer":
        assert part is None, "the only line, which calls the model"
        inside = Place("cell", 7, "", "h = self.cell(x, h)", (Unit(6, 8, "for x in xs:"),))
        part = costliest_part(replace(run, places=(inside,)), None)
        of_model = Place("cell", 7, "Encoder.forward", "vectors = self.words(tokens)")
        assert costliest_part(replace(run, places=(of_model,)), None) is not None, "one layer of the model"
    assert part is not None and (part.share, part.line.line) == (0.6, 7)
    assert part.callee == ("json.dumps" if kind == "own" else "")
    assert costliest_part(looked("own", 60), None) is None, "an older run, which keeps no looks at the model"


@pytest.mark.parametrize(
    ("met", "starts", "level"), [(60, "The CPU", "notice"), (45, "No clear bottleneck: the", "good")]
)
def test_a_healthy_run_names_what_takes_most(
    met: int, starts: str, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = replace(looked("operator", met), callees=("",))
    part = leading_part(case_of(run))
    assert part is not None and part.share == met / 100
    assert leading_part(case_of(replace(run, device=run_of(gpu=True).device))) is None, (
        "the host's time is not the GPU's"
    )
    for backward, is_named in ((0.004, False), (0.2, True)):
        whole = with_part(case_of(run_of()), CHAINS, replace(part, backward_share=backward))
        assert ("with its backward pass" in whole.summary) is is_named, "no figure is said twice"
    monkeypatch.setattr(no_cause, "leading_part", lambda _: part)
    verdict = no_cause.healthy(case_of(run_of()))
    assert verdict is not None and verdict.summary.startswith(starts) and verdict.level == level
    assert f"Your line 7 takes {met} %" in verdict.summary and "line 7" in verdict.source_line


@pytest.mark.parametrize("python", [True, False])
def test_python_that_holds_the_lock_is_no_operator(python: bool) -> None:
    run = looked("own", 60)
    assert run.call_looks is not None
    held = (np.arange(100) % 10 < (9 if python else 5)).astype(np.uint8)
    call = costliest_call(replace(run, call_looks=replace(run.call_looks, holds_lock=held)), None, CALL_KINDS)
    assert (call is not None) is python


def test_what_lies_between_steps_counts() -> None:
    """As saving at an epoch's end: no step holds it."""
    run = looked("library", 40)
    assert run.call_looks is not None
    steps = replace(run.steps, start_ns=run.steps.start_ns * 2, end_ns=run.steps.end_ns * 2 - run.steps.wall_ns)
    looks = replace(run.call_looks, t_ns=run.call_looks.t_ns * 2)
    call = costliest_call(replace(run, steps=steps, call_looks=looks), None, CALL_KINDS)
    assert call is not None and call.whole > 90 and call.share == pytest.approx(0.4, abs=0.03)
    counted = (steps.phase == Phase.MEASURED) & (steps.flags == 0)
    assert call.cost_us == pytest.approx(0.4 * 2 * np.mean(run.steps.wall_ns[counted]) / 1e3, rel=0.2)


def test_a_call_of_two_lines_is_one() -> None:
    run = looked("aside", 40)
    assert run.call_looks is not None
    place = np.where(np.arange(100) < 25, 0, np.where(np.arange(100) < 40, 1, -1)).astype(np.int32)
    run = replace(run, call_looks=replace(run.call_looks, place=place), places=(*run.places, Place("cell", 8)))
    call = costliest_call(run, None, CALL_KINDS)
    assert call is not None and (call.line.line, call.other_lines, call.looks) == (7, 1, 40)


def in_long_steps(run: Run, place: list[int], *, really: bool = True) -> Run:
    """Every third step takes long, and looks lie in these alone, or in all."""
    counted = np.flatnonzero((run.steps.phase == Phase.MEASURED) & (run.steps.flags == 0))
    long = counted[:: max(2, len(counted) // 3)]
    start_ns, wall_ns = run.steps.start_ns.copy(), run.steps.wall_ns
    for i in long:
        start_ns[i + 1 :] += 20 * wall_ns[i]
    end_ns = np.append(start_ns[1:], start_ns[-1] + wall_ns[-1])
    count = len(place)
    at = np.resize(long if really else counted, count)
    t_ns = np.sort(start_ns[at] + (end_ns - start_ns)[at] * np.linspace(0.1, 0.9, count)).astype(np.int64)
    places, kind = np.array(place, np.int32), np.full(count, CALL_KINDS.index("own"), np.uint8)
    looks = CallLooks(t_ns, places, places % 2, places.copy(), kind)
    return replace(run, steps=replace(run.steps, start_ns=start_ns, end_ns=end_ns), call_looks=looks)


@pytest.mark.parametrize("really", [True, False])
def test_what_few_long_steps_hold_is_no_training(really: bool) -> None:
    call = costliest_call(in_long_steps(looked("own", 40), [0] * 60, really=really), None, CALL_KINDS)
    assert (call is not None) is really
    assert call is None or (call.few_steps is not None and call.few_steps == (4, 20))


def test_a_loop_of_several_calls_in_few_steps_is_named() -> None:
    """As one that collects: its model, its environment, its buffer."""
    loop = Unit(11, 14, "for _ in range(600):")
    places = tuple(Place("cell", line, "", "x = x + 1", (loop,)) for line in (12, 13))
    run = replace(looked("own", 40), callees=("a", "b"), places=places)
    for counts, line in (((30, 30), 11), ((55, 5), 12)):
        call = costliest_call(in_long_steps(run, [0] * counts[0] + [1] * counts[1]), None, CALL_KINDS)
        assert call is not None and (call.line.line, call.callee) == (line, "" if line == 11 else "a")


@pytest.mark.parametrize(("first", "busier"), [(0.05, False), (0.5, False), (0.5, True)])
def test_what_grows_with_the_steps_is_told(first: float, busier: bool) -> None:
    run = looked("aside", 0, 600)
    assert run.call_looks is not None
    place = np.where(np.random.default_rng(0).random(600) < np.linspace(first, 0.5, 600), 0, -1).astype(np.int32)
    looks, steps = replace(run.call_looks, place=place, callee=place), run.steps
    if busier:  # the machine: all of a step takes longer and longer
        start_ns, end_ns, t_ns = (
            (t + 4 * t.astype(np.float64) ** 2 / steps.end_ns[-1]).astype(np.int64)
            for t in (steps.start_ns, steps.end_ns, looks.t_ns)
        )
        steps, looks = replace(steps, start_ns=start_ns, end_ns=end_ns), replace(looks, t_ns=t_ns)
    call = costliest_call(replace(run, steps=steps, call_looks=looks), None, CALL_KINDS)
    assert call is not None and (call.growth_us is not None) is (first < 0.5)


@pytest.mark.parametrize(
    ("callee", "word"),
    [
        ("torch.save", "saving"),
        ("save_state", "saving"),
        ("lightning.pytorch.callbacks.ModelCheckpoint.on_train_batch_end", "saving"),
        ("load_checkpoint", ""),
        ("Net.forward_checkpointed", ""),
        ("claim.pay", ""),
        ("mylib.evaluate.foo", ""),
        ("rich.print", "logging"),
        ("Trainer.log", "logging"),
    ],
)
def test_what_a_function_is_there_for(callee: str, word: str) -> None:
    run = replace(looked("library", 40), callees=(callee,))
    call = costliest_call(run, None, CALL_KINDS, saving=word == "saving")
    assert call is not None and call.word == word


def test_a_line_that_takes_the_time_itself_and_its_loop() -> None:
    loop = Unit(11, 14, "for _ in range(600):")
    places = tuple(Place("cell", line, "", "x = x + 1", (loop,)) for line in (12, 13, 14))
    run = replace(looked("batch", 100), callees=("",), places=places)
    assert run.call_looks is not None
    for lines, number in (([0] * 100, 12), ([0, 1, 2] * 33 + [0], 11)):
        for kind in ("batch", "own"):
            kinds = np.full(100, CALL_KINDS.index(kind), np.uint8)
            looks = replace(run.call_looks, place=np.array(lines, np.int32), kind=kinds)
            call = costliest_call(replace(run, call_looks=looks), None, CALL_KINDS)
            assert (call is None) is (kind == "own"), "it may be the training"
            assert call is None or (call.line.line, call.callee, call.looks) == (number, "", 100)
