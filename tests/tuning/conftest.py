"""Fixtures of experiments: the names that a cell finds, and interrupts that come."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any

import pytest

from tests.tuning.cells import SETUP


@pytest.fixture
def names() -> dict[str, Any]:
    """A namespace as a notebook's, after the cells before the training."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    exec(SETUP, namespace)
    return namespace


@pytest.fixture
def interrupts_come() -> Iterator[None]:
    """Whatever started the tests may ignore them: a shell's background job does."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
