"""Experiments end to end on tiny cells: what runs, what is put back, what is said when something goes wrong."""

from __future__ import annotations

import copy
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import gpulab
from gpulab.errors import UsageError
from gpulab.tuning.record import Experiment
from gpulab.tuning.schedule import Progress
from tests.knobs.test_model_knobs import everything
from tests.support.knob_cells import Cell
from tests.tuning.cells import CELL, SETUP, same, weights


def quick(
    code: Callable[[], object] | str, knobs: dict[str, object], names: dict[str, Any] | None = None, **more: Any
) -> Any:
    given = {"pairs": 5, "steps": 4, "budget_s": 300.0, "save": False, "show": False, **more}
    return gpulab.experiment(code, knobs, namespace=names, **given)


def last() -> Experiment:
    """What the latest experiment gave."""
    latest = gpulab.experiments[-1].result
    assert isinstance(latest, Experiment)
    return latest


COMPILABLE = """
model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
"""


@pytest.mark.parametrize(
    ("knob", "value"),
    [
        ("fused_optimizer", "on"),
        ("workers", 1),
        ("cache", "on"),
        ("batch_size", 2),
        ("accumulate", 2),
        ("channels_last", "on"),
        ("attention", "math"),
        ("compile", "default"),
    ],
)
def test_everything_is_as_before(
    names: dict[str, Any], knob: str, value: object, torch_without_a_space: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpulab.tuning.runner.FULL_RUN_LIMIT_S", 250.0)  # compiling on a busy machine takes long
    torch.compiler.reset()  # what an earlier test compiled would be kept with ours
    if knob == "compile":
        exec(COMPILABLE, names)
    cell = Cell(names["model"], names["optimizer"])
    before, state, left = weights(names), copy.deepcopy(cell.optimizer.state_dict()), everything(cell)
    random = (torch.get_rng_state(), np.random.get_state(legacy=False)["state"]["key"].copy())
    found = quick(CELL, {knob: value}, names, pairs=1)
    if knob == "compile" and (refused := found.only.b.failure) and not refused.startswith("no effect"):
        pytest.skip(refused)
    (check,) = found.only.b.checks
    assert check.state == "took effect", check.evidence
    assert names["model"] is cell.model and names["optimizer"] is cell.optimizer and same(before, names)
    assert cell.optimizer.state_dict() == state and everything(cell) == left
    assert torch.equal(random[0], torch.get_rng_state())
    assert (random[1] == np.random.get_state(legacy=False)["state"]["key"]).all()
    assert names["loss"].requires_grad and names["factor"] == 1.0, "what the cell makes is there"


def test_as_written_trains_as_the_bare_cell_and_is_recorded(
    names: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    bare: dict[str, Any] = {"__name__": "__main__", "losses": []}
    exec(SETUP, bare)
    exec(CELL.replace("    loss.backward()", "    losses.append(loss.item())\n    loss.backward()"), bare)
    torch.manual_seed(0)
    exec(SETUP, names)
    found = quick(CELL, {"workers": 1}, names, pairs=1, seeds=2, save=True, name="kept")
    assert list(found.loss.a) == pytest.approx(bare["losses"][: len(found.loss.a)], rel=1e-6)
    assert found.loss.verdict == "same" and found.loss.seeds == 2 and len(found.loss.band) > 5
    assert any(high > low for low, high in found.loss.band)
    last_run = gpulab.runs[-1]
    assert last_run.settings.knobs == {"workers": "1"} and not gpulab.runs[-2].changes
    assert last_run.loader is not None and last_run.loader.num_workers == 1
    assert [(c.name, c.state) for c in last_run.changes] == [("workers", "took effect")]
    stored = gpulab.runs.store.load(last_run.id)
    assert stored.settings.name == "kept: workers=1" and stored.changes[0].state == "took effect"


def test_variables_of_the_notebook_and_of_the_cell(names: dict[str, Any]) -> None:
    found = quick(CELL, {"pause": 0.02, "factor": 3.0}, names, pairs=2)
    assert all(b.time_ns >= b.step_count * 20e6 for b in found.only.b.blocks), "it slept in every step"
    assert {check.kind for check in found.only.b.checks} == {"variable"}
    assert names["pause"] == 0.0 and names["factor"] == 1.0
    assert found.loss.b[0] == pytest.approx(3 * found.loss.a[0], rel=1e-5)
    assert "factor = 3.0" in found.only.b.edit and found.only.b.edit_is_diff


def test_a_sweep_goes_on_after_values_that_cannot_be(names: dict[str, Any]) -> None:
    full = "    if len(x) > 10: raise torch.OutOfMemoryError('CUDA out of memory.')"
    found = quick(CELL.replace("    time.sleep(pause)", full), {"batch_size": [2, 16, 1000, 8]}, names, pairs=2)
    sides = found.result.sides
    assert [side.label for side in sides[:3]] == ["baseline", "batch_size=2", "batch_size=16"]
    assert "out of memory" in sides[2].failure and not sides[3].blocks
    assert sides[3].failure.startswith("the dataset has 96 items"), "its label names it already"
    measured = [sides[i] for i in (0, 1, 4)]
    assert [bool(side.failure) for side in measured] == [False] * 3
    assert [side.facts.samples_per_s / side.facts.steps_per_s for side in measured] == pytest.approx([4, 2, 8])
    of_measured = [found.comparisons[0], found.comparisons[3]]
    assert all(c.unit == "sample" for c in of_measured)
    assert [side.us_per_sample for side in measured[1:]] == [c.b.us_per_sample for c in of_measured], (
        "medians of blocks"
    )


@pytest.mark.parametrize(
    ("knobs", "words"),
    [
        ({"wrkers": 2}, "workers"),
        ({"workers": "many"}, "many"),
        ({}, "name a setting"),
        ({"batch_size": []}, "batch_size"),
        ({"hiden": 3}, "hiden"),
    ],
)
def test_nothing_runs_where_the_plan_cannot_work(names: dict[str, Any], knobs: dict[str, object], words: str) -> None:
    names["ran"] = np.zeros(1)  # what is written into an array stays: it is not put back
    with pytest.raises(UsageError, match=words):
        quick("ran[0] += 1\n" + CELL, knobs, names)
    assert names["ran"][0] == 0


def test_an_error_as_written_passes_after_what_there_is(
    names: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ZeroDivisionError):
        quick(CELL + "\n1 / 0", {"workers": 1}, names, steps=30)
    assert last().stopped
    with pytest.raises(NameError, match="nowhere"):
        quick("nowhere\n" + CELL, {"workers": 1}, names, show=True)
    assert not capsys.readouterr().out, "without a result no page is shown"


def test_an_error_under_a_knob_is_a_result(names: dict[str, Any]) -> None:
    names["guard"] = 4
    found = quick("if guard != 4: raise ValueError('guarded')\n" + CELL, {"guard": 5}, names, pairs=1)
    assert "guarded" in found.result.sides[1].failure
    assert "not comparable" in found.verdict


def interrupted_at(what: str, names: dict[str, Any]) -> Any:
    from gpulab.api.experiment import conduct
    from gpulab.tuning.code import Code
    from gpulab.tuning.schedule import Arm, Plan

    def tell(progress: Progress) -> None:
        if progress.what.startswith(what):
            raise KeyboardInterrupt

    plan = Plan((Arm({"workers": 1}),), block_steps=4, pairs=5, save=False)
    with pytest.raises(KeyboardInterrupt):
        conduct(Code.of_text(CELL, names), plan, show=False, tell=tell)
    return gpulab.experiments[-1]


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("workers=1", "cannot be compared with the baseline: stopped before workers=1 had run."),
        ("block 1 ", "Stopped before a pair of blocks had run: only the full run of each is there."),
        ("block 7", "Stopped after 2 pairs of blocks."),
    ],
)
def test_an_interrupt_says_what_there_is_and_restores_all(names: dict[str, Any], what: str, words: str) -> None:
    before = weights(names)
    found = interrupted_at(what, names)
    assert words in f"{found.headline.sentence} {found.headline.evidence}"
    assert "--ab" not in found.text(full=True), "that is what was asked for"
    assert last().stopped and len(last().sides) == 2
    assert same(before, names)


