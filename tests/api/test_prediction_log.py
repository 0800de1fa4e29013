"""The scoreboard: nothing is lost or torn, damage is counted, and intervals learn from it by a stated rule."""

from __future__ import annotations

import math
import multiprocessing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell
from msgspec.structs import replace

import gpulab
from gpulab.api.predict import ScoreboardView
from gpulab.errors import StoreError
from gpulab.prediction.prediction import LEAST_FOR_BIAS, NARROWEST, WIDEST, Prediction, recalibrated
from gpulab.store import prediction_log
from gpulab.store.prediction_log import NAME, Board, Record, Scoreboard
from gpulab.tuning.arms import log_predictions
from gpulab.tuning.record import Comparison, Experiment
from gpulab.verdict import is_decided
from tests.support import comparisons as made
from tests.support import synthetic
from tests.support.shell import shell_with_gpulab
from tests.tuning.cells import CELL, SETUP

ratios = st.floats(0.05, 20)


@st.composite
def around(draw: st.DrawFn, middle: st.SearchStrategy[float] = ratios) -> tuple[float, tuple[float, float]]:
    ratio = draw(middle)
    return ratio, (ratio * math.exp(-draw(st.floats(0, 1))), ratio * math.exp(draw(st.floats(0, 1))))


@st.composite
def records(draw: st.DrawFn) -> Record:
    (predicted, its), (measured, interval) = draw(around()), draw(around())
    return Record(
        when=f"2026-08-{draw(st.integers(1, 28)):02d}T10:00:00.000+00:00",
        knob=draw(st.sampled_from(["workers", "amp + workers", "batch_size"])),
        value=draw(st.text(max_size=40)),
        predicted=predicted,
        predicted_interval=its,
        measured=measured,
        measured_interval=interval,
        device=draw(st.sampled_from(["CPU", "NVIDIA H100 80GB HBM3"])),
        cell="0123456789ab",
        only_sign=draw(st.booleans()),
    )


def a_record(**changes: Any) -> Record:
    usual: dict[str, Any] = {
        "when": prediction_log.now(),
        "knob": "workers",
        "value": "workers=2",
        "predicted": 0.5,
        "predicted_interval": (0.4, 0.6),
        "measured": 0.55,
        "measured_interval": (0.54, 0.56),
        "device": "CPU",
        "cell": "0123456789ab",
    }
    return Record(**{**usual, **changes})


# the file


@given(st.lists(records(), max_size=8))
def test_what_is_written_is_read(tmp_path_factory: pytest.TempPathFactory, given_records: list[Record]) -> None:
    board = Scoreboard(tmp_path_factory.mktemp("board"))
    for record in given_records:
        board.append([record])
    found = board.read()
    assert found.damaged == 0 and not found.problem
    assert sorted(map(repr, found.records)) == sorted(map(repr, (r for r in given_records if r.conclusive)))
    assert found.undecided == sum(not r.conclusive for r in given_records)
    assert [r.when for r in found.records] == sorted(r.when for r in given_records if r.conclusive)


def _write(folder: str, who: int, count: int) -> None:
    board = Scoreboard(Path(folder))
    for i in range(count):
        board.append([a_record(value=f"{who}:{i} {'x' * 500}")])


def test_two_notebooks_at_once_lose_and_tear_nothing(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=_write, args=(str(tmp_path), who, 60)) for who in range(2)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(120)
    found = Scoreboard(tmp_path).read()
    assert found.damaged == 0
    assert {r.value.split()[0] for r in found.records} == {f"{who}:{i}" for who in range(2) for i in range(60)}


def test_a_full_file_is_put_aside_and_the_oldest_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prediction_log, "FULL_BYTES", 3_000)
    board = Scoreboard(tmp_path)
    for i in range(100):
        board.append([a_record(value=f"n={i}")])
    files = list(tmp_path.iterdir())
    assert len(files) <= prediction_log.MOST_FULL + 1
    assert sum(f.stat().st_size for f in files) < 5 * 3_500
    kept = [int(r.value[2:]) for r in board.read().records]
    assert kept == list(range(kept[0], 100)) and len(kept) > 20


