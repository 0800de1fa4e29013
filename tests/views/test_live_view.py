"""The live view without a browser: what it sends, what it forgets, and that it never harms the run."""

from __future__ import annotations

import base64
import json
import math
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from gpulab.live_feed import Delta, Status
from gpulab.user_code import PACKAGE_FOLDER
from gpulab.views import live_view
from gpulab.views.live_view import LiveView, message
from gpulab.views.page import static
from gpulab.views.widgets import STOP_MESSAGE, accept_stop
from tests.support.kernel_session import WIDGET_VIEW
from tests.support.paths import ROOT, TESTS
from tests.support.scripted_feed import CPU_SERIES, ScriptedFeed

STATIC = PACKAGE_FOLDER / "views" / "static"
FRONT_END = ROOT / "frontend"
LOADS = re.compile(r"\bimport\s*[({*\"']|\bfrom\s*[\"']|\brequire\s*\(|https?://")
GOLDEN = TESTS / "golden" / "live_message.json"
STATUS = Status("measuring", 12, 113, "epoch", 1.5, "device: CPU")


class FakeWidget:
    """Keeps what it was sent; `break_on` names the call that raises."""

    break_on = ""

    def __init__(self, run_key: str) -> None:
        self.run_key = run_key
        self.sent: list[tuple[dict[str, Any], list[bytes]]] = []
        self.senders: set[str] = set()
        self.callbacks: list[Callable[..., None]] = []
        self.closed = 0
        self.layout = self
        self._fail("__init__")

    def _fail(self, call: str) -> None:
        if self.break_on == call:
            raise RuntimeError(f"{call} is broken")

    def send(self, content: dict[str, Any], buffers: list[bytes]) -> None:
        self._fail("send")
        self.senders.add(threading.current_thread().name)
        self.sent.append((content, buffers))

    def on_msg(self, callback: Callable[..., None], remove: bool = False) -> None:
        (self.callbacks.remove if remove else self.callbacks.append)(callback)

    def close(self) -> None:
        self.closed += 1
        self._fail("close")

    def _repr_mimebundle_(self) -> tuple[dict[str, Any], dict[str, Any]]:
        return {WIDGET_VIEW: {"model_id": "m"}, "text/plain": "<object at 0x1>"}, {}


class FakeHandle:
    display_id = "d"

    def __init__(self) -> None:
        self.shown: list[Any] = []

    def update(self, obj: object, **kwargs: object) -> None:
        self.shown.append((obj, kwargs))


class FakeSession:
    def __init__(self) -> None:
        self.sent: list[tuple[Any, ...]] = []

    def send(self, stream: object, msg_or_type: str, content: dict[str, Any], parent: object, ident: object) -> None:
        self.sent.append((stream, msg_or_type, content, parent, ident))


class FakeKernel:
    def __init__(self) -> None:
        self.session = FakeSession()
        self.control_handlers: dict[str, Any] = {"shutdown_request": None}

    def receive(self, content: dict[str, Any]) -> dict[str, Any]:
        """A control message, as ipykernel hands it over; returns the reply's content."""
        self.control_handlers[STOP_MESSAGE]("stream", [b"id"], {"content": content})
        return dict(self.session.sent[-1][2])


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> FakeHandle:
    handle = FakeHandle()

    def display(obj: object, **kwargs: object) -> FakeHandle:
        handle.shown.append((obj, kwargs))
        return handle

    monkeypatch.setattr(live_view, "_widget_class", lambda: FakeWidget)
    monkeypatch.setattr("IPython.display.display", display)
    monkeypatch.setattr(FakeWidget, "break_on", "")
    return handle


def begun(feed: ScriptedFeed, kernel: FakeKernel) -> tuple[LiveView, FakeWidget]:
    view = LiveView(kernel, interval_s=0.005)
    view.begin(feed)
    widget = view._widget
    assert isinstance(widget, FakeWidget)
    return view, widget


def until(happened: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not happened():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.002)


def golden_delta() -> Delta:
    steps = np.array([[0.5, 500, 400, 128], [0.75, 250, 62.5, math.nan]], np.float32)
    samples = {"cpu_pct": np.array([[0.25, 50], [0.5, 62.5]], np.float32), "rss_bytes": np.zeros((0, 2), np.float32)}
    return Delta(STATUS, steps, samples)


def test_the_message_is_the_golden_one_that_the_browser_reads() -> None:
    head, buffers = message(golden_delta(), CPU_SERIES)
    golden = json.loads(GOLDEN.read_text())
    assert json.loads(json.dumps(head)) == golden["head"]
    assert [base64.b64encode(b).decode() for b in buffers] == golden["buffers"]


def test_a_run_is_shown_fed_from_a_thread_and_replaced(stage: FakeHandle) -> None:
    feed, kernel = ScriptedFeed(), FakeKernel()
    view, widget = begun(feed, kernel)
    (note, _), (shown, how) = stage.shown[:2]
    assert "gpulab-live-note" in note["text/html"] and "%gpulab report" in note["text/html"]
    assert WIDGET_VIEW in shown and "0x" not in shown["text/plain"] and how["raw"] and how["display_id"]
    until(lambda: len(widget.sent) > 3)
    feed.advance(2.0)
    assert widget.senders == {"gpulab-live-view"}
    view.end()
    last = widget.sent[-1][0]
    assert last["ended"] and last["status"]["step"] == feed.step
    assert sum(len(b[0]) for _, b in widget.sent) == feed.step * 4 * len(live_view.STEP_COLUMNS), (
        "each step is sent once"
    )
    assert not [t for t in threading.enumerate() if t.name == "gpulab-live-view"]
    assert list(kernel.control_handlers) == ["shutdown_request"]
    assert widget.closed == 0, "the chart stays until it is replaced"
    view.close()
    assert [bundle for bundle, _ in stage.shown[-2:]] == [{"text/plain": "", "text/html": ""}] * 2, "view and note"
    assert widget.closed == 2 and widget.callbacks == [], "the widget and its layout"
    assert view.problem == ""
    view.close()


