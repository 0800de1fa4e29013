"""Random but lawful `Run` objects for property tests, built so that `Run.check` holds."""

from __future__ import annotations

from types import NoneType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import numpy as np
from hypothesis import strategies as st
from msgspec import Struct

from gpulab.run import (
    Category,
    Choice,
    Device,
    Environment,
    Lane,
    Loader,
    Memory,
    Missing,
    Observer,
    Phase,
    Run,
    Samples,
    Series,
    Settings,
    StepFlag,
    Steps,
    Timeline,
)
from tests.support.timelines import steps_between

T = TypeVar("T")
NS = 10**12
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
counts = st.integers(0, 2**53)
packages = st.dictionaries(texts, texts, max_size=3)
details = st.dictionaries(
    texts, st.none() | texts | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False, allow_infinity=False)
)


def int64(low: int, high: int, size: int) -> st.SearchStrategy[np.ndarray]:
    """A column of that many whole numbers."""
    return st.lists(st.integers(low, high), min_size=size, max_size=size).map(lambda v: np.array(v, np.int64))


def float64(size: int) -> st.SearchStrategy[np.ndarray]:
    """A column of any floats: NaN, infinities and negative zero among them."""
    return st.lists(st.floats(), min_size=size, max_size=size).map(lambda v: np.array(v, np.float64))


@st.composite
def steps(draw: st.DrawFn, max_count: int = 8) -> Steps:
    """Steps that do not overlap, with waits inside them."""
    size = draw(st.integers(0, max_count))
    edges = np.sort(draw(int64(0, NS, 2 * size)))
    start, end = edges[0::2].copy(), edges[1::2].copy()
    return Steps(
        number=np.arange(size, dtype=np.int64) + draw(st.integers(0, 10**6)),
        start_ns=start,
        end_ns=end,
        data_wait_ns=((end - start) * draw(st.floats(0, 1))).astype(np.int64),
        optimizer_ns=((end - start) * draw(st.floats(0, 1))).astype(np.int64),
        batch_count=draw(int64(0, 64, size)),
        sample_count=draw(int64(-1, 2**40, size)),
        phase=draw(int64(0, max(Phase), size)).astype(np.uint8),
        flags=draw(int64(0, sum(StepFlag), size)).astype(np.uint8),
    )


@st.composite
def series(draw: st.DrawFn) -> Series:
    """One curve of a few readings."""
    size = draw(st.integers(0, 6))
    return Series(draw(texts), draw(texts), draw(texts), draw(texts), draw(int64(-NS, NS, size)), draw(float64(size)))


lanes = st.builds(
    Lane, kind=st.sampled_from(["thread", "stream"]), process=counts, number=st.integers(-(2**40), 2**63), label=texts
)


@st.composite
def timelines(draw: st.DrawFn, max_count: int = 10) -> Timeline:
    """A sorted timeline whose ids all point at something."""
    size = draw(st.integers(0, max_count))
    names = tuple(draw(st.lists(texts, min_size=1, max_size=5)))
    rows = tuple(draw(st.lists(lanes, min_size=1, max_size=3)))
    start, duration = draw(int64(0, NS, size)), draw(int64(0, NS, size))
    order = np.lexsort((-duration, start))
    window = sorted((draw(counts), draw(counts)))
    return Timeline(
        start_ns=start[order],
        duration_ns=duration[order],
        name_id=draw(int64(0, len(names) - 1, size)).astype(np.int32),
        category=draw(int64(0, max(Category), size)).astype(np.uint8),
        lane_id=draw(int64(0, len(rows) - 1, size)).astype(np.int32),
        correlation=draw(int64(0, 2**40, size)),
        names=names,
        lanes=rows,
        window_ns=(window[0], window[1]),
        training_lane=draw(st.none() | st.integers(0, len(rows) - 1)),
        extra={name: draw(float64(size)) for name in draw(st.lists(texts, max_size=2, unique=True))},
    )


VALUES: dict[object, st.SearchStrategy[Any]] = {
    str: texts,
    bool: st.booleans(),
    int: counts,
    float: st.floats(0, 1e4),
    dict[str, str]: packages,
    dict[str, str | int | float | None]: details,
}


def whole(kind: type[T]) -> st.SearchStrategy[T]:
    """A record with any values of its fields' types."""
    return st.builds(kind, **{name: _values(hint) for name, hint in get_type_hints(kind).items()})


