"""`make gpu-first` without a GPU: every part runs on the CPU in its place, and its judgements are shown both ways."""

from __future__ import annotations

import ast
import gzip
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from msgspec.structs import replace

from benchmarks.gpu_first import __main__ as command
from benchmarks.gpu_first import conductor, metering, names, packages, run_ahead, sessions, stage, versions
from benchmarks.gpu_first.answer import Answer, Contents, plain
from benchmarks.gpu_first.conductor import Folder, Part, conduct
from benchmarks.gpu_first.metering import Metered
from benchmarks.gpu_first.names import Kernel as NamedKernel
from benchmarks.gpu_first.parts import BUDGET_S, PARTS
from benchmarks.gpu_first.stage import Stage
from benchmarks.gpu_first.table import table
from benchmarks.simulated_gpu.program import Graph, Kernel, Loop, Operator, Read, Update
from benchmarks.simulated_gpu.record import Plan, record
from gpulab.analysis.facts import Facts, facts
from gpulab.run import Category, Timeline
from tests.support import real_traces
from tests.support.fake_nvml import fake_nvml, h100, t4
from tests.support.paths import ROOT
from tests.support.timelines import MAIN, STREAM, Span, timeline

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


def environment(folder: Path) -> dict[str, str]:
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path, "GPULAB_DIR": str(folder / "runs"), "OMP_NUM_THREADS": "1"}