@pytest.mark.parametrize("call", ["__init__", "send", "close"])
def test_a_broken_front_end_ends_the_view_not_the_run(
    stage: FakeHandle, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    monkeypatch.setattr(FakeWidget, "break_on", call)
    feed, kernel = ScriptedFeed(), FakeKernel()
    view = LiveView(kernel, interval_s=0.005)
    view.begin(feed)
    if call == "send":
        until(lambda: view.problem)
        until(lambda: not [t for t in threading.enumerate() if t.name == "gpulab-live-view"])
    view.end()
    view.close()
    assert view.problem == f"RuntimeError: {call} is broken"
    assert list(kernel.control_handlers) == ["shutdown_request"]


def test_an_output_that_cannot_be_updated_costs_nothing(stage: FakeHandle, monkeypatch: pytest.MonkeyPatch) -> None:
    view, widget = begun(ScriptedFeed(), FakeKernel())
    view.end()

    def broken(*_: object, **__: object) -> None:
        raise OSError("gone")

    monkeypatch.setattr(stage, "update", broken)
    view.close()
    assert view.problem == "" and widget.closed == 2


def test_stop_on_the_control_channel_is_answered(stage: FakeHandle) -> None:
    feed, kernel = ScriptedFeed(), FakeKernel()
    view, widget = begun(feed, kernel)
    assert kernel.receive({"run": "another run"})["status"] == "error"
    assert not feed.stop_requested.is_set()
    assert kernel.receive({"run": widget.run_key}) == {"status": "ok"}
    assert feed.stop_requested.is_set()
    stream, kind, _, parent, ident = kernel.session.sent[-1]
    assert (stream, kind, ident) == ("stream", "gpulab_stop_reply", [b"id"]) and parent["content"]
    view.end()
    view.close()


def test_two_runs_share_the_handler_and_the_last_takes_it_away() -> None:
    kernel, a, b = FakeKernel(), threading.Event(), threading.Event()
    undo_a, undo_b = accept_stop(kernel, "a", a.set), accept_stop(kernel, "b", b.set)
    without_a_run: list[Any] = [None, {}, {"run": 7}, {"run": ["x"]}, "text"]
    for content in without_a_run:
        assert kernel.receive(content)["status"] == "error", "it names no run"
    undo_a()
    undo_a()
    kernel.receive({"run": "b"})
    assert b.is_set() and not a.is_set()
    undo_b()
    assert STOP_MESSAGE not in kernel.control_handlers


def test_a_kernel_without_control_handlers_is_left_alone() -> None:
    accept_stop(object(), "a", lambda: None)()


def test_stop_over_the_comm_is_heard_until_the_end(stage: FakeHandle) -> None:
    feed = ScriptedFeed()
    view, widget = begun(feed, FakeKernel())
    (callback,) = widget.callbacks
    callback(widget, {"kind": "hello"}, [])
    assert not feed.stop_requested.is_set()
    callback(widget, {"kind": "stop"}, [])
    assert feed.stop_requested.is_set()
    view.end()
    feed.stop_requested.clear()
    callback(widget, {"kind": "stop"}, [])
    assert not feed.stop_requested.is_set(), "late clicks stop nothing"
    view.close()


def test_asking_for_a_live_view_in_a_script_imports_no_ipython() -> None:
    code = "import sys; from gpulab.views import live_view; assert live_view.Stage.open(live=True).monitor is None"
    code += "; assert live_view.why_no_live_view() == 'no Jupyter kernel runs this code'; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert {"IPython", "ipywidgets", "anywidget", "torch"}.isdisjoint(done.stdout.split())


def test_the_real_widget_is_a_pipe_with_our_module() -> None:
    pytest.importorskip("anywidget")
    import ipywidgets

    before = set(ipywidgets.widgets.widget._instances)
    widget: Any = live_view._widget_class()(run_key="k")
    assert widget._esm == static("live.js")
    assert {"run_key", "_esm"} <= set(widget.get_state())
    widget.layout.close()
    widget.close()
    assert set(ipywidgets.widgets.widget._instances) == before


def test_the_modules_load_nothing() -> None:
    """VS Code and Colab take a module's text alone, and no network has to be there."""
    modules = {
        path.name: path.read_text(encoding="utf-8") for path in (PACKAGE_FOLDER / "views" / "static").glob("*.js")
    }
    assert {"bench.js", "live.js", "stop_button.js"} <= modules.keys()
    assert {name for name, text in modules.items() if LOADS.search(text)} == set()


@pytest.mark.skipif(shutil.which("node") is None, reason="needs Node")
def test_front_end() -> None:
    tests = sorted(str(path) for path in (FRONT_END / "test").glob("*.test.js"))
    done = subprocess.run(["node", "--test", *tests], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(shutil.which("node") is None, reason="needs Node")
@pytest.mark.skipif(not (FRONT_END / "node_modules" / "esbuild").exists(), reason="needs esbuild: npm ci in frontend")
def test_the_committed_module_is_what_its_source_builds() -> None:
    done = subprocess.run(["node", "build.mjs", "--check"], cwd=FRONT_END, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
