"""The making of batches, timed where it happens: by real workers, however they are started."""

from __future__ import annotations

import copy
import functools
import itertools
import pickle
import random
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, _DatasetKind
from torch.utils.data._utils import pin_memory

import gpulab
from gpulab.capture import batch_clock, fetch_clock, torch_hooks
from gpulab.capture import fetch_clock as loading_worker
from gpulab.capture.fetch_clock import BUDGET, DISTURBANCE, FIRST, ComputeThreads, FetchClock, FetchPace
from gpulab.capture.loading_rows import Rows, SharedRows, batches_of
from gpulab.knobs.changed_loader import overriding
from gpulab.knobs.knob import KnobEffects
from gpulab.run import Batches, Run
from tests.support.leftovers import own_frames
from tests.support.loading_datasets import (
    AtOnce,
    Burn,
    Drawing,
    Dying,
    Failing,
    Planted,
    StandIns,
    Stream,
    offset,
)

PARTS = ("read_ns", "transform_ns", "collate_ns")


def end_workers(loader: DataLoader[Any]) -> None:
    batches: Any = loader._iterator
    batches._shutdown_workers()


def trained(loader: Any, epochs: int = 1, take: int | None = None) -> tuple[Run, list[torch.Tensor]]:
    """A run that trains a little on the loader, and the batches that it had."""
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    had = []
    with gpulab.profile(show=False, save=False, trace=False) as p:
        for _ in range(epochs):
            for i, batch in enumerate(loader):
                if i == take:
                    break
                had.append(batch.clone())
                model(batch.reshape(-1, 4)).sum().backward()
                optimizer.step()
    assert p.run is not None
    p.run.check()
    return p.run, had


def timed(run: Run) -> Batches:
    assert run.batches is not None, run.missing
    b = run.batches
    wall = b.end_ns - b.start_ns
    assert (sum(getattr(b, part) for part in PARTS) <= wall).all(), "the parts exceed the batch"
    for part in PARTS:
        cpu = getattr(b, part.replace("_ns", "_cpu_ns"))
        assert ((cpu >= 0) & (cpu <= getattr(b, part))).all()
    had = b.answered_ns >= 0
    assert (b.answered_ns[had] >= b.end_ns[had]).all(), "the loop has it before it is made"
    assert (b.answered_ns[had] >= b.asked_ns[had]).all()
    return b


@pytest.mark.parametrize(("workers", "method"), [(0, None), (2, "fork"), (2, "spawn")])
def test_every_batch_is_timed_where_it_is_made(workers: int, method: str | None) -> None:
    dataset = Planted(24, transform=Burn(0.005))
    init = offset if workers else None
    options: dict[str, Any] = {"num_workers": workers, "multiprocessing_context": method, "worker_init_fn": init}
    loader = DataLoader(dataset, batch_size=4, **options)
    run, had = trained(loader)
    b = timed(run)
    assert len(b) == len(run.steps) == 6 and set(b.item_count.tolist()) == {4}
    assert set(b.worker.tolist()) == (set(range(workers)) if workers else {-1})
    assert (b.answered_ns >= 0).all() and (np.diff(b.answered_ns) > 0).all()
    assert max(PARTS, key=lambda part: float(np.median(getattr(b, part)))) == "transform_ns"
    values = torch.cat(had)[:, 0].tolist()
    assert values == [i + (100.0 if workers else 0.0) for i in range(24)], "the user's worker_init_fn did its work"
    assert not [m for m in run.missing if m.key == "workers_inside"]
    assert run.loader is not None and (run.loader.worker_threads is None) == (not workers)
    assert loader.worker_init_fn is init
    assert type(dataset.transform) is Burn


def three_threads(worker: int) -> None:
    torch.set_num_threads(3)


@pytest.mark.parametrize(("method", "init", "threads"), [("fork", None, 1), ("spawn", three_threads, 3)])
def test_how_many_threads_a_worker_computes_with(method: str, init: Callable[[int], None] | None, threads: int) -> None:
    loader = DataLoader(Planted(24), batch_size=4, num_workers=2, multiprocessing_context=method, worker_init_fn=init)
    run, _ = trained(loader)
    assert run.loader is not None and run.loader.worker_threads == threads


@pytest.mark.parametrize("anew", [False, True])
def test_whether_the_loop_makes_its_loader_anew(anew: bool) -> None:
    dataset = Planted(24)
    first = DataLoader(dataset, batch_size=4)
    epochs = itertools.chain.from_iterable(DataLoader(dataset, batch_size=4) if anew else first for _ in range(3))
    run, _ = trained(epochs)
    assert run.loader is not None and run.loader.remade is anew and run.loader.batch_tensors == 1


