"""A setting that cannot act here is answered before anything runs, or after one look at the cell."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import gpulab
from gpulab.errors import UsageError
from gpulab.knobs import loader_options
from gpulab.run import Device
from gpulab.tuning.code import Code
from gpulab.tuning.resolve import check
from gpulab.tuning.schedule import Arm, Plan
from tests.support.scripted_runs import ScriptedRuns

BUILT = "from torch.utils.data import DataLoader\nloader = DataLoader(data, batch_size=4)\nfor x in loader: x.sum()\n"
GIVEN = "lr = 0.1\nfor (x,) in loader: (x * lr).sum()\n"


@pytest.fixture
def names() -> dict[str, Any]:
    data = torch.arange(12.0)
    return {"__name__": "__main__", "data": data, "loader": DataLoader(TensorDataset(data), batch_size=4), "rate": 2}


def refused(code: str, names: dict[str, Any], *arms: dict[str, Any]) -> str:
    with pytest.raises(UsageError) as said:
        check(Code.of_text(code, names), Plan(tuple(map(Arm, arms))))
    return str(said.value)


THERE = "{}: the baseline has this already, so there is nothing to compare."


@pytest.mark.parametrize(
    ("code", "arms", "words"),
    [
        *((c, [{"pin_memory": True}], "pin_memory=on: there is no GPU") for c in (BUILT, GIVEN)),
        (BUILT, [{"pin_memory": True, "batch_size": 2}], "pin_memory=on: there is no GPU"),
        (GIVEN, [{"batch_size": 4}], THERE.format("batch_size=4")),
        (GIVEN, [{"workers": 0}], THERE.format("workers=0")),
        (GIVEN, [{"lr": 0.1}], THERE.format("lr=0.1")),
        (GIVEN, [{"workers": 0, "lr": 0.1}], "workers=0, lr=0.1: the baseline has all of this already"),
        ("batch_size = 4\nprint(batch_size)\n", [{"batch_size": "many"}], "it is 4 in the code"),
        ("batch_size = 4\nprint(batch_size)\n", [{"batch_size": 8}, {"batch_size": "many"}], "it is 4 in the"),
        (GIVEN, [{"batch_size": 5000}], "the largest is batch_size=12"),
        (GIVEN, [{"prefetch": 4}], "set workers=2 together with it"),
        (GIVEN, [{"tf32": True}], "TF32 needs an NVIDIA GPU"),
        (GIVEN, [{"workers": 1}], ""),
        (GIVEN, [{"workers": 0, "batch_size": 2}], ""),
        (GIVEN, [{"lr": 1}], ""),
        (GIVEN, [{"batch_size": 5000}, {"batch_size": 8}], ""),
        ("amp = 'fast'\nprint(amp)\n", [{"amp": "slow"}], ""),
        ("prefetch = 3\nprint(prefetch)\n" + GIVEN, [{"prefetch": 4}], ""),
    ],
)
def test_what_cannot_act_is_said_before_anything_runs(
    names: dict[str, Any], code: str, arms: list[dict[str, Any]], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader_options, "pins_nothing_here", lambda: True)
    monkeypatch.setattr("gpulab.tuning.resolve.detect_device", lambda requested: Device("cpu", "CPU"))
    if words:
        assert words in refused(code, names, *arms)
    else:
        check(Code.of_text(code, names), Plan(tuple(map(Arm, arms))))


def test_a_sweep_goes_on_without_the_value_that_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = ScriptedRuns(lambda label: 0.05).install(monkeypatch)
    code = Code.of_text("workers = 0\n", {})
    experiment = runs.conduct(code, Plan((Arm({"workers": 0}), Arm({"workers": 1})), pairs=2, save=False))
    assert [settings.knobs for settings in runs.full_runs] == [{}, {"workers": "1"}]
    assert set(runs.blocks) == {"baseline", "workers=1"}
    assert experiment.sides[1].failure == "the baseline has this already, so there is nothing to compare"


def test_one_look_is_enough_where_the_cell_must_be_seen(names: dict[str, Any], tmp_path: Path) -> None:
    runs = tmp_path / "runs"  # a file: objects are put back
    runs.touch()
    names["note"] = lambda: runs.write_text(f"{runs.read_text()}x")
    found = gpulab.experiment(f"note()\n{BUILT}", {"batch_size": 4}, namespace=names, save=False, show=False)
    assert "the baseline has this already" in found.headline.sentence
    assert found.only.b.facts is None and not found.only.b.blocks and runs.read_text() == "x"
    with pytest.raises(UsageError, match="batch_size=4: the baseline has this already"):
        gpulab.experiment(f"note()\n{BUILT}", {"batch_size": 4}, namespace=names, save=False, show=False)
    assert runs.read_text() == "x", "what was seen then is remembered"


def test_what_did_nothing_in_its_own_run_has_no_blocks() -> None:
    """One channel: channels first and channels last are the same layout, which only a run with the change tells."""
    model = torch.nn.Sequential(torch.nn.Conv2d(1, 1, 3))
    names = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1), "x": torch.randn(4, 1, 8, 8)}
    code = "for i in range(30):\n    optimizer.zero_grad()\n    model(x).sum().backward()\n    optimizer.step()\n"
    found = gpulab.experiment(code, {"channels_last": True}, namespace=names, pairs=2, save=False, show=False)
    assert found.only.evidence == "sequential" and found.only.verdict == "not comparable"
    assert found.headline.sentence.startswith("channels_last=on has no effect: for these shapes")
