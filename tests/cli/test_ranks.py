"""`gpulab record --ranks N`: one command, N recorded processes, one report."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

import pytest

from gpulab.arguments import command_of
from gpulab.cli.ranks import _of_each, _status
from gpulab.store.folders import Store
from tests.support.fork_server import python_with_torch

TRAINING = """
import sys, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
weight = torch.nn.Parameter(torch.zeros(2))
optimizer = torch.optim.SGD([weight], lr=0.1)
for step in range(int(sys.argv[1])):
    if dist.get_rank() == 1:
        time.sleep(0.01)
    weight.sum().backward()
    dist.all_reduce(weight.grad)
    optimizer.step()
    if step == 20:
        print("training", flush=True)
dist.destroy_process_group()
sys.exit(int(sys.argv[2]) if len(sys.argv) > 2 else 0)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    file = tmp_path / "train.py"
    file.write_text(TRAINING)
    return file


def parse(words: Sequence[str]) -> Namespace:
    """The options of a command line."""
    _, parser, rest = command_of(words, "terminal")
    return parser.read(rest)


def test_each_rank_has_the_same_options() -> None:
    line = ["record", "--ranks", "4", "--name", "x", "--steps", "30", "--no-live", "--all", "--html", "r.html", "t.py"]
    words = _of_each(parse([*line, "--lr", "1"]))
    assert "--ranks" not in words and words[-3:] == ["t.py", "--lr", "1"]
    again = parse(words[2:])
    assert (again.name, again.steps, again.no_live, again.silent) == ("x", 30, True, True)
    assert again.ranks is None and again.device == "auto" and not again.no_save
    assert not again.all and again.html is None, "the launcher shows the report of all of them"
    alone = parse(_of_each(parse([*line[:-1], "--no-save", line[-1]]))[2:])
    assert (alone.all, alone.html, alone.silent) == (True, Path("r.html"), False), "nothing is stored to show"


def test_the_status_is_as_a_shell_has_it() -> None:
    assert (_status(0), _status(3), _status(-signal.SIGKILL)) == (0, 3, 137)


def record(script: Path, *words: str, python: str = "") -> subprocess.Popen[str]:
    launcher = [python or python_with_torch(), "-m", "gpulab", "record", "--ranks", "2", "--no-live"]
    command = [*launcher, str(script), *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ.copy())


def test_a_rank_that_fails_fails_the_command(script: Path, own_store: Path) -> None:
    with record(script, "12", "3") as process:
        _, said = process.communicate()
    assert process.returncode == 1 and "exitcode  : 3" in said
    (opening,) = (line for line in said.splitlines() if line.startswith("gpulab · "))
    assert "rank 1 failed" in opening or "all failed" in opening
    assert "gpulab: The ranks did not come to the end of the script. Rank " in said and "SystemExit: 3" in said
    assert Store(own_store / "runs").list(), "what was measured is kept"


def test_a_signal_ends_all_ranks_and_keeps_them(script: Path, own_store: Path) -> None:
    with record(script, "1000000") as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.readline()
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate()
    assert process.returncode == 128 + signal.SIGTERM
    (opening,) = (line for line in said.splitlines() if line.startswith("gpulab · "))
    assert "2 of 2 ranks · all interrupted" in opening, "one report, of both"
    entries = Store(own_store / "runs").list()
    assert entries and {entry.outcome for entry in entries} == {"interrupted"}


@pytest.mark.skipif(sys.platform != "linux", reason="needs prctl")
@pytest.mark.parametrize("victim", ["gpulab", "torch.distributed.run"])
def test_ranks_end_with_a_launcher_that_is_killed(script: Path, own_store: Path, victim: str) -> None:
    import psutil

    with record(script, "3000", python=sys.executable) as process:
        assert process.stdout is not None
        process.stdout.readline()
        (torchrun,) = psutil.Process(process.pid).children()
        os.kill(process.pid if victim == "gpulab" else torchrun.pid, signal.SIGKILL)
        process.communicate()  # until the last of them has closed its output
    assert process.returncode == (-signal.SIGKILL if victim == "gpulab" else 128 + signal.SIGKILL)
    entries = Store(own_store / "runs").list()
    assert len(entries) == 2 and "interrupted" in {entry.outcome for entry in entries}
    assert "completed" not in {entry.outcome for entry in entries}
