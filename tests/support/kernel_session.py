"""A real Jupyter kernel for tests: run cells, collect what a notebook would show and save."""

from __future__ import annotations

import json
import os
import queue
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.manager import KernelManager
from msgspec import Struct, field

from tests.support import leftovers
from tests.support.fork_server import EXECUTABLE, KERNEL_MODULES, python_with_torch

WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
PATIENCE_S = 300.0  # for whatever must come; nothing is asserted about how soon

_ESCAPE = re.compile(r"\x1b\[[0-9;]*m")
_KERNEL_FILE = re.compile(r"ipykernel_\d+")
_KINETO_STAMP = re.compile(r"USDT:[^\]]*]")
_ADDRESS = re.compile(r"0x[0-9a-f]{6,}")

# What the kernel finds of ours in its process and in its shell. The user's namespace stays as it was.
_LEFT_BEHIND = """
def _gpulab_test_left_behind(source):
    import json
    scope = {"__name__": "leftovers"}
    exec(source, scope)
    shell = get_ipython()
    found = [f"exception hook for {e}" for e in shell.custom_exceptions]
    callbacks = shell.events.callbacks["post_execute"]
    found += [f"callback {c.__qualname__}" for c in callbacks if "gpulab" in c.__module__]
    found += ["control handler"] if "gpulab_stop" in shell.kernel.control_handlers else []
    print(json.dumps({"process": scope["leftovers"](), "shell": found}))
_gpulab_test_left_behind(%r)
del _gpulab_test_left_behind
""" % Path(leftovers.__file__).read_text(encoding="utf-8")  # noqa: UP031


class Answer(Struct):
    """What one cell did: `outputs` as the saved notebook would hold them, display updates applied."""

    outputs: list[dict[str, Any]] = field(default_factory=list)
    reply: dict[str, Any] = field(default_factory=dict)
    updated: list[str] = field(default_factory=list)  # display ids that were updated
    buttons: list[dict[str, Any]] = field(default_factory=list)
    shown_first: dict[str, dict[str, Any]] = field(default_factory=dict)  # display id → data before any update

    @property
    def status(self) -> str:
        return str(self.reply.get("status"))

    def stream(self, name: str) -> str:
        return "".join(o["text"] for o in self.outputs if o["output_type"] == "stream" and o["name"] == name)

    @property
    def stdout(self) -> str:
        return self.stream("stdout")

    @property
    def stderr(self) -> str:
        return self.stream("stderr")

    @property
    def error(self) -> tuple[str, str, str] | None:
        """Name, text and rendered traceback (no colour) of the exception a notebook shows."""
        for o in self.outputs:
            if o["output_type"] == "error":
                return o["ename"], o["evalue"], plain("\n".join(o["traceback"]))
        return None

    @property
    def result(self) -> dict[str, Any] | None:
        """The cell's value as displayed: its MIME bundle and prompt number."""
        for o in self.outputs:
            if o["output_type"] == "execute_result":
                return {"data": plain_data(o["data"]), "execution_count": o["execution_count"]}
        return None

    def displays(self) -> list[dict[str, Any]]:
        return [o["data"] for o in self.outputs if o["output_type"] == "display_data"]

    def report(self) -> tuple[dict[str, Any], str]:
        """The output of the report, and its HTML. Asserts that there is one."""
        displays = self.displays()
        reports = [i for i, d in enumerate(displays) if d.get("text/plain", "").startswith("gpulab · ")]
        assert len(reports) == 1, f"not one report: {[sorted(d) for d in displays]}\n{self.stderr}{self.error}"
        shown = displays[reports[0]]
        assert "<table" in shown["text/html"], sorted(shown)
        return shown, shown["text/html"]

    def theirs(self) -> list[dict[str, Any]]:
        """The outputs of the user's own cell: ours taken out, neighbouring streams joined."""
        left: list[dict[str, Any]] = []
        for o in self.outputs:
            if o["output_type"] == "display_data" and is_ours(o["data"]):
                continue
            if o["output_type"] == "error":
                o = {**o, "evalue": plain(o["evalue"]), "traceback": plain("\n".join(o["traceback"]))}
            if o["output_type"] in ("display_data", "execute_result"):
                o = {**o, "data": plain_data(o["data"])}
            if o["output_type"] == "stream":
                o = {**o, "text": plain(o["text"])}
            if left and o["output_type"] == "stream" and left[-1].get("name") == o["name"]:
                left[-1] = {**left[-1], "text": left[-1]["text"] + o["text"]}
            else:
                left.append(o)
        return left


