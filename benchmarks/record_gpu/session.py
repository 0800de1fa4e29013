"""Makes the recordings one after the other, each in a process of its own that is ended at its limit.

While one is made, the one before is judged and packed, and where cores are free the process of the next imports what it
needs and waits. So the GPU waits for little else than the cells, and a call that is killed loses only the recording
that it is at.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.util import find_spec
from typing import Any, Literal, TypedDict

from benchmarks.conductor import Ended, Job, append_to_log, conduct, write_json
from benchmarks.record_gpu.catalogue import Recording
from benchmarks.record_gpu.judging import judgement, totals
from benchmarks.record_gpu.outlet import SIMULATED, Outlet, document_of, size_of
from benchmarks.record_gpu.packing import Packer
from benchmarks.record_gpu.table import table
from gpulab.devices.machine import usable_cores

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
        wanted = [recording for recording in recordings if self._is_due(recording)]
        try:
            self._make(wanted)
        finally:
            self._finish()
        return self.results

    def _is_due(self, recording: Recording) -> bool:
        if self._outlet.whole(recording, self._machine):
            self._keep(recording, "there already", 0.0)
            self._judge(recording)
            return False
        missing = [name for name in recording.needs if find_spec(name) is None]
        if missing:
            self._keep(recording, "not possible", 0.0, f"it needs {', '.join(missing)}, which is not installed here")
        return not missing

    def _make(self, wanted: Sequence[Recording]) -> None:
        of = {recording.name: recording for recording in wanted}
        before: list[Recording] = []  # at most one, which is not judged yet

        def limit_of(job: Job) -> float | None:
            limit_s = min(of[job.name].limit_s, self._last - time.monotonic())
            return limit_s if limit_s >= self._least_s else None

        def review() -> None:
            while before:
                self._review(before.pop())

        def ended(job: Job, how: Ended) -> None:
            self._settle(of[job.name], how)
            before.append(of[job.name])
            if not self._spare:
                review()

        def skipped(job: Job) -> None:
            self._keep(of[job.name], "no time left", 0.0, "call the command again: it goes on from here")

        jobs = [self._job(recording) for recording in wanted]
        conduct(jobs, limit_of=limit_of, ended=ended, skipped=skipped, ahead=self._spare, meanwhile=review)
        review()

    def _job(self, recording: Recording) -> Job:
        words = [*RECORDER, recording.name, str(self._outlet.path.absolute()), self._machine]
        own = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        return Job(recording.name, words, own | ({"CUDA_VISIBLE_DEVICES": ""} if self._machine == SIMULATED else {}))

    def _settle(self, recording: Recording, how: Ended) -> None:
        """Keep what became of a recording."""
        append_to_log(self._outlet.log, recording.name, how.printed, LOG_BYTES)
        detail = how.reason or f"it ended without a recording; {how.last_line}"
        state: State = "timed out" if how.code is None else "failed"
        if how.code == 0 and self._outlet.whole(recording, self._machine):
            state, detail = "recorded", ""
        self._keep(recording, state, how.seconds, detail)
        size = f", {size_of(self._outlet.folder(self._machine, recording.name)):,} bytes" if state == "recorded" else ""
        print(f"  {state} after {how.seconds:.0f} s{size}", flush=True)

    def _review(self, before: Recording) -> None:
        """Judge the recording before, while the next one is made; pack now and then."""
        rows = self.results["recordings"]
        if rows[before.name]["state"] != "recorded":
            return
        self._judge(before)
        if sum(row["state"] == "recorded" for row in rows.values()) % PACK_EVERY == 0:
            self._packer.pack(self._outlet.folders())

    def _judge(self, recording: Recording) -> None:
        row = self.results["recordings"][recording.name]
        row |= judgement(self._outlet.folder(self._machine, recording.name), recording)
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
