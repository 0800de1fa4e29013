"""What is said of a DataLoader from inside: against a dumber oracle, and from real cells whose slow part is planted."""

from __future__ import annotations

import json
import subprocess
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Struct
from msgspec.structs import asdict, astuple, replace

import gpulab
from gpulab.analysis.loader import LoadingFacts, loading, making, times_by_cause, waiting_for_core_us
from gpulab.run import Batches, Run, Steps
from gpulab.store.folders import Store
from gpulab.views.report.report import Report
from tests.support.fork_server import python_with_torch
from tests.support.paths import ROOT
from tests.support.synthetic import cpu_case

EPS = 1e-6
NANOSECOND = 1e-3  # in µs: batches of a few of them are rounded
MS = 1_000_000


class Made(Struct, frozen=True):
    """One batch, in ns."""

    worker: int
    start: int
    parts: tuple[int, int, int]
    cpu: tuple[float, float, float]  # share of each part
    core: int
    asked: int  # before its end; negative: after it
    hand: int
    pin: int
    items: int

    @property
    def end(self) -> int:
        return self.start + sum(self.parts)

    @property
    def answered(self) -> int:
        return max(self.end, self.asked_at) + self.hand + max(self.pin, 0)

    @property
    def asked_at(self) -> int:
        return max(0, self.end - self.asked)


made = st.builds(
    Made,
    worker=st.integers(0, 2),
    start=st.integers(0, 10**9),
    parts=st.tuples(*(st.integers(0, 10**7) for _ in range(3))),
    cpu=st.tuples(*(st.floats(0, 1) for _ in range(3))),
    core=st.integers(-1, 10**7),
    asked=st.integers(-(10**7), 10**7),
    hand=st.integers(0, 10**6),
    pin=st.sampled_from([-1, 0, 1000, 50_000]),
    items=st.integers(0, 64),
)


def run_of(rows: list[Made]) -> Run:
    """Without steps: then the batches after the first one count."""
    rows = sorted(rows, key=lambda r: r.answered)

    def column(values: list[int]) -> Any:
        return np.array(values, np.int64)

    parts = {}
    for i, part in enumerate(("read", "transform", "collate")):
        parts[f"{part}_ns"] = column([r.parts[i] for r in rows])
        parts[f"{part}_cpu_ns"] = column([int(r.cpu[i] * r.parts[i]) for r in rows])
    batches = Batches(
        **parts,
        worker=np.array([r.worker for r in rows], np.int32),
        start_ns=column([r.start for r in rows]),
        end_ns=column([r.end for r in rows]),
        item_count=column([r.items for r in rows]),
        core_wait_ns=column([r.core for r in rows]),
        asked_ns=column([r.asked_at for r in rows]),
        answered_ns=column([r.answered for r in rows]),
        pin_ns=column([r.pin for r in rows]),
    )
    empty = replace(cpu_case().run, steps=Steps.empty(), timeline=None, traced_numbers=())
    return replace(empty, batches=batches, loader=None)


def median_us(values: list[int]) -> float:
    return float(np.median(values)) / 1e3


@given(st.lists(made, min_size=4, max_size=12))
def test_figures_are_those_of_a_dumber_oracle(rows: list[Made]) -> None:
    known = loading(run_of(rows))
    assert known is not None
    counted = sorted(rows, key=lambda r: r.answered)[1:]
    assert known.batches == len(counted)
    assert known.batch_us == median_us([r.end - r.start for r in counted])
    together = max(1, sum(max(r.end - r.start, sum(r.parts)) for r in counted))
    for part, part_us in enumerate((known.read_us, known.transform_us, known.collate_us)):
        assert part_us == pytest.approx(known.batch_us * sum(r.parts[part] for r in counted) / together, abs=EPS)
    waited = [r for r in counted if r.asked_at < r.end]
    hand = [max(0, r.answered - r.end - max(0, r.pin)) for r in waited]
    assert known.hand_over_us == (median_us(hand) if waited else None)
    total = [r.answered - r.asked_at for r in counted]
    assert known.wait is not None
    assert known.wait.total_us == pytest.approx(median_us(total), abs=EPS) or sum(total) == 0
    for row in known.workers:
        mine = [r for r in counted if r.worker == row.worker]
        assert row.batches == len(mine) and row.batch_us == median_us([r.end - r.start for r in mine])
        parts = [median_us([r.parts[part] for r in mine]) for part in range(3)]
        assert [row.read_us, row.transform_us, row.collate_us] == parts
        handed = [max(0, r.answered - r.end - max(0, r.pin)) for r in mine if r.asked_at < r.end]
        assert row.hand_over_us == (median_us(handed) if handed else None)
        assert row.waited_fraction is None or 0 <= row.waited_fraction <= 1
    assert sum(row.batches for row in known.workers) == len(counted)


