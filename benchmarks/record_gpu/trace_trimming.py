"""A profiler's trace, cut down to whole steps, so that it can be shipped: what they did, and nothing of the machine."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

STEP = "ProfilerStep#"
_OF_THE_MACHINE = ("traceName", "host_name")  # where the file lay, and on which computer


def trim(source: Path, target: Path, *, steps: int = 1) -> int:
    """Write the last so many whole steps of a trace to another file; the size of that file in bytes.

    What a step's launches did on the GPU is kept with it, also where it happened after the step. A trace without marks
    of steps is kept whole. Raises ValueError for what is no trace.
    """
    with gzip.open(source, "rt", encoding="utf-8") as file:
        trace: dict[str, Any] = json.load(file)
    if not isinstance(trace, dict) or not isinstance(trace.get("traceEvents"), list):
        raise ValueError(f"{source.name} is no trace: it has no traceEvents")
    for key in _OF_THE_MACHINE:
        trace.pop(key, None)
    trace["traceEvents"] = trimmed(trace["traceEvents"], steps)
    text = json.dumps(trace, ensure_ascii=False, separators=(",", ":"))
    target.write_bytes(gzip.compress(text.encode(), 9, mtime=0))
    return target.stat().st_size


def trimmed(events: list[dict[str, Any]], steps: int) -> list[dict[str, Any]]:
    """The events of the last so many steps, and those that name processes and threads."""
    marks = sorted(
        (event for event in events if _is_step(event)), key=lambda event: float(event["ts"])
    )[-steps:]  # fmt: skip
    if not marks:
        return events
    begin, end = float(marks[0]["ts"]), max(float(m["ts"]) + float(m["dur"]) for m in marks)
    launched = {
        correlation
        for event in events
        if (correlation := _correlation(event)) is not None and begin <= float(event["ts"]) < end and _on_host(event)
    }
    return [event for event in events if _belongs(event, begin, end, launched)]


def _is_step(event: dict[str, Any]) -> bool:
    on_host = event.get("cat") == "user_annotation"
    return on_host and event.get("ph") == "X" and str(event.get("name", "")).startswith(STEP)


def _belongs(event: dict[str, Any], begin: float, end: float, launched: set[Any]) -> bool:
    if event.get("ph") == "M":
        return True
    if "ts" not in event:
        return False
    if event.get("ph") == "X" and (correlation := _correlation(event)) is not None and not _on_host(event):
        return correlation in launched
    if event.get("ph") in ("s", "t", "f"):  # arrows: their id is the correlation
        return event.get("id") in launched or begin <= float(event["ts"]) < end
    return begin <= float(event["ts"]) and float(event["ts"]) + float(event.get("dur", 0)) <= end


def _on_host(event: dict[str, Any]) -> bool:
    return event.get("cat") not in ("kernel", "gpu_memcpy", "gpu_memset", "gpu_user_annotation")


def _correlation(event: dict[str, Any]) -> Any:
    arguments = event.get("args")
    return arguments.get("correlation") if isinstance(arguments, dict) and event.get("ph") == "X" else None
