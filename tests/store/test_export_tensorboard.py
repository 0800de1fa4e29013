"""A stored run opens in the tools people already have: TensorBoard's PyTorch plugin and readers of Chrome traces."""

from __future__ import annotations

import gzip
import json
import os
import platform
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

import gpulab
from gpulab.store.folders import read, trace_path

START_S = 240.0
PATIENCE_S = 120.0


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that gpulab captured: sixty steps of a small training loop."""
    torch = pytest.importorskip("torch")
    layer = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    folder = tmp_path_factory.mktemp("gpulab")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GPULAB_DIR", str(folder))
        with gpulab.profile("with a trace", trace_steps=3, device="cpu", show=False) as p:
            for _ in range(60):
                layer(torch.ones(4, 8)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
    return folder / "runs" / p.run.id


def test_the_trace_is_what_perfetto_and_hta_read(stored: Path) -> None:
    trace, run = trace_path(stored), read(stored)
    assert trace is not None and run.timeline is not None
    with gzip.open(trace, "rb") as file:
        document = json.load(file)
    names = {event.get("name") for event in document["traceEvents"]}
    steps = {f"ProfilerStep#{number}" for number in run.traced_numbers}
    assert len(steps) == 3 and {*steps, "aten::linear", "Optimizer.step#SGD.step"} <= names
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
        server.wait(60)


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
    with opener.open(url, timeout=60) as answer:
        return json.load(answer)


@pytest.mark.tensorboard
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
    host = re.sub(r"[^A-Za-z0-9.-]", "-", platform.node())
    assert workers == [f"{host}_{os.getpid()}"], "the host and the process are read from the file's name"