def is_ours(data: dict[str, Any]) -> bool:
    """Whether a display is the live view, the picture or the tables of a report."""
    text = data.get("text/plain", "")
    html = data.get("text/html", "")
    tables = text == "" and "<table" in html
    place = data == {"text/plain": "", "text/html": ""} or "gpulab-live-note" in html  # of the live view
    return WIDGET_VIEW in data or text.startswith(("gpulab ·", "gpulab: the code raised before")) or tables or place


def is_button(data: dict[str, Any]) -> bool:
    """Whether a display is the button that opens the knobs, or the room under it: shown beside every live run."""
    return data == {"text/plain": ""} or str(data.get("text/plain", "")).endswith("%gpulab panel")


def plain(text: str) -> str:
    """Without colour, and without what differs between any two kernels."""
    for pattern, instead in ((_ESCAPE, ""), (_KERNEL_FILE, "ipykernel_…"), (_KINETO_STAMP, "USDT"), (_ADDRESS, "0x…")):
        text = pattern.sub(instead, text)
    return text


def plain_data(data: dict[str, Any]) -> dict[str, Any]:
    return {k: plain(v) if isinstance(v, str) else v for k, v in data.items()}


class KernelSession:
    """One kernel, one client. It has torch imported, unless it is to be `bare`."""

    def __init__(
        self, folder: Path, *, kernel_name: str = "python3", env: dict[str, str] | None = None, bare: bool = False
    ) -> None:
        self.manager = KernelManager(kernel_name=kernel_name)
        self.folder = folder
        environment = {**os.environ, "GPULAB_DIR": str(folder / "store"), "PYTHONWARNINGS": "default", **(env or {})}
        environment.pop("PYTEST_CURRENT_TEST", None)
        spec = self.manager.kernel_spec
        assert spec is not None
        if not bare:
            spec.argv[0] = python_with_torch(KERNEL_MODULES, **{"PYTHONWARNINGS": "default", **spec.env})
            environment.setdefault(EXECUTABLE, python_with_torch())
        self.manager.start_kernel(cwd=str(folder), env=environment)
        client = self.manager.client()
        assert isinstance(client, BlockingKernelClient)
        self.client = client
        self.client.start_channels()
        self.client.wait_for_ready(timeout=PATIENCE_S)
        self.comms: dict[str, dict[str, Any]] = {}

    def close(self) -> None:
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)

    def run(self, code: str, timeout_s: float = PATIENCE_S) -> Answer:
        """Run one cell to its end."""
        return self.finish(self.begin(code), timeout_s)

    def begin(self, code: str) -> Running:
        return Running(self.client.execute(code), Answer())

    def finish(self, running: Running, timeout_s: float = PATIENCE_S) -> Answer:
        """Collect until the kernel is idle again."""
        self._collect(running, timeout_s, lambda _: False)
        deadline = time.monotonic() + timeout_s
        while True:
            reply = self.client.get_shell_msg(timeout=max(0.1, deadline - time.monotonic()))
            if reply["parent_header"].get("msg_id") == running.message_id:
                running.answer.reply = reply["content"]
                return running.answer

    def wait(self, running: Running, until: Callable[[Answer], bool], timeout_s: float = PATIENCE_S) -> None:
        """Collect until the outputs so far satisfy `until`. Raises AssertionError where the cell ends before."""
        assert self._collect(running, timeout_s, until), f"the cell ended too early: {running.answer}"

    def _collect(self, running: Running, timeout_s: float, until: Callable[[Answer], bool]) -> bool:
        deadline = time.monotonic() + timeout_s
        while not until(running.answer):
            try:
                message = self.client.get_iopub_msg(timeout=max(0.1, deadline - time.monotonic()))
            except queue.Empty:
                raise AssertionError(f"no end after {timeout_s:g} s: {running.answer}") from None
            kind, content = message["msg_type"], message["content"]
            if kind == "comm_open":
                self.comms[content["comm_id"]] = content["data"].get("state", {})
            if message["parent_header"].get("msg_id") != running.message_id:
                continue
            if kind == "status" and content["execution_state"] == "idle":
                return False
            _take(running.answer, kind, content)
        return True

    def interrupt(self) -> None:
        self.manager.interrupt_kernel()

    def run_key(self) -> str:
        """What a Stop button would send: the key of the newest live view."""
        return str([s["run_key"] for s in self.comms.values() if s.get("run_key")][-1])

    def control(self, kind: str, content: dict[str, Any]) -> dict[str, Any]:
        """Send a message on the control channel, as the browser does; return the reply's content."""
        message = self.client.session.msg(kind, content)
        self.client.control_channel.send(message)
        while True:
            reply = self.client.get_control_msg(timeout=PATIENCE_S)
            if reply["parent_header"].get("msg_id") == message["header"]["msg_id"]:
                return dict(reply["content"])

    def complete(self, code: str) -> list[str]:
        """What Tab offers at the end of `code`."""
        message_id = self.client.complete(code)
        while True:
            reply = self.client.get_shell_msg(timeout=PATIENCE_S)
            if reply["parent_header"].get("msg_id") == message_id:
                return list(reply["content"]["matches"])

    def left_behind(self) -> dict[str, list[str]]:
        """Everything of ours that is still in the kernel; empty where nothing is."""
        deadline = time.monotonic() + 60
        while True:
            answer = self._silent(_LEFT_BEHIND)
            assert answer.error is None, answer.error
            left = {k: v for k, v in json.loads(answer.stdout).items() if v}
            if not left or time.monotonic() > deadline:
                return left
            time.sleep(0.05)

    def names(self) -> set[str]:
        """The user's namespace, IPython's own numbered names apart."""
        answer = self._silent("print('\\n'.join(get_ipython().user_ns))")
        return {n for n in answer.stdout.split() if not re.fullmatch(r"_i?\d+|_i+|_+|_gpulab_test.*", n)}

    def value(self, expression: str) -> Any:
        """An expression's value, through JSON."""
        answer = self._silent(f"import json as _gpulab_test_json; print(_gpulab_test_json.dumps({expression}))")
        assert answer.error is None, answer.error
        return json.loads(answer.stdout)

    def _silent(self, code: str) -> Answer:
        """Run without a prompt number and without history, so that the session looks untouched.

        For a moment after an error a kernel turns down what it is asked.
        """
        until = time.monotonic() + 60
        while True:
            answer = self.finish(Running(self.client.execute(code, store_history=False), Answer()))
            if answer.status != "aborted" or time.monotonic() > until:
                return answer
            time.sleep(0.1)