@pytest.mark.parametrize(
    "damage",
    [
        b"{",
        b"null",
        b"\xff\xfe\x00",
        b'{"when": 1}',
        b"[" * 5_000,
        b'{"a": "' + b"x" * 40_000 + b'"}',
        msgspec.json.encode(a_record(predicted=-1.0)),
        msgspec.json.encode(a_record(measured_interval=(2.0, 1.0))),
        msgspec.json.encode(a_record(knob="")),
    ],
)
def test_damaged_lines_are_skipped_and_counted(tmp_path: Path, damage: bytes) -> None:
    board = Scoreboard(tmp_path)
    board.append([a_record(value="first")])
    with (tmp_path / NAME).open("ab") as file:
        file.write(damage)  # without an end, as an interrupted write leaves it
    board.append([a_record(value="second")])
    found = board.read()
    assert [r.value for r in found.records] == ["first", "second"] and found.damaged == 1
    assert "1 line" in repr(ScoreboardView(found))


def test_a_record_that_could_not_be_read_again_is_not_written(tmp_path: Path) -> None:
    for wrong in ({"predicted": 0.0}, {"measured": math.nan}, {"value": "x" * 20_000}):
        with pytest.raises(ValueError, match="no sound record"):
            Scoreboard(tmp_path).append([a_record(**wrong)])
    assert not Scoreboard(tmp_path).read().records


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot be written"):
        Scoreboard(tmp_path / "file" / "deeper").append([a_record()])


def test_a_file_that_cannot_be_read_is_said(tmp_path: Path) -> None:
    (tmp_path / NAME).mkdir()
    found = Scoreboard(tmp_path).read()
    assert not found.records and "cannot be read" in repr(ScoreboardView(found))


def test_errors_are_of_this_device_and_of_estimates() -> None:
    board = Board(
        (a_record(), a_record(device="another"), a_record(only_sign=True), a_record(knob="amp", measured=1.0))
    )
    assert board.errors("CPU") == {"workers": (pytest.approx(1.1),), "amp": (2.0,)}


# the rule


@given(around(), st.lists(st.floats(0.2, 5), max_size=40))
def test_the_interval_stays_sound(found: tuple[float, tuple[float, float]], errors: list[float]) -> None:
    ratio, interval = found
    told = recalibrated(Prediction({"workers": "2"}, ratio, interval, "because"), errors)
    assert told.ratio is not None and told.interval is not None
    assert 0 < told.interval[0] <= told.ratio * (1 + 1e-9) and told.ratio <= told.interval[1] * (1 + 1e-9)
    if not errors:
        assert (told.ratio, told.interval) == (ratio, interval)
    if len(errors) < LEAST_FOR_BIAS:
        assert told.ratio == ratio
    before = math.log(interval[1] / interval[0])
    after = math.log(told.interval[1] / told.interval[0])
    assert NARROWEST * before * 0.999 <= after <= WIDEST * max(before, 2e-6) * 1.001


@given(st.integers(1, 9), st.floats(0.01, 0.5), st.floats(0.01, 0.5))
def test_larger_errors_make_it_wider(count: int, half: float, error: float) -> None:
    before = Prediction({"workers": "2"}, 0.5, (0.5 * math.exp(-half), 0.5 * math.exp(half)), "")
    small = recalibrated(before, [math.exp(error)] * count)
    large = recalibrated(before, [math.exp(2 * error)] * count)
    assert small.interval is not None and large.interval is not None and before.interval is not None
    assert large.interval[1] >= small.interval[1] * (1 - 1e-9) and large.interval[0] <= small.interval[0] * (1 + 1e-9)
    if error < 0.99 * half:
        assert small.interval[1] < before.interval[1]
    if error > 1.01 * half:
        assert small.interval[1] > before.interval[1]


