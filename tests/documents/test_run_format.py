"""The page on stored runs, held against the code that writes and reads them."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from gpulab.run import (
    SCHEMA,
    Batches,
    CallLooks,
    CoreTimes,
    CoreUse,
    LoadingLooks,
    MemoryEvents,
    Run,
    Samples,
    StackSamples,
)
from gpulab.store import run_format
from gpulab.store.folders import COLUMNS, DOCUMENT, TRACE_SUFFIX, Store
from gpulab.store.table_file import read
from tests.support.paths import ROOT
from tests.support.strategies import tiny_run

PAGE = (ROOT / "docs" / "run-format.md").read_text(encoding="utf-8")
ROWS = re.findall(
    r"^\| `([^`]+)` \| ([^|]+) \| ([^|]+) \|$", PAGE.partition("## columns.tables")[2], flags=re.MULTILINE
)


def run_with_every_column() -> Run:
    run = tiny_run(name="tiny")
    steps = replace(run.steps, device_ns=run.steps.end_ns - run.steps.start_ns)
    events = MemoryEvents(**_one_row(MemoryEvents) | {"device_index": np.zeros(1, np.int32)})
    batches = Batches(**_one_row(Batches) | {"worker": np.zeros(1, np.int32)})
    no_place, flag = np.full(1, -1, np.int32), np.zeros(1, np.uint8)
    stack = StackSamples(np.zeros(1, np.int64), no_place, prepares_batch=flag)
    looks = LoadingLooks(no_place.copy(), flag.copy(), np.ones(1, np.int64))
    core_times = CoreTimes(**_one_row(CoreTimes) | {"profiler": np.zeros(1, np.uint8)})
    curves = tuple(replace(s, t_ns=s.t_ns.copy()) for s in run.samples.series)  # a shared array is one column
    return replace(
        run,
        steps=steps,
        samples=Samples(curves),
        memory_events=events,
        batches=batches,
        stack=stack,
        loading_looks=looks,
        call_looks=CallLooks(np.zeros(1, np.int64), no_place.copy(), no_place.copy(), no_place.copy(), flag.copy()),
        core_times=core_times,
        core_use=CoreUse(**_one_row(CoreUse)),
    )


def _one_row(kind: type[MemoryEvents | Batches | CoreTimes | CoreUse]) -> dict[str, Any]:
    return {name: np.zeros(1, np.int64) for name in kind.__struct_fields__}


def test_the_page_names_the_files_and_their_limits() -> None:
    files = re.findall(r"^\| `([^`]+)` \| ([^|]+) \|$", PAGE, flags=re.MULTILINE)
    assert [name for name, _ in files] == [DOCUMENT, COLUMNS, f"<host>_<pid>.<ns>{TRACE_SUFFIX}"]
    assert f"at most {run_format.MAX_DOCUMENT_BYTES >> 20} MiB" in files[0][1]
    assert f"at most {run_format.MAX_COLUMNS_BYTES >> 30} GiB" in files[1][1]


def test_the_page_names_every_column() -> None:
    written = set(read(io.BytesIO(run_format.encode(run_with_every_column())[1])).tables)
    named = {prefix.replace("<i>", "0") + column for prefix, _, columns in ROWS for column in _named(prefix, columns)}
    assert named == written


def _named(prefix: str, columns: str) -> list[str]:
    return re.findall(r"`(\w+)`", columns) if prefix.endswith(".") else [""]


def test_the_keys_of_the_example_are_fields_of_a_run() -> None:
    example = PAGE.partition("## run.json")[2].partition("```\n")[2].partition("```")[0]
    document = json.loads(example.replace(",…", "").replace("…", ""))
    assert list(document) == [name for name in Run.__struct_fields__ if name in document]
    assert {"steps", "samples", "timeline"} <= set(document)
    assert document["schema"] == SCHEMA
    assert f"`schema` is {SCHEMA}." in PAGE


def test_the_example_in_python_reads_a_stored_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(Store(tmp_path).save(run_with_every_column()))
    exec(PAGE.partition("```python\n")[2].partition("```")[0], {})
    assert capsys.readouterr().out == "10 ms per step\n"


def test_within_a_schema_fields_may_come_and_be_absent() -> None:
    document, columns = run_format.encode(tiny_run())
    plain = json.loads(document)
    del plain["alerts"], plain["steps"]["device_ns"]
    run = run_format.decode(json.dumps(plain | {"not_yet_invented": [1]}).encode(), io.BytesIO(columns))
    assert run.alerts == ()
    assert len(run.steps.device_ns) == 0
