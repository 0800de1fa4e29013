"""`make record-gpu` without a GPU: every cell of the set runs on the CPU in its place, and what goes wrong is kept."""

from __future__ import annotations

import ast
import gzip
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

import gpulab
from benchmarks.planted.catalogue import CELLS as PLANTED
from benchmarks.record_gpu import __main__ as command
from benchmarks.record_gpu import catalogue, collecting, conductor
from benchmarks.record_gpu.catalogue import Recording, chosen, every
from benchmarks.record_gpu.collecting import CannotCollect, collect
from benchmarks.record_gpu.conductor import Session
from benchmarks.record_gpu.judging import totals
from benchmarks.record_gpu.outlet import DOCUMENT, SIMULATED, Outlet, document_of, machine_of, shortcoming, size_of
from benchmarks.record_gpu.packing import PATTERN, Packer, unpack
from benchmarks.record_gpu.table import table
from benchmarks.record_gpu.trace_trimming import trim, trimmed
from gpulab import recordings as reader
from gpulab.store import folders
from tests.benchmarks.test_planted import ISSUE_5
from tests.support.paths import ROOT

EVERY = every()
NAMES = [recording.name for recording in EVERY]
ALONE = "planted-accelerate-batch-of-two"  # Accelerate cannot be set up twice in one process: recorded by the command
LESSONS = """
workers-0 workers-2 workers-4 workers-8 stored-files stored-memmap batch-8 batch-32 batch-64 batch-256 batch-1024
checkpointing-off checkpointing-on depthwise-off depthwise-on precision-fp32 precision-tf32 precision-bf16
precision-fp16 attention-four-operators attention-sdpa optimizer-foreach optimizer-fused compile-off compile-on
channels-last-off channels-last-on launch-small-operators launch-cuda-graph sync-item sync-none copy-pageable
copy-pinned utilization-one-sm utilization-full capstone-before capstone-after search-width-16 search-width-128
own-python-line own-python-line-cured gpt2-fp32 gpt2-tf32 gpt2-bf16 gpt2-compile gpt2-flash gpt2-fused
"""
RECORD = """
import json, os, sys, time, traceback
from pathlib import Path
for absent in ("IPython", "ipywidgets", "anywidget"):
    sys.modules[absent] = None
from benchmarks.record_gpu.catalogue import every
from benchmarks.record_gpu.outlet import SIMULATED, Outlet
from benchmarks.record_gpu import recorder
import torch.utils.data
folder, alone = Path(sys.argv[1]), sys.argv[2]
os.chdir(folder)
recorder._get_ready()
torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL = 0.2  # no second is waited for workers of a cell that is over
answers = {}
for recording in every():
    if recording.name == alone:
        continue
    began = time.monotonic()
    try:
        recorder.record(recording, Outlet(folder / "out", folder / "out"), SIMULATED)
        answers[recording.name] = ""
    except BaseException:
        answers[recording.name] = traceback.format_exc()
    print(recording.name, round(time.monotonic() - began, 1), flush=True)
Path(folder, "answers.json").write_text(json.dumps(answers))
os._exit(0)  # as the recorder does
"""


def environment(folder: Path) -> dict[str, str]:
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    own = {
        "GPULAB_DIR": str(folder / "runs"),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
    }
    return {**os.environ, "PYTHONPATH": path, **own}