@given(st.lists(st.tuples(made, st.integers(1, 5)), min_size=4, max_size=9))
def test_a_row_counts_as_often_as_it_stands_for_batches(rows: list[tuple[Made, int]]) -> None:
    """As many batches like it would have said the same."""
    run = run_of([row for row, _ in rows])
    assert run.batches is not None
    counts = np.array([n for _, n in sorted(rows, key=lambda r: r[0].answered)], np.int64)
    counts[0] = 1  # the one that does not count
    some = loading(replace(run, batches=replace(run.batches, stands_for=counts)))
    repeated = {
        name: np.repeat(getattr(run.batches, name), counts) for name in asdict(run.batches) if name != "stands_for"
    }
    every = loading(replace(run, batches=Batches(**repeated)))
    assert some is not None and every is not None
    assert (some.batches, some.of_batches) == (len(rows) - 1, counts[1:].sum())
    for name in (n for n in LoadingFacts.__struct_fields__ if n not in ("batches", "workers", "wait")):
        assert getattr(some, name) == pytest.approx(getattr(every, name), abs=NANOSECOND)
    assert some.wait is not None and every.wait is not None
    assert astuple(some.wait) == pytest.approx(astuple(every.wait), abs=NANOSECOND)
    for one, other in zip(some.workers, every.workers, strict=True):
        its, others = (astuple(replace(w, idle_fraction=None)) for w in (one, other))
        assert its == pytest.approx(others, abs=NANOSECOND)


def test_a_worker_is_not_idle_where_its_batches_were_not_timed() -> None:
    """One in five was timed, each took its whole time."""
    rows = [Made(0, 50 * MS * i, (10 * MS, 0, 0), (1.0, 0.0, 0.0), 0, 0, 0, 0, 4) for i in range(20)]
    run = run_of(rows)
    assert run.batches is not None
    few = loading(replace(run, batches=replace(run.batches, stands_for=np.full(20, 5))))
    assert few is not None and few.workers[0].idle_fraction == pytest.approx(0.0)
    assert few.workers[0].items_per_s == pytest.approx(400)
    assert making(few).startswith("loading one batch takes 10.0 ms (median of 19 timed, out of 95)")


@given(st.lists(made, min_size=4, max_size=12), st.data())
def test_waiting_without_a_core_is_neither_work_nor_contention(rows: list[Made], data: Any) -> None:
    """One part only, so that the oracle needs no sharing out."""
    alone = [replace(r, parts=(r.parts[0] + 1, 0, 0), core=0) for r in rows]
    known = loading(run_of(alone))
    assert known is not None and known.transform_waited_fraction is None
    counted = sorted(alone, key=lambda r: r.answered)[1:]
    wall = sum(r.parts[0] for r in counted)
    cpu = sum(int(r.cpu[0] * r.parts[0]) for r in counted)
    assert known.read_waited_fraction == pytest.approx(1 - cpu / wall, abs=EPS)
    crowded = [replace(r, core=r.parts[0]) for r in alone]
    again = loading(run_of(crowded))
    assert again is not None and again.read_waited_fraction is not None
    assert again.read_waited_fraction == pytest.approx(0.0, abs=EPS)
    assert again.core_wait_fraction == pytest.approx(1 - cpu / wall, abs=EPS)


