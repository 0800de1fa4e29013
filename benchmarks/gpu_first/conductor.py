"""Plays the parts one after the other, each in a process that is ended at its limit, and keeps what each one says."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, TypedDict

from msgspec import Struct, field

from benchmarks.gpu_first.answer import Check, Contents, write_json

ROOT = Path(__file__).parents[2]
LOG_BYTES_PER_PART = 400_000
END_S = 5.0  # for the table, after the last part

State = Literal["complete", "crashed", "timed out", "skipped"]


class Part(Struct, frozen=True):
    """One question. `limit_s` is its share of the time; what earlier parts leave over is added to it."""

    name: str
    module: str
    limit_s: float
    least_s: float = 10.0  # it is not started with less
    arguments: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    writes_traces: bool = False  # its module is given the folder for them


class Result(TypedDict):
    """What became of a part."""

    state: State
    seconds: float
    limit_s: float
    detail: str
    simulated: bool | None
    figures: dict[str, Any]
    checks: list[Check]


class Folder(Struct, frozen=True):
    """What is brought back: at most eight files, at most two folders deep."""

    path: Path

    @property
    def results(self) -> Path:
        """Everything that was measured."""
        return self.path / "results.json"

    @property
    def log(self) -> Path:
        """What the parts have printed."""
        return self.path / "log.txt"

    @property
    def table(self) -> Path:
        """For people."""
        return self.path / "table.md"

    @property
    def traces(self) -> Path:
        """Two small traces."""
        return self.path / "traces"


def conduct(parts: Sequence[Part], folder: Folder, *, simulate: bool, budget_s: float) -> dict[str, Any]:
    """Play all parts within the budget; the results, which are on disk after every part. Never raises for a part."""
    folder.path.mkdir(parents=True, exist_ok=True)
    folder.log.write_text("", encoding="utf-8")
    began = time.monotonic()
    last = began + budget_s - END_S
    kept: dict[str, Any] = {"began": f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}", "budget_s": budget_s, "parts": {}}
    shares = [sum(part.limit_s for part in parts[: i + 1]) for i in range(len(parts))]
    for part, share in zip(parts, shares, strict=True):
        limit_s = min(began + share, last) - time.monotonic()
        print(f"{part.name} … (at most {max(0, limit_s):.0f} s)", flush=True)
        result = play(part, folder, limit_s, simulate=simulate)
        print(f"  {result['state']} after {result['seconds']:.0f} s", flush=True)
        kept["parts"][part.name] = result
        kept["seconds"] = time.monotonic() - began
        write_json(folder.results, kept)
    return kept


def play(part: Part, folder: Folder, limit_s: float, *, simulate: bool) -> Result:
    """Play one part. It is not started where less time is left than it needs at least."""
    if limit_s < part.least_s:
        why = f"{max(0.0, limit_s):.0f} s were left and it needs {part.least_s:.0f} s"
        return _result("skipped", 0.0, limit_s, why, None)
    with tempfile.TemporaryDirectory(prefix="gpu-first-") as temporary:
        file = Path(temporary, "answer.json")
        began = time.monotonic()
        code, printed = _process(_command(part, folder, file, simulate=simulate), part.environment, limit_s, temporary)
        seconds = time.monotonic() - began
        _log(folder.log, part.name, printed)
        state: State = "timed out" if code is None else "crashed" if code else "complete"
        return _result(state, seconds, limit_s, _reason(code, printed), _contents(file))


def _command(part: Part, folder: Folder, answer: Path, *, simulate: bool) -> list[str]:
    arguments = part.arguments | ({"folder": str(folder.traces.absolute())} if part.writes_traces else {})
    command = [sys.executable, "-m", "benchmarks.gpu_first.part", part.module, json.dumps(arguments), str(answer)]
    return [*command, "--simulate"] if simulate else command


def _process(command: list[str], environment: dict[str, str], limit_s: float, scratch: str) -> tuple[int | None, str]:
    """Exit code (None: killed at the limit) and what it printed. Its children end with it."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    own = {
        "PYTHONPATH": path,
        "GPULAB_DIR": str(Path(scratch, "runs")),
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
    }
    own |= environment
    output = Path(scratch, "output.txt")
    with output.open("wb") as target:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=target, stderr=subprocess.STDOUT, env=os.environ | own, cwd=ROOT,
            start_new_session=True,
        )  # fmt: skip
        try:
            code: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end(process)
    return code, output.read_text(encoding="utf-8", errors="replace")


def _end(process: subprocess.Popen[bytes]) -> None:
    """The process and all that it started in its session; it may have left some behind although it has ended."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _log(file: Path, name: str, printed: str) -> None:
    if len(printed) > LOG_BYTES_PER_PART:
        half = LOG_BYTES_PER_PART // 2
        printed = f"{printed[:half]}\n[… {len(printed) - 2 * half} characters left out …]\n{printed[-half:]}"
    with file.open("a", encoding="utf-8") as target:
        target.write(f"===== {name}\n{printed}\n")


def _contents(file: Path) -> Contents | None:
    """What the part has said; None where it did not come to say anything."""
    try:
        contents: Contents = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return contents


def _result(state: State, seconds: float, limit_s: float, detail: str, contents: Contents | None) -> Result:
    return {
        "state": state,
        "seconds": seconds,
        "limit_s": max(0.0, limit_s),
        "detail": detail,
        "simulated": contents["simulated"] if contents is not None else None,
        "figures": contents["figures"] if contents is not None else {},
        "checks": contents["checks"] if contents is not None else [],
    }


def _reason(code: int | None, printed: str) -> str:
    """Why a part did not end well, with the last line that it printed; empty where it did."""
    if code == 0:
        return ""
    lines = [line.strip() for line in printed.splitlines() if line.strip()]
    last = lines[-1][:500] if lines else "it printed nothing"
    how = "ended at its limit; " if code is None else f"ended by signal {-code}; " if code < 0 else ""
    return f"{how}{last}"


def clear(folder: Folder) -> None:
    """Take away what an earlier call has written: its results must not be taken for new ones."""
    for file in (folder.results, folder.log, folder.table):
        file.unlink(missing_ok=True)
    if folder.traces.is_dir():
        shutil.rmtree(folder.traces)


def unknown(names: Iterable[str], parts: Sequence[Part]) -> list[str]:
    """Names that no part has."""
    return sorted(set(names) - {part.name for part in parts})
