"""The model of a data-parallel step: buckets on a link beside the backward pass, and the ways of an all-reduce."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gpulab.lessons.bucket_timeline import (
    Exchange,
    all_reduce_ms,
    play_exchange,
)

SETTINGS = st.builds(
    Exchange,
    gradients_mb=st.floats(0, 500),
    mb_per_s=st.floats(10, 10_000),
    latency_ms=st.floats(0, 20),
    buckets=st.integers(1, 64),
    backward_ms=st.floats(0, 300),
    forward_ms=st.floats(0, 300),
)


@given(SETTINGS)
def test_one_bucket_at_a_time_and_none_before_its_gradients(setting: Exchange) -> None:
    played = play_exchange(setting)
    assert len(played.link) == setting.buckets
    for before, after in pairwise(played.link):
        assert after.start >= before.start + before.length - 1e-6
    for number, bucket in enumerate(played.link, start=1):
        assert bucket.start >= setting.forward_ms + setting.backward_ms * number / setting.buckets - 1e-6
    last = played.link[-1]
    assert played.step_ms == pytest.approx(max(last.start + last.length, setting.computing_ms))
    assert played.step_ms == pytest.approx(setting.computing_ms + played.exposed_ms)


@given(SETTINGS, st.floats(0, 50))
def test_a_worse_link_makes_no_step_shorter(setting: Exchange, more: float) -> None:
    step_ms = play_exchange(setting).step_ms
    for worse in (
        replace(setting, latency_ms=setting.latency_ms + more),
        replace(setting, mb_per_s=setting.mb_per_s / (1 + more)),
        replace(setting, gradients_mb=setting.gradients_mb + more),
    ):
        assert play_exchange(worse).step_ms >= step_ms - 1e-6


def test_the_last_bucket_is_never_hidden() -> None:
    one = Exchange(buckets=1)
    assert play_exchange(one).exposed_ms == pytest.approx(one.bucket_ms)
    some = Exchange(buckets=4)
    assert some.bucket_ms <= play_exchange(some).exposed_ms < play_exchange(one).exposed_ms
    assert play_exchange(Exchange(buckets=40)).step_ms > play_exchange(some).step_ms, "each has its latency"


def test_ring_tree_and_one_rank_cost_what_the_formulas_say() -> None:
    def ms(way: str, ranks: int, size_mb: float) -> float:
        return all_reduce_ms(way, ranks, size_mb, latency_ms=0.02, mb_per_s=10_000)

    assert ms("ring", 2, 100) == pytest.approx(2 * 0.02 + 10)
    assert ms("ring", 1024, 100) == pytest.approx(2 * 1023 * 0.02 + 2 * 1023 / 1024 * 10)
    assert ms("tree", 1024, 0.1) == pytest.approx(20 * 0.02 + 0.02) and ms("tree", 1024, 0.1) < ms("ring", 1024, 0.1)
    assert ms("ring", 8, 100) < ms("tree", 8, 100) < ms("one rank adds up", 8, 100)
    assert all(ms(way, 1, 100) == 0 for way in ("ring", "tree", "one rank adds up"))
    with pytest.raises(ValueError, match="no such way: star"):
        ms("star", 2, 1)
