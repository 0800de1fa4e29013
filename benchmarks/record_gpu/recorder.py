"""The process of one recording: `python -m benchmarks.record_gpu.recorder NAME OUT MACHINE`.

It imports what every cell needs and waits for a line on its standard input, so that this takes place while the
recording before it is still made. Then it runs the cell under gpulab and puts the run into its folder in one step.
"""

from __future__ import annotations

import argparse
import json
import linecache
import multiprocessing
import os
import resource
import secrets
import shutil
import sys
import threading
import time
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from msgspec.structs import replace

from benchmarks.record_gpu.catalogue import Recording, every
from benchmarks.record_gpu.outlet import DOCUMENT, SIMULATED, Outlet
from benchmarks.record_gpu.trace_trimming import trim
from gpulab.capture.recorder import Capture
from gpulab.capture.threads import stop_behind
from gpulab.devices.machine import environment
from gpulab.live_feed import Feed
from gpulab.run import Outcome, Run, Settings
from gpulab.store import folders
from gpulab.tuning.code import Code
from gpulab.user_code import CELL_WITHOUT_IPYTHON

SECONDS = 2.5  # after the warm-up, so that the meters have something to say
LEAST_SHARE = 0.7  # of the steps that were asked for: both profiled windows lie before
TRACE_LIMIT_BYTES = 250_000
FEWEST_STEPS = 8
EARLIER = "earlier cells"  # as the report names their lines
_POLL_S = 0.05


class Timekeeper:
    """A monitor that ends the run once the profiled steps are over and it has gone on for long enough."""

    def __init__(self, seconds: float, least_steps: int) -> None:
        self._seconds = seconds
        self._least_steps = least_steps
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self, feed: Feed) -> None:
        """Watch from now on."""
        self._thread = threading.Thread(target=self._watch, args=(feed,), daemon=True)
        self._thread.start()

    def _watch(self, feed: Feed) -> None:
        began: float | None = None
        while not self._over.wait(_POLL_S):
            status = feed.drain().status
            if began is None and status.phase != "warm-up":
                began = time.monotonic()
            complete = status.phase == "after profiling" and status.step >= self._least_steps
            if began is not None and complete and time.monotonic() - began >= self._seconds:
                return feed.request_stop()

    def end(self) -> None:
        """Stop watching."""
        self._over.set()
        if self._thread is not None:
            self._thread.join()


def record(recording: Recording, outlet: Outlet, machine: str) -> Path:
    """Run the cell here and keep its run; the folder. Raises RuntimeError where the run is not worth keeping."""
    simulate = machine == SIMULATED
    earlier, cell = recording.cells(simulate=simulate)
    names = notebook(earlier)
    run, write_trace = profiled(recording, cell, names, simulate=simulate)
    _require_content(run, recording, simulate=simulate)
    run = replace(run, environment=replace(run.environment, hostname=machine), device=replace(run.device, uuid=None))
    stage = outlet.path / f".making-{recording.name}-{secrets.token_hex(3)}"

    def write_trimmed(path: Path) -> None:
        whole = stage / "whole.json.gz"
        write_trace(whole)
        size = trim(whole, path)
        whole.unlink()
        if size > TRACE_LIMIT_BYTES:
            path.unlink()
            raise RuntimeError(f"one step takes {size:,} bytes, more than the {TRACE_LIMIT_BYTES:,} of a recording")

    try:
        folder = folders.Store(stage).save(run, None if write_trace is None else write_trimmed)
        return _settled(folder, recording, outlet, machine)
    finally:
        shutil.rmtree(stage, ignore_errors=True)


def notebook(earlier: str) -> dict[str, Any]:
    """The names that the earlier cells leave behind. They are a module's, because the compiler asks for one."""
    module = ModuleType("__recorded__")
    module.__file__ = EARLIER
    sys.modules[module.__name__] = module
    linecache.cache[EARLIER] = (len(earlier), None, earlier.splitlines(keepends=True), EARLIER)
    exec(compile(earlier, EARLIER, "exec"), vars(module))
    return vars(module)


