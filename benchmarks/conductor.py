"""The conductor of `gpu_first` and `record_gpu`: job after job, each in a process that is ended at its limit.

A GPU is lent for minutes: a job that hangs or crashes costs only itself. Its answers until then are stored, and no
process that it started survives it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct, field

ROOT = Path(__file__).parents[1]
# module → the distribution that brings it
NEEDED = {
    "torch": "torch",
    "numpy": "numpy",
    "msgspec": "msgspec",
    "psutil": "psutil",
    "pynvml": "nvidia-ml-py",
    "matplotlib": "matplotlib",
    "pytest": "pytest",
}


class Job(Struct, frozen=True):
    """One process: what follows the interpreter, and what its environment has besides. `folder`: None: a new one."""

    name: str
    words: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    folder: Path | None = None


class Ended(Struct, frozen=True):
    """How a process ended: its exit code (None: at its limit), what it printed, and its time since its `go`."""

    code: int | None
    printed: str
    seconds: float

    @property
    def reason(self) -> str:
        """Why it did not end well, with the last line that it printed; empty where it did."""
        return "" if self.code == 0 else f"{self._how}{self.last_line}"

    @property
    def last_line(self) -> str:
        """Of what it printed."""
        lines = [line.strip() for line in self.printed.splitlines() if line.strip()]
        return lines[-1][:500] if lines else "it printed nothing"

    @property
    def _how(self) -> str:
        if self.code is None:
            return "ended at its limit; "
        return f"ended by signal {-self.code}; " if self.code < 0 else ""


class Process:
    """The process of one job. It may get ready at once, and waits for a line on its standard input where it wants."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.seconds = 0.0
        self._scratch = tempfile.TemporaryDirectory(prefix="gpulab-job-", ignore_cleanup_errors=True)
        self._output = Path(self._scratch.name, "output.txt")
        work = Path(self._scratch.name, "work")
        work.mkdir()
        with self._output.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, *job.words], stdin=subprocess.PIPE, stdout=output, stderr=subprocess.STDOUT,
                cwd=job.folder or work, env=self._environment(job.environment), start_new_session=True,
            )  # fmt: skip
        self._began = time.monotonic()

    def _environment(self, more: Mapping[str, str]) -> dict[str, str]:
        own = {
            "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
            "GPULAB_DIR": str(Path(self._scratch.name, "runs")),
            "PYTHONUNBUFFERED": "1",
            "PYTHONFAULTHANDLER": "1",
        }
        return {**os.environ, **own, **more}

    def go(self) -> None:
        """The job begins now, and its time runs."""
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
        """What it has said."""
        return self._output.read_text(encoding="utf-8", errors="replace")

    def end(self) -> None:
        """It and its files are not wanted any more."""
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


def conduct(
    jobs: Sequence[Job],
    *,
    limit_of: Callable[[Job], float | None],
    ended: Callable[[Job, Ended], None],
    skipped: Callable[[Job], None],
    ahead: bool = False,
    meanwhile: Callable[[], None] = lambda: None,
) -> None:
    """Play all jobs. `limit_of`: None where too little time is left. `ahead`: the next gets ready while one is played.

    Never raises for a job. `meanwhile` is called once while each one runs.
    """
    present: Process | None = None
    following: Process | None = None
    try:
        for number, job in enumerate(jobs):
            limit_s = limit_of(job)
            if limit_s is None:
                if following is not None:
                    following.end()
                    following = None
                skipped(job)
                continue
            print(f"{job.name} … (at most {limit_s:.0f} s)", flush=True)
            present, following = following or Process(job), None
            present.go()
            if ahead and number + 1 < len(jobs):
                following = Process(jobs[number + 1])
            meanwhile()
            code = present.wait(limit_s)
            ended(job, Ended(code, present.printed(), present.seconds))
            present.end()
    finally:
        for process in (present, following):
            if process is not None:
                process.end()


# -- what the parts write ----------------------------------------------------------------------------------------------


def append_to_log(file: Path, name: str, printed: str, limit: int) -> None:
    """What a job has printed, the middle left out where it is too long."""
    if len(printed) > limit:
        half = limit // 2
        printed = f"{printed[:half]}\n[… {len(printed) - 2 * half} characters left out …]\n{printed[-half:]}"
    with file.open("a", encoding="utf-8") as target:
        target.write(f"===== {name}\n{printed}\n")


def write_json(file: Path, value: Mapping[str, Any]) -> None:
    """Replace the file in one step: a reader sees the old text or the new one, never half of either."""
    new = file.with_name(f".{file.name}.new")
    new.write_text(json.dumps(plain(value), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    os.replace(new, file)


def plain(value: object) -> Any:
    """The value as JSON has it: numbers that are none become null, other objects become text."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    if value is None or isinstance(value, bool | int | str):
        return value
    item = getattr(value, "item", None)  # NumPy's scalars
    number = item() if callable(item) else value
    if isinstance(number, float):
        return number if math.isfinite(number) else None
    return number if isinstance(number, bool | int) else str(value)


def row_of(cells: Iterable[str]) -> str:
    """A line of a table in Markdown."""
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


def reason_of(error: BaseException) -> str:
    """An error in one line."""
    return f"{type(error).__name__}: {error}".splitlines()[0][:300]


def what_is_missing(modules: Iterable[str] = NEEDED) -> str:
    """One sentence with all packages that are missing and the command that brings them; empty where none is."""
    absent = [NEEDED[module] for module in modules if importlib.util.find_spec(module) is None]
    if not absent:
        return ""
    count = f"{len(absent)} package{'s are' if len(absent) > 1 else ' is'} missing"
    return f"{count}: {', '.join(absent)}. Install with: python -m pip install {' '.join(absent)}"
