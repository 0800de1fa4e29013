"""Whether a variable that was set was really read: by lines, by functions, by nobody, or not to be told."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from msgspec.structs import replace

from gpulab.knobs import variable_reads
from gpulab.knobs.knob import Verification
from gpulab.run import Loader, Run
from gpulab.tuning.code import Code
from gpulab.tuning.execute import Execution
from gpulab.tuning.resolve import ResolvedArm, Setting
from tests.support.synthetic import no_step_case

WITHOUT_WORKERS = replace(no_step_case().run, loader=None)
FUNCTION = "def f():\n    return x\n"
STEPS = (
    "import torch\no = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1)\nfor _ in range(3):\n    o.step()\n"
)


def told(cell: str, x: Any = 2, earlier: str = "", run: Run | None = None) -> Verification:
    """A cell in whose namespace `x` is 1 runs with another."""
    namespace: dict[str, Any] = {"x": 1}
    exec(earlier, namespace)
    written = Code.of_text(cell, namespace)
    found = written.variables.literals.get("x", 1)
    used = "x" in written.variables.used
    execution = Execution(written, ResolvedArm((Setting("x", x, None, found, used=used),)))
    with execution.applied() as code:
        code.run()
    assert sys.getprofile() is None
    return variable_reads.verify(x, found, used, execution.effects["x"], run or WITHOUT_WORKERS)


@pytest.mark.parametrize(
    ("cell", "earlier", "who"),
    [
        ("y = x", "", "your code read the variable"),
        ("x = 1\ny = [x]", "", "your code read the variable"),
        ("for i in range(3):\n    y = x", "", "your code read the variable"),
        ("eval('x')", "", "your code read the variable"),
        ("exec('y = x')", "", "your code read the variable"),
        ("f()", FUNCTION, "f ran, which reads the variable"),
        ("x = 1\n" + FUNCTION + "f()", "", "f ran, which reads the variable"),
        ("calls['f']()", FUNCTION + "calls = {'f': f}", "f ran, which reads the variable"),
        ("class A:\n    y = x", "", "A ran, which reads the variable"),
        (
            "net.f(0)",
            "class Net:\n    def f(self, y):\n        return x\nnet = Net()",
            "Net.f ran, which reads the variable",
        ),
        ("x = 1", "", ""),
        ("x = 1\nx = 2 + 3\ny = x", "", ""),
        ("if False:\n    y = x", "", ""),
        ("y = len('a') or f()", FUNCTION, ""),
        ("x = 1\n" + STEPS, "", ""),
    ],
)
def test_who_read_it(cell: str, earlier: str, who: str) -> None:
    nobody = Verification("no effect", "nothing read the variable while the code ran")
    assert told(cell, earlier=earlier) == (Verification("took effect", who) if who else nobody)


@pytest.mark.parametrize(("cell", "x"), [("y = x", 1), ("x = 64\ny = x", 64)])
def test_the_value_that_is_there_already(cell: str, x: int) -> None:
    assert told(cell, x=x) == Verification("no effect", f"the value is already {x}")


def test_functions_are_not_watched_longer_than_the_first_steps() -> None:
    late = told(STEPS + "f()", earlier=FUNCTION)
    assert late.state == "cannot tell" and "after the first steps" in late.evidence


def test_what_workers_read_cannot_be_told() -> None:
    loader = Loader("Items", 10, 2, 1, 2, False, False, 5, False)
    found = told("y = len('a') or f()", earlier=FUNCTION, run=replace(WITHOUT_WORKERS, loader=loader))
    assert found.state == "cannot tell" and "worker processes" in found.evidence


def test_anothers_profile_function_stays() -> None:
    def theirs(*_: object) -> None:
        pass

    sys.setprofile(theirs)
    try:
        with variable_reads.observing_reads({"x": 2}, {"x": 2}):
            assert sys.getprofile() is theirs
    finally:
        sys.setprofile(None)


def test_own_lines_assign_and_delete_in_the_namespace() -> None:
    namespace: dict[str, Any] = {"x": 2, "z": 1}
    with variable_reads.observing_reads(namespace, {"x": 2}) as (lines, _):
        Code.of_text("import math as m\ny = x\ndel z\ndef f():\n    return y\nw = f()", namespace).through(lines).run()
    assert namespace["w"] == 2 and "z" not in namespace and namespace["m"].pi


def test_a_function_as_code() -> None:
    namespace: dict[str, Any] = {"x": 2}
    exec(FUNCTION, namespace)
    code = Code.of_function(namespace["f"])
    with variable_reads.observing_reads(code.namespace, {"x": 2}) as (lines, logs):
        code.through(lines).run()
    assert logs["x"].notes == ["f ran, which reads the variable"]