@pytest.mark.usefixtures("interrupts_come")
def test_a_swallowed_interrupt_ends_the_comparison(names: dict[str, Any], tmp_path: Path) -> None:
    before, runs = signal.getsignal(signal.SIGINT), tmp_path / "runs"  # a file: lists are put back for each run

    def swallows_the_fifth() -> None:
        with runs.open("a") as file:
            file.write("x")
        if runs.stat().st_size == 5:
            with suppress(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)

    names["swallows_the_fifth"] = swallows_the_fifth
    swallowing = "swallows_the_fifth()\n" + CELL
    with pytest.raises(KeyboardInterrupt):
        quick(swallowing, {"fused_optimizer": "on"}, names, pairs=30)
    assert signal.getsignal(signal.SIGINT) is before
    assert last().stopped and runs.stat().st_size <= 6


def test_a_cell_that_uses_up_an_iterator_is_told(names: dict[str, Any]) -> None:
    names["batches"] = iter([(torch.randn(4, 8), torch.randint(0, 3, (4,))) for _ in range(90)])
    found = quick(CELL.replace("in loader", "in batches"), {"fused_optimizer": "on"}, names)
    assert "uses up `batches`" in found.only.differences[0], "it is said at the top"
    assert found.only.restored.endswith("Not restored: `batches`.")


