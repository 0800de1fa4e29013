"""Trace files in every spelling and state: what is read is exact, what is broken is counted, the rest is refused."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from gpulab.analysis.breakdown import breakdown
from gpulab.errors import TraceError
from gpulab.run import Category, Timeline
from gpulab.trace import text_pieces
from gpulab.trace.kineto_file import Trace, read_trace
from gpulab.trace.load import load_run
from tests.support import real_traces
from tests.support import trace_files as made
from tests.support.trace_files import BASE_US, Event

PLAIN = [*made.step(3), *made.step(4, 1000.0), *made.labels()]
TEXT = made.text(PLAIN)
DATA = TEXT.encode()


def read(folder: Path, content: str | bytes, name: str = "made.json") -> Trace:
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return read_trace(path)


def rows(timeline: Timeline) -> set[tuple[Any, ...]]:
    """Every span in words: name, category, lane, times, correlation."""
    return {
        (
            timeline.names[timeline.name_id[i]],
            Category(timeline.category[i]).name,
            (timeline.lanes[timeline.lane_id[i]].kind, *_numbers(timeline, i)),
            int(timeline.start_ns[i]),
            int(timeline.duration_ns[i]),
            int(timeline.correlation[i]),
        )
        for i in range(len(timeline))
    }


def _numbers(timeline: Timeline, row: int) -> tuple[int, int]:
    lane = timeline.lanes[timeline.lane_id[row]]
    return lane.process, lane.number


FETCH = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
EXPECTED = {
    (name, category, lane, (at + start) * 1000, duration * 1000, correlation)
    for number, at in ((3, 0), (4, 1000))
    for name, category, lane, start, duration, correlation in (
        (f"ProfilerStep#{number}", "USER_ANNOTATION", ("thread", 100, 100), 0, 1000, 0),
        (FETCH, "USER_ANNOTATION", ("thread", 100, 100), 0, 200, 0),
        ("aten::mm", "CPU_OP", ("thread", 100, 100), 210, 50, 0),
        ("cudaLaunchKernel", "CUDA_RUNTIME", ("thread", 100, 100), 220, 10, 40 + number * 2),
        ("volta_sgemm_64x64_nt", "KERNEL", ("stream", 0, 7), 300, 200, 40 + number * 2),
        ("Memcpy HtoD (Pinned -> Device)", "GPU_MEMCPY", ("stream", 0, 7), 510, 20, 41 + number * 2),
        ("Optimizer.step#SGD.step", "USER_ANNOTATION", ("thread", 100, 100), 900, 90, 0),
    )
}


# -- one and the same trace, written in different ways, is one and the same record -------------------------------------


def spelled(change: Callable[[Event], Event]) -> str:
    return made.text(made.changed(PLAIN, change))


def of_torch_1_8(event: Event) -> Event:
    """Categories in upper case, marks recorded as operators, text as ids."""
    old = {"user_annotation": "Operator", "cpu_op": "Operator", "cuda_runtime": "Runtime", "gpu_memcpy": "Memcpy"}
    if event["ph"] == "X":
        event["cat"] = old.get(event["cat"], event["cat"].capitalize())
        event["tid"] = "stream 7" if event["pid"] == 0 else str(event["tid"])
    return event


def without_stream(event: Event) -> Event:
    if event.get("cat") in ("kernel", "gpu_memcpy"):
        event["args"] = {"correlation": event["args"]["correlation"]}
    return event


def of_the_product(change: Event) -> str:
    return spelled(lambda event: event | change if event["name"] == "aten::mm" else event)


OTHER_PHASES = [{"ph": p, "name": "x", "ts": 1, "pid": 1, "tid": 1} for p in "BECbneNOD"]
OF_THE_PROFILER = made.span("Trace", "PyTorch Profiler (0)", -500, 9000, pid="Spans", tid="PyTorch Profiler")
SPELLINGS: dict[str, str | bytes] = {
    "as Kineto writes it": TEXT,
    "gzip": gzip.compress(DATA),
    "several gzip members": gzip.compress(DATA[:700]) + gzip.compress(DATA[700:]) + b"\0" * 100,
    "one line": json.dumps(made.document(PLAIN)),
    "lines without white space": json.dumps(made.document(PLAIN), indent=0),
    "much white space": json.dumps(made.document(PLAIN), indent=8),
    "metadata after the events": json.dumps(dict(reversed(made.document(PLAIN).items()))),
    "a byte order mark": b"\xef\xbb\xbf" + DATA,
    "torch 1.8": spelled(of_torch_1_8),
    "no device and stream among the arguments": spelled(without_stream),
    "the profiler's own span": made.text([OF_THE_PROFILER, *PLAIN]),
    "other phases": made.text([*OTHER_PHASES, *PLAIN]),
    "no arguments": of_the_product({"args": None}),
    "a list of arguments": of_the_product({"args": []}),
    "arguments of odd types": of_the_product({"args": {"stream": [7], "Call stack": {"a": 1}}}),
    "a correlation too large": of_the_product({"args": {"correlation": 10**30}}),
    "a correlation of letters": of_the_product({"args": {"correlation": "abc"}}),
}


@pytest.mark.parametrize("content", SPELLINGS.values(), ids=SPELLINGS)
def test_every_spelling_is_the_same_record(tmp_path: Path, content: str | bytes) -> None:
    for name in ("made.json", "made.json.gz", "no_suffix"):
        trace = read(tmp_path, content, name)
        assert rows(trace.timeline) == EXPECTED
        assert trace.origin.device_properties[0].name == "NVIDIA H100 80GB HBM3"
    assert trace.timeline.window_ns == (0, 2_000_000)
    assert trace.timeline.lanes[trace.timeline.training_lane or 0].label == "training thread"


def test_a_bare_list_of_events(tmp_path: Path) -> None:
    trace = read(tmp_path, json.dumps(PLAIN))
    assert rows(trace.timeline) == EXPECTED and trace.origin.device_properties == ()


def test_what_is_kept_beside_the_spans(tmp_path: Path) -> None:
    more = {
        "distributedInfo": {"backend": "nccl", "rank": 2, "world_size": 4},
        "cuda_runtime_version": 12040,
        "hip_runtime_version": 60443483,
        "with_stack": 1,
        "record_shapes": 0,
        "baseTimeNanoseconds": 1_751_410_836_000_000_000,
    }
    origin = read(tmp_path, made.text(PLAIN, **more)).origin
    assert (origin.events_read, origin.flow_events, origin.clock, origin.damage) == (len(PLAIN), 4, "us", ())
    assert (origin.rank, origin.world_size, origin.backend, origin.schema_version) == (2, 4, "nccl", 1)
    assert origin.versions == {"cuda_runtime": "12.4", "hip_runtime": "6.4.43483"}
    assert origin.options == ("with_stack",)
    assert origin.zero_ns == 1_751_410_836_000_000_000 + BASE_US * 1000
    (device,) = origin.device_properties
    assert (device.sm_count, device.compute_capability) == (132, "9.0")
    assert (device.max_threads_per_sm, device.warp_size) == (2048, 32)


@pytest.mark.parametrize("block", [64, 257, 1000, 5000])
def test_cut_anywhere(tmp_path: Path, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_pieces, "BLOCK_BYTES", block)
    monkeypatch.setattr(text_pieces, "LEARNED_BYTES", block)
    assert rows(read(tmp_path, TEXT).timeline) == EXPECTED


def test_many_labels_before_the_first_span(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_pieces, "BLOCK_BYTES", 2000)
    monkeypatch.setattr(text_pieces, "LEARNED_BYTES", 2000)
    monkeypatch.setattr(text_pieces, "EVENT_LIMIT_BYTES", 4000)
    spans = [made.span("cpu_op", f"op{i}", 0.5 * i, 0.25) for i in range(100)]
    trace = read(tmp_path, made.text([*made.labels() * 20, *PLAIN, *spans]))
    assert rows(trace.timeline) > EXPECTED and len(trace.timeline) == len(EXPECTED) + 100
    assert trace.origin.damage == ()


def test_text_that_looks_like_an_event_boundary(tmp_path: Path) -> None:
    name = 'a}, {"ph": "X"} ], "traceEvents": [ {lambda()#1}]'
    trace = read(tmp_path, made.text([made.span("cpu_op", name, 5, 5), *PLAIN]))
    assert name in trace.timeline.names
    assert len(trace.timeline) == len(EXPECTED) + 1


def test_the_old_autograd_profilers_export(tmp_path: Path) -> None:
    events = [
        {"name": "aten::mm", "ph": "X", "ts": 10.0, "dur": 5.0, "tid": 1, "pid": "CPU functions", "args": {}},
        {"name": "sgemm", "ph": "X", "ts": 12.0, "dur": 2.0, "tid": 0, "pid": "CUDA functions", "args": {}},
    ]
    timeline = read(tmp_path, json.dumps(events)).timeline
    assert [Category(c).name for c in timeline.category] == ["CPU_OP", "KERNEL"]


def test_odd_thread_ids_are_lanes_of_their_own(tmp_path: Path) -> None:
    events = [
        made.span("cpu_op", "a", 0, 1, tid="0x7f00000000ff"),
        made.span("cpu_op", "b", 2, 1, tid="main"),
        made.span("cpu_op", "c", 4, 1, tid="worker"),
        made.span("cpu_op", "d", 6, 1, tid=100),
        made.span("cpu_op", "e", 8, 1, tid="100"),
    ]
    timeline = read(tmp_path, made.text(events)).timeline
    assert len(timeline.lanes) == 4
    assert timeline.lane_id[3] == timeline.lane_id[4]


def test_thread_names_label_lanes(tmp_path: Path) -> None:
    timeline = read(tmp_path, made.text([*PLAIN, made.span("cpu_op", "x", 1, 1, tid=7)])).timeline
    assert {lane.label for lane in timeline.lanes} == {"training thread", "GPU 0 stream 7", "thread 7 (pt)"}


def test_step_copies_on_the_device_are_counted_apart(tmp_path: Path) -> None:
    copy = made.on_gpu("gpu_user_annotation", "ProfilerStep#3", 300, 7000, 0)
    path = made.write(tmp_path, made.text([*PLAIN, copy]))
    run = load_run(path)
    assert run.origin is not None and run.origin.step_marks_duplicated == 1
    assert run.steps.number.tolist() == [3, 4]
    assert run.timeline is not None and run.timeline.training_lane is not None
    assert run.timeline.lanes[run.timeline.training_lane].kind == "thread"


# -- times are exact to the nanosecond, whatever clock the trace counts on ---------------------------------------------


@pytest.mark.parametrize(
    ("written", "start_ns"),
    [
        (("1419116104654.001", "1419116104654.502"), 501),
        (("1712195495505543.001", "1712195495505543.502"), 501),
        (("1712195495505543.5", "1712195495505544.123"), 623),
        (("1712195495505543", "1712195495505544.123"), 1123),
        (("1712195495505543", "1712195495505544"), 1000),
        (('"1712195495505543.001"', '"1712195495505544.002"'), 1001),
        (("7776000000000.001", "7776000000000.999"), 998),
        (("1.419116104654e12", "1419116104654.25"), 250),
        (("-3.5", "2"), 5500),
    ],
)
def test_to_the_nanosecond(tmp_path: Path, written: tuple[str, str], start_ns: int) -> None:
    one = '{{"ph": "X", "cat": "cpu_op", "name": "a", "pid": 1, "tid": 1, "ts": {}, "dur": 0.001}}'
    timeline = read(tmp_path, f"[{one.format(written[0])},\n{one.format(written[1])}]").timeline
    assert timeline.start_ns.tolist() == [0, start_ns]
    assert timeline.duration_ns.tolist() == [1, 1]


def test_parents_come_before_children(tmp_path: Path) -> None:
    events = [made.span("cpu_op", n, 5, d) for n, d in (("inner", 1), ("outer", 9), ("middle", 4))]
    timeline = read(tmp_path, made.text(events)).timeline
    assert [timeline.names[i] for i in timeline.name_id] == ["outer", "middle", "inner"]


@given(st.lists(st.integers(0, 10**9), min_size=1, max_size=30), st.sampled_from([0, BASE_US, 1_712_195_495_505_543]))
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_nanoseconds_come_back(tmp_path: Path, starts: list[int], base_us: int) -> None:
    one = '{{"ph": "X", "cat": "cpu_op", "name": "a", "pid": 1, "tid": 1, "ts": {}.{:03d}, "dur": 1}}'
    lines = ",\n".join(one.format(base_us + s // 1000, s % 1000) for s in starts)
    timeline = read(tmp_path, f"[{lines}]").timeline
    assert timeline.start_ns.tolist() == sorted(s - min(starts) for s in starts)


# -- what else the record keeps of a span, and of memory ---------------------------------------------------------------


def test_arguments_of_device_spans(tmp_path: Path) -> None:
    timeline = read(tmp_path, made.text(PLAIN)).timeline
    of_device = {"bytes", "blocks_per_sm", "occupancy_pct"}
    assert set(timeline.extra) == {*of_device, "product_m", "product_n", "product_k"}
    kernel = timeline.category == Category.KERNEL
    copy = timeline.category == Category.GPU_MEMCPY
    assert timeline.extra["occupancy_pct"][kernel].tolist() == [6.0, 6.0]
    assert timeline.extra["blocks_per_sm"][kernel].tolist() == [0.5, 0.5]
    assert timeline.extra["bytes"][copy].tolist() == [2048.0, 2048.0]
    assert np.isnan(timeline.extra["bytes"][~copy]).all()


def test_amd_kernels_have_no_occupancy_column(tmp_path: Path) -> None:
    events = [made.on_gpu("kernel", "Cijk_Ailk", 5, 5, 3, kind="Dispatch Kernel")]
    assert read(tmp_path, made.text([*events, made.span("cpu_op", "a", 0, 1)])).timeline.extra == {}


def test_memory_events(tmp_path: Path) -> None:
    def memory(at: float, size: int, device: int, address: int, **more: int) -> Event:
        args = {"Device Type": int(device >= 0), "Device Id": device, "Bytes": size, "Addr": address, **more}
        return {"ph": "i", "s": "t", "name": "[memory]", "pid": 100, "tid": 100, "ts": BASE_US + at, "args": args}

    events = [
        *PLAIN,
        memory(20, -512, 0, 2**63 + 5, **{"Total Allocated": 0, "Total Reserved": 4096}),
        memory(10, 512, 0, 2**63 + 5, **{"Total Allocated": 512, "Total Reserved": 4096}),
        memory(30, 8, -1, 77),
        {"ph": "i", "name": "Record Window End", "pid": "", "tid": "", "ts": BASE_US + 40},
    ]
    found = read(tmp_path, made.text(events)).memory_events
    assert found is not None
    assert found.t_ns.tolist() == [10_000, 20_000, 30_000]
    assert found.bytes.tolist() == [512, -512, 8]
    assert found.total_allocated_bytes.tolist() == [512, 0, -1]
    assert found.total_reserved_bytes.tolist() == [4096, 4096, -1]
    assert found.device_index.tolist() == [0, 0, -1]
    assert found.address.view(np.uint64).tolist() == [2**63 + 5, 2**63 + 5, 77]


def test_no_memory_events_is_none(tmp_path: Path) -> None:
    assert read(tmp_path, made.text(PLAIN)).memory_events is None


# -- what is broken is counted under its name, and costs nothing but itself --------------------------------------------

UNTIMED = {"ph": "X", "cat": "cpu_op", "name": "lost", "pid": 1, "tid": 1, "dur": 3}
BROKEN_LAST = made.text([*PLAIN, made.span("cpu_op", "broken", 5, 5)], rank=1)
PACKED = gzip.compress(DATA)
WRONG_SUM = PACKED[:-8] + b"\x12\x34\x56\x78" + PACKED[-4:]
HEAD = TEXT[: TEXT.index('"traceName"')].rstrip().rstrip(",").rstrip().removesuffix("]")
DAMAGE: dict[str, tuple[str | bytes, dict[str, int]]] = {
    "spans without time": (made.text([*PLAIN, UNTIMED, UNTIMED | {"ts": "soon"}]), {"missing ts": 2}),
    "a time far from all others": (made.text([*PLAIN, made.step()[2] | {"ts": 0}]), {"broken times": 1}),
    "an unreadable last event": (BROKEN_LAST.replace('"broken"', '"broken'), {"unreadable events": 1}),
    "no closing brackets": (HEAD, {"truncated tail": 1}),
    "a gzip file with a broken end": (WRONG_SUM, {"broken gzip": 1, "truncated tail": 1}),
    "broken metadata": (TEXT.replace('"traceName": "made.json"', '"traceName": oops'), {"unreadable metadata": 1}),
}


@pytest.mark.parametrize(("content", "damage"), DAMAGE.values(), ids=DAMAGE)
def test_damage_costs_only_itself(tmp_path: Path, content: str | bytes, damage: dict[str, int]) -> None:
    trace = read(tmp_path, content)
    assert rows(trace.timeline) == EXPECTED
    assert {d.name: d.count for d in trace.origin.damage} == damage
    assert trace.origin.device_properties


@pytest.mark.parametrize(
    ("change", "damage", "duration_ns"),
    [
        ({"dur": None}, "missing dur", 0),
        ({"dur": "50"}, "dur as text", 50_000),
        ({"dur": -50}, "negative dur", 0),
    ],
)
def test_durations(tmp_path: Path, change: Event, damage: str, duration_ns: int) -> None:
    trace = read(tmp_path, of_the_product(change))
    assert trace.origin.damaged(damage) == 2
    rest = {row for row in EXPECTED if row[0] != "aten::mm"}
    found = rows(trace.timeline)
    assert rest < found
    assert {row[4] for row in found - rest} == {duration_ns}


@pytest.mark.parametrize(
    ("raw", "damage", "name"),
    [
        (b"a\x01b", "control characters", "a b"),
        (b"a\x1b[31mb", "control characters", "a [31mb"),
        (b"a\nb", "odd values", None),
        (b"a\xffb", "invalid UTF-8", "a�b"),
        (b"C:\\Users\\me", "odd values", "C:\\Users\\me"),
        (b"a\\ud800b", "odd values", "a?b"),
    ],
)
def test_names_that_are_no_json(tmp_path: Path, raw: bytes, damage: str, name: str | None) -> None:
    trace = read(tmp_path, DATA.replace(b"aten::mm", raw, 1))
    assert len(trace.timeline) == len(EXPECTED)
    if name is not None:
        assert name in trace.timeline.names
        assert trace.origin.damaged(damage) == 1


@pytest.mark.parametrize("value", ["NaN", "inf", "-Infinity", "nan"])
def test_numbers_that_are_none(tmp_path: Path, value: str) -> None:
    trace = read(tmp_path, TEXT.replace('"blocks per SM": 0.5', f'"blocks per SM": {value}', 1))
    assert rows(trace.timeline) == EXPECTED
    assert trace.origin.damaged("not a number") == 1
    blocks = trace.timeline.extra["blocks_per_sm"]
    assert blocks[~np.isnan(blocks)].tolist() == [0.5]


def test_one_unreadable_event_costs_one_event(tmp_path: Path) -> None:
    trace = read(tmp_path, TEXT.replace('"aten::mm"', '"aten::mm', 1))
    (damage,) = trace.origin.damage
    assert (damage.name, damage.count) == ("unreadable events", 1) and "byte" in damage.detail
    assert rows(trace.timeline) == {r for r in EXPECTED if r[0] != "aten::mm" or r[3] != 210_000}


@pytest.mark.parametrize("share", [0.5, 0.7, 0.9])
def test_half_a_file(tmp_path: Path, share: float) -> None:
    trace = read(tmp_path, TEXT[: int(len(TEXT) * share)])
    found = rows(trace.timeline)
    assert found <= EXPECTED and len(found) >= 5
    (damage,) = [d for d in trace.origin.damage if d.name == "truncated tail"]
    assert "at byte" in damage.detail


def test_a_gzip_file_keeps_what_comes_before_its_damage(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    many = [made.span("cpu_op", f"op{rng.integers(1 << 60)}", 2.0 * i, 1) for i in range(3000)]
    text = made.text(many).encode()
    whole, half = gzip.compress(text), len(text) // 2
    cut = read(tmp_path, whole[: len(whole) // 2])
    assert 1000 < len(cut.timeline) < 2000
    packer = zlib.compressobj(6, zlib.DEFLATED, 31)
    begun = packer.compress(text[:half]) + packer.flush(zlib.Z_FULL_FLUSH)
    torn = read(tmp_path, begun + b"\xff" * 3000 + packer.compress(text[half:]) + packer.flush())
    assert 1400 <= len(torn.timeline) <= 1501
    for trace in (cut, torn):
        assert trace.origin.damaged("broken gzip") == trace.origin.damaged("truncated tail") == 1


def test_no_gpu_event(tmp_path: Path) -> None:
    host = [e for e in PLAIN if e.get("cat") not in ("kernel", "gpu_memcpy")]
    run = load_run(made.write(tmp_path, made.text(host)))
    assert run.device.kind == "cuda"
    assert "device time" in {m.what for m in run.missing}
    assert breakdown(run) is None


# -- what is no trace is refused in a sentence with the file, the reason and the next step -----------------------------

HTML = b"<!DOCTYPE html><html><body>404</body></html>"


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "is empty"),
        (b"   \n ", "holds no text"),
        (HTML, "web page"),
        (gzip.compress(HTML, mtime=0), "web page"),
        (gzip.compress(b"", mtime=0), "holds no text"),
        (gzip.compress(b"{" * 3, mtime=0)[:12], "broken gzip"),
        (b"\x1f\x8b\x08\x00rubbish-rubbish", "broken gzip"),
        (b"PK\x03\x04...", "zip"),
        (b"\x28\xb5\x2f\xfd....", "zstd"),
        (b"\x80\x04\x95pickle", "pickle"),
        (b"SQLite format 3\x00", "SQLite"),
        (b"\x0a\x1f\x08\x01\x12\x05abc\x00\x01", "Perfetto"),
        ("{}".encode("utf-16"), "UTF-16"),
        (b"hello world", "not JSON"),
        (b"{}", "no list of traceEvents"),
        (b'{"cells": [], "metadata": {}}', "its keys are 'cells', 'metadata'"),
        (b'{"schema": "1.1.1-chakra", "nodes": []}', "execution trace"),
        (b'{"schemaVersion": 1, "deviceProp', "the text ends or breaks"),
        (b'{"traceEvents": null}', "no list of traceEvents"),
        (b'{"traceEvents": []}', "holds no span"),
        (b'{"traceEvents": [', "holds no span"),
        (b"[]", "holds no span"),
        (b"[1, 2, 3]", "unreadable events: 3"),
        (b'[{"a": 1}, {"b": 2}]', "unreadable events: 2"),
        (b"[" * 5000, "holds no span"),
        (b'{"a":' * 5000, "no list of traceEvents"),
        (made.text(made.labels()).encode(), "holds no span: 3 events were read"),
        (made.text([made.span("devtools.timeline", "Paint", 0, 5)]).encode(), "another program"),
        (json.dumps({"\x1b[31m<script>": 1}).encode(), "its keys are"),
    ],
)
def test_what_is_no_trace_is_refused_in_a_sentence(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "given.json.gz"
    path.write_bytes(content)
    with pytest.raises(TraceError, match=says.replace("(", r"\(")) as caught:
        read_trace(path)
    told = str(caught.value)
    assert str(path) in told
    assert not {"\n", "\x1b"} & set(told) and len(told) < 600


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="is a folder"):
        read_trace(tmp_path)
    with pytest.raises(TraceError, match="cannot be read"):
        read_trace(tmp_path / "absent.json")


VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=5), st.just([]), st.just({})
)
EVENTS = st.lists(
    st.fixed_dictionaries(
        {},
        optional={
            "ph": st.one_of(st.sampled_from(["X", "X", "X", "i", "M", "s", "f", "B"]), VALUES),
            "cat": st.one_of(st.sampled_from(["cpu_op", "kernel", "Kernel", "user_annotation", "cuda_sync"]), VALUES),
            "name": st.one_of(st.sampled_from(["ProfilerStep#1", "ProfilerStep#²", "[memory]", "aten::mm"]), VALUES),
            "ts": st.one_of(st.integers(0, 10**6), VALUES),
            "dur": st.one_of(st.integers(0, 10**4), VALUES),
            "pid": VALUES,
            "tid": VALUES,
            "args": st.one_of(VALUES, st.dictionaries(st.sampled_from(["stream", "device", "correlation"]), VALUES)),
        },
    ),
    max_size=12,
)


@given(EVENTS)
@example([{"ph": "X", "dur": 1.797693134862316e305}])  # in nanoseconds it is infinite
@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_events_are_a_sound_record_or_one_sentence(tmp_path: Path, events: list[Event]) -> None:
    path = made.write(tmp_path, json.dumps({"traceEvents": events}))
    sentence = None
    try:
        run = load_run(path)
    except TraceError as e:
        sentence = str(e)
    if sentence is not None:
        assert str(path) in sentence
    else:
        run.check()
        assert len(run.timeline or ()) > 0


def test_a_share_of_the_fuzz_bench(tmp_path: Path) -> None:
    from benchmarks import fuzz

    found = fuzz.run(fuzz.seeds(real_traces.folder()), 400, seed=1, folder=tmp_path)
    assert found.unhandled == []
    assert found.inputs == 400 and found.traces > 100 and found.damaged > 50 and sum(found.sentences.values()) > 5