@pytest.mark.parametrize(
    ("workers", "item_s", "timed_batches"), [(0, 0.0001, {0, 4, 8}), (1, 0.0001, {0, 4, 8}), (0, 0.003, set(range(12)))]
)
def test_every_fourth_batch_of_short_items_times_transforms(
    workers: int, item_s: float, timed_batches: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    if item_s < 0.001:
        monkeypatch.setattr(fetch_clock, "_SHORT_NS", 10**9)  # also on a busy machine
    data = StandIns(48, transform=Burn(item_s))
    run, had = trained(DataLoader(data, batch_size=4, num_workers=workers))
    assert {i for i, batch in enumerate(had) if batch.any()} == timed_batches
    b = timed(run)
    assert len(b) == 12 and (b.transform_ns > 0).all()
    assert isinstance(data.transform, Burn) and type(data.transform) is Burn


@given(st.integers(50_000, 50_000_000), st.integers(5_000, 100_000))
def test_later_batches_are_timed_within_the_budget(between_ns: int, own_ns: int) -> None:
    pace, now_ns, timed, stands_for = FetchPace(), 0, [], 0
    for i in range(40_000):
        now_ns += between_ns
        if pace.skip:
            pace.skip -= 1
            continue
        stands_for += pace.distance
        timed.append(i)
        pace.add(own_ns, now_ns)
    assert timed[:FIRST] == list(range(FIRST)) and stands_for == timed[-1] + 1
    later = len(timed) - FIRST
    assert later * DISTURBANCE * own_ns <= 1.3 * BUDGET * now_ns or DISTURBANCE * own_ns > 40_000 * BUDGET * between_ns
    assert (later == 40_000 - FIRST) is (DISTURBANCE * own_ns <= BUDGET * between_ns) or later > 20_000


@pytest.mark.parametrize("workers", [0, 2])
def test_a_row_stands_for_the_batches_that_were_not_timed(workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def every_fifth_after_four(pace: FetchPace, own_ns: int, now_ns: int) -> None:
        pace._timed += 1
        if pace._timed >= 4:
            pace.distance, pace.skip = 5, 4

    monkeypatch.setattr(FetchPace, "add", every_fifth_after_four)
    run, had = trained(DataLoader(Planted(800), batch_size=2, num_workers=workers), epochs=2)
    b = timed(run)
    assert len(had) == 800 and torch.cat(had)[:800, 0].tolist() == list(range(800))
    assert set(b.stands_for[:4].tolist()) == {1} and set(b.stands_for.tolist()) == {1, 5}
    assert len(b) < 200 and 780 < b.stands_for.sum() <= 800
    for worker in set(b.worker.tolist()):
        assert (np.diff(b.start_ns[b.worker == worker]) > 0).all()
    assert run.steps.batch_count.sum() == 800, "each batch is counted, whether timed or not"


@given(st.lists(st.tuples(st.integers(0, 2), st.booleans(), st.integers(0, 999), st.integers(0, 999)), min_size=1))
def test_untimed_transforms_take_the_share_of_the_last_timed(rows: list[tuple[int, bool, int, int]]) -> None:
    table = []
    for i, (worker, looked, read, transform) in enumerate(rows):
        times = (read, transform) if looked else (read + transform, -1)
        cpu = (read // 2, transform // 2) if looked else ((read + transform) // 2, -1)
        row = (worker, 2_000 * i, 2_000 * i + 1_998, times[0], times[1], 0, cpu[0], cpu[1], 0, 4, -1)
        table.append((*row, 2_000 * i, 2_000 * i + 1_999, 0, 1))
    b, _ = batches_of([np.array(table)], 0, 10**9, 1000)
    assert b is not None
    last: dict[int, float] = {}
    for worker, looked, read, transform in rows:
        if looked and worker not in last:
            last[worker] = transform / max(read + transform, 1)
    for i, (worker, looked, read, transform) in enumerate(rows):
        assert b.read_ns[i] + b.transform_ns[i] == read + transform
        assert 0 <= b.transform_cpu_ns[i] <= b.transform_ns[i] and 0 <= b.read_cpu_ns[i] <= b.read_ns[i]
        if looked:
            assert b.transform_ns[i] == transform
            last[worker] = transform / max(read + transform, 1)
        else:
            assert abs(b.transform_ns[i] - last.get(worker, 0.0) * (read + transform)) <= 1


@pytest.mark.parametrize("workers", [0, 2])
def test_random_numbers_and_data_are_those_of_an_unprofiled_run(workers: int) -> None:
    def data() -> Any:
        torch.manual_seed(3)
        np.random.seed(3)
        random.seed(3)
        return DataLoader(Drawing(16), batch_size=4, shuffle=True, num_workers=workers)

    loader = data()
    plain = [batch.clone() for batch in loader] + [torch.rand(3)]
    loader = data()
    run, had = trained(_without_model_draws(loader, torch.get_rng_state()))
    had.append(torch.rand(3))
    assert len(timed(run)) == 4
    assert all(torch.equal(a, b) for a, b in zip(plain, had, strict=True))


def _without_model_draws(loader: Any, state: torch.Tensor) -> Iterator[Any]:
    """The model of `trained` draws its weights: put that back before the loader begins."""
    torch.set_rng_state(state)
    yield from loader


@pytest.mark.parametrize("workers", [0, 2])
def test_other_kinds_of_datasets(workers: int) -> None:
    make = functools.partial(DataLoader, num_workers=workers)
    run, had = trained(make(Stream(24, Burn(0.002)), batch_size=4))
    b = timed(run)
    assert len(b) == len(run.steps) == len(had) and b.item_count.sum() == 24
    assert (b.transform_ns > 0).all(), "a transform that a generator has taken at its beginning"
    run, had = trained(make(Planted(12), batch_size=None))
    assert len(timed(run)) == 12 and torch.equal(had[3], torch.full((4,), 3.0))
    assert set(timed(run).item_count.tolist()) == {1}
    run, had = trained(make(AtOnce(12), batch_size=4))
    assert len(timed(run)) == 3 and torch.cat(had)[:, 0].tolist() == list(range(12))


def test_transforms_within_a_subset_and_of_two_names_are_found() -> None:
    inner = Planted(20, transform=Burn(0.003))
    parts = [torch.utils.data.Subset(inner, range(8)), Planted(4, transform=Burn(0.003))]
    both: torch.utils.data.ConcatDataset[Any] = torch.utils.data.ConcatDataset(parts)
    assert (timed(trained(DataLoader(both, batch_size=4))[0]).transform_ns > 0).all()


def test_what_fails_in_a_worker_says_what_it_says_without_us() -> None:
    options: dict[str, Any] = {"num_workers": 1, "multiprocessing_context": "spawn", "worker_init_fn": offset}
    loader = DataLoader(Failing(16, transform=Burn()), batch_size=4, **options)
    with pytest.raises(ValueError, match="item 9 is broken") as plain:
        list(loader)
    with pytest.raises(ValueError, match="item 9 is broken") as profiled:
        trained(loader)
    assert str(profiled.value) == str(plain.value)
    assert "loading_datasets.py" in str(profiled.value) and not own_frames(str(profiled.value))


def test_batches_after_one_that_failed_keep_their_own_times() -> None:
    with gpulab.profile(show=False, save=False, trace=False) as p:
        it, had = iter(DataLoader(Failing(32), batch_size=4, num_workers=1)), 0
        for _ in range(8):
            with suppress(ValueError):
                next(it)
                had += 1
        assert next(it, None) is None
    assert p.run is not None and had == 7
    b = timed(p.run)
    assert len(b) == 7 and (b.answered_ns >= 0).all()


def test_a_worker_that_dies_loses_no_batch_before_it() -> None:
    loader = DataLoader(Dying(40), batch_size=4, num_workers=1, prefetch_factor=1)
    with pytest.raises(RuntimeError, match="exited"), gpulab.profile(show=False, save=False, trace=False) as p:
        list(loader)
    assert p.run is not None and any(m.key == "loader" for m in p.run.missing)
    assert len(timed(p.run)) == 5


def test_persistent_workers_are_timed_in_each_epoch_and_run() -> None:
    loader = DataLoader(Planted(24), batch_size=4, num_workers=2, persistent_workers=True)
    first, _ = trained(loader, epochs=3, take=4)
    assert (timed(first).answered_ns >= 0).sum() == 15, "the loop asks for a fifth one before it breaks off"
    list(loader)  # between two runs nobody listens
    second, had = trained(loader)
    b = timed(second)
    assert len(b) == 6 and (b.answered_ns >= 0).all() and b.start_ns.min() >= 0
    assert torch.cat(had)[:, 0].tolist() == list(range(24))
    end_workers(loader)


def second_is_late(worker: int) -> None:
    """It begins with the first epoch's batches when the second epoch has begun."""
    time.sleep(worker * 0.5)


def test_unfinished_batches_of_a_broken_epoch_are_dropped() -> None:
    options: dict[str, Any] = {"num_workers": 2, "prefetch_factor": 4, "persistent_workers": True}
    loader = DataLoader(Planted(40, wait_s=0.01), batch_size=2, worker_init_fn=second_is_late, **options)

    def broken_off() -> Iterator[Any]:
        yield from itertools.islice(loader, 1)
        yield from loader

    b = timed(trained(broken_off())[0])
    assert (b.answered_ns >= 0).sum() == 1 + 20 and len(b) > 21
    end_workers(loader)


def test_workers_older_than_the_run_are_not_timed() -> None:
    loader = DataLoader(Planted(24), batch_size=4, num_workers=1, persistent_workers=True)
    list(loader)
    run, had = trained(loader)
    assert run.batches is None and len(had) == 6
    (said,) = (m for m in run.missing if m.key == "workers_inside")
    assert "before this run" in said.reason
    end_workers(loader)


def test_an_iterator_of_before_is_timed_without_workers() -> None:
    begun = iter(DataLoader(Planted(24), batch_size=4))
    next(begun)
    assert len(timed(trained(begun)[0])) == 5


def test_batches_out_of_order_are_matched_by_worker() -> None:
    run, _ = trained(DataLoader(Planted(40, wait_s=0.001), batch_size=2, num_workers=2, in_order=False))
    assert (timed(run).answered_ns >= 0).all()


def test_only_the_loader_that_feeds_the_steps_is_in_the_record() -> None:
    feeding = DataLoader(Planted(24), batch_size=4)
    other = DataLoader(Planted(9), batch_size=3, num_workers=1)

    def both() -> Iterator[Any]:
        yield from feeding
        list(other)

    b = timed(trained(both())[0])
    assert len(b) == 6 and set(b.item_count.tolist()) == {4}


def test_a_copy_that_a_knob_makes_is_timed() -> None:
    loader = DataLoader(Planted(24), batch_size=4)

    def overridden() -> Iterator[Any]:
        with overriding("num_workers", 2, KnobEffects()):
            yield from loader

    assert set(timed(trained(overridden())[0]).worker.tolist()) == {0, 1}
    assert loader.worker_init_fn is None


def test_nothing_is_left() -> None:
    dataset = Planted(24, transform=Burn())
    transform, create, pin = dataset.transform, _DatasetKind.create_fetcher, pin_memory.pin_memory
    single = DataLoader(dataset, batch_size=4)
    list(DataLoader(dataset, batch_size=4, num_workers=1))  # the first workers of a process leave torch's own files
    before = psutil.Process().num_fds()
    kept: Any = None
    with gpulab.profile(show=False, save=False, trace=False):
        kept = iter(single)
        next(kept)
        several: Any = iter(DataLoader(dataset, batch_size=4, num_workers=1, worker_init_fn=offset))
        next(several)
        assert several._worker_init_fn is offset
    assert dataset.transform is transform and _DatasetKind.create_fetcher is create
    assert pin_memory.pin_memory is pin
    assert set(vars(kept._dataset_fetcher)) == {"dataset", "auto_collation", "collate_fn", "drop_last"}
    assert kept._dataset_fetcher.collate_fn is single.collate_fn
    assert type(next(kept)) is torch.Tensor and next(several) is not None
    several._shutdown_workers()
    del several
    until = time.monotonic() + 60  # the thread that feeds a queue of torch's closes its pipe when it comes to its end
    while psutil.Process().num_fds() > before + 1 and time.monotonic() < until:
        time.sleep(0.01)
    assert psutil.Process().num_fds() <= before + 1


@pytest.mark.parametrize("broken", ["WorkerFetchClock", "_begin", "_new_row"])
def test_a_fault_of_ours_in_a_worker_is_not_the_users(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> Any:
        raise ZeroDivisionError("ours")

    if broken == "WorkerFetchClock":
        monkeypatch.setattr(loading_worker, broken, fail)
    else:
        monkeypatch.setattr(FetchClock, broken, fail)
    run, had = trained(DataLoader(Planted(24), batch_size=4, num_workers=2, multiprocessing_context="fork"))
    assert torch.cat(had)[:, 0].tolist() == list(range(24))
    assert run.batches is None and [m.key for m in run.missing] == ["workers_inside"]


def test_a_torch_without_these_methods_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.utils.data import dataloader

    absent = ("torch.utils.data.dataloader", "_SingleProcessDataLoaderIter", "_process_data", "wrap_process")
    monkeypatch.setattr(batch_clock, "LOADING", (*torch_hooks.LOADING, absent))
    run, had = trained(DataLoader(Planted(24), batch_size=4))
    assert len(had) == 6 and [m.key for m in run.missing] == ["workers_inside"]
    assert dataloader._SingleProcessDataLoaderIter._next_data.__module__ == "torch.utils.data.dataloader"


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_where_the_system_has_no_memory_without_a_name(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("os.memfd_create")
    loader = DataLoader(Planted(24), batch_size=4, num_workers=1, multiprocessing_context=method)
    assert len(timed(trained(loader)[0])) == 6


def test_of_too_many_batches_the_newest_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    for workers in (0, 2):
        monkeypatch.setattr(batch_clock, "MOST_BATCHES", 6)
        run, _ = trained(DataLoader(Planted(80), batch_size=2, num_workers=workers))
        b = timed(run)
        assert len(run.steps) == 40 and len(b) <= 6
        assert b.answered_ns.max() > run.steps.end_ns[-3]
        assert any(c.what == "batches timed inside the DataLoader" for c in run.choices)


def test_a_stand_in_is_what_it_stands_for() -> None:
    users = Burn(0.25)
    ours: Any = fetch_clock._StandIn(users, fetch_clock._Spent())
    assert isinstance(ours, Burn) and ours.seconds == 0.25 and callable(ours) and ours == users
    ours.seconds = 0.5
    assert users.seconds == 0.5 and repr(ours) == repr(users) and hash(ours) == hash(users)
    assert type(copy.copy(ours)) is Burn and type(copy.deepcopy(ours)) is Burn
    assert type(pickle.loads(pickle.dumps(ours))) is Burn
    assert bool(fetch_clock._StandIn([], fetch_clock._Spent())) is False


@given(st.integers(1, 5), st.lists(st.integers(0, 99), max_size=20), st.integers(0, 20))
def test_rows_are_the_newest_in_shared_memory_too(most: int, values: list[int], first: int) -> None:
    shared = SharedRows(2, 3, most)
    for rows in (shared.of_worker[1], Rows.here(3, most)):
        for value in values:
            rows.append((value, 0, -value))
        count = len(values)
        newest = list(enumerate(values))[-most:] if values else []
        assert (rows.most, rows.count) == (most, count) and shared.of_worker[0].count == 0
        assert rows.between(first, count).tolist() == [[v, 0, -v] for i, v in newest if i >= first]
        numbers = np.arange(-2, count + 2)
        expected = [dict(newest).get(i, None) for i in numbers.tolist()]
        assert rows.numbered(numbers).tolist() == [[-1] * 3 if v is None else [v, 0, -v] for v in expected]


def timed_here() -> tuple[Any, FetchClock]:
    """An iterator, and the clock of its next batch."""
    loader: Any = iter(DataLoader(Planted(8), batch_size=4))
    clock = FetchClock(loader._dataset_fetcher, loader._dataset, FetchPace(), ComputeThreads())
    clock.put_in()
    return loader, clock


def one_batch() -> tuple[int, ...]:
    """What is timed of it."""
    loader, clock = timed_here()
    next(loader)
    clock.close()
    assert clock.row is not None
    return clock.row


def test_what_timing_a_batch_takes_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look at the clock is 1 ns: own are those before the batch's begin and after its end."""
    ticks = itertools.count()
    monkeypatch.setattr(fetch_clock, "perf_counter_ns", lambda: next(ticks))
    loader, clock = timed_here()
    entered = next(ticks)
    next(loader)
    whole = next(ticks) - entered - 1
    clock.close()
    assert clock.row is not None
    start, end, *_ = clock.row
    assert clock.own_ns == whole - 1 - (end - start) > 0


def test_what_the_trainings_threads_use_is_no_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, wall = itertools.count(step=1_000_000), itertools.count(step=1_000_000)  # a core is used all the time
    monkeypatch.setattr(fetch_clock, "process_time_ns", lambda: next(cpu))
    monkeypatch.setattr(fetch_clock, "perf_counter_ns", lambda: next(wall))
    for spun_ns, worked in ((0, True), (10**12, False)):
        monkeypatch.setattr(ComputeThreads, "end", lambda self, spun_ns=spun_ns: spun_ns)
        _, _, read_ns, _, collate_ns, read_cpu_ns, _, collate_cpu_ns, *_ = one_batch()
        assert (read_cpu_ns > 0.5 * read_ns > 0) is worked and (collate_cpu_ns > 0) is worked and collate_ns > 0
