"""Whose code it is: files, classes, frames and traces; each module that marks itself is recognised where it stands."""

from __future__ import annotations

import dataclasses
import importlib.util
import logging.handlers
import pkgutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from IPython.core.interactiveshell import InteractiveShell

import gpulab
from gpulab import demo, user_code
from gpulab.capture.places import users_stack
from gpulab.capture.recorder import Capture
from gpulab.demo import digits
from gpulab.snapshot import walk
from gpulab.tuning import cell_code
from gpulab.tuning.code import Code
from gpulab.user_code import Owner, is_gpulabs_file, is_users_class, is_users_file, is_users_in_trace, owners
from tests.support.fork_server import python_with_torch
from tests.support.shell import shell_with_gpulab

torch = pytest.importorskip("torch")
from torch.utils.data import DataLoader, Dataset  # noqa: E402


def modules_of_the_package() -> Iterator[tuple[str, str]]:
    """Name and file of each, without importing it."""
    for info in pkgutil.walk_packages(gpulab.__path__, "gpulab."):
        spec = importlib.util.find_spec(info.name)
        assert spec is not None and spec.origin is not None
        yield info.name, spec.origin


def test_each_module_but_the_demo_is_gpulabs_own() -> None:
    for name, file in modules_of_the_package():
        in_demo = name == "gpulab.demo" or name.startswith("gpulab.demo.")
        assert is_users_file(file) is in_demo, name
        assert is_gpulabs_file(file) is not in_demo, name


def test_whose_file_it_is(tmp_path: Path) -> None:
    assert owners[__file__] is owners[str(tmp_path / "train.py")] is owners["<cell>"] is Owner.USER
    assert owners["<ipython-input-3-abc>"] is owners[str(digits.__file__)] is Owner.USER
    for file in (torch.__file__, logging.handlers.__file__, "<string>", "<frozen os>", ""):
        assert owners[str(file)] is Owner.LIBRARY, file
    assert owners[str(gpulab.__file__)] is Owner.GPULAB
    assert owners[str(Path(str(gpulab.__file__)).parent) + "_of_mine/train.py"] is Owner.USER


def test_a_file_that_is_reached_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "linked").symlink_to(Path(str(gpulab.__file__)).parent)
    (tmp_path / "python").symlink_to(Path(logging.__file__).parent)
    assert owners[str(tmp_path / "linked" / "run.py")] is Owner.GPULAB
    assert owners[str(tmp_path / "linked" / "tuning" / "cell_code.py")] is Owner.RUNNER
    assert owners[str(tmp_path / "linked" / "demo" / "digits.py")] is Owner.USER
    assert owners[str(tmp_path / "python" / "handlers.py")] is Owner.LIBRARY


def test_a_module_that_marks_itself_later_is_seen_from_then_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "gpulab"
    monkeypatch.setattr(user_code, "_GPULAB", (f"{folder}/",))
    monkeypatch.setattr(user_code, "_runners", set())
    monkeypatch.setattr(user_code, "_stand_ins", ())
    owners.clear()
    runner, sample = str(folder / "runner.py"), str(folder / "sample" / "data.py")
    assert owners[runner] is owners[sample] is Owner.GPULAB
    user_code.runs_users_code(runner)
    user_code.counts_as_users(str(folder / "sample" / "__init__.py"))
    assert owners[runner] is Owner.RUNNER and owners[sample] is Owner.USER
    monkeypatch.undo()
    owners.clear()


def test_whose_class_it_is() -> None:
    class Local:
        pass

    assert is_users_class(Local) and is_users_class(digits.DigitsFolder)
    assert not any(map(is_users_class, (int, Path, torch.nn.Linear, Code, logging.handlers.QueueHandler)))


def test_code_that_was_generated_may_be_the_users() -> None:
    @dataclasses.dataclass
    class Point:
        x: int

    assert user_code.is_users_code(Point.__init__.__code__), "generated for a class of the user's"
    assert user_code.is_users_code(test_code_that_was_generated_may_be_the_users.__code__)
    assert not user_code.is_users_code(torch.nn.Linear.forward.__code__)
    assert not user_code.is_users_code(importlib.util.find_spec.__code__)


def test_files_that_a_trace_names() -> None:
    of_users = ("train.py", "src/train.py", "/home/u/project/data/loader.py", "C:\\work\\train.py")
    of_libraries = (
        *("torch/nn/modules/module.py", "ema_pytorch/ema_pytorch.py", "json/decoder.py", "decorator.py"),
        *("/opt/conda/lib/python3.11/threading.py", "/usr/lib/python3/dist-packages/yaml/loader.py"),
        "C:\\env\\Lib\\site-packages\\x\\y.py",
    )
    assert [file for file in (*of_users, *of_libraries) if is_users_in_trace(file)] == [*of_users]


def test_libraries_of_restored_objects_are_libraries_in_traces() -> None:
    assert set(user_code.TRAINING_LIBRARIES) <= user_code.LIBRARIES
    assert set(walk.OUTSIDE) <= user_code.LIBRARIES | sys.stdlib_module_names


# -- what runs the user's code -----------------------------------------------------------------------------------------