def profiled(recording: Recording, cell: str, names: dict[str, Any], *, simulate: bool) -> tuple[Run, Any]:
    """The run of the cell under gpulab, and what writes its trace. Raises what the cell raises."""
    settings = Settings(recording.name, steps=recording.steps, trace_steps=recording.traced)
    # a function, because gpulab knows what calls it as its own: no line of this file is taken for the user's
    code = Code.of_function(FunctionType(compile(cell, CELL_WITHOUT_IPYTHON, "exec"), names))
    timekeeper = Timekeeper(0.0 if simulate else SECONDS, round(LEAST_SHARE * recording.steps))
    capture = Capture(settings, "cell", cell, timekeeper)
    capture.start()
    outcome: Outcome = "completed"
    try:
        try:
            code.run()
        except BaseException as error:
            if stop_behind(error) is None:
                capture.finish("failed", str(error))
                raise
            outcome = "stopped"
        return capture.finish(outcome)
    finally:
        capture.close()


def _require_content(run: Run, recording: Recording, *, simulate: bool) -> None:
    reasons = "; ".join(f"{missing.what}: {missing.reason}" for missing in run.missing)
    if len(run.steps) < FEWEST_STEPS:
        raise RuntimeError(f"only {len(run.steps)} steps were seen. {reasons}")
    if run.timeline is None or not run.traced_numbers:
        raise RuntimeError(f"no step was profiled. {reasons}")
    if not simulate and not run.timeline.has_device_events and recording.causes != ("wrong_device",):
        raise RuntimeError(f"nothing that the GPU did was recorded. {reasons}")


def _settled(folder: Path, recording: Recording, outlet: Outlet, machine: str) -> Path:
    """Put a saved run where it belongs, in one step, with what a run does not hold beside it."""
    run = folders.read(folder)
    earlier, cell = recording.cells(simulate=machine == SIMULATED)
    document = {
        "name": recording.name,
        "machine": machine,
        "device": run.device.name,
        "created": run.created,
        "simulated": machine == SIMULATED,
        "lesson": recording.lesson,
        "because": recording.because,
        "causes": recording.causes,
        "also": recording.also,
        "steps": len(run.steps),
        "traced_steps": len(run.traced_numbers),
        "python": run.environment.python,
        "cpu": run.environment.cpu,
        "usable_cores": run.environment.usable_cores,
        "versions": versions(run),
        "files": sorted(file.name for file in folder.iterdir()),
        "earlier": earlier,
        "cell": cell,
    }
    (folder / DOCUMENT).write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    final = outlet.folder(machine, recording.name)
    final.parent.mkdir(parents=True, exist_ok=True)
    if final.exists():
        final.rename(folder.parent / "replaced")  # lies in the stage, and goes with it
    folder.rename(final)
    return final


def versions(run: Run) -> dict[str, str]:
    """Of what made the figures."""
    import gpulab

    details = {name: str(value) for name, value in run.device.details.items() if "driver" in name or "cuda" in name}
    return {"gpulab": gpulab.__version__} | run.environment.packages | details


def main() -> None:
    """Get ready, wait for a line, record. What is raised ends the process with a traceback."""
    parser = argparse.ArgumentParser()
    parser.add_argument("name")
    parser.add_argument("out", type=Path)
    parser.add_argument("machine")
    arguments = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a crash with CUDA would write gigabytes
    recording = next(recording for recording in every() if recording.name == arguments.name)
    _get_ready()
    if not sys.stdin.readline():
        return  # nobody waits for this recording any more
    record(recording, Outlet(arguments.out, arguments.out), arguments.machine)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # loaders that were left in the middle would wait for their workers; the conductor ends those


def _get_ready() -> None:
    """Import what each cell and each capture needs; nothing of it touches the GPU."""
    import torch._dynamo  # the first optimizer would
    import torch.profiler
    import torch.utils.data

    environment()
    if multiprocessing.get_start_method() != "fork":  # workers that start anew cannot find a class of a cell
        multiprocessing.set_start_method("fork", force=True)
        torch.multiprocessing.set_start_method("fork", force=True)


if __name__ == "__main__":
    main()
