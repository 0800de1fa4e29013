"""What many tests of knobs look at: one traced run of a cell as written, and what it was seen to use."""

from __future__ import annotations

import pytest

from gpulab.knobs.observation import Observation
from gpulab.run import Run
from tests.support.knob_cells import new_cell, observation_of, traced


@pytest.fixture(scope="session")
def seen() -> Observation:
    """What the baseline is seen to use."""
    return observation_of(new_cell())


@pytest.fixture(scope="session")
def plain_run() -> Run:
    """The baseline, with its trace."""
    run, _ = traced(new_cell())
    return run