# -- every part, without the packages of a notebook --------------------------------------------------------------------


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Contents]:
    """What each part says of the CPU; all in one process, so that torch is imported once."""
    folder = tmp_path_factory.mktemp("parts")
    done = subprocess.run(
        [sys.executable, "-c", PLAY, str(folder)], cwd=ROOT, env=environment(folder), capture_output=True, text=True,
        check=False, timeout=500,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return {part.name: json.loads((folder / f"{i}.json").read_text()) for i, part in enumerate(PARTS)}


@pytest.mark.parametrize("name", [part.name for part in PARTS])
def test_a_part_runs_to_its_end_in_the_place_of_a_gpu(played: dict[str, Contents], name: str) -> None:
    contents = played[name]
    assert contents["simulated"] is True
    assert contents["checks"], "it says nothing"
    assert all(check["what"] and check["expected"] and check["measured"] for check in contents["checks"])


def test_what_must_not_break_does_not_break_on_the_cpu(played: dict[str, Contents]) -> None:
    checks = [c for name, contents in played.items() if name.startswith("crash") for c in contents["checks"]]
    assert len(checks) > 12
    assert [c for c in checks if c["verdict"] == "disagrees"] == []
    assert [c["what"] for c in checks if c["verdict"] == "not measured"] == ["a cell on cuda:1"]


def test_nothing_fails_that_only_a_gpu_should_stop(played: dict[str, Contents]) -> None:
    reasons = {c["note"] for contents in played.values() for c in contents["checks"] if c["verdict"] == "not measured"}
    theirs = r"simulated|0 GPUs here|the truth is unknown|Skipped: needs an NVIDIA GPU|no test has run; simulated"
    assert [reason for reason in reasons if not re.fullmatch(theirs, reason)] == []


def test_nothing_is_said_of_kernels_where_none_can_be(played: dict[str, Contents]) -> None:
    for name in ("sessions", "kernel names", "kernel names, compiled", "runs in one notebook"):
        of_kernels = [c for c in played[name]["checks"] if "kernels" in c["what"] or "withheld" in c["what"]]
        assert of_kernels and all(c["verdict"] == "not measured" for c in of_kernels), name


def test_figures_are_there_to_be_looked_into(played: dict[str, Contents]) -> None:
    figures = {name: contents["figures"] for name, contents in played.items()}
    assert figures["versions"]["queries"]["power"]["code"] == 0
    assert figures["versions"]["queries"]["MIG mode"]["code"] is None, "the scripted NVML has no such function"
    assert set(figures["versions"]["gpm"]) == {f"{s:g} s" for s in versions.WINDOWS_S}
    assert figures["meters"]["idle, alone"]["readings"]["power_w"] > 0
    assert len(figures["run-ahead"][run_ahead.SMALL[0].name]["truth_ms"]) == run_ahead.SMALL[0].steps - 1
    assert figures["doubled work"]["twice the work, left by break"]["pairs"] == 2
    assert figures["traces"]["graph_replay"]["bytes"] > 10_000
    assert len(figures["traces"]["graph_replay"]["true_step_ms"]) == 5


# -- the parts as processes --------------------------------------------------------------------------------------------

STUB = """
class Tensor: ...
class cuda:
    @staticmethod
    def is_available(): return False
"""
HANGS = """
import subprocess, sys, time
def measure(answer, stage):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    answer.figure("child", child.pid)
    answer.check("before it hangs", "kept", "kept", agrees=True)
    time.sleep(600)
"""
CRASHES = """
def measure(answer, stage, how):
    answer.check("before it crashes", "kept", "kept", agrees=False)
    if how == "signal":
        import os, signal
        os.kill(os.getpid(), signal.SIGSEGV)
    raise RuntimeError("the GPU | fell off the bus")
"""
ANSWERS = """
def measure(answer, stage, word="yes"):
    print("a line for the log")
    answer.unmeasured("a question", word, "nobody knows")
"""


@pytest.fixture
def modules(tmp_path: Path) -> dict[str, str]:
    """An environment with parts of our own, and a torch that is imported in no time."""
    folder = tmp_path / "modules"
    (folder / "torch").mkdir(parents=True)
    (folder / "torch" / "__init__.py").write_text(STUB)
    (folder / "torch" / "profiler.py").write_text("class ProfilerActivity: ...\n")
    for name, text in (("hangs", HANGS), ("crashes", CRASHES), ("answers", ANSWERS)):
        (folder / f"{name}.py").write_text(text)
    return {"PYTHONPATH": str(folder)}


def test_a_part_that_hangs_or_crashes_is_cut_off(tmp_path: Path, modules: dict[str, str]) -> None:
    folder = Folder(tmp_path / "out")
    parts = [
        Part("hangs", "hangs", 15, 1, {}, modules),
        Part("raises", "crashes", 200, 1, {"how": "raise"}, modules),
        Part("dies", "crashes", 200, 1, {"how": "signal"}, modules),
        Part("answers", "answers", 200, 1, {"word": "perhaps"}, modules),
    ]
    kept = conduct(parts, folder, simulate=True, budget_s=620)
    results = kept["parts"]
    assert [result["state"] for result in results.values()] == ["timed out", "crashed", "crashed", "complete"]
    assert results["raises"]["detail"] == "RuntimeError: the GPU | fell off the bus"
    assert results["answers"]["checks"][0]["expected"] == "perhaps"
    for name in ("hangs", "raises", "dies"):
        assert results[name]["checks"][0]["measured"] == "kept", "what a part has said before stays"
    assert gone(results["hangs"]["figures"]["child"]), "the part's own child is ended with it"
    assert json.loads(folder.results.read_text()) == plain(kept)
    assert "a line for the log" in folder.log.read_text()
    page = table(kept)
    assert "2 of 7 checks disagree, 4 could not be measured. 1 of 4 parts ran to their end." in page
    assert (
        page.index("What does not agree")
        < page.index("| hangs | the rest of the part | an end |")
        < page.index("agrees")
    )
    assert results["dies"]["detail"].startswith("ended by signal 11")
    assert results["hangs"]["detail"].startswith("ended at its limit")
    assert "the GPU \\| fell off the bus" in page


def gone(pid: int) -> bool:
    """Whether the process has ended, if need be in a moment."""
    for _ in range(600):
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.1)
    return False


def test_a_part_is_skipped_where_too_little_time_is_left(tmp_path: Path, modules: dict[str, str]) -> None:
    parts = [Part("hangs", "hangs", 2, 1, {}, modules), Part("long", "answers", 60, 30, {}, modules)]
    results = conduct(parts, Folder(tmp_path / "out"), simulate=True, budget_s=20)["parts"]
    assert [result["state"] for result in results.values()] == ["timed out", "skipped"]
    assert re.search(r"^1?\d s were left and it needs 30 s$", results["long"]["detail"])
    assert results["long"]["checks"] == []