def owner_above() -> Owner:
    """Whose the first frame above the caller is that is neither the user's nor a library's."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        owner = owners[frame.f_code.co_filename]
        if owner in (Owner.GPULAB, Owner.RUNNER):
            return owner
        frame = frame.f_back
    raise AssertionError("nothing of gpulab's is above")


@pytest.fixture
def shell() -> Iterator[InteractiveShell]:
    with shell_with_gpulab() as own:
        yield own


CELL = "above = owner_above(); stack = users_stack(sys._getframe())"
QUIET = "--no-save --no-live --no-trace"


def in_experiment(shell: InteractiveShell) -> None:
    with cell_code.silence():
        Code.of_cell(shell, CELL, cell_code.parsed(shell, CELL)).run()


@pytest.mark.parametrize(
    "run",
    [
        lambda shell: shell.run_cell(f"%%gpuprofile {QUIET}\n{CELL}").raise_error(),
        lambda shell: shell.run_cell(f"%gpuprofile {QUIET} {CELL}").raise_error(),
        in_experiment,
        lambda shell: Code.of_text(CELL, shell.user_ns).run(),
    ],
    ids=["cell", "statement", "experiment", "text"],
)
def test_what_runs_a_cell_is_a_runner(run: Callable[[InteractiveShell], None], shell: InteractiveShell) -> None:
    shell.push({"owner_above": owner_above, "users_stack": users_stack, "sys": sys})
    run(shell)
    assert shell.user_ns["above"] is Owner.RUNNER
    (spot,) = shell.user_ns["stack"]
    assert spot[1] == 1, "only the cell's own line: what is above the runner is not profiled"


def test_what_the_magic_does_before_the_cell_has_no_line(
    shell: InteractiveShell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Above the magic is the whole cell as IPython runs it, and here this file."""
    start, seen = Capture.start, []

    def noted(capture: Capture) -> None:
        seen.append(users_stack(sys._getframe(1)))
        start(capture)

    monkeypatch.setattr(Capture, "start", noted)
    shell.run_cell(f"%%gpuprofile {QUIET}\n1").raise_error()
    assert seen == [()]


def test_what_runs_a_function_is_a_runner() -> None:
    seen: dict[str, Any] = {}

    def train() -> None:
        seen.update(above=owner_above(), stack=users_stack(sys._getframe()))

    Code.of_function(train).run()
    assert seen["above"] is Owner.RUNNER and [spot[2].split(".")[-1] for spot in seen["stack"]] == ["train"]


def test_a_script_of_the_command_line(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import sys\n"
        "from gpulab.user_code import Owner, owners, within_gpulab\n"
        "print(owners[sys._getframe(1).f_code.co_filename].value, within_gpulab(sys._getframe()))\n"
    )
    order = [python_with_torch(), "-m", "gpulab", "record", "--no-save", "--no-trace", str(script)]
    done = subprocess.run(order, capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.splitlines()[0] == "runner False"


# -- a call of gpulab's own --------------------------------------------------------------------------------------------


class Asking(Dataset[Any]):
    """Notes whether each item is asked for within a call of gpulab's."""

    def __init__(self) -> None:
        self.within: list[bool] = []

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        self.within.append(user_code.within_gpulab(sys._getframe()))
        return torch.zeros(2)


def test_a_fetch_is_within_gpulabs_call_and_the_loop_outside() -> None:
    dataset, outside = Asking(), []
    with gpulab.profile(show=False, save=False, trace=False):
        for _ in DataLoader(dataset, batch_size=2):
            outside.append(user_code.within_gpulab(sys._getframe()))
    assert all(dataset.within) and len(dataset.within) == 8
    assert not any(outside) and len(outside) == 4


def test_the_demos_frames_are_no_call_of_gpulabs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def write(_: Path) -> None:
        raise RuntimeError(str(user_code.within_gpulab(sys._getframe())))

    monkeypatch.setattr(digits, "write_digits", write)
    with pytest.raises(RuntimeError, match="False"):
        demo.DigitsFolder(tmp_path)


# -- tracebacks --------------------------------------------------------------------------------------------------------


def files_of(error: BaseException) -> list[str]:
    trace, files = error.__traceback__, []
    while trace is not None:
        files.append(trace.tb_frame.f_code.co_filename)
        trace = trace.tb_next
    return files


def raised(run: Callable[[], object]) -> BaseException:
    try:
        run()
    except BaseException as error:
        return error
    raise AssertionError("nothing was raised")


def test_gpulabs_frames_are_removed_from_an_error_and_its_cause() -> None:
    def fail() -> None:
        try:
            Code.of_function(lambda: 1 / 0).run()
        except ZeroDivisionError as e:
            raise ExceptionGroup("two", [ValueError("one"), e]) from e

    error = raised(lambda: Code.of_function(fail).run())
    assert any(map(is_gpulabs_file, files_of(error)))
    user_code.hide_gpulabs_frames(error)
    assert isinstance(error, ExceptionGroup) and error.__cause__ is not None
    for each in (error, error.__cause__, *error.exceptions):
        assert set(files_of(each)) <= {__file__}
    assert len(files_of(error)) == 3 and len(files_of(error.__cause__)) == 2


def test_an_error_within_gpulab_alone_has_no_frames_left() -> None:
    error = raised(lambda: Code.of_text("(", {}))
    trace = error.__traceback__
    while trace is not None and not is_gpulabs_file(trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next
    assert trace is not None
    user_code.hide_gpulabs_frames(error.with_traceback(trace))
    assert error.__traceback__ is None
