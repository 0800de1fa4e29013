"""Masks of spans are worked out once; those of a long window are kept as bits, and come back as they were."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings

from gpulab.run import Category, Timeline
from gpulab.timeline import spans
from tests.support.strategies import timelines


def masks(timeline: Timeline) -> list[spans.Mask]:
    return [
        spans.in_category(timeline, Category.CPU_OP),
        spans.named(timeline, spans.is_kernel_launch),
        spans.on_training_threads(timeline),
        spans.launches(timeline),
        spans.on_device(timeline, 0),
    ]


@settings(max_examples=40)
@given(timelines(max_count=40))
def test_masks_that_are_kept_as_bits_are_the_same(timeline: Timeline) -> None:
    spans._kept_of.clear()
    plain = masks(timeline)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(spans, "PACKED_FROM", -1)
        spans._kept_of.clear()
        first, again = masks(timeline), masks(timeline)
    spans._kept_of.clear()
    for one, two, three in zip(plain, first, again, strict=True):
        assert one.dtype == two.dtype == three.dtype == np.bool_
        assert np.array_equal(one, two) and np.array_equal(two, three)