def _values(hint: object) -> st.SearchStrategy[Any]:
    if hint in VALUES:
        return VALUES[hint]
    members = get_args(hint)
    if get_origin(hint) is Literal:
        return st.sampled_from(members)
    return st.one_of(*(st.none() if member is NoneType else _values(member) for member in members))


@st.composite
def runs(draw: st.DrawFn) -> Run:
    """A whole record."""
    found = draw(steps())
    return Run(
        id=draw(st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,30}", fullmatch=True)),
        created=draw(st.datetimes().map(lambda t: t.isoformat() + "+00:00")),
        source=draw(st.sampled_from(["cell", "statement", "block", "script", "trace"])),
        settings=draw(whole(Settings)),
        device=draw(whole(Device)),
        environment=draw(whole(Environment)),
        steps=found,
        samples=Samples(tuple(draw(st.lists(series(), max_size=2)))),
        timeline=draw(st.none() | timelines()),
        wall_ns=draw(counts),
        outcome=draw(st.sampled_from(["completed", "stopped", "interrupted", "failed"])),
        step_source=draw(texts),
        outcome_detail=draw(texts),
        code=draw(texts),
        loader=draw(st.none() | whole(Loader)),
        memory=draw(whole(Memory)),
        observer=draw(whole(Observer)),
        missing=tuple(draw(st.lists(whole(Missing), max_size=2))),
        choices=tuple(draw(st.lists(whole(Choice), max_size=2))),
        traced_numbers=tuple(found.number[:2].tolist()),
    )


def tiny_run(id: str = "20250101-000000-aaaaaa", *, name: str = "", step_ms: float = 10.0, count: int = 6) -> Run:
    """A small fixed run: warm-up, measured and traced steps of equal length, one curve, a timeline of two spans."""
    step_ns = int(step_ms * 1e6)
    start = np.arange(count) * step_ns
    phase = [Phase.WARMUP, *[Phase.MEASURED] * (count - 2), Phase.TRACED]
    waits = {"data_wait_ns": step_ns // 2, "optimizer_ns": step_ns // 10}
    found = steps_between(start, start + step_ns, phase=phase[-count:], batch_count=1, sample_count=32, **waits)
    last = int(start[-1])
    timeline = Timeline(
        start_ns=np.array([last, last + 1000], np.int64),
        duration_ns=np.array([10**6, 10**5], np.int64),
        name_id=np.array([0, 1], np.int32),
        category=np.array([Category.CPU_OP, Category.CPU_OP], np.uint8),
        lane_id=np.zeros(2, np.int32),
        correlation=np.zeros(2, np.int64),
        names=("aten::linear", "aten::addmm"),
        lanes=(Lane("thread", 1, 1, "main"),),
        window_ns=(last, last + step_ns),
        training_lane=0,
        extra={"bytes": np.array([np.nan, 4.0])},
    )
    curve = Series("cpu_pct", "%", "CPU", "psutil", start, np.linspace(0, 100, count))
    return Run(
        id=id,
        created="2025-01-01T00:00:00+00:00",
        source="cell",
        settings=Settings(name=name),
        device=Device("cpu", "a CPU"),
        environment=Environment("3.11", "Linux", "a CPU", 2, 2.0, 2**33, {"torch": "2.13.0"}, "host"),
        steps=found,
        samples=Samples((curve,)),
        timeline=timeline,
        wall_ns=last + step_ns,
        outcome="completed",
        step_source="DataLoader",
        traced_numbers=(count - 1,),
    )


def assert_same(one: object, other: object, where: str = "run") -> None:
    """Field by field and bit by bit: NaN equals NaN, 0.0 is not -0.0, int is not float. Raises AssertionError."""
    assert type(one) is type(other), where
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        assert one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes(), where
    elif isinstance(one, Struct):
        for name in one.__struct_fields__:
            assert_same(getattr(one, name), getattr(other, name), f"{where}.{name}")
    elif isinstance(one, dict) and isinstance(other, dict):
        assert list(one) == list(other), where
        for key in one:
            assert_same(one[key], other[key], f"{where}[{key!r}]")
    elif isinstance(one, tuple) and isinstance(other, tuple):
        assert len(one) == len(other), where
        for index, (a, b) in enumerate(zip(one, other, strict=True)):
            assert_same(a, b, f"{where}[{index}]")
    else:
        assert repr(one) == repr(other), where
