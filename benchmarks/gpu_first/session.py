"""One call: all parts within the budget, and what each one says, on disk after every part."""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, TypedDict

from msgspec import Struct, field

from benchmarks.conductor import ROOT, Ended, Job, append_to_log, conduct, write_json
from benchmarks.gpu_first.answer import Check, Contents

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


def play_all(parts: Sequence[Part], folder: Folder, *, simulate: bool, budget_s: float) -> dict[str, Any]:
    """The results. Never raises for a part. One is not started where less time is left than it needs at least."""
    folder.path.mkdir(parents=True, exist_ok=True)
    folder.log.write_text("", encoding="utf-8")
    began = time.monotonic()
    last = began + budget_s - END_S
    kept: dict[str, Any] = {"began": f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}", "budget_s": budget_s, "parts": {}}
    ends = {part.name: began + sum(p.limit_s for p in parts[: i + 1]) for i, part in enumerate(parts)}
    of = {part.name: part for part in parts}
    limits: dict[str, float] = {}

    def limit_of(job: Job) -> float | None:
        limits[job.name] = limit_s = min(ends[job.name], last) - time.monotonic()
        return limit_s if limit_s >= of[job.name].least_s else None

    def keep(job: Job, state: State, seconds: float, detail: str, contents: Contents | None) -> None:
        print(f"  {job.name}: {state} after {seconds:.0f} s", flush=True)
        kept["parts"][job.name] = _result(state, seconds, limits[job.name], detail, contents)
        kept["seconds"] = time.monotonic() - began
        write_json(folder.results, kept)

    def ended(job: Job, how: Ended) -> None:
        append_to_log(folder.log, job.name, how.printed, LOG_BYTES_PER_PART)
        state: State = "timed out" if how.code is None else "crashed" if how.code else "complete"
        keep(job, state, how.seconds, how.reason, _contents(Path(job.words[4])))

    def skipped(job: Job) -> None:
        why = f"{max(0.0, limits[job.name]):.0f} s were left and it needs {of[job.name].least_s:.0f} s"
        keep(job, "skipped", 0.0, why, None)

    with tempfile.TemporaryDirectory(prefix="gpu-first-") as answers:
        jobs = [_job(part, folder, Path(answers, f"{i}.json"), simulate=simulate) for i, part in enumerate(parts)]
        conduct(jobs, limit_of=limit_of, ended=ended, skipped=skipped)
    return kept


def _job(part: Part, folder: Folder, answer: Path, *, simulate: bool) -> Job:
    arguments = part.arguments | ({"folder": str(folder.traces.absolute())} if part.writes_traces else {})
    words = ["-m", "benchmarks.gpu_first.part", part.module, json.dumps(arguments), str(answer)]
    return Job(part.name, [*words, "--simulate"] if simulate else words, part.environment, ROOT)


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


def clear(folder: Folder) -> None:
    """Take away what an earlier call has written: its results must not be taken for new ones."""
    for file in (folder.results, folder.log, folder.table):
        file.unlink(missing_ok=True)
    if folder.traces.is_dir():
        shutil.rmtree(folder.traces)
