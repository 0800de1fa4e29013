"""The knob for compute threads: set for the run, put back after it, seen through where the cell sets them itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

import pytest

from gpulab.knobs.catalogue import KNOBS
from gpulab.knobs.observe.observation import Observation
from gpulab.run import Device
from gpulab.tuning.record import Experiment
from tests.support import synthetic

torch = pytest.importorskip("torch")

KNOB = KNOBS["compute_threads"]
SCENE = Observation(Device("cpu", "CPU"), compute_threads=2)
RUN = synthetic.cpu_case().run


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_it_is_set_for_the_run_and_put_back_whatever_happens() -> None:
    with suppress(KeyError), KNOB.applied(1):
        assert torch.get_num_threads() == 1
        raise KeyError
    assert torch.get_num_threads() == 2


def test_it_took_effect_unless_the_code_sets_its_own() -> None:
    with KNOB.applied(1) as log:
        torch.ones(3).sum()
    assert KNOB.verify(SCENE, 1, log, RUN).state == "took effect"
    with KNOB.applied(1) as log:
        torch.set_num_threads(3)
    found = KNOB.verify(SCENE, 1, log, RUN)
    assert found.state == "no effect" and "had 3 at the end" in found.evidence
    assert torch.get_num_threads() == 2


def test_the_record_of_a_run_holds_the_threads_it_was_given() -> None:
    import gpulab

    weights = torch.ones(8, requires_grad=True)

    def train() -> None:
        optimizer = torch.optim.SGD([weights], lr=0.1)
        for _ in range(12):
            (weights * 2).sum().backward()
            optimizer.step()

    found = gpulab.experiment(train, {"compute_threads": [1]}, pairs=2, save=False, show=False)
    assert isinstance(found.result, Experiment)
    threads = [side.facts.run.environment.compute_threads for side in found.result.sides if side.facts is not None]
    assert threads == [2, 1] and torch.get_num_threads() == 2
