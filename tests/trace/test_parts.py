"""A file that several processes read is what one would have read, to the last bit."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpulab.errors import TraceError
from gpulab.trace import json_text, kineto_file, other_processes, parts
from gpulab.trace.json_text import TraceText
from gpulab.trace.kineto_file import Trace, read_trace
from tests.support import loaded_traces
from tests.support import trace_files as made
from tests.support.paths import ROOT
from tests.support.strategies import assert_same

STEPS = [event for number in range(3, 9) for event in made.step(number, number * 1000.0)]


def memory(at: float, size: int) -> made.Event:
    args = {"Bytes": size, "Addr": 2**63 + size, "Device Type": 1, "Device Id": 0, "Total Allocated": size}
    return {
        "ph": "i",
        "cat": "cpu_instant_event",
        "name": "[memory]",
        "pid": 100,
        "ts": made.BASE_US + at,
        "args": args,
    }


FILES = {
    "whole": made.text([*made.labels(), *STEPS]),
    "labels last": made.text([*STEPS, *made.labels()]),
    "memory": made.text([e for i, step in enumerate(STEPS) for e in (step, memory(100.0 * i, i))]),
    "names that are no text": made.text(STEPS).replace("volta_sgemm", "volta\\x00sgemm"),
    "not a number": made.text(STEPS).replace('"dur": 990', '"dur": NaN').replace('"dur": 90', '"dur": NaN'),
    "one unreadable event": made.text(STEPS).replace('"dur": 50', '"dur": ', 1),
    "no dur": made.text([*STEPS, {k: v for k, v in STEPS[0].items() if k != "dur"}]),
    "cut short": made.text(STEPS)[:-300],
    "spelled differently": made.text([*made.step(3), *({**e, "pid": str(e["pid"])} for e in made.step(4, 1000.0))]),
}


def read_in(path: Path, count: int) -> Trace:
    """As `count` processes read it, each part as the bytes that travel."""
    whole = TraceText(path)
    decoded = [parts.decode(whole, 0, count), *(parts.decode(TraceText(path), i, count) for i in range(1, count))]
    return kineto_file._assemble(path, whole, parts.together([as_travelled(part) for part in decoded]))


def as_travelled(part: parts.Part) -> parts.Part:
    file = io.BytesIO()
    parts.write(part, file)
    file.seek(0)
    return parts.read(file)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(sorted(FILES)), st.integers(200, 4000), st.integers(2, 5))
def test_any_parts_give_what_one_gives(tmp_path: Path, name: str, block_bytes: int, count: int) -> None:
    path = made.write(tmp_path, FILES[name], "made.json")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_text, "BLOCK_BYTES", block_bytes)
        patch.setattr(json_text, "LEARNED_BYTES", block_bytes)
        assert_same(read_in(path, 1), read_in(path, count))


def test_names_keep_the_order_in_which_they_come() -> None:
    one, other = ["a", "c", "d"], ["c", "b", "d"]  # pieces 0, 2, 4 and 1, 3, 5
    names, pieces, numbers = parts._renumbered([(one, [0, 2, 4]), (other, [1, 3, 5])])
    assert names == ["a", "c", "b", "d"] and pieces == [0, 1, 3, 4]
    assert [n.tolist() for n in numbers] == [[0, 1, 3], [1, 2, 3]]


@pytest.mark.parametrize("end", [0, 4, 8, 100, -1])
def test_a_part_that_ends_too_early_is_none(tmp_path: Path, end: int) -> None:
    file = io.BytesIO()
    parts.write(parts.decode(TraceText(made.write(tmp_path, FILES["whole"]))), file)
    with pytest.raises((EOFError, msgspec.MsgspecError)):
        parts.read(io.BytesIO(file.getvalue()[:end]))


@pytest.mark.parametrize("name", ["h100_owlv2_starved", "a100_alexnet_sync_events"])
def test_real_traces_by_real_processes(name: str) -> None:
    alone = loaded_traces.trace(name)
    assert_same(alone, read_trace(Path(alone.origin.path), parts=2))


def test_a_killed_process_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = made.write(tmp_path, FILES["memory"], "made.json")
    part = other_processes.Other.part
    killed: list[int] = []

    def kill(self: other_processes.Other) -> parts.Part | None:
        os.kill(self._pid, signal.SIGKILL)
        assert self._process is not None
        self._process.wait()
        self._output.read()  # what it had written already
        killed.append(self._pid)
        return part(self)

    monkeypatch.setattr(other_processes.Other, "part", kill)
    assert_same(read_trace(path, parts=1), read_trace(path, parts=2))
    assert len(killed) == 1


def test_what_is_no_trace_is_said_as_ever(tmp_path: Path) -> None:
    path = made.write(tmp_path, "<html>", "made.json")
    with pytest.raises(TraceError, match="web page"):
        read_trace(path, parts=2)


AHEAD = """
import os, sys
from gpulab.trace import other_processes
other_processes.FORK_FROM_BYTES, other_processes.PLAIN_PER_GZIP = 1, 1
other_processes.os.sched_getaffinity = lambda _: {0, 1, 2}
other_processes.begin(sys.argv[1])
assert "numpy" not in sys.modules, "a fork before anything is imported"
(others,) = other_processes._begun.values()
assert len(others) == 2
from pathlib import Path
from gpulab.trace.kineto_file import read_trace
with other_processes.reading(Path(sys.argv[1]), 1):
    pass  # an end without their parts
other_processes.begin(sys.argv[1])
other_processes.end_all()  # the file is not read in the end
assert not other_processes._begun
other_processes.begin(sys.argv[1])
ahead = read_trace(Path(sys.argv[1]))
assert not other_processes._begun
try:
    os.waitpid(-1, os.WNOHANG)
except ChildProcessError:
    print(len(ahead.timeline))
"""


def test_a_command_line_forks_before_it_imports(tmp_path: Path) -> None:
    path = made.write(tmp_path, FILES["whole"], "made.json")
    done = subprocess.run(
        [sys.executable, "-c", AHEAD, str(path)], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert done.stdout == f"{len(read_trace(path).timeline)}\n", done.stderr


def test_a_small_file_is_read_by_one(tmp_path: Path) -> None:
    path = made.write(tmp_path, json.dumps(made.document(STEPS)), "made.json")
    assert (
        other_processes._count(path, other_processes.FORK_FROM_BYTES)
        == 1
        == other_processes._count(tmp_path / "absent", 0)
    )
    with other_processes.reading(path, None) as others:
        assert others == []