@given(st.floats(0.7, 1.4), st.integers(LEAST_FOR_BIAS, 50))
def test_a_bias_is_corrected_only_with_enough_records(error: float, count: int) -> None:
    before = Prediction({"workers": "2"}, 0.5, (0.4, 0.625), "")
    few, many = recalibrated(before, [error] * (LEAST_FOR_BIAS - 1)), recalibrated(before, [error] * count)
    assert few.ratio == 0.5 and "corrected" not in few.basis
    assert many.ratio == pytest.approx(0.5 * error)
    assert ("corrected" in many.basis) == (error != 1)


def test_chance_is_no_bias_and_ranges_and_refusals_stay() -> None:
    errors = [1.3, 0.8, 1.1, 0.75, 1.25, 0.9, 1.02, 0.85, 1.2, 0.95, 1.15, 0.9]
    assert recalibrated(Prediction({}, 0.5, (0.4, 0.6), ""), errors).ratio == 0.5
    for told in (Prediction({}, 0.5, (0.4, 0.6), "", only_sign=True), Prediction({}, None, None, "", refused="why")):
        assert recalibrated(told, [2.0] * 20) is told


# what is shown


def test_an_empty_board_says_what_to_do() -> None:
    board = gpulab.scoreboard()
    assert all("%%gpuprofile --ab workers=2" in shown for shown in (repr(board), board._repr_html_()))


def test_the_board_in_figures() -> None:
    measured = ((0.55, (0.54, 0.56)), (0.45, (0.44, 0.46)), (0.9, (0.8, 1.0)))
    board = Board(tuple(a_record(measured=ratio, measured_interval=interval) for ratio, interval in measured))
    text = repr(ScoreboardView(board))
    assert text.split("\n")[1].split() == ["workers", "3", "11", "%", "2", "of", "3"]  # off by 10, 11 and 80 %
    assert "2.0 (1.7–2.5)" in text and "×" not in text
    assert "predicted speedup" in text and "measured speedup" in ScoreboardView(board)._repr_html_()


def test_each_device_has_its_own_line() -> None:
    gpu = "NVIDIA H100 80GB HBM3"
    here = [a_record(predicted=0.5, measured=0.5)] * 2
    both = repr(ScoreboardView(Board((*here, a_record(device=gpu, measured=1.0)))))
    of_knobs = both.split("\n\n")[0].splitlines()
    assert of_knobs[0].split()[-1] == "device"
    assert [line.split()[:3] for line in of_knobs[1:]] == [["workers", "2", "0"], ["workers", "1", "100"]]
    assert of_knobs[1].endswith("CPU") and of_knobs[2].endswith(gpu)
    assert "device" not in repr(ScoreboardView(Board(tuple(here)))).splitlines()[0]


def test_nothing_of_a_record_reaches_html_unescaped() -> None:
    hostile = a_record(knob=synthetic.HOSTILE, value=synthetic.HOSTILE, device=synthetic.HOSTILE)
    assert "<script" not in ScoreboardView(Board((hostile,)))._repr_html_()
    assert "\x1b" not in repr(ScoreboardView(Board((hostile,))))


# predictions beside measurements


def predicted(ratio: float | None = 0.5, **more: Any) -> Any:
    interval = None if ratio is None else (ratio * 0.9, ratio * 1.1)
    told = Prediction({"workers": "2"}, ratio, interval, "from the clouds", **more)
    return made.a_comparison(made.faster(prediction=told))


