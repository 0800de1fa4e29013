"""Comparisons against made-up ones: what is to be kept, that all views say the same, and the command."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from msgspec.structs import replace

import gpulab
from gpulab import cli
from gpulab.diagnosis.headline import Headline
from gpulab.errors import UsageError
from gpulab.prediction.prediction import Prediction
from gpulab.run import Change
from gpulab.store.folders import Store
from gpulab.tuning.record import Experiment
from gpulab.views import text as terminal
from gpulab.views.comparison import Compared
from gpulab.views.layout import Column, Row, Section
from tests.support import comparisons as made
from tests.support.paths import ROOT
from tests.views.every_view import REFUSED, compared, noisy, refused

DOCUMENTED = ROOT / "docs" / "compare-json.md"


def test_only_what_is_faster_and_took_effect_is_to_be_kept() -> None:
    """And where the losses differ, one is to look at them before."""
    check = Change("channels_last", "on", "off", "module call", "no effect", "nothing to lay out")
    other = made.faster(losses=made.loss_curve(seed=9))
    beside = made.faster(checks=(check, *made.faster().checks))
    slower = made.faster(blocks=made.blocks(1, 76.0))
    for b, kept, differ in (
        (made.faster(), True, False), (other, True, True), (beside, True, False), (slower, False, False),
        (made.alike(), False, False), (made.alike(checks=(check,)), False, False), (refused(), False, False),
    ):  # fmt: skip
        shown = Compared(made.a_comparison(b))
        assert ("KEEP IT" in shown.text()) is kept and (shown.json()["b"]["edit"] is not None) is kept  # type: ignore[index]
        assert (": check them before you keep it." in shown.text()) is differ


def test_a_setting_that_failed_has_no_table() -> None:
    for name in ("comparison_refused", "comparison_refused_sweep"):
        shown = compared()[name]
        assert "<table" not in shown.html() and " ".join(shown.text(full=True).split()).count(REFUSED) == 1


def test_short_words_stand_beside_their_row() -> None:
    columns = (Column("setting"), Column("", "wrap"), Column("", "wrap"))
    told = terminal.render("", Headline("", "", "", ""), [Section("T", columns, (Row(("workers=2", "x", "faster")),))])
    assert "  workers=2  x  faster\n" in told


def test_the_object_has_what_a_program_asks_for() -> None:
    found = made.a_comparison()
    shown = Compared(found)
    assert (shown.verdict, shown.ratio, shown.interval) == (found.verdict, found.ratio, found.interval)
    assert (shown.noise_floor, shown.parts, shown.loss) == (found.noise_floor, found.parts, found.loss)
    assert Compared(Experiment((found.a, found.b), (found,), 1.0)).ratio == found.ratio
    with pytest.raises(UsageError, match="5 settings"):
        Compared(made.a_sweep()).verdict  # noqa: B018
    assert shown._repr_mimebundle_() == shown.bundle()
    assert repr(shown).startswith("<Compared: Faster: workers=2 gives a 2.9")


def test_the_document_is_the_documented_one() -> None:
    """Each key of the JSON stands in the page about it, and each key there in the JSON."""
    cells = re.findall(r"^\| (`[^|]+`) \|", DOCUMENTED.read_text(), re.MULTILINE)
    told = {key for cell in cells for key in re.findall(r"`(\w+)`", cell)}
    predicted = made.faster(prediction=Prediction({"workers": "2"}, 0.4, (0.3, 0.5), "because"))
    one, many = Compared(made.a_comparison(predicted)).json(), Compared(made.a_sweep()).json()
    side, loss, parts = one["a"], one["loss"], one["parts"]
    assert isinstance(side, dict) and isinstance(loss, dict) and isinstance(parts, list)
    blocks, checks = side["blocks"], one["b"]["checks"]  # type: ignore[index]
    assert isinstance(blocks, list)
    found = {*one, *many, *side, *loss, *parts[0], *blocks[0], *checks[0], *side["per_million_samples"]}
    found |= {*one["b"]["prediction"]}  # type: ignore[index]
    assert found == told


def test_an_infinite_loss_is_told_in_json() -> None:
    loss = compared()["comparison_nan"].json()["loss"]
    assert isinstance(loss, dict) and loss["b"] == [2.0, None, "inf", 1.0]
    assert "infinite from step 3 on" in loss["words"] or "not a number from step 2 on" in loss["words"]


def test_nothing_but_the_blocks_has_a_ratio() -> None:
    """Headline and JSON of an undecided comparison have one figure and one verdict; its text is a golden one."""
    shown = Compared(noisy())
    figures = shown.json()
    assert shown.verdict == figures["verdict"] == "undecided" and shown.headline.key == "undecided"
    assert f"{shown.times_as_fast:.1f}× speedup per step, but" in shown.headline.sentence
    assert figures["times_as_fast"] == shown.times_as_fast
    a, b = figures["a"], figures["b"]
    assert a["us_per_step"] / b["us_per_step"] == pytest.approx(shown.times_as_fast)  # type: ignore[index]
    assert b["edit"] is None  # type: ignore[index]


@pytest.mark.parametrize("ratio", [0.4, 1.0, 3.0])
def test_what_decides_nothing_is_no_hit(ratio: float) -> None:
    """Any prediction lies between 0.6 and 2.0 times as fast."""
    told = Prediction({"workers": "2"}, ratio, (ratio / 1.2, ratio * 1.2), "because")
    text = " ".join(Compared(noisy(prediction=told)).text(full=True).split())
    assert "as predicted" not in text and "than predicted" not in text
    held = replace(told, ratio=0.345, interval=(0.3, 0.4))
    assert "as predicted" in Compared(made.a_comparison(made.faster(prediction=held))).text()


# the command line and the door


@pytest.fixture
def stored() -> Store:
    store = Store()
    store.save(made.run_of(made.as_written(facts=made.facts_with(38.0, made.PARTS_A, seed=1, name="before"))))
    shares = {"data_wait": 0.02, "compute": 0.8}
    store.save(made.run_of(made.faster(facts=made.facts_with(13.0, shares, workers=2, seed=2, name="after"))))
    return store


def test_compare_prints_stored_runs_by_name(stored: Store, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["compare", "before", "after"]) == 0
    out = capsys.readouterr().out
    assert (
        "Faster: after gives a 2.9" in out
        and "× speedup over before per step" in out
        and "BEFORE YOU RELY ON THIS" in out
    )
    assert gpulab.compare("before", "after").verdict == "faster"


def test_compare_writes_json_and_a_page(stored: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["compare", "before", "20260801-000002", "--json", "--price-per-hour", "2"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["kind"] == "comparison" and figures["ratio"] == pytest.approx(13 / 38, rel=0.02)
    assert figures["b"]["per_million_samples"]["cost"] == pytest.approx(2 * 13e-3 / 32 * 1e6 / 3600, rel=0.02)
    page = tmp_path / "both.html"
    assert cli.main(["compare", "before", "after", "after", "--html", str(page)]) == 0
    assert "both.html" in capsys.readouterr().out
    assert "is the fastest of 3 settings" in page.read_text()


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["compare", "before"], "A comparison needs two runs"),
        (["compare"], "RUN is missing. Usage: `gpulab compare"),
        (["compare", "before", "gone"], "gone"),
        (["compare", "before", "no/such.json"], "There is no file or folder 'no/such.json'"),
        (
            ["compare", "before", "after", "--price-per-hour", "-2"],
            "--price-per-hour must be a number > 0",
        ),
    ],
)
def test_wrong_usage_is_one_line(
    stored: Store, argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(argv) == 2
    out, error = capsys.readouterr()
    assert out == "" and error.count("\n") == 1 and message in error, error
