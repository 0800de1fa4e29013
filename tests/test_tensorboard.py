"""A stored run opens in the tools people already have: TensorBoard's PyTorch plugin and readers of Chrome traces."""

from __future__ import annotations

import gzip
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpulab.sources.store import Store, trace_path
from tests.strategies import tiny_run

START_S = 120.0
PATIENCE_S = 60.0


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run with a real trace of three steps of a small training loop."""
    torch = pytest.importorskip("torch")
    from torch.profiler import ProfilerActivity, profile, record_function

    layer = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiler:
        for number in range(3):
            with record_function(f"ProfilerStep#{number}"):
                layer(torch.ones(4, 8)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
    store = Store(tmp_path_factory.mktemp("gpulab") / "runs")
    return store.save(tiny_run(name="with a trace"), lambda path: profiler.export_chrome_trace(str(path)))


def test_the_trace_is_what_perfetto_and_hta_read(stored: Path) -> None:
    trace = trace_path(stored)
    assert trace is not None
    with gzip.open(trace, "rb") as file:
        document = json.load(file)
    names = {event.get("name") for event in document["traceEvents"]}
    assert {"ProfilerStep#0", "ProfilerStep#2", "aten::linear", "Optimizer.step#SGD.step"} <= names
    assert all({"ts", "dur", "pid", "tid"} <= event.keys() for event in document["traceEvents"] if event["ph"] == "X")


@pytest.fixture
def tensorboard(stored: Path, tmp_path: Path) -> Iterator[str]:
    """The address of a TensorBoard on the store; it is killed, with its data server, in the end."""
    pytest.importorskip("tensorboard")
    pytest.importorskip("torch_tb_profiler")
    log = tmp_path / "tensorboard.log"
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(stored.parent), "--port", "0"]
    with log.open("wb") as output:
        server = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        yield _address(server, log)
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait(10)


def _address(server: subprocess.Popen[bytes], log: Path) -> str:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and server.poll() is None:
        found = re.search(r"http://[^/\s]*:(\d+)/", log.read_text())
        if found:
            return f"http://127.0.0.1:{found[1]}"
        time.sleep(0.2)
    pytest.fail(f"TensorBoard did not start:\n{log.read_text()[-2000:]}")


def _get(url: str) -> object:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(url, timeout=10) as answer:
        return json.load(answer)


@pytest.mark.tensorboard
@pytest.mark.timeout(240)
@pytest.mark.skipif(not hasattr(os, "killpg"), reason="process groups end the server and its data server")
def test_tensorboards_plugin_lists_the_run_and_its_worker(stored: Path, tensorboard: str) -> None:
    plugin = f"{tensorboard}/data/plugin/pytorch_profiler"
    listed: object = None
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        try:
            listed = _get(f"{plugin}/runs")
        except (OSError, urllib.error.HTTPError) as error:
            listed = error
        if isinstance(listed, dict) and stored.name in listed["runs"]:
            break
        time.sleep(0.5)
    assert isinstance(listed, dict), listed
    assert listed["runs"] == [stored.name]
    views = _get(f"{plugin}/views?run={stored.name}")
    assert isinstance(views, list) and "Overview" in views
    workers = _get(f"{plugin}/workers?run={stored.name}&view=Overview")
    assert workers == [f"host_{os.getpid()}"], "the host and the process are read from the file's name"
