"""What every test of the lessons needs."""

from __future__ import annotations

import math

import pytest


@pytest.fixture(autouse=True)
def undisturbed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether an answer is slow does not depend here on what else this machine does."""
    monkeypatch.setattr("gpulab.lessons.pairs.LEAST_OTHERS", math.inf)
