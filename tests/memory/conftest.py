"""Fixtures of the tests of memory: searches for live tensors need not walk what earlier tests have imported."""

from __future__ import annotations

import gc

import pytest


@pytest.fixture(autouse=True, scope="module")
def few_objects() -> None:
    gc.collect()
    gc.freeze()
