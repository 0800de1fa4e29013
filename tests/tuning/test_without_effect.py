"""A setting that cannot act here is answered before anything runs, or after one look at the cell."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import gpulab
from gpulab.errors import UsageError
from gpulab.knobs.dataloader import loader_options
from gpulab.tuning.function_code import TextCode
from gpulab.tuning.plan import Arm, Plan
from gpulab.tuning.runner import check
from tests.support.scripted_runs import ScriptedRuns

BUILT = "from torch.utils.data import DataLoader\nloader = DataLoader(data, batch_size=4)\nfor x in loader: x.sum()\n"
GIVEN = "lr = 0.1\nfor (x,) in loader: (x * lr).sum()\n"


@pytest.fixture
def names() -> dict[str, Any]:
    data = torch.arange(12.0)
    return {"__name__": "__main__", "data": data, "loader": DataLoader(TensorDataset(data), batch_size=4), "rate": 2}


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader_options, "pins_nothing_here", lambda: True)


def refused(code: str, names: dict[str, Any], *arms: dict[str, Any]) -> str:
    with pytest.raises(UsageError) as said:
        check(TextCode.parsed(code, names), Plan(tuple(map(Arm, arms))))
    return str(said.value)


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize("code", [BUILT, GIVEN])
def test_memory_is_pinned_for_a_gpu_only(names: dict[str, Any], code: str) -> None:
    words = "pin_memory=on: there is no GPU to pin memory for: torch pins nothing here."
    assert refused(code, names, {"pin_memory": True}) == words


@pytest.mark.usefixtures("no_gpu")
def test_one_knob_that_cannot_act_is_named_among_several(names: dict[str, Any]) -> None:
    assert "pin_memory=on: there is no GPU" in refused(BUILT, names, {"pin_memory": True, "batch_size": 2})


def test_a_gpu_can_be_pinned_for(names: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader_options, "pins_nothing_here", lambda: False)
    check(TextCode.parsed(BUILT, names), Plan((Arm({"pin_memory": True}),)))


@pytest.mark.parametrize(
    ("settings", "label"),
    [({"batch_size": 4}, "batch_size=4"), ({"workers": 0}, "workers=0"), ({"lr": 0.1}, "lr=0.1")],
)
def test_the_value_that_is_there_is_not_measured(names: dict[str, Any], settings: dict[str, Any], label: str) -> None:
    assert refused(GIVEN, names, settings) == f"{label}: the cell has this as written, so there is nothing to compare."


def test_several_values_that_are_all_there(names: dict[str, Any]) -> None:
    said = refused(GIVEN, names, {"workers": 0, "lr": 0.1})
    assert said == "workers=0, lr=0.1: the cell has all of this as written, so there is nothing to compare."


@pytest.mark.parametrize("settings", [{"workers": 1}, {"workers": 0, "batch_size": 2}, {"lr": 1}])
def test_another_value_is_measured(names: dict[str, Any], settings: dict[str, Any]) -> None:
    check(TextCode.parsed(GIVEN, names), Plan((Arm(settings),)))


def test_a_sweep_goes_on_without_the_value_that_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = ScriptedRuns(lambda label: 0.05).install(monkeypatch)
    code = TextCode.parsed("workers = 0\n", {})
    experiment = runs.conduct(code, Plan((Arm({"workers": 0}), Arm({"workers": 1})), pairs=2, save=False))
    assert [settings.knobs for settings in runs.trials] == [{}, {"workers": "1"}]
    assert set(runs.blocks) == {"as written", "workers=1"}
    assert experiment.sides[1].failure == "the cell has this as written, so there is nothing to compare"


def test_one_look_is_enough_where_the_cell_must_be_seen(names: dict[str, Any], tmp_path: Path) -> None:
    runs = tmp_path / "runs"  # a file: objects are put back
    runs.touch()
    names["note"] = lambda: runs.write_text(f"{runs.read_text()}x")
    found = gpulab.experiment(f"note()\n{BUILT}", {"batch_size": 4}, namespace=names, save=False, show=False)
    assert "the cell has this as written" in found.headline.sentence
    assert found.only.b.facts is None and not found.only.b.blocks and runs.read_text() == "x"
    with pytest.raises(UsageError, match="batch_size=4: the cell has this as written"):
        gpulab.experiment(f"note()\n{BUILT}", {"batch_size": 4}, namespace=names, save=False, show=False)
    assert runs.read_text() == "x", "what was seen then is remembered"


@pytest.mark.parametrize("values", [("many",), (8, "many")])
def test_a_value_that_fits_neither_knob_nor_variable(values: tuple[object, ...]) -> None:
    arms = [{"batch_size": value} for value in values]
    assert "batch_size is 4 in the code" in refused("batch_size = 4\nprint(batch_size)\n", {}, *arms)


def test_a_value_of_a_variable_with_the_name_of_a_knob_is_taken() -> None:
    check(TextCode.parsed("amp = 'fast'\nprint(amp)\n", {}), Plan((Arm({"amp": "slow"}),)))


def test_what_did_nothing_in_its_own_run_has_no_blocks() -> None:
    """One channel: channels first and channels last are the same layout, which only a run with the change tells."""
    model = torch.nn.Sequential(torch.nn.Conv2d(1, 1, 3))
    names = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1), "x": torch.randn(4, 1, 8, 8)}
    code = "for i in range(30):\n    optimizer.zero_grad()\n    model(x).sum().backward()\n    optimizer.step()\n"
    found = gpulab.experiment(code, {"channels_last": True}, namespace=names, pairs=2, save=False, show=False)
    assert found.only.evidence == "sequential" and found.only.verdict == "not comparable"
    assert found.headline.sentence.startswith("channels_last=on has no effect: with these shapes")