@given(st.lists(made, min_size=4, max_size=12))
def test_no_share_of_a_batch_is_more_than_the_batch(rows: list[Made]) -> None:
    """Reading that slept, work, putting together and the wait for a core are parts of one whole."""
    known = loading(run_of(rows))
    assert known is not None
    assert min(times_by_cause(known).values()) >= -EPS
    assert sum(times_by_cause(known).values()) + waiting_for_core_us(known) <= known.batch_us + EPS
    for fraction in (known.read_waited_fraction, known.transform_waited_fraction, known.core_wait_fraction):
        assert fraction is None or -EPS <= fraction <= 1 + EPS


def test_what_nothing_tells_is_unknown() -> None:
    quiet = Made(worker=0, start=0, parts=(10**6, 0, 0), cpu=(0.1, 0.0, 0.0), core=-1, asked=0, hand=0, pin=0, items=4)
    known = loading(run_of([quiet] * 8))
    assert known is not None
    assert known.read_waited_fraction is None and known.core_wait_fraction is None
    assert loading(cpu_case().run) is None
    assert loading(run_of([])) is None


TRAIN = """
import gpulab, torch
from torch.utils.data import DataLoader
from tests.support.loading_datasets import Burn, Choosing, Planted, slow_collate

loader = DataLoader({}, batch_size=4)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with gpulab.profile(show=False, trace=False):
    for _ in range(2):
        for batch in loader:
            model(batch).sum().backward()
            optimizer.step()
"""


def profiled(loader: str) -> Report:
    """A training on it, in a process of its own: CPU time of the tests' other threads would be the dataset's."""
    subprocess.run([python_with_torch(), "-c", TRAIN.format(loader)], cwd=ROOT, check=True)
    (stored,) = Store().list()
    return gpulab.report(Store().load(stored.id))


def inside(report: Report) -> LoadingFacts:
    assert report.facts.loading is not None
    return report.facts.loading


@pytest.mark.parametrize(
    ("loader", "part", "waits"),
    [
        ("Planted(32, wait_s=0.05), num_workers=0", "read", True),  # longer than for a core
        ("Planted(32, wait_s=0.05), num_workers=1", "read", True),
        ("Planted(32, work_s=0.02), num_workers=0", "read", False),
        ("Planted(32, transform=Burn(0.02)), num_workers=0", "transform", False),
        ("Planted(32, transform=Burn(0.02)), num_workers=1", "transform", False),
        ("Planted(48), num_workers=1, collate_fn=slow_collate", "collate", None),
    ],
)
def test_the_planted_part_is_the_slow_one(loader: str, part: str, waits: bool | None) -> None:
    report = profiled(loader)
    found = inside(report)
    own, others = _of_part(found, part)
    assert own > 3 * others
    assert found.wait is not None
    own, others = _of_part(found.wait, part)
    assert own >= 3 * others  # all 0: it waited for a core
    if waits is not None:
        fraction = getattr(found, f"{part}_waited_fraction")
        assert fraction is not None and (fraction > 0.5) is waits
    said = " ".join(report.text(full=True).split())
    assert "INSIDE THE DATALOADER" in said and (not waits or "blocked on I/O or locks" in said)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_slow_sampler_is_no_making_of_batches(workers: int) -> None:
    report = profiled(f"Planted(48), num_workers={workers}, sampler=Choosing(48, 0.01)")
    assert inside(report).handing_over > 0.5
    loader = report.facts.run.loader
    assert loader is not None and "def __iter__" in loader.sampler_line


def _of_part(times: Any, part: str) -> tuple[float, float]:
    """The time of that part, and of the others."""
    each = {name: getattr(times, f"{name}_us") for name in ("read", "transform", "collate")}
    return each[part], sum(each.values()) - each[part]


def test_it_is_in_every_view_and_in_the_store() -> None:
    report = profiled("Planted(48, wait_s=0.001, transform=Burn(0.001)), num_workers=2")
    figures = json.loads(json.dumps(report.json()))["loading"]
    assert figures["batches"] == inside(report).batches and len(figures["workers"]) == 2
    assert figures["wait"]["read_us"] >= 0
    for shown in (report.html(), report.fragment(), report.text(full=True)):
        assert "Inside the DataLoader".lower() in shown.lower() and "collate" in shown
    again = Store().load(report.facts.run.id)
    assert loading(again) == inside(report)
