"""A stored run opens in the tools people already have: TensorBoard's PyTorch plugin and readers of Chrome traces."""

from __future__ import annotations

import gzip
import json
import os
import platform
import re
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest

import gpulab
from gpulab.api import tensorboard
from gpulab.store.folders import read, trace_path

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


@pytest.mark.tensorboard
def test_tensorboards_plugin_lists_the_run_and_its_worker(stored: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensorboard, "_START_S", 600.0)
    pytest.importorskip("tensorboard")
    pytest.importorskip("torch_tb_profiler")
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def answer(question: str) -> Any:
        with opener.open(f"{address}data/plugin/pytorch_profiler/{question}", timeout=60) as page:
            return json.load(page)

    def runs() -> list[str]:
        try:
            names: list[str] = answer("runs")["runs"]
        except OSError:
            return []
        return names

    try:
        address = tensorboard.start(stored.parent).partition("#")[0]
        deadline = time.monotonic() + PATIENCE_S
        while not (listed := runs()) and time.monotonic() < deadline:
            time.sleep(0.5)
        assert listed == [stored.name]
        assert "Overview" in answer(f"views?run={stored.name}")
        host = re.sub(r"[^A-Za-z0-9.-]", "-", platform.node())
        workers = answer(f"workers?run={stored.name}&view=Overview")
        assert workers == [f"{host}_{os.getpid()}"], "the host and the process are read from the file's name"
    finally:
        tensorboard.stop()
