"""What a setting needs before each block is little: a block that begins after much work of ours is slower by it."""

from __future__ import annotations

from contextlib import ExitStack
from typing import ClassVar

import pytest
from msgspec.structs import asdict

from gpulab.knobs.variables import Variables
from gpulab.tuning.function_code import TextCode
from gpulab.tuning.trial import Setting


class Counting(TextCode, frozen=True):
    """Counts how often somebody looks for its variables."""

    looks: ClassVar[int] = 0

    @property
    def variables(self) -> Variables:
        Counting.looks += 1
        return super().variables


@pytest.mark.parametrize(("text", "within"), [("y = x", 2), ("x = 1\ny = x", 1)])
def test_variables_are_looked_for_once_not_in_each_block(text: str, within: int) -> None:
    namespace = {"x": 1}
    parsed = TextCode.parsed(text, namespace)
    code = Counting(**asdict(parsed))
    Counting.looks = 0
    setting = Setting(code, {}, "x=2", {"x": 2})
    for _ in range(3):
        with ExitStack() as stack:
            setting.applied(stack)
            assert namespace["x"] == within  # a literal of the code is replaced in its text
        assert namespace["x"] == 1
    assert Counting.looks == 1
