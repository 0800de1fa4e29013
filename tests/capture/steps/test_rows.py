"""The columns of closed steps stay rows, wherever an interrupt comes."""

from __future__ import annotations

from dataclasses import fields

import pytest

from gpulab.capture.steps.rows import OpenStep, Rows
from gpulab.run import Steps

COLUMNS = ("data_wait_ns", "optimizer_ns", "own_ns", "batches", "samples", "flags")


class Interrupted(OpenStep):
    """Raises where that attribute is read, as Ctrl-C may."""

    at = ""

    def __getattribute__(self, name: str) -> object:
        if name == object.__getattribute__(self, "at"):
            raise KeyboardInterrupt
        return super().__getattribute__(name)


@pytest.mark.parametrize("at", ["start_ns", *COLUMNS])
@pytest.mark.parametrize("goes_on", [True, False])
def test_an_interrupt_amid_a_row_leaves_whole_rows(at: str, goes_on: bool) -> None:
    rows = Rows()
    rows.append(OpenStep(0, data_wait_ns=1, batches=1, samples=4), 10, 2)
    broken = Interrupted(10, data_wait_ns=7, batches=1, samples=7)
    broken.at = at
    with pytest.raises(KeyboardInterrupt):
        rows.append(broken, 20, 2)
    assert len(rows) == 1
    if goes_on:
        rows.append(OpenStep(20, data_wait_ns=3, batches=1, samples=4), 30, 2)
    steps = rows.steps(0)
    lengths = {len(getattr(steps, field.name)) for field in fields(Steps) if field.name != "device_ns"}
    assert lengths == {1 + goes_on}
    assert steps.data_wait_ns.tolist() == [1, 3][: 1 + goes_on] and steps.sample_count.tolist() == [4, 4][: 1 + goes_on]
