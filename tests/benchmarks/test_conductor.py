"""What `make gpu-first` and `make record-gpu` rely on, without a GPU: limits, what is kept, packed and shipped."""

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
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from msgspec.structs import replace

from benchmarks import conductor
from benchmarks.gpu_first import names, sessions
from benchmarks.gpu_first import session as first
from benchmarks.gpu_first.parts import BUDGET_S, PARTS
from benchmarks.gpu_first.session import Folder, Part, play_all
from benchmarks.gpu_first.table import table as first_table
from benchmarks.record_gpu import __main__ as command
from benchmarks.record_gpu import catalogue, collecting
from benchmarks.record_gpu import session as recording_session
from benchmarks.record_gpu.catalogue import Recording, every, select
from benchmarks.record_gpu.collecting import CannotCollect, collect
from benchmarks.record_gpu.outlet import DOCUMENT, SIMULATED, Outlet, document_of, machine_of, shortcoming, size_of
from benchmarks.record_gpu.packing import Packer, unpack
from benchmarks.record_gpu.session import Session
from benchmarks.record_gpu.trace_trimming import trim, trimmed
from gpulab import recordings as reader
from gpulab.run import Category, Timeline
from gpulab.store import folders
from tests.support import real_traces
from tests.support.changes import where_changed
from tests.support.paths import ROOT, TESTS
from tests.support.timelines import MAIN, STREAM, Span, timeline

pytestmark = where_changed("benchmarks/", "tests/benchmarks/", "planted/", "gpulab/recordings/")
EVERY = every()

# -- limits ------------------------------------------------------------------------------------------------------------

STUB = """
import json, os, shutil, subprocess, sys, time
from pathlib import Path
here, how = Path(__file__).parent, sys.argv[1]
def behave():
    print("a line of", how)
    if how == "hangs":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        (here / "child").write_text(str(child.pid))
        time.sleep(600)
    if how == "raises":
        raise RuntimeError("the GPU | fell off the bus")
    if how == "dies":
        os.kill(os.getpid(), 11)
def measure(answer, stage, how="answers"):
    globals()["how"] = how
    answer.check("before", "kept", "kept", agrees=how == "answers")
    behave()
if __name__ == "__main__" and sys.stdin.readline():
    name, out, machine = sys.argv[2:]
    behave()
    if how == "works":
        shutil.copytree(here / "whole", Path(out, machine, name), dirs_exist_ok=True)
        shutil.copy(here / f"{name}.json", Path(out, machine, name, "recording.json"))
"""
TORCH = """
class Tensor: ...
class cuda:
    @staticmethod
    def is_available(): return False
"""
WAYS = {"hangs": "timed out", "raises": "crashed", "dies": "crashed", "answers": "complete"}


def has_ended(pid: int) -> bool:
    """Whether the process has ended, if need be in a moment."""
    for _ in range(300):
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.1)
    return False


@pytest.fixture
def stub(tmp_path: Path) -> Path:
    """Parts and recordings that do in no time what they are told, with a torch that is imported in no time."""
    folder = tmp_path / "stub"
    (folder / "torch").mkdir(parents=True)
    (folder / "torch" / "__init__.py").write_text(TORCH)
    (folder / "torch" / "profiler.py").write_text("class ProfilerActivity: ...\n")
    (folder / "stub.py").write_text(STUB)
    return folder


def test_a_part_that_hangs_or_crashes_costs_only_itself(tmp_path: Path, stub: Path) -> None:
    own = {"PYTHONPATH": os.pathsep.join([str(stub), str(ROOT)])}
    parts = [Part(how, "stub", 15 if how == "hangs" else 200, 1, {"how": how}, own) for how in WAYS]
    folder = Folder(tmp_path / "out")
    kept = play_all(parts, folder, simulate=True, budget_s=700)
    results = kept["parts"]
    assert {how: result["state"] for how, result in results.items()} == WAYS
    assert all(result["checks"][0]["measured"] == "kept" for result in results.values()), "what it has said stays"
    assert results["raises"]["detail"] == "RuntimeError: the GPU | fell off the bus"
    assert results["dies"]["detail"].startswith("ended by signal 11")
    assert results["hangs"]["detail"] == "ended at its limit; a line of hangs"
    assert has_ended(int((stub / "child").read_text())), "the part's own child is ended with it"
    assert json.loads(folder.results.read_text()) == conductor.plain(kept)
    assert "a line of answers" in folder.log.read_text()
    page = first_table(kept)
    assert "3 of 7 checks disagree, 3 could not be measured. 1 of 4 parts ran to their end." in page
    assert "the GPU \\| fell off the bus" in page


