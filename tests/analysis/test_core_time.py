"""Time without a core: how much of it, and that it is a part of a step of its own."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gpulab.analysis import cores
from gpulab.analysis.breakdown import DEVICE_PARTS, breakdown
from gpulab.analysis.cores import core_share
from gpulab.run import CoreTimes, Run
from tests.support.core_readings import with_cores
from tests.support.rule_cases import loader, run_of
from tests.support.synthetic import cpu_case, gpu_case

EDGES = st.lists(st.integers(0, 10**9), min_size=2, max_size=12, unique=True).map(sorted)


def computing(**readings: float) -> Run:
    """A profiled run on a CPU."""
    return with_cores(cpu_case().run, **readings)  # type: ignore[arg-type]


def share_of(run: Run, part: str) -> float:
    account = breakdown(run)
    assert account is not None
    return account.share[part]


def test_waiting_for_a_core_is_a_part_of_its_own() -> None:
    before, after = breakdown(computing()), breakdown(computing(waited=0.6))
    assert before is not None and after is not None
    assert before.share["core_wait"] == 0
    assert after.share["data_wait"] == before.share["data_wait"] > 0  # the loop loads by itself, and waits there, too
    assert after.share["core_wait"] == pytest.approx(0.6 * (1 - before.share["data_wait"]), abs=0.01)
    assert after.share["compute"] < 0.6 * before.share["compute"]
    for one, other in zip(before.steps, after.steps, strict=True):
        assert sum(one.parts_ns.values()) == sum(other.parts_ns.values()) == other.end_ns - other.start_ns
        assert min(other.parts_ns.values()) >= 0
    assert after.core_wait_from and "core_wait" not in after.core_wait_from


def test_waiting_for_workers_is_no_wait_for_a_core() -> None:
    run = computing(waited=0.3)
    itself, workers = (replace(run, loader=loader(count)) for count in (0, 2))
    for loaded in (itself, workers):
        assert share_of(loaded, "data_wait") == pytest.approx(share_of(computing(), "data_wait"))
    assert share_of(itself, "core_wait") < share_of(workers, "core_wait")


def test_on_a_gpu_only_idle_time_is_a_wait_for_a_core() -> None:
    quiet = gpu_case().run
    starved = with_cores(quiet, waited=0.5)
    before, after = breakdown(quiet), breakdown(starved)
    assert before is not None and after is not None
    for part in DEVICE_PARTS:
        assert after.share[part] == before.share[part]
    assert after.share["core_wait"] <= 0.5 * (1 - before.typical_share(*DEVICE_PARTS)) + 0.01


def test_a_system_that_does_not_tell_leaves_the_parts() -> None:
    assert share_of(computing(waited=None), "core_wait") == 0  # type: ignore[arg-type]
    share = core_share(computing(waited=None))  # type: ignore[arg-type]
    assert share is not None and share.thread_wait_fraction is None and share.wait_us is None


def test_the_share_is_that_of_the_steps() -> None:
    run = with_cores(run_of(), computed=0.3, waited=0.7, got=0.5, others=1.4, pool_waiting=0.8, throttled=0.25)
    share = core_share(run)
    assert share is not None and share.pressure_fraction is None
    assert share.wait_us == pytest.approx(0.7 * 20e3, rel=0.02)
    times = (share.thread_cpu_fraction, share.thread_wait_fraction, share.got_cores, share.others_cores)
    assert times == pytest.approx((0.3, 0.7, 0.5, 1.4), abs=0.01)
    assert (share.pool_waiting, share.throttled_fraction) == pytest.approx((0.8, 0.25), abs=0.01)


def test_of_a_tenth_of_a_second_no_other_program_is_told() -> None:
    run = with_cores(run_of(), others=1.0)
    assert run.core_use is not None
    short = replace(run.core_use, t_ns=run.core_use.t_ns // 10**6)
    share = core_share(replace(run, core_use=short))
    assert share is not None and share.others_cores is None


@given(EDGES, st.floats(0, 1), st.floats(0, 1))
def test_windows_get_no_more_than_was_waited(edges: list[int], rate: float, skipped: float) -> None:
    t_ns = np.array(edges, np.int64)
    wait = np.concatenate(([0], np.cumsum(np.diff(t_ns) * rate))).astype(np.int64)
    zero = np.zeros(len(t_ns), np.int64)
    readings = CoreTimes(t_ns, zero, wait, zero, zero.astype(np.uint8))
    windows = np.stack((t_ns[:-1], t_ns[:-1] + (np.diff(t_ns) * skipped).astype(np.int64)), axis=1)
    waited = cores.waited_ns(readings, windows)
    assert (waited >= 0).all() and (waited <= windows[:, 1] - windows[:, 0]).all()
    assert waited.sum() <= wait[-1] + len(windows)


@given(st.lists(st.lists(st.integers(0, 10**9), min_size=4, max_size=4), min_size=1), st.floats(0, 3e9))
def test_moving_time_keeps_each_step_whole(rows: list[list[int]], taken_ns: float) -> None:
    totals = np.array(rows, np.int64)
    after = cores.moved(totals, [0, 1], 3, np.full(len(rows), taken_ns))
    assert (after >= 0).all() and (after.sum(axis=1) == totals.sum(axis=1)).all()
    assert (after[:, 2] == totals[:, 2]).all()
    left = np.maximum(totals[:, :2].sum(axis=1) - taken_ns, 0)
    assert np.abs(after[:, :2].sum(axis=1) - left).max() <= 4
