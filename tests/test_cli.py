"""The command line: what it prints, what it returns, and that a recorded script cannot tell it from `python script`."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

import gpulab
from gpulab import cli
from gpulab.api import doctor
from gpulab.errors import GpulabError
from gpulab.run import Steps
from gpulab.store.folders import Store
from gpulab.views.report.report import Report
from tests.support import synthetic, trace_files
from tests.support.fork_server import python_with_torch
from tests.support.paths import ROOT
from tests.support.strategies import tiny_run

ID = "20250101-000000-aaaaaa"
Recorded = Callable[..., tuple[int, str, str]]
HOSTILE = "<b>bold</b>\x1b[31m"


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty store that every command of the test finds by itself."""
    monkeypatch.setenv("GPULAB_DIR", str(tmp_path))
    return tmp_path / "runs"


def one_line(error: str) -> str:
    assert error.startswith("gpulab: ") and error.count("\n") == 1 and "Traceback" not in error, error
    return error.removeprefix("gpulab: ").strip()


def failure(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert cli.main(argv) == 2
    out, error = capsys.readouterr()
    assert out == ""
    return one_line(error)


# usage

ABSENT = "The script 'absent.py' cannot be opened: No such file or directory."


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["recrod", "x.py"], "There is no command 'recrod'. Did you mean record?"),
        (["climb"], "There is no command 'climb' here. In a notebook: %gpulab climb."),
        (["report", "--jsno"], "gpulab report has no option --jsno; did you mean --json?"),
        (["record", "--stepz=5", "x.py"], "gpulab record has no option --stepz; did you mean --steps?"),
        (["record", "--num-workers", "2", "x.py"], "gpulab record has no option --num-workers; "),
        (["runs", "-v"], "gpulab runs has no option -v; did you mean --all?"),
        (["--verison"], "gpulab has no option --verison; did you mean --version?"),
        (["doctor", "strange"], "Unexpected argument 'strange'. See `gpulab doctor --help`."),
        (["record", "--warmup", "1.5", "x.py"], "--warmup must be an integer ≥ 0, got '1.5'."),
        (
            ["record", "--no-trace", "--trace-steps", "3", __file__],
            "--no-trace and --trace-steps cannot be combined: drop one.",
        ),
        (["record", "--pairs", "3", __file__], "--pairs needs a comparison: add --ab NAME=VALUE."),
        (
            ["record", "--ab", "workers=2", "--whole", __file__],
            "--whole and --ab cannot be combined",
        ),
        (
            ["record", "--ab", "workers=2", "--ranks", "2", __file__],
            "--ab runs in a single process, not in",
        ),
        (["record"], "SCRIPT is missing. Usage: `gpulab record [options] (SCRIPT | -m MODULE) [ARGS ...]`."),
        (["record", "absent.py"], ABSENT),
        (["record", "--ranks", "2", "absent.py"], ABSENT),
        (["record", "--ranks=0", "x.py"], "--ranks must be an integer ≥ 1, got '0'."),
        (
            ["record", "--html", "no/dir/x.html", __file__],
            "'no/dir/x.html' cannot be written: there is no folder 'no/dir'.",
        ),
        (["compare", "a", "b", "--fail-if-slower", "five"], "--fail-if-slower must be a share"),
        ([], "A command is missing: record, report, compare, runs, watch, fleet, tensorboard, doctor, lab."),
    ],
)
def test_wrong_usage_is_one_line_that_names_the_nearest(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert failure(argv, capsys).startswith(message)


def test_version_help_and_doctor(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"gpulab {gpulab.__version__}\n"
    assert cli.main(["record", "--help"]) == 0
    assert capsys.readouterr().out.startswith("usage: gpulab record [options] (SCRIPT | -m MODULE) [ARGS ...]")
    assert cli.main(["doctor"]) == 0
    assert capsys.readouterr().out.startswith("gpulab doctor")


def test_an_error_is_one_line_whatever_it_holds(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(store: Path) -> None:
        raise GpulabError("two\nlines \x1b[31m")

    monkeypatch.setattr(doctor, "examine", fail)
    assert failure(["doctor"], capsys) == r"two\nlines \x1b[31m"


# report, runs, doctor


def test_report_prints_a_stored_run_again(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tiny_run(ID, name=HOSTILE)
    folder = Store(root).save(run)
    expected = gpulab.report(run)
    for argv in ([], [ID], [HOSTILE], ["2025"], ["-1"], [str(folder)], [ID, "--store", str(root)]):
        assert cli.main(["report", *argv]) == 0
        assert capsys.readouterr().out == expected.text(), argv
    assert cli.main(["report", ID, "--all"]) == 0
    assert capsys.readouterr().out == expected.text(full=True)
    assert cli.main(["report", ID, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(expected.json()))
    page = tmp_path / "report.html"
    assert cli.main(["report", ID, "--html", str(page)]) == 0
    assert capsys.readouterr().out == f"Page written to {page}\n"
    assert "&lt;b&gt;bold" in page.read_text() and "<b>bold" not in page.read_text()
    assert [f.name for f in tmp_path.iterdir() if f.is_file()] == ["report.html"]


def test_report_of_what_is_not_there(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Store(root).save(tiny_run(ID, name="resnet"))
    assert "Did you mean 'resnet'?" in failure(["report", "resnte"], capsys)
    (root / "foreign\x1b[31m").mkdir()
    error = failure(["report", "foreign\x1b[31m"], capsys)
    assert "it has no run.json" in error and "\x1b" not in error
    error = failure(["report", "--html", str(tmp_path / "no" / "report.html")], capsys)
    assert "cannot be written: there is no folder" in error


def test_a_reader_that_leaves_early_is_no_error(root: Path) -> None:
    Store(root).save(tiny_run(ID))
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "gpulab", "runs"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = subprocess.run(command, cwd=ROOT, env=environment, stdout=writing, stderr=subprocess.PIPE)
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, b"")


# what an answer waits for


def imported_by(*argv: str) -> set[str]:
    """The packages and gpulab's rooms that a command imports, as `python -X importtime` lists them."""
    command = [sys.executable, "-X", "importtime", "-m", "gpulab", *argv]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-500:]
    modules = re.findall(r"^import time: .*\| +(\S+)$", done.stderr, re.MULTILINE)
    assert "gpulab.cli" in modules
    return {".".join(name.split(".")[: 2 if name.startswith("gpulab.") else 1]) for name in modules}


HEAVY = {"torch", "IPython", "matplotlib", "asyncio", "pandas", "psutil", "pynvml", "gpulab.capture", "gpulab.tuning"}
OF_REPORTS = {"numpy", "msgspec", "gpulab.run", "gpulab.views", "gpulab.analysis", "gpulab.api"}
OF_OTHERS = {"subprocess", "concurrent", "hashlib", "socket", "email", "csv", "gpulab.knobs", "gpulab.snapshot"}


@pytest.mark.parametrize(
    ("argv", "needless"),
    [
        (["--help"], HEAVY | OF_REPORTS),
        (["report", "--help"], HEAVY | OF_REPORTS),
        (["runs"], HEAVY - {"psutil", "pynvml"}),
        (["report", "made.json", "--json"], HEAVY | OF_OTHERS),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else str(len(value)),
)
def test_an_answer_waits_for_no_more_than_it_needs(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, argv: list[str], needless: set[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Store(root).save(tiny_run(ID))
    trace_files.write(tmp_path, trace_files.text(trace_files.step(3)), "made.json")
    imported = imported_by(*argv)
    assert not imported & needless
    assert ({"numpy", "gpulab.run"} <= imported) is ("--help" not in argv), "the test sees what is imported"


# record


def python(*argv: str, cwd: Path, command: str = sys.executable) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run([command, *argv], cwd=cwd, env=environment, capture_output=True, text=True, timeout=300)


def record(*argv: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return python("-m", "gpulab", "record", "--no-save", *argv, cwd=cwd, command=python_with_torch())


def script(folder: Path, code: str) -> str:
    (folder / "sub").mkdir(exist_ok=True)
    (folder / "sub" / "train.py").write_text(textwrap.dedent(code))
    return os.path.join("sub", "train.py")


def test_a_recorded_script_sees_what_python_would_show_it(tmp_path: Path, root: Path) -> None:
    path = script(
        tmp_path,
        """
        import inspect, os, pickle, sys
        import neighbour
        class Here: pass
        def f(): return "source"
        print(__name__, __file__, __package__, __spec__, __builtins__)
        print(sys.argv, sys.path[0], sys.modules["__main__"].Here is Here)
        print(inspect.getsource(f), pickle.loads(pickle.dumps(Here())).__class__ is Here)
        print(inspect.signature(lambda x: 1), f.__annotations__, sorted(globals()))
        def annotated(x: int): pass
        print(annotated.__annotations__)
        """,
    )
    (tmp_path / "sub" / "neighbour.py").write_text("print('imported')")
    args = ["--lr", "0.1", "--", "--steps", "7", "-x"]
    plain, recorded = python(path, *args, cwd=tmp_path), record(path, *args, cwd=tmp_path)
    assert plain.returncode == recorded.returncode == 0, recorded.stderr
    only_pythons = re.compile(r"'__(annotations|cached)__', ")
    assert only_pythons.sub("", recorded.stdout) == only_pythons.sub("", plain.stdout)
    assert not root.exists()


@pytest.mark.parametrize("name", ["pack", "pack.train"])
def test_a_recorded_module_sees_what_python_would_show_it(name: str, tmp_path: Path, root: Path) -> None:
    pack = tmp_path / "pack"
    pack.mkdir()
    (pack / "__init__.py").write_text("import sys; print('pack', sys.argv, sys.path[0])")
    (pack / "beside.py").write_text("def one(): return 1")
    code = """
        import multiprocessing, pickle, sys
        from .beside import one
        class Here: pass
        def child(x): return x + one()
        if __name__ == "__main__":
            print(__name__, __file__, __package__, __cached__, __spec__.name, __spec__.origin, type(__loader__))
            print(sys.argv, sys.path[0], pickle.loads(pickle.dumps(Here())).__class__ is Here)
            if __spec__.name == "pack.train":  # a child of a package's __main__ does not run that
                with multiprocessing.get_context("spawn").Pool(1) as pool:
                    print(pool.map(child, [1]))
            sys.exit(3)
    """
    for file in ("__main__.py", "train.py"):
        (pack / file).write_text(textwrap.dedent(code))
    args = ["--lr", "0.1", "-m", "--steps", "7"]
    plain, recorded = python("-m", name, *args, cwd=tmp_path), record("-m", name, *args, cwd=tmp_path)
    assert plain.returncode == recorded.returncode == 3, recorded.stderr
    assert recorded.stdout == plain.stdout


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_such.module", "The module 'no_such.module' cannot be found: No module named 'no_such'."),
        ("no_such_module", "There is no module 'no_such_module' that can be run."),
        ("train.py", "After -m stands the name of a module: leave out the .py of 'train.py', or the -m."),
    ],
)
def test_a_module_that_is_none_is_said(name: str, message: str, tmp_path: Path, root: Path) -> None:
    done = record("-m", name, cwd=tmp_path)
    assert done.returncode == 2 and one_line(done.stderr) == message


TRAINING = """
    import torch
    from torch.utils.data import DataLoader, TensorDataset
    layer = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    for number, (batch,) in enumerate(DataLoader(TensorDataset(torch.ones(400, 4)), batch_size=4)):
        layer(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    print("trained", number)
"""


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Recorded:
    """`gpulab record` in this process, which the script takes over: status, output and standard error."""
    for name in ("argv", "path", "excepthook"):
        monkeypatch.setattr(sys, name, getattr(sys, name) if name == "excepthook" else list(getattr(sys, name)))
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])

    def run(*argv: str) -> tuple[int, str, str]:
        status = cli.main(["record", *argv])
        return status, *capsys.readouterr()

    return run


def test_a_recorded_training_is_reported_and_kept(tmp_path: Path, root: Path, recorded: Recorded) -> None:
    page, figures = tmp_path / "r.html", tmp_path / "r.json"
    path = str(tmp_path / script(tmp_path, TRAINING))
    status, out, error = recorded("--name", "cnn", "--html", str(page), "--json", str(figures), path)
    assert (status, out) == (0, "trained 99\n"), error
    run = Store(root).load("cnn")
    assert (run.source, run.outcome, len(run.steps)) == ("script", "completed", 100)
    assert run.code == textwrap.dedent(TRAINING)
    assert error.endswith(gpulab.report(run).text())
    assert json.loads(figures.read_text())["id"] == run.id
    assert page.read_text().lstrip().startswith("<!")
    status, out, error = recorded("--steps", "8", "--no-trace", path)
    assert (status, out) == (0, ""), error
    run = Store(root).load("latest")
    assert (run.outcome, len(run.steps), run.timeline) == ("stopped", 8, None)


def test_what_a_scripts_report_proposes_is_done_where_it_is_read(
    tmp_path: Path, root: Path, recorded: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPULAB_QUICK", "1")
    path = str(tmp_path / script(tmp_path, f"batch = 4\n{textwrap.dedent(TRAINING).replace('=4)', '=batch)')}"))
    status, _, error = recorded("--set", "batch=8", path)
    assert (status, Store(root).load("train.py").settings.knobs) == (0, {"batch": "8"}), error
    assert "Changed for this run: batch=8: took effect" in error
    figures = tmp_path / "ab.json"
    status, _, error = recorded("--ab", "workers=1", "--json", str(figures), path)
    assert status == 0 and "workers=1 vs. baseline" in error, error
    assert error.endswith("The rest: the same command with --all or --html FILE\n")
    assert json.loads(figures.read_text())
    entries = [entry.name for entry in Store(root).list()]
    assert entries == ["train.py", "train.py: baseline", "train.py: workers=1"]
    listed = python("-m", "gpulab", "runs", "--store", str(root), cwd=tmp_path).stdout
    assert re.findall(r"train\.py.*?(?=  )", listed) == [
        "train.py: workers=1",
        "train.py: baseline",
        "train.py · batch=8",
    ]


def test_a_compared_script_that_fails_ends_as_without_gpulab(tmp_path: Path, root: Path, recorded: Recorded) -> None:
    path = str(tmp_path / script(tmp_path, "raise ValueError('mine')"))
    plain = python(path, cwd=tmp_path)
    status, out, error = recorded("--ab", "workers=1", path)
    assert (status, out) == (1, "") and error.endswith(plain.stderr) and "against" not in error


@pytest.mark.parametrize(
    ("code", "status", "error", "outcome"),
    [
        ("import sys; sys.exit()", 0, "", "completed"),
        ("import sys; sys.exit(3)", 3, "", "failed"),
        ("raise SystemExit('a reason')", 1, "a reason\n", "failed"),
        ("def (:", 1, None, "failed"),
        ("def train():\n    raise ValueError('mine') from KeyError('cause')\ntrain()", 1, None, "failed"),
        ("import sys; sys.excepthook = lambda *e: print('hooked', e[0].__name__); 1 / 0", 1, "", "failed"),
    ],
)
def test_exit_statuses_are_kept(
    tmp_path: Path, root: Path, recorded: Recorded,
    code: str, status: int, error: str | None, outcome: str,
) -> None:  # fmt: skip
    path = str(tmp_path / script(tmp_path, code))
    plain = python(path, cwd=tmp_path)
    assert plain.returncode == status and error in (None, plain.stderr)
    run_status, out, said = recorded(path)
    assert (run_status, out) == (status, plain.stdout)
    run = Store(root).load("latest")
    assert run.outcome == outcome and ("raise Value" not in code or run.outcome_detail == "ValueError: mine")
    said = re.sub(r"^gpulab: .*\n", "", said)  # on a busy machine: what goes on
    assert said == f"\n{gpulab.report(run).text()}{plain.stderr}"


def test_an_interrupt_ends_a_script_with_its_report(tmp_path: Path, root: Path, recorded: Recorded) -> None:
    status, _, error = recorded(str(tmp_path / script(tmp_path, "raise KeyboardInterrupt")))
    assert status == 130 and error.endswith("\nKeyboardInterrupt\n")
    assert "gpulab/" not in error.partition("Traceback")[2]
    assert Store(root).load("latest").outcome == "interrupted"


def test_a_run_that_cannot_be_kept_is_still_reported(tmp_path: Path, own_store: Path, recorded: Recorded) -> None:
    own_store.write_text("a file in the way of the store")
    status, out, error = recorded(str(tmp_path / script(tmp_path, "print('ran')")))
    assert (status, out) == (0, "ran\n"), error
    assert "Run not saved" in error and "ot a directory" in error


def test_spawned_workers_find_the_scripts_main(tmp_path: Path, root: Path) -> None:
    path = script(
        tmp_path,
        """
        import sys, torch
        from torch.utils.data import DataLoader, Dataset
        class Squares(Dataset):
            def __len__(self): return 8
            def __getitem__(self, i): return torch.tensor(i * i)
        if __name__ == "__main__":
            loader = DataLoader(Squares(), batch_size=4, num_workers=1, multiprocessing_context="spawn")
            print([batch.tolist() for batch in loader])
        """,
    )
    done = record(path, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "[[0, 1, 4, 9], [16, 25, 36, 49]]\n"), done.stderr


@pytest.mark.parametrize("target", [".", ""])
def test_a_page_that_is_a_folder_is_refused_before_the_script(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "is a folder: name a file in it" in failure(["record", "--html", target, __file__], capsys)


def test_a_page_that_gpulab_wrote_is_no_login_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "two.html"
    page.write_text(Report(synthetic.cases()["tiny"].facts, synthetic.cases()["tiny"].diagnosis).html())
    assert failure(["report", str(page)], capsys).endswith(
        "two.html is a report that gpulab wrote, not a trace. Open it in a browser, or name its run."
    )


GATE = [(10.0, "5%", 0), (5.0, "5%", 0), (20.0, "5%", 1), (20.0, "100%", 0), (None, "5%", 1)]


@pytest.mark.parametrize(("step_ms", "limit", "status"), GATE)
def test_a_gate_for_ci(
    root: Path, capsys: pytest.CaptureFixture[str], step_ms: float | None, limit: str, status: int
) -> None:
    """Against ten milliseconds; None: a run without a step."""
    other = tiny_run("20250102-000000-aaaaaa", name="new", step_ms=step_ms or 10.0, count=60)
    if step_ms is None:
        other = replace(other, steps=Steps.empty(), timeline=None, traced_numbers=())
    for run in (tiny_run("20250101-000000-aaaaaa", name="old", count=60), other):
        Store(root).save(run)
    assert cli.main(["compare", "old", "new", "--fail-if-slower", limit]) == status
    said = capsys.readouterr().err
    assert ("exit status 1" in said) == bool(status)
    assert cli.main(["compare", "old", "new"]) == 0, "without the gate nothing fails"
