"""Makes the recordings one after the other, each in a process of its own that is ended at its limit.

While one is made, the one before is judged and packed, and where cores are free the process of the next imports what it
needs and waits. So the GPU waits for little else than the cells, and a call that is killed loses only the recording
that it is at.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, TypedDict

from benchmarks.gpu_first.answer import write_json
from benchmarks.record_gpu.catalogue import Recording
from benchmarks.record_gpu.judging import judged, totals
from benchmarks.record_gpu.outlet import SIMULATED, Outlet, document_of, size_of
from benchmarks.record_gpu.packing import Packer
from benchmarks.record_gpu.table import table
from gpulab.devices.machine import usable_cores

ROOT = Path(__file__).parents[2]
RECORDER = ("-m", "benchmarks.record_gpu.recorder")
BUDGET_S = 570.0
END_S = 8.0  # for the last judgement, the packing and the tables
LEAST_S = 12.0  # no recording is begun with less
PACK_EVERY = 6
LOG_BYTES = 100_000  # of one recording
CORES_TO_SPARE = 8.0  # with fewer, a process that gets ready takes time from the cell that is recorded

State = Literal["recorded", "there already", "failed", "timed out", "no time left", "not possible"]


class Result(TypedDict, total=False):
    """What became of one recording, and what the rules say of it."""

    state: State
    seconds: float
    detail: str


class Session:
    """One call: its results, on disk after every recording."""

    def __init__(self, outlet: Outlet, machine: str, *, budget_s: float, least_s: float = LEAST_S) -> None:
        self._outlet = outlet
        self._machine = machine
        self._began = time.monotonic()
        self._last = self._began + budget_s - END_S
        self._least_s = least_s
        self._packer = Packer(outlet.brief)
        self._spare = usable_cores() >= CORES_TO_SPARE
        self.results: dict[str, Any] = {
            "began": f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}",
            "machine": machine,
            "simulated": machine == SIMULATED,
            "budget_s": budget_s,
            "recordings": {},
        }

    def conduct(self, recordings: Sequence[Recording]) -> dict[str, Any]:
        """Make what is missing; the results. Never raises for a recording."""
        self._outlet.path.mkdir(parents=True, exist_ok=True)
        self._outlet.brief.mkdir(parents=True, exist_ok=True)
        self._outlet.log.write_text("", encoding="utf-8")
        self._outlet.sweep()
        wanted = deque(recording for recording in recordings if self._is_wanted(recording))
        try:
            self._make(wanted)
        finally:
            self._finish()
        return self.results

    def _is_wanted(self, recording: Recording) -> bool:
        if self._outlet.whole(recording, self._machine):
            self._keep(recording, "there already", 0.0)
            self._judge(recording)
            return False
        missing = [name for name in recording.needs if find_spec(name) is None]
        if missing:
            self._keep(recording, "not possible", 0.0, f"it needs {', '.join(missing)}, which is not installed here")
        return not missing

    def _make(self, wanted: deque[Recording]) -> None:
        following = self._started(wanted)
        present: Process | None = None
        before: Recording | None = None
        try:
            while following is not None:
                present, following = following, None
                limit_s = min(present.recording.limit_s, self._last - time.monotonic())
                if limit_s < self._least_s:
                    self._stop_short([present.recording, *wanted])
                    break
                print(f"{present.recording.name} … (at most {limit_s:.0f} s)", flush=True)
                present.go()
                following = self._started(wanted) if self._spare else None
                if self._spare:
                    self._look_back(before)
                self._settle(present, present.wait(limit_s))
                before = present.recording
                if not self._spare:
                    self._look_back(before)
                    following = self._started(wanted)
        finally:
            for process in (present, following):
                if process is not None:
                    process.end()
        if self._spare:
            self._look_back(before)

    def _stop_short(self, recordings: Sequence[Recording]) -> None:
        for recording in recordings:
            self._keep(recording, "no time left", 0.0, "call the command again: it goes on from here")

    def _started(self, wanted: deque[Recording]) -> Process | None:
        return Process(wanted.popleft(), self._outlet, self._machine) if wanted else None

    def _settle(self, process: Process, code: int | None) -> None:
        """Keep what became of a recording."""
        recording, printed = process.recording, process.printed()
        self._log(recording.name, printed)
        if code == 0 and self._outlet.whole(recording, self._machine):
            state: State = "recorded"
        else:
            state = "timed out" if code is None else "failed"
        self._keep(recording, state, process.seconds, "" if state == "recorded" else _reason(code, printed))
        size = f", {size_of(self._outlet.folder(self._machine, recording.name)):,} bytes" if state == "recorded" else ""
        print(f"  {state} after {process.seconds:.0f} s{size}", flush=True)

    def _look_back(self, before: Recording | None) -> None:
        """Judge the recording before, while the next one is made; pack now and then."""
        rows = self.results["recordings"]
        if before is None or rows[before.name]["state"] != "recorded":
            return
        self._judge(before)
        if sum(row["state"] == "recorded" for row in rows.values()) % PACK_EVERY == 0:
            self._packer.pack(self._outlet.folders())

    def _judge(self, recording: Recording) -> None:
        row = self.results["recordings"][recording.name]
        row |= judged(self._outlet.folder(self._machine, recording.name), recording)
        write_json(self._outlet.results, self.results)

    def _keep(self, recording: Recording, state: State, seconds: float, detail: str = "") -> None:
        row: Result = {"state": state, "seconds": round(seconds, 1), "detail": detail}
        self.results["recordings"][recording.name] = {**row, "lesson": recording.lesson, "because": recording.because}
        self.results["seconds"] = round(time.monotonic() - self._began, 1)
        write_json(self._outlet.results, self.results)

    def _finish(self) -> None:
        folders = list(self._outlet.folders())
        rows = self.results["recordings"]
        self.results["totals"] = totals(rows)
        self.results["bytes"] = sum(size_of(folder) for folder in folders)
        documents = (document_of(folder) for folder in folders if folder.parent.name == self._machine)
        self.results["made_with"] = next(({"device": d["device"], **d["versions"]} for d in documents if d), {})
        self.results["packed"] = [file.name for file in self._packer.pack(folders)]
        self.results["seconds"] = round(time.monotonic() - self._began, 1)
        write_json(self._outlet.results, self.results)
        self._outlet.table.write_text(table(self.results), encoding="utf-8")

    def _log(self, name: str, printed: str) -> None:
        if len(printed) > LOG_BYTES:
            left_out = len(printed) - LOG_BYTES
            printed = f"{printed[: LOG_BYTES // 2]}\n[… {left_out} characters left out …]\n{printed[-LOG_BYTES // 2 :]}"
        with self._outlet.log.open("a", encoding="utf-8") as file:
            file.write(f"===== {name}\n{printed}\n")


class Process:
    """The process of one recording; it waits to be told to go."""

    def __init__(self, recording: Recording, outlet: Outlet, machine: str) -> None:
        self.recording = recording
        self.seconds = 0.0
        self._scratch = tempfile.TemporaryDirectory(prefix="record-gpu-", ignore_cleanup_errors=True)
        self._output = Path(self._scratch.name, "output.txt")
        work = Path(self._scratch.name, "work")
        work.mkdir()
        with self._output.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, *RECORDER, recording.name, str(outlet.path.absolute()), machine],
                stdin=subprocess.PIPE, stdout=output, stderr=subprocess.STDOUT, cwd=work,
                env=_environment(self._scratch.name, simulate=machine == SIMULATED), start_new_session=True,
            )  # fmt: skip
        self._began = time.monotonic()

    def go(self) -> None:
        """The recording begins now, and its time runs."""
        self._began = time.monotonic()
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # it has died while it got ready: `wait` says so
            self._process.stdin.write(b"go\n")
            self._process.stdin.close()

    def wait(self, limit_s: float) -> int | None:
        """Its exit code; None: it was ended at the limit."""
        try:
            return self._process.wait(max(0.0, self._began + limit_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            return None
        finally:
            self.seconds = time.monotonic() - self._began
            self._kill()

    def printed(self) -> str:
        """What it has said; its files are gone afterwards."""
        text = self._output.read_text(encoding="utf-8", errors="replace")
        self._scratch.cleanup()
        return text

    def end(self) -> None:
        """It is not wanted any more."""
        self._kill()
        self._scratch.cleanup()

    def _kill(self) -> None:
        """The process and all that it has started in its session; it may have left some behind."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()


def _environment(scratch: str, *, simulate: bool) -> dict[str, str]:
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    own = {
        "PYTHONPATH": path,
        "GPULAB_DIR": str(Path(scratch, "runs")),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
    }
    return os.environ | own | ({"CUDA_VISIBLE_DEVICES": ""} if simulate else {})


def _reason(code: int | None, printed: str) -> str:
    """Why there is no recording, with the last line that was printed."""
    lines = [line.strip() for line in printed.splitlines() if line.strip()]
    last = lines[-1][:500] if lines else "it printed nothing"
    if code == 0:
        return f"it ended without a recording; {last}"
    how = "ended at its limit; " if code is None else f"ended by signal {-code}; " if code < 0 else ""
    return f"{how}{last}"