ENDLESS = """
def cycle(loader):
    while True:
        for batch in loader:
            yield batch

batches = cycle(loader)
"""
TAKING = CELL.replace("for x, y in loader:", "for _ in range(60):\n    x, y = next(batches)")


def test_an_earlier_generator_goes_on_after_a_comparison(names: dict[str, Any]) -> None:
    exec(ENDLESS, names)
    found = quick(TAKING, {"batch_size": 2}, names)
    assert found.verdict != "not comparable" and len(found.only.b.blocks) == 5
    assert "DataLoader inside it" in found.only.differences[0]
    assert len(next(names["batches"])[0]) in (2, 4), "it has not ended"


@pytest.mark.parametrize("takes", ["x, y = next(batches)", "x, y = next(inner)"])
def test_an_earlier_generator_goes_on_after_an_early_end(names: dict[str, Any], takes: str) -> None:
    exec(ENDLESS + "inner = (batch for batch in batches)", names)
    with gpulab.profile(steps=9, save=False, live=False, show=False, code=TAKING) as p:
        exec(TAKING.replace("x, y = next(batches)", takes), names)
    assert p.run.outcome == "stopped" and len(p.run.steps) == 9
    assert len(next(names["inner"])[0]) == len(next(names["batches"])[0]) == 4


def test_code_that_only_loads_from_a_generator_ends_all_the_same(names: dict[str, Any]) -> None:
    exec(ENDLESS, names)
    with gpulab.profile(steps=9, save=False, live=False, show=False) as p:
        for x, y in names["batches"]:
            del x, y
    assert p.run.outcome == "stopped" and len(p.run.steps) == 9


def test_more_time_than_the_budget_is_told(names: dict[str, Any]) -> None:
    found = quick(CELL, {"workers": 1}, names, pairs=None, budget_s=1e-6)
    assert found.only.ended_early == "The budget of less than 1 s was over before workers=1 had run"
    assert not found.result.stopped and len(found.result.sides[0].facts.run.steps) <= 1
    assert "the budget of less than 1 s was over before workers=1 had run" in " ".join(found.text().split())


def test_the_record_of_a_run_holds_the_threads_it_was_given(names: dict[str, Any]) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        sides = quick(CELL, {"compute_threads": [1]}, names, pairs=1).result.sides
        assert [side.facts.run.environment.compute_threads for side in sides] == [2, 1]
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_steps_that_were_asked_for_make_a_single_run_longer(names: dict[str, Any]) -> None:
    from gpulab.tuning.code import Code
    from gpulab.tuning.runner import Runner
    from gpulab.tuning.schedule import Arm, Plan

    code = Code.of_text("for _ in range(3):\n" + CELL.replace("\n", "\n    "), names)
    plans = [Plan((Arm({"pause": 0.001}),), block_steps=n, interleaved=False, save=False) for n in (20, 35)]
    counts = [[len(s.facts.run.steps) for s in Runner(code, plan).run().sides if s.facts] for plan in plans]
    assert [after - before for before, after in zip(*counts, strict=True)] == [15, 15]