def test_time_that_a_part_leaves_over_is_the_next_ones(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    limits: list[float] = []

    def play(part: Part, folder: Folder, limit_s: float, *, simulate: bool) -> conductor.Result:
        limits.append(limit_s)
        return conductor._result("complete", 0.0, limit_s, "", None)

    monkeypatch.setattr(conductor, "play", play)
    monkeypatch.setattr(conductor, "time", SimpleNamespace(monotonic=lambda: 7.0))
    conduct(
        [Part("a", "a", 50), Part("b", "b", 30), Part("c", "c", 200)], Folder(tmp_path), simulate=True, budget_s=105
    )
    assert limits == [50, 80, 100], "never more than the budget has"


def test_the_limits_fit_into_ten_minutes() -> None:
    assert sum(part.limit_s for part in PARTS) <= BUDGET_S <= 600
    assert all(part.least_s <= part.limit_s for part in PARTS)
    assert len({part.name for part in PARTS}) == len(PARTS)


def test_the_command_measures_writes_and_ends_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    patient = [replace(part, limit_s=400) for part in PARTS]
    monkeypatch.setattr(command, "PARTS", patient)
    out = tmp_path / "out"
    (out / "traces").mkdir(parents=True)
    (out / "results.json").write_text("of an earlier call")
    (out / "traces" / "old.json.gz").write_text("of an earlier call")
    chosen = ["traces"]
    monkeypatch.setattr(sys, "argv", ["gpu_first", "--simulate", "--out", str(out), *chosen])
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert command.main() == 0
    printed = capsys.readouterr().out
    files = sorted(str(file.relative_to(out)) for file in out.rglob("*") if file.is_file())
    names = ("cudnn_attention_run_ahead", "graph_replay")
    assert files == ["log.txt", "results.json", "table.md", *(f"traces/{name}.pt.trace.json.gz" for name in names)]
    results = json.loads((out / "results.json").read_text())["parts"]
    assert {name: result["state"] for name, result in results.items()} == dict.fromkeys(chosen, "complete")
    page = (out / "table.md").read_text()
    assert page.splitlines()[2].startswith("SIMULATED: there was no GPU")
    assert page.splitlines()[2] in printed, "it is printed as well"
    assert "What agrees" in page and "What agrees" not in printed


def test_what_is_missing_is_named_at_once_and_in_one_list(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for module in ("no_such_module", "nor_this_one"):
        monkeypatch.setitem(packages.NEEDED, module, module.replace("_", "-"))
    monkeypatch.setattr(command, "conduct", lambda *a, **k: pytest.fail("a part was played"))
    monkeypatch.setattr(sys, "argv", ["gpu_first", "--out", str(tmp_path / "out")])
    assert command.main() == 2
    said = capsys.readouterr().err
    assert "2 packages are missing: no-such-module, nor-this-one." in said
    assert "pip install no-such-module nor-this-one" in said


def test_a_part_that_is_none_is_a_usage_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu_first", "--out", str(tmp_path), "no such part"])
    with pytest.raises(SystemExit) as ended:
        command.main()
    assert ended.value.code == 2


# -- what runs on a GPU only -------------------------------------------------------------------------------------------


def uses(module: Path, root: str) -> Iterator[str]:
    """Dotted names below `root` that the file uses: torch.cuda.Event, torch.cuda.graph, …"""
    for node in ast.walk(ast.parse(module.read_text())):
        if isinstance(node, ast.Attribute) and re.fullmatch(rf"{root}(\.\w+)+", ast.unparse(node)):
            yield ast.unparse(node)


@pytest.mark.parametrize("file", sorted((ROOT / "benchmarks" / "gpu_first").glob("*.py")), ids=lambda file: file.stem)
def test_every_name_of_torch_that_a_part_uses_is_there(file: Path) -> None:
    for name in uses(file, "torch"):
        thing: Any = torch
        for attribute in name.split(".")[1:]:
            assert hasattr(thing, attribute), name
            thing = getattr(thing, attribute)


def test_every_name_of_nvml_that_is_asked_for_is_there() -> None:
    pynvml = pytest.importorskip("pynvml")
    asked = set(uses(Path(versions.__file__), "nv"))
    assert len(asked) > 25
    assert [name for name in sorted(asked) if not hasattr(pynvml, name.split(".")[1])] == []


def test_the_gpu_is_used_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The calls that a CPU build can only be asked for, with the arguments that they take."""
    calls: list[str] = []

    class Event:
        def __init__(self, *, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            calls.append("record")

        def elapsed_time(self, other: object) -> float:
            assert isinstance(other, Event)
            return 25.0

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: calls.append("synchronize"))
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: calls.append(f"{cycles} cycles"))
    real = Stage.here(simulate=False)
    assert (real.simulated, real.device, len(real.activities)) == (False, "cuda", 2)
    spin = real.spinner()
    calls.clear()
    spin(0.5)
    assert calls == [f"{stage.CALIBRATION_CYCLES // 50} cycles"], "25 ms have so many cycles, half a millisecond 1/50"
    assert Stage.here(simulate=True).simulated


def test_nvml_queries_keep_their_raw_codes() -> None:
    script = t4()
    script["errors"]["nvmlDeviceGetPowerUsage"] = "NoPermission"
    nv = fake_nvml(script)
    nv.nvmlInit()
    rows = {name: versions.timed(nv, ask, repeats) for name, ask, repeats in versions.queries(nv, 0)}
    assert (rows["power"]["code"], rows["utilization"]["code"], rows["MIG mode"]["code"]) == (4, 0, None)
    assert rows["power"]["reason"].startswith("no permission")
    assert rows["throttle reasons, new name"]["code"] == 13 and rows["throttle reasons, old name"]["value"] == 4


def test_gpm_metrics_keep_their_own_codes() -> None:
    script = h100()
    script["errors"] = {"gpm:5": "NotSupported"}
    nv = fake_nvml(script)
    nv.nvmlInit()
    values = versions.gpm(nv, 0, 0.0)
    assert values["2"] == [0, 42.0] and values["5"][0] == 3
    nv.nvmlShutdown()  # raises where a sample was not given back


# -- judgements, both ways ---------------------------------------------------------------------------------------------


def verdicts(answer: Answer) -> dict[str, str]:
    return {check["what"]: check["verdict"] for check in answer.contents["checks"]}


@pytest.fixture
def answer(tmp_path: Path) -> Answer:
    return Answer(tmp_path / "answer.json", simulated=False)


def test_what_fails_costs_only_itself(answer: Answer, capsys: pytest.CaptureFixture[str]) -> None:
    def fails() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate a lot")

    with answer.guarded("the first", "a figure"):
        fails()
    answer.check("the second", "a figure", "1", agrees=True)
    first, second = answer.contents["checks"]
    assert (first["verdict"], first["note"]) == ("not measured", "OutOfMemoryError: CUDA out of memory.")
    assert second["verdict"] == "agrees" and "Traceback" in capsys.readouterr().err


def curve(value: float, seconds: int = 10) -> list[tuple[float, float]]:
    return [(float(second), value) for second in range(seconds)]


@pytest.mark.parametrize(("tensor", "joules_per_s", "said"), [(0.9, 500, "agrees"), (0.4, 650, "disagrees")])
def test_matrix_products_must_keep_tensor_cores_busy(
    answer: Answer, tensor: float, joules_per_s: float, said: str
) -> None:
    energy = [(float(second), joules_per_s * second) for second in range(10)]
    curves = {"tensor_active_fraction": curve(tensor), "power_w": curve(500.0), "energy_j": energy}
    load = metering.Load("matrix products in bf16", lambda: None, flop=1e12)
    metering.judge(answer, Stage(simulated=True), load, Metered(curves, 10, 10.0))
    judged = verdicts(answer)
    assert judged["tensor active, matrix products"] == said
    assert judged["energy against power over time, matrix products in bf16"] == said
    assert judged["SM active, matrix products"] == "not measured"


@pytest.mark.parametrize(("rate_mb", "said"), [(50_000.0, "agrees"), (25_000.0, "disagrees")])
def test_uploads_must_be_what_pcie_carries(answer: Answer, rate_mb: float, said: str) -> None:
    load = metering.Load("copies from pinned host memory", lambda: None, bytes=5e9)
    metering.judge(answer, Stage(simulated=True), load, Metered({"pcie_rx_mb_per_s": curve(rate_mb)}, 100, 10.0))
    assert verdicts(answer)["PCIe to the GPU"] == said


def test_kernels_are_counted_in_the_windows_of_steps() -> None:
    spans = [Span("k", Category.KERNEL, STREAM, 100 * i, 50) for i in range(6)]
    assert run_ahead.kernels_in(timeline(spans), [(0, 200), (200, 600)]) == [2, 4]


def test_the_truth_of_steps_is_the_median_of_those_asked_for() -> None:
    truth = run_ahead.Truth((1.0, 1.0, 1.0, 40.0, 42.0, 44.0))
    assert truth.us_of([1, 2]) == 1_000 and truth.us_of([0]) is None
    assert truth.settled_us == 42_000


def played_on_a_simulated_gpu(case: run_ahead.Case, *, timed: bool = True) -> tuple[Facts, run_ahead.Truth]:
    """The loop of the case on the model of a GPU: what gpulab says of it, and the model's own account.

    `timed`: the steps were timed on the GPU; else their times are the host's.
    """
    spins = tuple(Kernel("spin_kernel(long)", round(1e6 * case.step_ms / case.launches)) for _ in range(case.launches))
    work = (Graph(50_000, spins),) if case.graph else tuple(Operator("spin", 3_000, (spin,)) for spin in spins)
    update = Update((Operator("aten::add_", 20_000, (Kernel("vectorized_elementwise_kernel", 2_000),)),))
    loop = Loop((*work, update, Read(pinned=True)) if case.item else (*work, update))
    recorded = record(loop, plan=Plan(warmup=3, measured=12, traced=5, after=0))
    ends = {step.number: 0 for step in recorded.machine.steps}
    for task in recorded.tasks:
        ends[task.step] = max(ends[task.step], task.end_ns)
    lengths_ns = np.diff([0, *(ends[number] for number in sorted(ends))])
    steps = replace(recorded.run.steps, device_ns=lengths_ns if timed else np.empty(0, np.int64))
    return facts(replace(recorded.run, steps=steps)), run_ahead.Truth(tuple((lengths_ns[1:] / 1e6).tolist()))


CASES = (
    run_ahead.Case(40),
    run_ahead.Case(150, item=True),
    run_ahead.Case(600),
    run_ahead.Case(150, graph=True),
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_loop_that_runs_ahead_agrees_on_a_simulated_gpu(answer: Answer, case: run_ahead.Case) -> None:
    shown, truth = played_on_a_simulated_gpu(case)
    run_ahead.judge(answer, Stage(simulated=False), case, shown, truth)
    wrong = [check for check in answer.contents["checks"] if check["verdict"] != "agrees"]
    assert wrong == []
    assert verdicts(answer).keys() == {f"{what}, {case.name}" for what in ("step", "traced step", "kernels")}


def test_times_of_a_host_that_runs_ahead_disagree(answer: Answer) -> None:
    shown, truth = played_on_a_simulated_gpu(CASES[0], timed=False)
    run_ahead.judge(answer, Stage(simulated=False), CASES[0], shown, truth)
    assert verdicts(answer)[f"step, {CASES[0].name}"] == "disagrees"


def test_other_step_lengths_or_kernel_counts_disagree(answer: Answer) -> None:
    shown, truth = played_on_a_simulated_gpu(CASES[0])
    longer = run_ahead.Truth(tuple(1.2 * ms for ms in truth.step_ms))
    run_ahead.judge(answer, Stage(simulated=False), replace(CASES[0], launches=41), shown, longer)
    assert set(verdicts(answer).values()) == {"disagrees"}


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


def test_kernels_that_a_session_loses_or_moves_are_counted() -> None:
    assert sessions.counted(session(set(), set(), set())) == sessions.Session(5, 5, 0, (), 0, 0)
    assert sessions.counted(session({0, 1, 2, 3}, set(), set())).lost == 0, "they were launched to be lost"
    assert sessions.counted(session({3, 4, 6}, {7}, {8})) == sessions.Session(5, 3, 2, (0, 2), 1, 1)


def test_kernels_are_joined_with_operator_and_types() -> None:
    def event(category: str, name: str, number: int, **args: object) -> dict[str, Any]:
        return {"ph": "X", "cat": category, "name": name, "dur": 5.0, "args": {"External id": number, **args}}

    events = [
        event("cpu_op", "aten::mm", 7, **{"Input type": ["c10::BFloat16", "", "c10::BFloat16"]}),
        event("cpu_op", "aten::linear", 6),
        event("kernel", "nvjet_tst_128", 7),
        event("kernel", "nvjet_tst_128", 7),
        event("kernel", "graph_kernel", 99),
        {"ph": "s", "cat": "ac2g", "name": "ac2g"},
    ]
    assert names.kernels_of({"traceEvents": events}) == [
        NamedKernel("nvjet_tst_128", "aten::mm", ("c10::BFloat16", "c10::BFloat16"), 2, 10.0),
        NamedKernel("graph_kernel", "", (), 1, 5.0),
    ]


def test_the_join_works_on_a_trace_of_an_h100() -> None:
    """Written by another PyTorch with `record_shapes`: what the part on names will read."""
    with gzip.open(real_traces.path("h100_owlv2_starved"), "rt", encoding="utf-8", errors="replace") as text:
        kernels = names.kernels_of(json.load(text))
    assert len(kernels) > 50 and all(kernel.operator for kernel in kernels)
    products = [kernel for kernel in kernels if kernel.operator in ("aten::addmm", "aten::bmm")]
    assert products and all("c10::BFloat16" in kernel.types for kernel in products)
    assert names.wrong_classes(kernels) == [] and names.wrong_formats(kernels, "bf16") == []


BF16, FP32 = ("c10::BFloat16", "c10::BFloat16"), ("float", "float")


@pytest.mark.parametrize(
    ("kernel", "case_format", "wrong"),
    [
        (NamedKernel("nvjet_tst_128x64_h_bz_coopA_TNT", "aten::mm", BF16, 1, 9.0), "bf16", 0),
        (NamedKernel("ampere_sgemm_128x64_tn", "aten::mm", FP32, 1, 9.0), "fp32", 0),
        (NamedKernel("ampere_sgemm_128x64_tn", "aten::mm", FP32, 1, 9.0), "TF32", 0),  # it may, it need not
        (NamedKernel("ampere_sgemm_128x64_tn", "aten::mm", BF16, 1, 9.0), "bf16", 1),
        (NamedKernel("ampere_bf16_s16816gemm_bf16_128x64", "aten::mm", FP32, 1, 9.0), "fp32", 1),
        (NamedKernel("ampere_bf16_s16816gemm_bf16_128x64", "aten::mm", FP32, 1, 9.0), "TF32", 1),
        (NamedKernel("void elementwise_kernel<float>", "aten::add", FP32, 1, 9.0), "bf16", 0),  # multiplies nothing
    ],
)
def test_a_format_read_out_of_a_name_is_held_against_the_types(
    kernel: NamedKernel, case_format: str, wrong: int
) -> None:
    assert len(names.wrong_formats([kernel], case_format)) == wrong


def test_a_class_read_out_of_a_name_is_held_against_the_operator() -> None:
    product = NamedKernel("ampere_sgemm_128x64_tn", "aten::mm", FP32, 1, 9.0)
    helper = NamedKernel("void at::native::reduce_kernel<512>", "aten::mm", FP32, 1, 1.0)
    stranger = NamedKernel("void at::native::reduce_kernel<512>", "aten::bmm", FP32, 1, 8.0)
    images = NamedKernel("nchwToNhwcKernel", "aten::cudnn_convolution", FP32, 1, 7.0)
    assert names.wrong_classes([product, images, helper]) == []
    (wrong,) = names.wrong_classes([product, stranger, helper])
    assert "of aten::bmm is matrix, read as reduction" in wrong
