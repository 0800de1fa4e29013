"""DataLoader workers that die or cannot start: the user's own error passes, the record says what is missing."""

from __future__ import annotations

import functools
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import textwrap
from contextlib import suppress
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Subset

import gpulab
from gpulab.capture import arguments, loader_facts
from gpulab.run import Missing, Run
from tests.support.fork_server import python_with_torch
from tests.support.leftovers import own_frames
from tests.support.paths import ROOT

pytestmark = pytest.mark.skipif(os.name != "posix", reason="signals")

KILLED = "DataLoader worker (pid 41) is killed by signal: Killed. "


class Deadly(Dataset[Any]):
    """Its worker is killed, or ends, at item 21, once `received` is set: the batches before were trained with."""

    def __init__(self, how: int, received: Event) -> None:
        self.how, self.received = how, received

    def __len__(self) -> int:
        return 64

    def __getitem__(self, i: int) -> torch.Tensor:
        if i == 21:
            self.received.wait(300)
            if self.how < 0:
                os._exit(-self.how)
            os.kill(os.getpid(), self.how)
        return torch.full((3,), float(i))


def step(x: torch.Tensor) -> None:
    w = torch.ones(3, requires_grad=True)
    optimizer = torch.optim.SGD([w], lr=0.1)
    (x @ w).sum().backward()  # type: ignore[no-untyped-call]
    optimizer.step()


def train_until_death(how: int, pids: list[int]) -> None:
    """Five steps, after which the worker whose number is in `pids` ends."""
    received = multiprocessing.Event()
    batches: Any = iter(DataLoader(Deadly(how, received), batch_size=4, num_workers=1))
    pids.extend(w.pid for w in batches._workers)
    for number, x in enumerate(batches, 1):
        step(x)
        if number == 5:
            received.set()


def train_four_steps() -> None:
    for x in DataLoader(torch.ones(16, 3), batch_size=4):  # type: ignore[arg-type]
        step(x)


def lost(run: Run, key: str = "loader") -> Missing:
    (missing,) = [m for m in run.missing if m.key == key]
    return missing


@pytest.mark.parametrize(
    ("how", "said"), [(signal.SIGKILL, r"killed by signal(: Killed| 9 \(SIGKILL\))"), (-7, "exit code 7")]
)
def test_a_worker_that_dies_is_the_users_error_and_recorded(how: int, said: str) -> None:
    pids: list[int] = []

    with pytest.raises(RuntimeError) as caught, gpulab.profile("deadly", show=False, save=False) as p:
        train_until_death(how, pids)
    assert re.match(rf"DataLoader worker \(pid(\(s\))? {pids[0]}\)", str(caught.value))
    assert not own_frames(caught.value)
    run = p.run
    run.check()
    assert run.outcome == "failed" and len(run.steps) == 5, "the batches before were steps"
    missing = lost(run)
    assert missing.what == "data from a DataLoader worker"
    assert str(pids[0]) in missing.reason
    assert re.search(said, missing.reason), missing.reason
    assert missing.since_ns is not None and run.steps.end_ns[-1] < missing.since_ns <= run.wall_ns
    assert "DataLoader worker" in p.report.text(full=True)


def test_a_run_that_goes_on_without_its_worker_says_since_when() -> None:
    with gpulab.profile("deadly", show=False, save=False) as p:
        with suppress(RuntimeError):
            train_until_death(signal.SIGKILL, [])
        train_four_steps()
    run = p.run
    assert run.outcome == "completed" and len(run.steps) == 9
    missing = lost(run)
    assert missing.since_ns is not None
    assert run.steps.end_ns[4] < missing.since_ns < run.steps.start_ns[-4]


def test_torchs_signal_handler_is_not_taken_for_a_fault_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """It raises wherever the main thread is: also within our own code."""

    def interrupted(batch: Any) -> int:
        raise RuntimeError(KILLED)

    monkeypatch.setattr(arguments, "samples_in", interrupted)

    with pytest.raises(RuntimeError, match="pid 41"), gpulab.profile("signal", show=False, save=False) as p:
        train_four_steps()
    assert lost(p.run).reason == "worker process 41 killed by signal: Killed"
    assert not [m for m in p.run.missing if m.key == "steps"]


def test_a_lost_worker_of_an_earlier_cell_costs_no_report(capsys: pytest.CaptureFixture[str]) -> None:
    """Its handler looks after all of them whenever a child process ends: so does the sampling process, with the run."""
    heard = []

    def handle(number: int, frame: Any) -> None:
        heard.append(number)
        raise RuntimeError("DataLoader worker (pid 41) exited unexpectedly with exit code 1.")

    before = signal.signal(signal.SIGCHLD, handle)
    try:
        with gpulab.profile("earlier", show=False, save=False) as p:
            train_four_steps()
        assert signal.getsignal(signal.SIGCHLD) is handle, "put back"
    finally:
        signal.signal(signal.SIGCHLD, before)
    assert heard and len(p.run.steps) == 4 and p.run.outcome == "completed"
    assert "gpulab failed" not in capsys.readouterr().err


def test_which_errors_are_deaths() -> None:
    for error in ("DataLoader timed out after 5 seconds", "CUDA error", ""):
        assert loader_facts.death(error) is None
    death = loader_facts.death("DataLoader worker (pid(s) 4, 51) exited unexpectedly")
    assert death == "worker processes 4, 51 exited unexpectedly"


# -- workers that cannot start -----------------------------------------------------------------------------------------