def test_time_that_a_part_leaves_over_is_the_next_ones(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    limits: list[float | None] = []

    def asked(jobs: list[conductor.Job], limit_of: Callable[[conductor.Job], float | None], **_: object) -> None:
        limits.extend(limit_of(job) for job in jobs)

    monkeypatch.setattr(first, "time", SimpleNamespace(monotonic=lambda: 7.0))
    monkeypatch.setattr(first, "conduct", asked)
    parts = [Part("a", "a", 50), Part("b", "b", 30), Part("c", "c", 200), Part("d", "d", 99, 101)]
    play_all(parts, Folder(tmp_path), simulate=True, budget_s=105)
    assert limits == [50, 80, 100, None], "never more than the budget has"
    assert sum(part.limit_s for part in PARTS) <= BUDGET_S <= 600
    assert all(part.least_s <= part.limit_s for part in PARTS)


@pytest.mark.parametrize("ahead", [False, True])
def test_a_skipped_job_leaves_the_next_process_alone(ahead: bool) -> None:
    jobs = [conductor.Job(name, ["-c", f"input(); print({name!r})"]) for name in "abc"]
    said: list[tuple[str, str]] = []
    conductor.conduct(
        jobs,
        limit_of=lambda job: None if job.name == "b" else 200.0,
        ended=lambda job, how: said.append((job.name, how.last_line)),
        skipped=lambda job: said.append((job.name, "skipped")),
        ahead=ahead,
    )
    assert said == [("a", "a"), ("b", "skipped"), ("c", "c")]


def test_an_interrupt_ends_every_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    started: list[conductor.Process] = []

    class Noted(conductor.Process):
        def __init__(self, job: conductor.Job) -> None:
            super().__init__(job)
            started.append(self)

    monkeypatch.setattr(conductor, "Process", Noted)
    jobs = [conductor.Job(name, ["-c", "import time; time.sleep(600)"]) for name in "ab"]
    with pytest.raises(KeyboardInterrupt):
        conductor.conduct(
            jobs, limit_of=lambda job: 200.0, ended=lambda *_: None, skipped=print, ahead=True, meanwhile=interrupted
        )
    assert len(started) == 2 and all(has_ended(process._process.pid) for process in started)


# -- every part of the first hour, without the packages of a notebook --------------------------------------------------

PLAY = """
import json, sys
from importlib import import_module
from pathlib import Path
for absent in ("IPython", "ipywidgets", "anywidget"):
    sys.modules[absent] = None
from benchmarks.gpu_first.answer import Answer
from benchmarks.gpu_first.parts import PARTS
from benchmarks.gpu_first.stage import Stage
folder = Path(sys.argv[1])
for number, part in enumerate(PARTS):
    arguments = part.arguments | ({"folder": str(folder / "traces")} if part.writes_traces else {})
    answer = Answer(folder / f"{number}.json", simulated=True)
    import_module(part.module).measure(answer, Stage(simulated=True), **arguments)
"""


@pytest.mark.slow("the only run of the eighteen parts before a GPU is lent")
def test_every_part_runs_to_its_end_in_the_place_of_a_gpu(tmp_path: Path) -> None:
    environment = {"PYTHONPATH": str(ROOT), "GPULAB_DIR": str(tmp_path / "runs"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", PLAY, str(tmp_path)], cwd=ROOT, env=os.environ | environment, capture_output=True,
        text=True, check=False, timeout=500,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    said = {part.name: json.loads((tmp_path / f"{i}.json").read_text())["checks"] for i, part in enumerate(PARTS)}
    assert all(
        checks and all(c["what"] and c["expected"] and c["measured"] for c in checks) for checks in said.values()
    )
    crashes = [c for name, checks in said.items() if name.startswith("crash") for c in checks]
    assert [c for c in crashes if c["verdict"] == "disagrees"] == [] and len(crashes) > 12
    reasons = [c["note"] for checks in said.values() for c in checks if c["verdict"] == "not measured"]
    valueless = [reason for reason in reasons if reason == "gpulab gives no value"]
    assert len(valueless) <= 2, "beside other programs a time may have no value, but not many"
    theirs = r"simulated|0 GPUs here|the truth is unknown|Skipped: needs an NVIDIA GPU|no test has run; simulated"
    others = {reason for reason in reasons if not re.fullmatch(theirs, reason)} - {*valueless}
    assert not others, "only a GPU should stop it"


def uses(text: str, root: str) -> Iterator[str]:
    """Dotted names below `root` that the code uses: torch.cuda.Event, torch.cuda.graph, …"""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Attribute) and re.fullmatch(rf"{root}(\.\w+)+", ast.unparse(node)):
            yield ast.unparse(node)


def test_every_name_of_torch_and_nvml_that_parts_use_is_there() -> None:
    pynvml = pytest.importorskip("pynvml")
    parts = {file.name: file.read_text() for file in (ROOT / "benchmarks" / "gpu_first").glob("*.py")}
    for where, text in (*parts.items(), *((recording.name, recording.text) for recording in EVERY)):
        for name in uses(text, "torch"):
            thing: Any = torch
            for attribute in name.split(".")[1:]:
                assert hasattr(thing, attribute), f"{where}: {name}"
                thing = getattr(thing, attribute)
    asked = set(uses(parts["versions.py"], "nv"))
    assert len(asked) > 25 and [name for name in asked if not hasattr(pynvml, name.split(".")[1])] == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="they run where there is a GPU")
def test_the_tests_for_a_gpu_can_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each skips itself before it imports what it tests; this sees what a GPU would be the first to see."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.syspath_prepend(str(TESTS / "gpu"))
    for file in sorted((TESTS / "gpu").glob("test_*.py")):
        try:
            module = __import__(file.stem)
        finally:
            sys.modules.pop(file.stem, None)
        assert any(name.startswith("test_") for name in vars(module)), file.name


def test_kernels_that_a_session_loses_or_moves_are_counted() -> None:
    def session(lost: set[int], early: set[int], shifted: set[int]) -> Timeline:
        """Four kernels that may be lost, then five that count."""
        spans = [
            Span(sessions.FIRST_MARK, Category.USER_ANNOTATION, MAIN, 0, 400_000),
            Span(sessions.SECOND_MARK, Category.USER_ANNOTATION, MAIN, 500_000, 500_000),
            Span(sessions.SECOND_MARK, Category.GPU_USER_ANNOTATION, STREAM, 600_000, 900_000),
        ]
        for i, begin in enumerate([*range(0, 40_000, 10_000), *range(500_000, 550_000, 10_000)]):
            spans.append(Span("cudaLaunchKernel", Category.CUDA_RUNTIME, MAIN, begin, 5_000, i + 1))
            start = begin - 5_000 if i in early else 2_000_000 if i in shifted else begin + 20_000
            if i not in lost:
                spans.append(Span("add", Category.KERNEL, STREAM, start, 2_000, i + 1))
        return timeline(spans)

    assert sessions.counted(session({0, 1, 2, 3}, set(), set())) == sessions.Session(5, 5, 0, (), 0, 0)
    assert sessions.counted(session({3, 4, 6}, {7}, {8})) == sessions.Session(5, 3, 2, (0, 2), 1, 1)


def test_kernel_names_of_an_h100_are_read_rightly() -> None:
    with gzip.open(real_traces.path("h100_owlv2_starved"), "rt", encoding="utf-8", errors="replace") as text:
        kernels = names.kernels_of(json.load(text))
    assert len(kernels) > 50 and all(kernel.operator for kernel in kernels)
    assert names.wrong_classes(kernels) == [] and names.wrong_formats(kernels, "bf16") == []
    product = next(kernel for kernel in kernels if kernel.operator == "aten::addmm")
    assert len(names.wrong_formats([replace(product, types=("float", "float"))], "fp32")) == 1
    stranger = replace(product, name="void at::native::reduce_kernel<512>")
    assert "is matrix, read as reduction" in names.wrong_classes([stranger])[0]


# -- recordings --------------------------------------------------------------------------------------------------------

FRAMEWORKS = ["sync-item", "planted-lightning-prints", "planted-accelerate-batch-of-two"]


def named(name: str) -> Recording:
    [recording] = select([name], EVERY)
    return recording


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The command with one recording of each framework, on the CPU; its folder."""
    folder = tmp_path_factory.mktemp("recordings")
    with pytest.MonkeyPatch.context() as patch:
        slow = tuple(replace(recording, limit_s=300.0) for recording in EVERY)
        patch.setattr(catalogue, "every", lambda: slow)
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("GPULAB_DIR", str(folder / "runs"))
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder / "compiled"))
        asked = ["--simulate", "--out", str(folder / "out"), "--budget", "900", "--only", *FRAMEWORKS]
        patch.setattr(sys, "argv", ["record_gpu", *asked])
        assert command.main() == 0
    return folder / "out"


@pytest.mark.slow("three recordings by the command itself, each in a process")
def test_the_command_records_judges_and_packs(made: Path) -> None:
    rows = json.loads((made / "results.json").read_text())["recordings"]
    assert {name: row["state"] for name, row in rows.items()} == dict.fromkeys(FRAMEWORKS, "recorded")
    assert all(row["headline"] and row["right"] in (True, False) for row in rows.values())
    assert {f.name for f in made.iterdir() if f.is_file()} == {
        "results.json", "table.md", "log.txt", "recordings-1.tar.gz"
    }  # fmt: skip
    assert "SIMULATED" in (made / "table.md").read_text() and not list(made.glob(".making-*"))
    for name in FRAMEWORKS:
        folder = made / SIMULATED / name
        assert shortcoming(folder, named(name), simulate=True) is None and size_of(folder) < 1_000_000
        run = folders.read(folder)
        run.check()
        assert len(run.steps) >= 8 and run.traced_numbers and folders.trace_path(folder) is not None
        assert not any(place.file.endswith("recorder.py") for place in run.places), "only the user's lines are named"
        for file in folder.glob("*.json*"):
            text = gzip.decompress(file.read_bytes()).decode() if file.suffix == ".gz" else file.read_text()
            assert str(ROOT) not in text and str(made.parent) not in text, f"{file.name}: nothing of the machine"


def test_lessons_name_recordings_of_the_set() -> None:
    texts = [text.read_text(encoding="utf-8") for text in (ROOT / "notebooks" / "lessons").glob("*.md")]
    calls = [call for text in texts for call in re.findall(r"compare_recorded\(([^)]*)\)", text)]
    asked = {name for call in calls for name in re.findall(r'"([^"]+)"', call)}
    assert len(asked) > 10 and asked <= {recording.name for recording in EVERY}


@pytest.mark.parametrize("cores", [2.0, 16.0])
def test_a_cell_that_fails_is_noted_and_the_rest_goes_on(
    tmp_path: Path, made: Path, stub: Path, monkeypatch: pytest.MonkeyPatch, cores: float
) -> None:
    monkeypatch.setattr(recording_session, "usable_cores", lambda: cores)
    ways = {"batch-8": "raises", "batch-32": "hangs", "batch-64": "nothing", "sync-none": "works"}
    outlet = Outlet(tmp_path / "out", tmp_path / "brief")
    shutil.copytree(made / SIMULATED / "sync-item", stub / "whole")
    for name in (*ways, "workers-0", "workers-2", "workers-4"):
        (stub / f"{name}.json").write_text(json.dumps(_document(named(name), made)))
    wanted = []
    for name, how in ways.items():
        wanted.append(replace(named(name), limit_s=6.0 if how == "hangs" else 60.0))
    wanted.append(replace(named("sync-item"), needs=("no_such_module",)))
    for name in ("workers-0", "workers-2", "workers-4"):  # whole; torn; of another cell
        shutil.copytree(made / SIMULATED / "sync-item", outlet.folder(SIMULATED, name))
        shutil.copy(stub / f"{name}.json", outlet.folder(SIMULATED, name) / DOCUMENT)
        wanted.append(named(name))
    columns = outlet.folder(SIMULATED, "workers-2") / folders.COLUMNS
    columns.write_bytes(columns.read_bytes()[:-300])
    (outlet.folder(SIMULATED, "workers-4") / DOCUMENT).write_text(
        json.dumps(_document(named("workers-4"), made) | {"cell": "of last week"})
    )
    monkeypatch.setattr(
        Session,
        "_job",
        lambda self, r: conductor.Job(
            r.name, [str(stub / "stub.py"), ways.get(r.name, "works"), r.name, str(outlet.path), SIMULATED]
        ),
    )
    rows = Session(outlet, SIMULATED, budget_s=600.0, least_s=1.0).conduct(wanted)["recordings"]
    assert {name: row["state"] for name, row in rows.items()} == {
        "batch-8": "failed", "batch-32": "timed out", "batch-64": "failed", "sync-none": "recorded",
        "sync-item": "not possible", "workers-0": "there already", "workers-2": "recorded", "workers-4": "recorded",
    }  # fmt: skip
    assert rows["batch-8"]["detail"] == "RuntimeError: the GPU | fell off the bus"
    assert rows["batch-32"]["detail"] == "ended at its limit; a line of hangs"
    assert rows["batch-64"]["detail"] == "it ended without a recording; a line of nothing"
    assert rows["sync-none"]["headline"] and rows["workers-0"]["headline"], "what is there already is judged as well"
    assert has_ended(int((stub / "child").read_text())), "what a cell has started is ended with it"
    assert "fell off the bus" in outlet.table.read_text() and "a line of works" in outlet.log.read_text()
    late = Session(outlet, SIMULATED, budget_s=recording_session.END_S + 0.5, least_s=1.0)
    rows = late.conduct([named("batch-8")])["recordings"]
    assert rows["batch-8"]["state"] == "no time left"


def _document(recording: Recording, made: Path, machine: str = SIMULATED) -> dict[str, Any]:
    """What `recording.json` says of a whole one."""
    document = document_of(made / SIMULATED / "sync-item")
    assert document is not None
    earlier, cell = recording.cells(simulate=machine == SIMULATED)
    own = {"name": recording.name, "machine": machine, "simulated": machine == SIMULATED}
    return document | own | {"earlier": earlier, "cell": cell}


def test_a_gpus_name_is_a_folders() -> None:
    assert machine_of("NVIDIA H200") == "h200" and machine_of("NVIDIA H100 80GB HBM3") == "h100"
    assert machine_of("NVIDIA H100 PCIe") == "h100-pcie" and machine_of("NVIDIA A100-SXM4-80GB") == "a100"
    assert machine_of("NVIDIA GeForce RTX 4090") == "rtx-4090" and machine_of("") == "gpu"


# -- packing and collecting --------------------------------------------------------------------------------------------


@pytest.fixture
def outlet(tmp_path: Path, made: Path) -> Outlet:
    """Four recordings as if a GPU had made them."""
    outlet = Outlet(tmp_path / "out", tmp_path / "out")
    for name in ("workers-0", "workers-8", "sync-item", "sync-none"):
        shutil.copytree(made / SIMULATED / "sync-item", outlet.folder("h200", name))
        (outlet.folder("h200", name) / DOCUMENT).write_text(json.dumps(_document(named(name), made, "h200")))
    return outlet


def test_packed_files_are_small_and_alone_are_enough(outlet: Outlet, tmp_path: Path) -> None:
    wanted = list(outlet.folders())
    packer = Packer(outlet.brief, limit_bytes=2 * size_of(wanted[0]) + 50_000)
    files = packer.pack(wanted)
    assert [file.name for file in files] == ["recordings-1.tar.gz", "recordings-2.tar.gz"]
    before = [file.stat().st_mtime_ns for file in files]
    assert [file.stat().st_mtime_ns for file in packer.pack(wanted)] == before, "what has not changed is not written"
    shutil.rmtree(outlet.path / "h200")
    collected = collect(outlet.path, tmp_path / "data")
    assert reader.names(tmp_path / "data") == list(collected.names) == sorted(f"h200/{f.name}" for f in wanted)
    reader.open("h200/workers-0", tmp_path / "data").check()
    shutil.rmtree(tmp_path / "data" / "h200" / "workers-0")
    files[1].write_bytes(files[1].read_bytes()[: files[1].stat().st_size // 2])
    [torn] = unpack(outlet.brief, tmp_path / "again")
    assert torn.startswith("recordings-2.tar.gz: ")
    assert sum(shortcoming(folder) is None for folder in (tmp_path / "again").glob("h200/*")) in (2, 3)


def test_a_packed_file_writes_nowhere_else(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    with tarfile.open(tmp_path / "in" / "recordings-1.tar.gz", "w:gz") as archive:
        archive.add(__file__, "../escaped.py")
    [refused] = unpack(tmp_path / "in", tmp_path / "in")
    assert "outside the destination" in refused and not (tmp_path / "escaped.py").exists()


def test_too_much_is_refused_and_nothing_is_changed(outlet: Outlet, tmp_path: Path) -> None:
    data = tmp_path / "data"
    limit = sum(map(size_of, outlet.folders())) - 1
    with pytest.raises(CannotCollect, match=r"more than the .* MB that gpulab ships.*h200/.* MB.*--without-traces"):
        collect(outlet.path, data, limit_bytes=limit)
    assert not data.exists()
    assert collect(outlet.path, data, traces=False, limit_bytes=limit).total_bytes <= limit
    run = reader.open("h200/workers-0", data)
    assert [m.key for m in run.missing][-1] == "trace_file" and run.timeline is not None
    assert all(shortcoming(folder) is None for folder in data.glob("h200/*"))
    assert not list(data.rglob("*.pt.trace.json.gz"))


def test_what_no_gpu_has_made_is_not_shipped(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(collecting, "DATA", tmp_path / "data")
    for folder, words in ((made, "sync-item: the CPU stood in for a GPU"), (tmp_path / "no", "that --out has filled")):
        monkeypatch.setattr(sys, "argv", ["record_gpu", "--collect", str(folder)])
        assert command.main() == 1
        assert words in capsys.readouterr().err and not (tmp_path / "data").exists()
    monkeypatch.setattr(command, "_gpu", lambda: "")
    monkeypatch.setattr(sys, "argv", ["record_gpu", "--out", str(tmp_path / "out")])
    assert command.main() == 2
    assert "add --simulate" in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_a_trimmed_trace_has_what_its_steps_launched(tmp_path: Path) -> None:
    def event(name: str, ts: float, dur: float, cat: str, correlation: int | None = None) -> dict[str, Any]:
        arguments = {} if correlation is None else {"correlation": correlation}
        return {"ph": "X", "name": name, "ts": ts, "dur": dur, "cat": cat, "args": arguments}

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
        {"ph": "f", "id": 8, "name": "ac2g", "ts": 30, "cat": "ac2g"},
        {"ph": "f", "id": 7, "name": "ac2g", "ts": 40, "cat": "ac2g"},
    ]
    kept = [e["name"] for e in trimmed(events, 1)]
    assert kept == ["process_name", "ProfilerStep#2", "aten::add", "cudaLaunchKernel", "of step 2, run later", "ac2g"]
    assert len(trimmed(events, 2)) == len(events) - 1, "all but the mark's copy on the device"
    assert trimmed(events[4:], 1) == events[4:], "without marks nothing is cut"
    (tmp_path / "x.json.gz").write_bytes(gzip.compress(b"[]"))
    with pytest.raises(ValueError, match="is no trace: it has no traceEvents"):
        trim(tmp_path / "x.json.gz", tmp_path / "y.json.gz")