class Running(Struct):
    """A cell that was sent."""

    message_id: str
    answer: Answer


def _take(answer: Answer, kind: str, content: dict[str, Any]) -> None:
    """Apply one message as a front end would. The button under a report is kept apart."""
    if kind in ("display_data", "update_display_data") and is_button(content["data"]):
        answer.buttons.append(content["data"])
        return
    last = answer.outputs[-1] if answer.outputs else {}
    if kind == "stream" and last.get("output_type") == "stream" and last["name"] == content["name"]:
        last["text"] += content["text"]  # the kernel may send one line in two messages
    elif kind == "stream":
        answer.outputs.append({"output_type": "stream", "name": content["name"], "text": content["text"]})
    elif kind == "error":
        answer.outputs.append({"output_type": "error", **content})
    elif kind == "execute_result":
        answer.outputs.append(
            {"output_type": kind, "data": content["data"], "execution_count": content["execution_count"]}
        )
    elif kind == "display_data":
        key = content.get("transient", {}).get("display_id")
        answer.outputs.append({"output_type": kind, "data": content["data"], "display_id": key})
        if key is not None:
            answer.shown_first[key] = content["data"]
    elif kind == "update_display_data":
        key = content["transient"]["display_id"]
        answer.updated.append(key)
        for output in answer.outputs:
            if output.get("display_id") == key:
                output["data"] = content["data"]
    elif kind == "clear_output":
        answer.outputs.clear()


@contextmanager
def kernel(folder: Path, **options: Any) -> Iterator[KernelSession]:
    """A kernel that is gone at the end of the block."""
    session = KernelSession(folder, **options)
    try:
        yield session
    finally:
        session.close()