NOTEBOOK = """
import torch, gpulab
from torch.utils.data import DataLoader, Dataset

class Squares(Dataset):
    def __len__(self): return 8
    def __getitem__(self, i): return torch.tensor(float(i * i))

with gpulab.profile("workers", show=False, save=False) as p:
    got = []
    try:
        for batch in DataLoader(Squares(), batch_size=4, num_workers=1, multiprocessing_context="%s"):
            got += batch.tolist()
    except RuntimeError as e:
        got = "failed"
print(got, sorted({m.key for m in p.run.missing} & {"workers", "loader"}))
"""


def run_notebook(tmp_path: Path, start_method: str) -> tuple[str, str]:
    """What a program wrote whose main module is no file, as in a notebook."""
    command = [python_with_torch(), "-c", NOTEBOOK % start_method]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    return done.stdout.strip(), done.stderr


def predicted(stderr: str) -> list[str]:
    return [line for line in stderr.splitlines() if line.startswith("gpulab:")]


def test_a_notebook_dataset_is_predicted_to_fail_with_spawn(tmp_path: Path) -> None:
    out, stderr = run_notebook(tmp_path, "spawn")
    assert out == "failed ['loader', 'workers']", "torch's own failure came, as predicted"
    (line,) = predicted(stderr)
    assert stderr.startswith(line), "before it happened"
    assert "start method spawn" in line and "Squares" in line and ".py file" in line and "num_workers=0" in line


def test_nothing_is_foretold_where_the_workers_do_start(tmp_path: Path) -> None:
    out, stderr = run_notebook(tmp_path, "fork")
    assert out == "[0.0, 1.0, 4.0, 9.0, 16.0, 25.0, 36.0, 49.0] []" and not predicted(stderr)


class Held:
    """Stands for a DataLoader that is about to make an iterator."""

    def __init__(self, dataset: object, collate_fn: object = None, worker_init_fn: object = None, **other: Any) -> None:
        self.dataset, self.collate_fn, self.worker_init_fn = dataset, collate_fn, worker_init_fn
        self.num_workers = 2
        self.multiprocessing_context = torch.multiprocessing.get_context("spawn")
        vars(self).update(other)


class Plain(Dataset[Any]):
    def __init__(self, transform: object = None) -> None:
        self.transform = transform


class Refuses:
    """To be looked at."""

    @property
    def __dict__(self) -> Any:  # type: ignore[override]
        raise ValueError("no")


class Careful(Plain):
    """Leaves out of its pickle what workers cannot get."""

    def __getstate__(self) -> dict[str, Any]:
        return {}


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> type:
    """A main module that is no file, and a class defined in it."""
    main = type(sys)("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)
    return type("Mine", (Dataset,), {"__module__": "__main__", "method": lambda self: None})


def function(name: str = "mine") -> Any:
    made = lambda items: items  # noqa: E731
    made.__module__, made.__qualname__ = "__main__", name
    return made


def test_what_a_notebook_defines_is_found_however_it_is_held(notebook: type) -> None:
    mine = notebook()
    for loader, name in (
        (Held(mine), "Mine"),
        (Held(Subset(mine, [0])), "Mine"),
        (Held(Plain(transform=[function("crop")])), "crop"),
        (Held(Plain(), collate_fn=function("collate")), "collate"),
        (Held(Plain(), collate_fn=functools.partial(function("collate"), 3)), "collate"),
        (Held(Plain(), collate_fn=mine.method), "Mine"),
        (Held(Plain(), worker_init_fn=function("seed")), "seed"),
    ):
        why = loader_facts.cannot_start(loader)
        assert why is not None and f"will not find {name}:" in why


def test_what_workers_can_get_is_not_foretold_to_fail(notebook: type, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = notebook()
    fork = torch.multiprocessing.get_context("fork")
    for loader in (
        Held(Plain()),
        Held(Refuses()),
        Held(Careful(transform=mine)),
        Held(mine, num_workers=0),
        Held(mine, multiprocessing_context=fork),
        Held(mine, _iterator=object()),  # persistent workers that have started
    ):
        assert loader_facts.cannot_start(loader) is None
    monkeypatch.setattr(sys.modules["__main__"], "__file__", "train.py", raising=False)
    assert loader_facts.cannot_start(Held(mine)) is None


def test_the_default_start_method_is_looked_up_and_not_fixed(notebook: type) -> None:
    code = """
        import multiprocessing, sys
        from gpulab.knobs.description import start_method
        class Loader: multiprocessing_context = None
        print(start_method(Loader()), multiprocessing.get_start_method(allow_none=True))
    """
    said = subprocess.check_output([sys.executable, "-c", textwrap.dedent(code)], text=True, cwd=ROOT)
    assert said.split() == [multiprocessing.get_all_start_methods()[0], "None"]


def test_a_prophecy_that_does_not_come_true_is_not_in_the_record(notebook: type, capsys: Any) -> None:
    met = loader_facts.Workers()
    met.check(Held(notebook()), 5)
    met.check(Held(notebook()), 6)
    assert capsys.readouterr().err.count("gpulab:") == 1, "said once"
    assert met.missing(fed=True) == ()
    assert [(m.key, m.since_ns) for m in met.missing(fed=False)] == [("workers", 5)]
    met.fail(KILLED, 7)
    assert [(m.key, m.since_ns) for m in met.missing(fed=True)] == [("loader", 7), ("workers", 5)]