@pytest.fixture(scope="module")
def made_here(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """The folder of the whole set, and of each cell its traceback; all in one process, so that torch loads once."""
    folder = tmp_path_factory.mktemp("set")
    done = subprocess.run(
        [sys.executable, "-c", RECORD, str(folder), ALONE], cwd=ROOT, env=environment(folder), capture_output=True,
        text=True, check=False, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return folder / "out", json.loads((folder / "answers.json").read_text())


def named(name: str) -> Recording:
    [recording] = chosen([name], EVERY)
    return recording


def copied(source: Path, outlet: Outlet, recording: Recording, machine: str = SIMULATED) -> Path:
    """A whole recording in the place of this one; whatever machine, it says that it is no simulation but for that."""
    folder = outlet.folder(machine, recording.name)
    shutil.copytree(source, folder)
    document = document_of(folder)
    assert document is not None
    earlier, cell = recording.cells(simulate=machine == SIMULATED)
    own = {"name": recording.name, "machine": machine, "simulated": machine == SIMULATED}
    (folder / DOCUMENT).write_text(json.dumps(document | own | {"earlier": earlier, "cell": cell}))
    return folder


# -- the set -----------------------------------------------------------------------------------------------------------


def test_the_set_is_whole() -> None:
    assert set(LESSONS.split()) <= set(NAMES) and len(set(NAMES)) == len(NAMES)
    assert sum(name.startswith("planted-") for name in NAMES) == sum(planted.gpu for planted in PLANTED) >= 16


def test_lessons_name_recordings_of_the_set() -> None:
    asked = [
        name
        for text in (ROOT / "notebooks" / "lessons").glob("*.md")
        for call in re.findall(r"compare_recorded\(([^)]*)\)", text.read_text(encoding="utf-8"))
        for name in re.findall(r'"([^"]+)"', call)
    ]
    assert len(asked) > 10 and sorted(set(asked) - set(NAMES)) == []


def test_each_side_of_a_pair_is_its_own_cell() -> None:
    texts = [recording.text for recording in EVERY]
    assert len(set(texts)) == len(texts)
    for recording in EVERY:
        for simulate in (False, True):
            for text in recording.cells(simulate=simulate):
                compile(text, recording.name, "exec")
        assert str(ROOT) not in recording.text


def test_a_truth_names_findings_that_exist() -> None:
    with_truth = [recording for recording in EVERY if recording.truth is not None]
    assert len(with_truth) >= 25
    assert {key for r in with_truth if r.truth is not None for key in r.truth.accepted} <= ISSUE_5


@pytest.mark.parametrize("name", NAMES)
def test_every_name_of_torch_that_a_cell_uses_is_there(name: str) -> None:
    for node in ast.walk(ast.parse(named(name).text)):
        if isinstance(node, ast.Attribute) and re.fullmatch(r"torch(\.\w+)+", ast.unparse(node)):
            thing: Any = torch
            for attribute in ast.unparse(node).split(".")[1:]:
                assert hasattr(thing, attribute), ast.unparse(node)
                thing = getattr(thing, attribute)


HEADER = (
    '# /// cell\n# lesson = "03"\n# because = "x"\n{}# [[recording]]\n# name = "a"\n{}# ///\n# %% the training cell\n'
)


@pytest.mark.parametrize(
    ("of_file", "of_recording", "words"),
    [
        ("", '# edits = [["no such text", ""]]\n', "cell.py: 'no such text' is there 0 times"),
        ('# small = { SIDE = "4" }\n', "", "the constant SIDE is set 0 times"),
        ("# speed = 3\n", "", "a header has no field 'speed'"),
        ("", '# cause = ["x"]\n', "a header has no field 'cause'"),
        ("", '# like = "b"\n', "cell.py: 'b'"),
    ],
)
def test_a_header_that_is_wrong_says_where(tmp_path: Path, of_file: str, of_recording: str, words: str) -> None:
    file = tmp_path / "cell.py"
    file.write_text(HEADER.format(of_file, of_recording))
    with pytest.raises(ValueError, match=re.escape(words)):
        catalogue.read(file)


@pytest.mark.parametrize(
    ("device", "machine"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("Tesla T4", "t4"),
        ("", "gpu"),
    ],
)
def test_a_gpus_name_is_a_folders(device: str, machine: str) -> None:
    assert machine_of(device) == machine


# -- every cell, without the packages of a notebook --------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in NAMES if name != ALONE])
def test_a_cell_is_recorded_in_the_place_of_a_gpu(made_here: tuple[Path, dict[str, str]], name: str) -> None:
    out, answers = made_here
    assert answers[name] == ""
    folder = out / SIMULATED / name
    assert shortcoming(folder, named(name), simulate=True) is None
    run = folders.read(folder)
    run.check()
    assert (
        run.name == name
        and len(run.steps) >= 8
        and run.traced_numbers
        and run.code == named(name).cells(simulate=True)[1]
    )
    assert not any(place.file.endswith("recorder.py") for place in run.places), "only the user's lines are named"
    document = document_of(folder)
    assert document is not None
    assert document["versions"]["torch"] == run.environment.packages["torch"] and document["created"] == run.created
    assert folders.trace_path(folder) is not None, [m.reason for m in run.missing]
    assert size_of(folder) < 1_000_000


def test_nothing_of_the_machine_is_in_a_recording(made_here: tuple[Path, dict[str, str]]) -> None:
    import socket

    for file in made_here[0].rglob("*.json*"):
        text = gzip.decompress(file.read_bytes()).decode() if file.suffix == ".gz" else file.read_text()
        assert str(ROOT) not in text and str(made_here[0].parent) not in text, file.name
        assert f'"{socket.gethostname()}"' not in text, file.name


def test_a_recordings_trace_is_one_whole_step(made_here: tuple[Path, dict[str, str]]) -> None:
    trace = folders.trace_path(made_here[0] / SIMULATED / "precision-fp32")
    assert trace is not None
    run = gpulab.load(trace)
    assert isinstance(run, gpulab.Run) and len(run.steps) == 1 and run.timeline is not None and len(run.timeline) > 20


def test_two_recordings_are_compared(made_here: tuple[Path, dict[str, str]]) -> None:
    sides = [reader.open(f"{SIMULATED}/{name}", made_here[0]) for name in ("workers-0", "workers-8")]
    assert "workers-8" in str(gpulab.compare(*sides))


# -- the command -------------------------------------------------------------------------------------------------------


def test_the_command_records_judges_packs_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out, asked = tmp_path / "out", ["sync-item", ALONE]
    monkeypatch.setattr(
        sys, "argv", ["record_gpu", "--simulate", "--out", str(out), "--budget", "900", "--only", *asked]
    )
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("GPULAB_DIR", str(tmp_path / "runs"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "compiled"))
    patient(monkeypatch)
    assert command.main() == 0
    said = capsys.readouterr().out
    assert "2 of 2 recordings are there" in said and "SIMULATED" in said
    results = json.loads((out / "results.json").read_text())
    assert {name: row["state"] for name, row in results["recordings"].items()} == dict.fromkeys(asked, "recorded")
    assert all(row["headline"] and row["right"] in (True, False) for row in results["recordings"].values())
    files = {file.name for file in out.iterdir() if file.is_file()}
    assert files == {"results.json", "table.md", "log.txt", "recordings-1.tar.gz"}
    assert not list(out.glob(".making-*"))

    # a call that was killed: one recording is torn, the other is only packed
    columns = out / SIMULATED / "sync-item" / folders.COLUMNS
    columns.write_bytes(columns.read_bytes()[:-500])
    shutil.rmtree(out / SIMULATED / ALONE)
    (out / ".making-sync-item-abc").mkdir()
    assert command.main() == 0
    states = {n: r["state"] for n, r in json.loads((out / "results.json").read_text())["recordings"].items()}
    assert states == {"sync-item": "recorded", ALONE: "there already"}
    assert not list(out.glob(".making-*"))


def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits that a machine with other work keeps."""
    slow = tuple(replace(recording, limit_s=300.0) for recording in EVERY)
    monkeypatch.setattr(catalogue, "every", lambda: slow)


def test_a_name_that_is_none_is_answered_with_the_nearest(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["record_gpu", "--simulate", "--out", str(tmp_path), "--only", "worker-0"])
    with pytest.raises(SystemExit) as ended:
        command.main()
    assert ended.value.code == 2
    assert "there is no recording 'worker-0'; did you mean 'workers-0'?" in capsys.readouterr().err


def test_without_a_gpu_the_command_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "_gpu", lambda: "")
    monkeypatch.setattr(sys, "argv", ["record_gpu", "--out", str(tmp_path / "out")])
    assert command.main() == 2
    assert "add --simulate" in capsys.readouterr().err and not (tmp_path / "out").exists()


# -- what goes wrong ---------------------------------------------------------------------------------------------------

STUB = """
import json, os, shutil, subprocess, sys, time
from pathlib import Path
name, out, machine = sys.argv[1:4]
source, document = Path(__file__).parent / "whole", json.loads((Path(__file__).parent / f"{name}.json").read_text())
if not sys.stdin.readline():
    sys.exit(0)
print("a line of", name)
if document["how"] == "hangs":
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    (Path(__file__).parent / "child").write_text(str(child.pid))
    time.sleep(600)
if document["how"] == "raises":
    raise RuntimeError("CUDA out of memory | try less")
if document["how"] == "dies":
    os.kill(os.getpid(), 11)
if document["how"] == "nothing":
    sys.exit(0)
folder = Path(out, machine, name)
if folder.exists():
    shutil.rmtree(folder)
shutil.copytree(source, folder)
(folder / "recording.json").write_text(json.dumps(document["document"]))
"""


@pytest.fixture
def stub(tmp_path: Path, made_here: tuple[Path, dict[str, str]], monkeypatch: pytest.MonkeyPatch) -> Path:
    """A recorder that does in no time what it is told."""
    folder = tmp_path / "stub"
    folder.mkdir()
    (folder / "stub.py").write_text(STUB)
    shutil.copytree(made_here[0] / SIMULATED / "sync-item", folder / "whole")
    monkeypatch.setattr(conductor, "RECORDER", (str(folder / "stub.py"),))
    monkeypatch.setenv("GPULAB_DIR", str(tmp_path / "runs"))
    return folder


def behave(stub: Path, recording: Recording, how: str) -> None:
    document = document_of(stub / "whole")
    assert document is not None
    earlier, cell = recording.cells(simulate=True)
    own = {"name": recording.name, "earlier": earlier, "cell": cell}
    (stub / f"{recording.name}.json").write_text(json.dumps({"how": how, "document": document | own}))


def session(outlet: Outlet, budget_s: float = 600.0) -> Session:
    return Session(outlet, SIMULATED, budget_s=budget_s, least_s=1.0)


@pytest.mark.parametrize("cores", [2.0, 16.0])
def test_a_cell_that_fails_is_noted_and_the_rest_goes_on(
    tmp_path: Path, stub: Path, monkeypatch: pytest.MonkeyPatch, cores: float
) -> None:
    monkeypatch.setattr(conductor, "usable_cores", lambda: cores)
    ways = {
        "workers-0": "raises",
        "workers-2": "dies",
        "workers-4": "hangs",
        "workers-8": "nothing",
        "sync-item": "works",
    }
    wanted = [replace(named(name), limit_s=6.0 if how == "hangs" else 60.0) for name, how in ways.items()]
    for recording, how in zip(wanted, ways.values(), strict=True):
        behave(stub, recording, how)
    wanted.append(replace(named("sync-none"), needs=("no_such_module",)))
    outlet = Outlet(tmp_path / "out", tmp_path / "brief")
    rows = session(outlet).conduct(wanted)["recordings"]
    assert {name: row["state"] for name, row in rows.items()} == {
        "workers-0": "failed", "workers-2": "failed", "workers-4": "timed out", "workers-8": "failed",
        "sync-item": "recorded", "sync-none": "not possible",
    }  # fmt: skip
    assert rows["workers-0"]["detail"] == "RuntimeError: CUDA out of memory | try less"
    assert rows["workers-2"]["detail"].startswith("ended by signal 11")
    assert rows["workers-4"]["detail"] == "ended at its limit; a line of workers-4"
    assert rows["workers-8"]["detail"] == "it ended without a recording; a line of workers-8"
    assert rows["sync-none"]["detail"] == "it needs no_such_module, which is not installed here"
    assert rows["sync-item"]["headline"] and rows["sync-item"]["truth"] == [
        "sync_points",
        "logging_or_eval",
        "launch_bound",
    ]
    assert has_ended(int((stub / "child").read_text())), "what a cell has started is ended with it"
    page = outlet.table.read_text()
    assert "1 of 6 recordings are there" in page and "CUDA out of memory \\| try less" in page
    assert "a line of workers-2" in outlet.log.read_text()


def has_ended(pid: int) -> bool:
    import time

    import psutil

    for _ in range(300):
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.1)
    return False


def test_what_is_whole_is_not_made_again_and_what_is_not_is(tmp_path: Path, stub: Path) -> None:
    outlet = Outlet(tmp_path / "out", tmp_path / "out")
    names = ["workers-0", "workers-2", "workers-4", "workers-8", "batch-8"]
    wanted = [named(name) for name in names]
    for recording in wanted:
        behave(stub, recording, "works")
    for recording in wanted[:4]:
        copied(stub / "whole", outlet, recording)
    whole, torn, unfinished, changed = (outlet.folder(SIMULATED, name) for name in names[:4])
    torn_columns = torn / folders.COLUMNS
    torn_columns.write_bytes(torn_columns.read_bytes()[:-300])
    (unfinished / DOCUMENT).unlink()
    document = json.loads((changed / DOCUMENT).read_text())
    (changed / DOCUMENT).write_text(json.dumps(document | {"cell": "of last week"}))
    before = (whole / DOCUMENT).stat().st_mtime_ns
    rows = session(outlet).conduct(wanted)["recordings"]
    states = {name: row["state"] for name, row in rows.items()}
    assert states == {"workers-0": "there already"} | dict.fromkeys(names[1:], "recorded")
    assert (whole / DOCUMENT).stat().st_mtime_ns == before
    assert rows["workers-0"]["headline"], "what is there already is judged as well"
    assert all(outlet.whole(recording, SIMULATED) for recording in wanted)


def test_what_no_time_is_left_for_waits_for_the_next_call(tmp_path: Path, stub: Path) -> None:
    wanted = [replace(named("workers-0"), limit_s=3.0), named("workers-2"), named("workers-4")]
    for recording, how in zip(wanted, ("hangs", "works", "works"), strict=True):
        behave(stub, recording, how)
    outlet = Outlet(tmp_path / "out", tmp_path / "out")
    rows = session(outlet, budget_s=conductor.END_S + 3.5).conduct(wanted)["recordings"]
    states = [row["state"] for row in rows.values()]
    assert states == ["timed out", "no time left", "no time left"]
    assert rows["workers-2"]["detail"] == "call the command again: it goes on from here"


def test_an_interrupt_ends_the_cell_and_keeps_what_there_is(
    tmp_path: Path, stub: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = [named("workers-0"), named("workers-2")]
    behave(stub, wanted[0], "works")
    behave(stub, wanted[1], "hangs")
    outlet = Outlet(tmp_path / "out", tmp_path / "out")
    wait = conductor.Process.wait

    def interrupted(process: conductor.Process, limit_s: float) -> int | None:
        if process.recording.name == "workers-2":
            raise KeyboardInterrupt
        return wait(process, limit_s)

    monkeypatch.setattr(conductor.Process, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        session(outlet).conduct(wanted)
    assert outlet.whole(wanted[0], SIMULATED) and outlet.table.exists()
    assert [file.name for file in outlet.brief.glob(PATTERN)] == ["recordings-1.tar.gz"]


def test_totals_count_misses_by_name() -> None:
    rows: dict[str, dict[str, Any]] = {
        "a": {"truth": ["data_starved"], "right": True},
        "b": {"truth": ["no_tf32"], "right": False},
        "c": {"truth": ["healthy"], "right": False},
        "d": {"truth": None, "right": None},
        "e": {"truth": ["no_tf32"], "right": None, "problem": "torn"},
    }
    assert totals(rows) == {
        "with_a_cause": 2, "headline_right": 1, "healthy": 1, "false_alarms": 1, "misses": ["b", "c"],
        "not_judged": ["e"],
    }  # fmt: skip


def test_the_page_begins_with_the_verdict() -> None:
    row = {
        "state": "recorded", "seconds": 4.0, "detail": "", "bytes": 1000, "steps": 40, "step_ms": None, "right": False,
        "truth": ["no_tf32"], "headline": "healthy", "findings": ["healthy"], "summary": "All | well.",
    }  # fmt: skip
    rows = {"a": row, "b": {"state": "failed", "seconds": 1.0, "detail": "why"}}
    results = {"recordings": rows, "totals": totals(rows), "bytes": 1000, "seconds": 5.0, "simulated": False}
    lines = table(results).splitlines()
    assert lines[2].startswith("1 of 2 recordings are there") and lines[2].endswith("Missed: a.")
    assert "| a | no_tf32 | healthy | healthy | All \\| well. |" in lines
    assert "| b | failed | 1 | why |" in lines
    assert "| a | not measurable | 40 | healthy | no_tf32 | NO | 1 | 4 |" in lines
    assert "What is there" not in table(results, short=True)


# -- packing and collecting --------------------------------------------------------------------------------------------


@pytest.fixture
def outlet(tmp_path: Path, made_here: tuple[Path, dict[str, str]]) -> Outlet:
    """Four recordings as if a GPU had made them."""
    outlet = Outlet(tmp_path / "out", tmp_path / "out")
    for name in ("workers-0", "workers-8", "sync-item", "sync-none"):
        copied(made_here[0] / SIMULATED / "sync-item", outlet, named(name), "h200")
    return outlet


def test_packed_files_are_small_and_give_everything_back(outlet: Outlet, tmp_path: Path) -> None:
    wanted = list(outlet.folders())
    packer = Packer(outlet.brief, limit_bytes=2 * size_of(wanted[0]) + 50_000)
    files = packer.pack(wanted)
    assert [file.name for file in files] == ["recordings-1.tar.gz", "recordings-2.tar.gz"]
    assert all(file.stat().st_size < packer._limit_bytes for file in files)
    before = [file.stat().st_mtime_ns for file in files]
    assert [file.stat().st_mtime_ns for file in packer.pack(wanted)] == before, "what has not changed is not written"
    assert unpack(outlet.brief, tmp_path / "again") == []
    for folder in wanted:
        assert shortcoming(tmp_path / "again" / "h200" / folder.name) is None
    assert packer.pack(wanted[:2]) == files[:1] and not files[1].exists()


def test_a_torn_packed_file_is_named_and_gives_only_wholes(outlet: Outlet, tmp_path: Path) -> None:
    [file] = Packer(outlet.brief).pack(outlet.folders())
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    [torn] = unpack(outlet.brief, tmp_path / "again")
    assert torn.startswith("recordings-1.tar.gz: ")
    there = [folder for folder in (tmp_path / "again").glob("h200/*") if shortcoming(folder) is None]
    assert 0 < len(there) < 4


def test_a_packed_file_writes_nowhere_else(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    with tarfile.open(tmp_path / "in" / "recordings-1.tar.gz", "w:gz") as archive:
        archive.add(__file__, "../escaped.py")
    [refused] = unpack(tmp_path / "in", tmp_path / "in")
    assert "outside the destination" in refused and not (tmp_path / "escaped.py").exists()


def test_collected_recordings_open_in_gpulab(outlet: Outlet, tmp_path: Path) -> None:
    data = tmp_path / "data"
    collected = collect(outlet.path, data)
    assert reader.names(data) == list(collected.names) == sorted(f"h200/{f.name}" for f in outlet.folders())
    assert collected.total_bytes == sum(map(size_of, data.glob("*/*")))
    reader.open("h200/workers-0", data).check()
    shutil.rmtree(outlet.path / "h200" / "workers-8")
    assert collect(outlet.path, data).total_bytes == collected.total_bytes, "what is there stays and counts"


def test_packed_files_alone_are_enough(outlet: Outlet, tmp_path: Path) -> None:
    Packer(outlet.brief).pack(outlet.folders())
    shutil.rmtree(outlet.path / "h200")
    assert len(collect(outlet.path, tmp_path / "data").names) == 4


def test_too_much_is_refused_and_nothing_is_changed(outlet: Outlet, tmp_path: Path) -> None:
    data = tmp_path / "data"
    limit = sum(map(size_of, outlet.folders())) - 1
    with pytest.raises(CannotCollect, match=r"more than the .* MB that gpulab ships.*h200/.* MB.*--without-traces"):
        collect(outlet.path, data, limit_bytes=limit)
    assert not data.exists()
    collected = collect(outlet.path, data, traces=False, limit_bytes=limit)
    assert collected.total_bytes <= limit
    run = reader.open("h200/workers-0", data)
    assert [m.key for m in run.missing][-1] == "trace_file" and run.timeline is not None
    assert all(shortcoming(folder) is None for folder in data.glob("h200/*"))
    assert not list(data.rglob("*.pt.trace.json.gz"))


def test_what_no_gpu_has_made_is_not_shipped(
    made_here: tuple[Path, dict[str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(collecting, "DATA", tmp_path / "data")
    monkeypatch.setattr(sys, "argv", ["record_gpu", "--collect", str(made_here[0])])
    assert command.main() == 1
    assert "workers-0: the CPU stood in for a GPU" in capsys.readouterr().err and not (tmp_path / "data").exists()
    monkeypatch.setattr(sys, "argv", ["record_gpu", "--collect", str(tmp_path / "nowhere")])
    assert command.main() == 1
    assert "name the one that --out has filled" in capsys.readouterr().err


# -- traces ------------------------------------------------------------------------------------------------------------


def event(name: str, ts: float, dur: float, cat: str, correlation: int | None = None) -> dict[str, Any]:
    arguments = {} if correlation is None else {"correlation": correlation}
    return {"ph": "X", "name": name, "ts": ts, "dur": dur, "cat": cat, "args": arguments}


def test_a_trimmed_trace_has_what_its_steps_launched() -> None:
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "args": {"name": "python"}},
        event("ProfilerStep#1", 0, 10, "user_annotation"),
        event("ProfilerStep#2", 10, 10, "user_annotation"),
        event("ProfilerStep#2", 12, 30, "gpu_user_annotation"),
        event("aten::mm", 1, 2, "cpu_op"),
        event("aten::add", 11, 2, "cpu_op"),
        event("cudaLaunchKernel", 2, 1, "cuda_runtime", 7),
        event("cudaLaunchKernel", 12, 1, "cuda_runtime", 8),
        event("of step 1, run late", 15, 5, "kernel", 7),
        event("of step 2, run later", 30, 5, "kernel", 8),
        {"ph": "s", "id": 8, "name": "ac2g", "ts": 12, "cat": "ac2g"},
        {"ph": "f", "id": 8, "name": "ac2g", "ts": 30, "cat": "ac2g"},
        {"ph": "f", "id": 7, "name": "ac2g", "ts": 40, "cat": "ac2g"},
    ]
    names = [(e["ph"], e["name"]) for e in trimmed(events, 1)]
    assert names == [
        ("M", "process_name"), ("X", "ProfilerStep#2"), ("X", "aten::add"), ("X", "cudaLaunchKernel"),
        ("X", "of step 2, run later"), ("s", "ac2g"), ("f", "ac2g"),
    ]  # fmt: skip
    assert len(trimmed(events, 2)) == len(events) - 1, "all but the mark's copy on the device"
    assert trimmed(events[4:], 1) == events[4:], "without marks nothing is cut"


def test_a_file_that_is_no_trace_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "x.json.gz"
    file.write_bytes(gzip.compress(b"[]"))
    with pytest.raises(ValueError, match="is no trace: it has no traceEvents"):
        trim(file, tmp_path / "y.json.gz")
