"""Runs for other programs: what a row says, that files are whole or not there, and that their readers read them."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from msgspec.structs import replace

from gpulab.analysis.facts import facts
from gpulab.analysis.run_row import COLUMNS, run_row
from gpulab.api.runs import Runs
from gpulab.errors import StoreError
from gpulab.run import Category, Device, Loader, Memory, Run, Samples, Series, Settings
from gpulab.store import exports
from gpulab.store.exports import MOST_POINTS, plain_name
from gpulab.store.files import write_whole
from gpulab.store.folders import COLUMNS as COLUMNS_FILE
from gpulab.store.folders import DOCUMENT, Store
from tests.api.test_runs_table import complaint, do
from tests.support.strategies import runs as any_runs
from tests.support.strategies import tiny_run

OLD, NEW = "20250101-000000-aaaaaa", "20250102-000000-bbbbbb"
HOSTILE = "<b>x</b>, \"quoted\" 's'\r\nsecond line\t=1+1 ü 数"


@pytest.fixture
def runs(tmp_path: Path) -> Runs:
    """Two stored runs, one with everything set."""
    store = Store(tmp_path / "runs")
    store.save(tiny_run(OLD))
    full = replace(
        tiny_run(NEW, name=HOSTILE),
        settings=Settings(name=HOSTILE, steps=6, trace_steps=1, knobs={"workers": "4", "amp": "bf16"}),
        loader=Loader("Digits", 1000, 32, 2, 4, True, False, 31, False),
        memory=Memory(peak_allocated_bytes=123, peak_rss_bytes=2**40),
        outcome="failed",
    )
    store.save(full)
    return Runs(store)


# a row


def test_a_row_is_what_the_report_says(runs: Runs) -> None:
    run = runs[NEW]
    row, known = run_row(run), facts(run)
    assert known.step_us is not None
    assert (row["id"], row["name"], row["outcome"], row["device"]) == (NEW, HOSTILE, "failed", "cpu")
    assert row["step_median_us"] == known.step_us.median == 10_000
    assert row["counted_step_count"] == known.step_us.count == 4 and row["step_count"] == 6
    assert row["samples_per_s"] == known.samples_per_s == 3200
    assert row["data_wait_fraction"] == 0.5
    assert row["busy_fraction"] is None, "a CPU has no busy fraction, and None is no 0"
    assert (row["peak_allocated_bytes"], row["peak_reserved_bytes"], row["peak_rss_bytes"]) == (123, None, 2**40)
    assert (row["batch_size"], row["num_workers"], row["dataset"]) == (32, 2, "Digits")
    assert (row["setting_steps"], row["setting_warmup"], row["setting_trace"]) == (6, None, True)
    assert row["knobs"] == "workers=4, amp=bf16" and run_row(runs[OLD])["knobs"] == ""
    assert row["torch"] == "2.13.0"


@settings(max_examples=60)
@given(any_runs())
def test_every_cell_has_its_columns_type(run: Run) -> None:
    row = run_row(run)
    assert list(row) == list(COLUMNS)
    wrong = {n: v for n, v in row.items() if v is not None and type(v) is not COLUMNS[n]}
    assert not {n: v for n, v in wrong.items() if not (type(v) is int and COLUMNS[n] is float)}


def test_busy_is_that_of_the_profiled_steps(runs: Runs) -> None:
    run = runs[OLD]
    assert run.timeline is not None
    start_ns = run.timeline.start_ns + np.array([0, 2_000_000])
    gpu = np.array([Category.KERNEL, Category.GPU_MEMCPY], np.uint8)
    kernel = replace(run.timeline, start_ns=start_ns, category=gpu)
    lanes = (replace(kernel.lanes[0], kind="stream", process=0),)
    run = replace(run, device=Device("cuda", "A100", 0), timeline=replace(kernel, lanes=lanes, training_lane=None))
    account = facts(run).breakdown
    assert account is not None and account.busy_fraction == pytest.approx(0.11)
    row = run_row(run)
    assert row["busy_fraction"] == account.busy_fraction and row["kernel_busy_fraction"] == pytest.approx(0.1)


# tables


def test_csv_holds_every_name_as_it_is(runs: Runs, tmp_path: Path) -> None:
    file = tmp_path / "runs.csv"
    assert do(runs, f"export {file}") == f"2 runs written to {file}"
    with file.open(newline="", encoding="utf-8") as text:
        rows = list(csv.DictReader(text))
    assert [row["id"] for row in rows] == [OLD, NEW] and list(rows[0]) == list(COLUMNS)
    assert rows[1]["name"] == HOSTILE and rows[0]["name"] == ""
    assert rows[1]["busy_fraction"] == "" and float(rows[1]["step_median_us"]) == 10_000.0
    assert rows[1]["pin_memory"] == "True" and rows[0]["pin_memory"] == ""


def test_json_has_null_for_what_was_not_measured(runs: Runs, tmp_path: Path) -> None:
    exported = runs.export(tmp_path / "runs.JSON")
    assert exported.count == 2 and exported.skipped == ()
    rows = json.loads((tmp_path / "runs.JSON").read_text(encoding="utf-8"))
    assert rows == [json.loads(json.dumps(run_row(runs[id]))) for id in (OLD, NEW)]
    assert rows[0]["busy_fraction"] is None and rows[1]["name"] == HOSTILE


@pytest.mark.parametrize("name", ["n" * 10_000, "bad \udc80", "\0", "=HYPERLINK(1)", "a\rb"])
def test_any_name_comes_back(tmp_path: Path, name: str) -> None:
    runs = Runs(Store(tmp_path / "runs"))
    runs.add(tiny_run(OLD, name=name))
    whole = name.replace("\udc80", r"\udc80")
    runs.export(tmp_path / "a.json")
    assert json.loads((tmp_path / "a.json").read_text(encoding="utf-8"))[0]["name"] == whole
    runs.export(tmp_path / "a.csv")
    with (tmp_path / "a.csv").open(newline="", encoding="utf-8") as text:
        assert next(csv.DictReader(text))["name"] == whole


def test_what_is_not_finite_is_missing(tmp_path: Path) -> None:
    rows: list[dict[str, float | None]] = [{"a": float("nan"), "b": 0.0}, {"a": float("inf"), "b": None}]
    exports.write_table(tmp_path / "x.json", rows, {"a": float, "b": float})
    assert json.loads((tmp_path / "x.json").read_text()) == [{"a": None, "b": 0.0}, {"a": None, "b": None}]


def test_parquet_keeps_the_types_of_empty_columns(runs: Runs, tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    do(runs, f"export {tmp_path / 'runs.parquet'}")
    table = parquet.read_table(tmp_path / "runs.parquet")
    assert table.column_names == list(COLUMNS) and str(table.schema.field("busy_fraction").type) == "double"
    assert table.to_pylist() == [run_row(runs[id]) for id in (OLD, NEW)]


@pytest.mark.parametrize(
    ("target", "told"),
    [
        ("a.txt", "must end in .csv, .json or .parquet."),
        ("a", "must end in"),
        ("", "is a folder: name a file in it."),
        ("folder.csv", "is a folder: name a file in it."),
        ("no/a.csv", "there is no folder"),
        ("n" * 300 + ".csv", "cannot be written: file name too long."),
        ("a\0.csv", "cannot be written"),
        ("a.csv --name nothing", "Nothing to export: no run matches 'name nothing'."),
        ("a.csv --outcome x", "The outcome must be one of"),
        ("a.csv b.csv", "expects one target"),
        ("a.csv --tensorboard x", "expects one target"),
        ("--tensorboard", "expected one argument"),
        ("--tensorboard a_file", "is a file: name a folder."),
    ],
)
def test_a_file_that_cannot_be_is_one_sentence(
    runs: Runs, target: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.csv").mkdir()
    (tmp_path / "a_file").touch()
    before = sorted(tmp_path.iterdir())
    said = complaint(runs, f"export {target or repr(str(tmp_path))}")
    assert told in said and "\n" not in said
    assert sorted(tmp_path.iterdir()) == before


def test_a_file_is_replaced_whole_or_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "a.csv"
    file.write_bytes(b"before")

    def full(path: Path, content: bytes) -> int:
        path.open("wb").close()
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", full)
        with pytest.raises(StoreError, match="cannot be written: no space left on device"):
            write_whole(file, b"after")
    assert file.read_bytes() == b"before" and [f.name for f in tmp_path.iterdir() if f.is_file()] == ["a.csv"]
    write_whole(file, b"after")
    assert file.read_bytes() == b"after"


def test_a_run_that_cannot_be_read_is_left_out_and_named(runs: Runs, tmp_path: Path) -> None:
    damage(runs.store.root / OLD)
    shown = do(runs, f"export {tmp_path / 'a.json'}")
    assert shown.startswith("1 run written to") and f"left out: {OLD}: Run '{OLD}' cannot be read" in shown
    damage(runs.store.root / NEW)
    assert "Nothing to export" in complaint(runs, f"export {tmp_path / 'b.json'}")
    assert not (tmp_path / "b.json").exists()


def damage(folder: Path) -> None:
    """The header stays as it is, so that the run is listed."""
    document = (folder / DOCUMENT).read_bytes()
    (folder / DOCUMENT).write_bytes(document.replace(b'"python":"3.11"', b'"python":311'))
    assert (folder / DOCUMENT).read_bytes() != document and (folder / COLUMNS_FILE).exists()


# curves


def test_curves_have_a_point_per_step_and_per_reading() -> None:
    run = tiny_run()
    found = {curve.name: curve for curve in exports.scalars(run)}
    of_steps = {"step/wall_ms", "step/data_wait_ms", "step/optimizer_ms", "step/samples_per_s"}
    assert set(found) == of_steps | {"curve/cpu_pct"}
    wall = found["step/wall_ms"]
    assert (wall.value.tolist(), wall.number.tolist()) == ([10.0] * 6, list(range(6)))
    assert found["step/samples_per_s"].value.tolist() == [3200.0] * 6
    assert found["curve/cpu_pct"].number.tolist() == [0, 10, 20, 30, 40, 50]
    unknown = replace(run.steps, sample_count=np.full(6, -1, np.int64))
    assert of_steps - {c.name for c in exports.scalars(replace(run, steps=unknown))} == {"step/samples_per_s"}


def test_two_meters_of_one_name_keep_their_curves() -> None:
    one = tiny_run().samples.series[0]
    two = replace(one, value=one.value + 1)
    hostile = Series("../<b>\n", "", "", "", one.t_ns, one.value)
    found = exports.scalars(replace(tiny_run(), samples=Samples((one, two, hostile))))
    curves = {c.name: c.value[0] for c in found if c.name.startswith("curve/")}
    assert curves == {"curve/cpu_pct": 0.0, "curve/cpu_pct_2": 1.0, "curve/_b__": 0.0}


def test_long_curves_are_thinned_and_it_is_said() -> None:
    run = tiny_run(count=2 * MOST_POINTS + 1, step_ms=1)
    curve = exports.scalars(run)[0]
    assert curve.every == 3 and len(curve.number) <= MOST_POINTS
    assert curve.number[:3].tolist() == [0, 3, 6]
    names = {"a b/c-d_e.f": "a b/c-d_e.f", "x" * 10_000: "x" * 100, "///": "unnamed", "": "unnamed"}
    assert {name: plain_name(name) for name in names} == names, "what trackers refuse is spelled otherwise"


# TensorBoard


def events(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard itself reads of a folder."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # type: ignore[import-untyped]

    found = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    found.Reload()
    return {tag: [(e.step, e.value) for e in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


def test_tensorboard_reads_what_was_exported(runs: Runs, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    pytest.importorskip("torch")
    target = tmp_path / "tb"
    (target / "mine").mkdir(parents=True)
    shown = do(runs, f"export --tensorboard {target}")
    assert shown == f"2 runs written to {target}\nLook at them: tensorboard --logdir {target}"
    folders = sorted(f.name for f in target.iterdir())
    assert folders[0] == OLD and folders[1].endswith(NEW) and folders[2] == "mine"
    found = events(target / OLD)
    assert found["step/wall_ms"] == [(n, 10.0) for n in range(6)]
    assert found["curve/cpu_pct"] == [(0, 0.0), (10, 20.0), (20, 40.0), (30, 60.0), (40, 80.0), (50, 100.0)]
    (target / OLD / "notes.txt").write_text("mine")
    runs.name(OLD, "a/b")
    runs.name(NEW, "new")
    runs.export_tensorboard(target)  # in place of the first
    assert sorted(f.name for f in target.iterdir()) == [OLD, f"a_b {OLD}", "mine", f"new {NEW}"]
    assert [f.name for f in (target / OLD).iterdir()] == ["notes.txt"], "what is not ours stays"
    assert events(target / f"a_b {OLD}") == found


def test_a_writer_that_is_not_installed_is_named(runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(exports, "find_spec", lambda name: None)
    told = complaint(runs, "export runs.parquet")
    assert told == "A Parquet file needs pyarrow: pip install pyarrow. CSV and JSON need no package."
    before = sorted(tmp_path.iterdir())
    assert complaint(runs, "export --tensorboard x").endswith(": pip install tensorboard.")
    assert sorted(tmp_path.iterdir()) == before
