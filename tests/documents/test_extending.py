"""The worked examples of docs/extending.md, run as they stand there."""

from __future__ import annotations

import re
import sys
from types import ModuleType
from typing import Any

import pytest

from tests.support.paths import ROOT

torch = pytest.importorskip("torch")

import gpulab  # noqa: E402
from gpulab.errors import UsageError  # noqa: E402
from gpulab.knobs.catalogue import KNOBS, parse_settings  # noqa: E402
from gpulab.knobs.knob import Knob  # noqa: E402
from gpulab.knobs.observe.observation import Observation  # noqa: E402
from gpulab.prediction.predict import PREDICTORS  # noqa: E402
from gpulab.run import Device  # noqa: E402

DOCUMENT = ROOT / "docs" / "extending.md"


def blocks(section: str) -> list[str]:
    """The Python blocks of a section of the document."""
    text = DOCUMENT.read_text(encoding="utf-8")
    body = text.split(f"\n## {section}\n")[1].split("\n## ")[0]
    found: list[str] = re.findall(r"```python\n(.*?)```", body, re.DOTALL)
    return found


@pytest.fixture
def knob(monkeypatch: pytest.MonkeyPatch) -> Knob:
    """The knob of the document, in the catalogue and in the table of formulas as the document says."""
    code, line, prediction, _ = blocks("A knob")
    module = ModuleType("deterministic_knob")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(compile(code, str(DOCUMENT), "exec"), vars(module))
    exec(line, vars(module))
    exec(prediction, vars(module))
    (listed,) = vars(module)["_LIST"]
    assert isinstance(listed, Knob)
    monkeypatch.setitem(KNOBS, listed.name, listed)
    for name, formula in vars(module)["PREDICTORS"].items():
        monkeypatch.setitem(PREDICTORS, name, formula)
    return listed


def train() -> None:
    """A tiny training."""
    weights = torch.ones(8, requires_grad=True)
    optimizer = torch.optim.SGD([weights], lr=0.01)
    for _ in range(12):
        optimizer.zero_grad()
        (weights * 2).square().sum().backward()
        optimizer.step()


def test_the_knob_is_set_compared_and_put_back(knob: Knob, capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {"gpulab": gpulab, "train": train}
    usage = blocks("A knob")[-1]
    exec(usage, names)
    printed, promised = capsys.readouterr().out, re.findall(r"^# (.*)$", usage, re.MULTILINE)
    assert printed.splitlines() == promised and not torch.are_deterministic_algorithms_enabled()
    side = names["compared"].only.b
    assert side.label == "deterministic=on" and side.blocks and not side.failure
    assert "torch.use_deterministic_algorithms(True)" in side.edit
    assert side.prediction is not None and side.prediction.refused == PREDICTORS[knob.name]


def test_a_training_that_sets_the_switch_itself_shows_no_effect(knob: Knob) -> None:
    def train_without() -> None:
        torch.use_deterministic_algorithms(False)
        train()

    found = gpulab.experiment(train_without, {knob.name: True}, pairs=2, save=False, show=False)
    check = found.only.b.checks[0]
    assert (check.state, check.evidence) == ("no effect", "the code sets the switch itself")


def test_the_command_knows_the_knob(knob: Knob) -> None:
    magics = pytest.importorskip("gpulab.magics")
    assert f", {knob.name}, or any variable" in " ".join(magics.help_text().split())
    assert parse_settings(["deterministic=on"], lambda name: False) == {"deterministic": True}
    with pytest.raises(UsageError, match=r"Did you mean deterministic\?"):
        parse_settings(["reproducible=on"], lambda name: False)


def test_the_panel_has_a_row_for_the_knob(knob: Knob) -> None:
    pytest.importorskip("ipywidgets")
    from gpulab.panel.controls import KnobRow

    row = KnobRow(KNOBS[knob.name], lambda: None)
    row.show(Observation(Device("cpu", "CPU")), {})
    assert knob.title in row._title.value and row.current is False and not row.control.disabled