def test_only_what_was_proven_is_kept() -> None:
    sound = predicted()
    one = made.a_sweep()

    def kept(found: Any) -> int:
        before = len(Scoreboard().read().records)
        assert log_predictions(replace(one, comparisons=(found,))) == ""
        return len(Scoreboard().read().records) - before

    assert kept(sound) == 1
    assert kept(made.a_comparison()) == 0  # nothing was predicted
    assert kept(predicted(None, refused="nobody knows")) == 0
    assert kept(replace(sound, evidence="sequential")) == 0
    assert kept(replace(sound, verdict="not comparable")) == 0
    assert kept(replace(sound, interval=None)) == 0
    idle = tuple(replace(check, state="no effect") for check in sound.b.checks)
    assert kept(replace(sound, b=replace(sound.b, checks=idle))) == 0
    assert kept(replace(sound, b=replace(sound.b, settings={"batch_size": "8"}))) == 0  # per step: other work


def test_a_board_that_cannot_be_written_costs_a_note_only(own_store: Path) -> None:
    own_store.mkdir(parents=True, exist_ok=True)
    (own_store / NAME).mkdir()
    assert "cannot be written" in log_predictions(replace(made.a_sweep(), comparisons=(predicted(),)))


@pytest.fixture
def any_range(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also the wide one that the steps of a busy machine give is a prediction."""
    monkeypatch.setattr("gpulab.prediction.predict.CLEARLY", math.inf)
    monkeypatch.setattr("gpulab.prediction.predict.WIDEST", math.inf)


def foretold(knobs: dict[str, Any], **more: Any) -> Comparison:
    """A short experiment with these knobs, which has predicted them before."""
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(SETUP, names)
    found = gpulab.experiment(CELL, knobs, namespace=names, pairs=5, steps=4, show=False, **more).result
    assert names["loader"].batch_size == 4
    assert isinstance(found, Experiment) and found.comparisons[0].b.prediction is not None
    return found.comparisons[0]


@pytest.mark.usefixtures("any_range")
def test_an_experiment_foretells_and_keeps(own_store: Path) -> None:
    found = foretold({"fused_optimizer": True})
    told = found.b.prediction
    assert told is not None and told.ratio is not None and told.ratio < 1
    board = gpulab.scoreboard().records
    decided = is_decided(found.verdict)  # the machine's affair
    assert [(r.knob, r.predicted, r.measured) for r in board] == (
        [("fused_optimizer", told.ratio, found.ratio)] if decided else []
    )
    assert not decided or "optimizer.step" not in (own_store / NAME).read_text()  # the code itself is not kept


@pytest.mark.usefixtures("any_range")
def test_a_larger_batch_is_predicted_from_short_runs() -> None:
    told = foretold({"batch_size": 16}, save=False).b.prediction
    assert told is not None and told.ratio is not None
    assert "batch 2 took" in told.basis and "16 took" not in told.basis
    assert not gpulab.scoreboard().records, "save=False keeps nothing"


def test_a_variable_that_nobody_knows_is_refused() -> None:
    told = foretold({"factor": 2.0}, save=True).b.prediction
    assert told is not None and "factor" in told.refused
    assert not gpulab.scoreboard().records


@pytest.fixture
def shell() -> Iterator[InteractiveShell]:
    with shell_with_gpulab() as made_shell:
        yield made_shell


def test_the_magics(shell: InteractiveShell, capsys: pytest.CaptureFixture[str]) -> None:
    from gpulab.api.reading import runs

    shell.run_line_magic("gpulab", "scoreboard")
    assert "No prediction has been compared" in capsys.readouterr().out
    runs.add(made.facts_with(40, {"data_wait": 0.6, "compute": 0.4}).run, None)
    shell.run_line_magic("gpulab", "predict workers=2, amp=bf16")
    assert "no prediction" in capsys.readouterr().out
    shell.run_line_magic("gpulab", "predict workers=2")
    assert "workers=2  " in capsys.readouterr().out
    shell.run_line_magic("gpulab", "predict")
    assert capsys.readouterr().out.strip()
    for wrong, said in (("scoreboard now", "Unexpected argument"), ("predict wrkers=2", "Did you mean workers")):
        with pytest.raises(UsageError, match=said):
            shell.run_line_magic("gpulab", wrong)
