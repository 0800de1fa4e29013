"""Variables of a cell as knobs: which there are, what they can be set to, and that nothing of it stays."""

from __future__ import annotations

import ast
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpulab.errors import UsageError
from gpulab.knobs import variables
from gpulab.knobs.variables import Variables, fitted, replace_literals, setting_names

SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
PLAIN = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3) | st.tuples(inner, inner), max_leaves=5)


def of(cell: str, namespace: dict[str, Any] | None = None) -> Variables:
    return Variables.of(ast.parse(cell), namespace if namespace is not None else {})


def ran(text: str, **names: Any) -> dict[str, Any]:
    """A namespace in which a cell ran."""
    namespace: dict[str, Any] = dict(names)
    exec(text, namespace)
    return namespace


# -- which ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cell", "literals"),
    [
        ("hidden = 64\nf(hidden)", {"hidden": 64}),
        ("x = -1.5\ny: float = 2.0\nz: int", {"x": -1.5, "y": 2.0}),
        ("a, b = 1, 'x'\n(c, d) = [None, (1, [2])]", {"a": 1, "b": "x", "c": None, "d": (1, [2])}),
        ("a, *b = 1, 2\na = b = 1", {}),
        ("a = {1: 2}\nb = 2 ** 3\nc = b''\nd = f()", {}),
        ("print(a)\na = 1", {}),
        ("a += 1\na = 1", {}),
        ("if x:\n    a = 1", {}),
        ("def f():\n    return a\na = 1\nf()", {"a": 1}),
        ("def f():\n    return a\nf()\na = 1", {}),
        ("class Net:\n    def f(self):\n        return a\na = 1\nNet()", {"a": 1}),
        ("class Net:\n    b = a\na = 1", {}),
        ("x = [a for _ in y]\na = 1", {}),
        ("a = 1\na = 2\nf(a)\na = 3", {"a": 2}),
        ("x.a = 1\ny['a'] = 2", {}),
    ],
)
def test_literals_assigned_at_the_top_before_they_are_read(cell: str, literals: dict[str, Any]) -> None:
    assert variables.Variables.of(ast.parse(cell), {}).literals == literals


def test_free_names_are_those_not_bound_before() -> None:
    cell = "for epoch in range(epochs):\n    loss = net(x, epoch)\nlr = 1\nf(lr, loss)"
    read = variables.Variables.of(ast.parse(cell), {}).read
    assert {"epochs", "net", "x", "f"} <= read and not {"lr", "loss", "epoch"} & read


@pytest.mark.parametrize(
    "earlier",
    [
        "def train():\n    return hidden",
        "def build():\n    return hidden\ndef train():\n    return build()",
        "train = lambda: [hidden for _ in range(1)]",
        "class train:\n    def __init__(self):\n        self.x = hidden",
        "class Trainer:\n    def __call__(self):\n        return hidden\ntrain = Trainer()",
        "class train:\n    @staticmethod\n    def f():\n        def g():\n            return hidden",
        "import functools\n"
        "def noted(f):\n"
        "    @functools.wraps(f)\n"
        "    def g():\n"
        "        return f()\n"
        "    return g\n"
        "@noted\n"
        "def train():\n"
        "    return hidden",
    ],
)
def test_a_name_read_by_what_another_cell_defined_counts(earlier: str) -> None:
    namespace = ran(earlier, hidden=64)
    found = of("train()", namespace)
    assert found.has("hidden") and found.present("hidden") == 64 and "hidden" in found.names
    with pytest.raises(UsageError, match="hidden is 64 in the notebook, but this code does not appear to read it"):
        of("x = 1", namespace).has("hidden")


@pytest.mark.parametrize(
    ("held", "counts"),
    [
        ("train = Net()", False),
        ("train = [Net()]", False),
        ("train = Net", True),
        ("train = Net().again", True),
        ("class Kind(Net): pass\ntrain = {'a': Kind()}", False),
    ],
)
def test_what_an_object_read_when_it_was_built_is_read_no_more(held: str, counts: bool) -> None:
    built = "class Net:\n    def __init__(self):\n        self.x = hidden\n    def again(self):\n        return "
    namespace = ran(f"{built}{'hidden' if 'again' in held else 0}\n{held}", hidden=64)
    assert ("hidden" in of("train", namespace).names) is counts


@pytest.mark.parametrize("held", ["[Net()]", "{'a': (Net(),)}", "partial(print, Net().read)", "Holder(Net())"])
def test_what_an_object_holds_may_read_names(held: str) -> None:
    text = "from functools import partial\nclass Net:\n    def read(self):\n        return hidden\n"
    text += "class Holder:\n    def __init__(self, held):\n        self.held = held\n"
    assert of("train", ran(f"{text}train = {held}", hidden=64)).has("hidden")


def test_a_value_read_before_its_assignment_is_no_literal() -> None:
    namespace = ran("def build():\n    return hidden", hidden=64)
    assert of("net = build()\nhidden = 3\nf(hidden)", namespace).present("hidden") == 64
    assert of("hidden = 3\nnet = build()", namespace).present("hidden") == 3


def test_functions_of_other_modules_read_no_names_of_the_cell() -> None:
    namespace = {"median": __import__("statistics").median, "hidden": 3, "sorted": 1}
    assert of("median(hidden)", namespace).names == ("hidden",)


def test_names_of_a_function_are_its_globals() -> None:
    namespace = ran(
        "def build():\n    return hidden\ndef train(x=1):\n    y = 2\n    return build() + depth", hidden=8, depth=2
    )
    assert Variables.of_function(namespace["train"]).names == ("depth", "hidden")


def test_what_is_no_plain_literal_cannot_be_set() -> None:
    found = of("net(x, hidden)", {"net": ast.parse("1"), "hidden": 3})
    with pytest.raises(UsageError, match=r"net has type Module: only a number"):
        found.has("net")
    assert found.names == ("hidden",)
    assert not found.has("x")  # nothing has defined it
    assert not found.has("other")
    with pytest.raises(UsageError, match=r"x cannot be set: the code neither reads it .* e\.g\. x = 1"):
        found.present("x")


# -- replacing ------------------------------------------------------------------------------------------------------


@settings(max_examples=40)
@given(PLAIN)
def test_any_plain_value_can_stand_in_as_parsed(value: Any) -> None:
    new = replace_literals(ast.parse("hidden = 64"), {"hidden": value})
    namespace: dict[str, Any] = {}
    exec(compile(new, "cell", "exec"), namespace)
    assert namespace["hidden"] == value and type(namespace["hidden"]) is type(value)
    if "inf" not in repr(value):
        assert ast.dump(new) == ast.dump(ast.parse(f"hidden = {value!r}"))


def test_the_given_tree_and_other_names_stay_and_lines_still_fit() -> None:
    cell = "other = 1\nhidden = (\n    64\n)\nx = 1 / 0"
    tree = ast.parse(cell)
    new = replace_literals(tree, {"hidden": (1, [2, -3]), "absent": 1})
    assert ast.dump(tree) == ast.dump(ast.parse(cell))
    with pytest.raises(ZeroDivisionError) as caught:
        exec(compile(new, "cell", "exec"), {})
    assert caught.traceback[-1].lineno == 4  # counted from 0
    assert all(n.lineno == 3 for n in ast.walk(new.body[1].value) if hasattr(n, "lineno"))  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("cell", "values", "after"),
    [
        ("a = 1\na = 2\nb = a\na = 3", {"a": 9}, "a = 9\na = 9\nb = a\na = 3"),
        ("a, b = 1, 2", {"b": 7}, "a, b = (1, 7)"),
    ],
)
def test_only_what_comes_before_the_first_read_is_replaced(cell: str, values: dict[str, Any], after: str) -> None:
    assert ast.unparse(replace_literals(ast.parse(cell), values)) == after


# -- setting --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("then", ["x = 5; y = 6", "del x, y", "pass", "1 / 0", "global z; x = z = 0"])
def test_names_are_put_back_whatever_the_code_does(then: str) -> None:
    before = [1, 2]
    namespace: dict[str, Any] = {"x": before}
    if "/" in then:
        with pytest.raises(ZeroDivisionError), setting_names(namespace, {"x": 3, "y": 4}):
            exec(then, namespace)
    else:
        with setting_names(namespace, {"x": 3, "y": 4}):
            assert (namespace["x"], namespace["y"]) == (3, 4)
            exec(then, namespace)
    assert namespace["x"] is before and "y" not in namespace


# -- values ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "present", "value"),
    [
        ("512", 64, 512),
        (512, 64, 512),
        ("5.0", 64, 5),
        ("1", 0.5, 1.0),
        (3, 0.5, 3.0),
        ("1e-3", 0.5, 0.001),
        ("true", False, True),
        ("False", True, False),
        ("512", "256", "512"),
        ("'adam'", "sgd", "adam"),
        ("adam", "sgd", "adam"),
        ("64,64", (1, 2), (64, 64)),
        ("[64, 64]", (1, 2), (64, 64)),
        ((64,), [1], [64]),
        ("0.5", None, 0.5),
        ("relu", None, "relu"),
        ("-3", 1, -3),
    ],
)
def test_values_keep_the_type_of_the_present_one(given: Any, present: Any, value: Any) -> None:
    found = fitted("x", given, present)
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize(
    ("given", "present", "words"),
    [
        ("0.5", 1, "Write 1.0 in the code"),
        (True, 1, "an integer"),
        ("fast", 1, "an integer"),
        ("1", True, "True or False"),
        ("None", 0.5, "a number"),
        (3, "sgd", "a string"),
        ("3", (1, 2), "a tuple"),
        (2**53 + 1, 0.5, "a number"),
    ],
)
def test_a_value_that_would_change_the_type_is_refused(given: Any, present: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        fitted("x", given, present)


def test_plain_values_and_their_literals() -> None:
    for text, value in (("adam", "adam"), ("{1: 2}", "{1: 2}"), (" (1, None) ", (1, None))):
        assert variables.plain_value(text) == value
    assert [variables.is_plain(value) for value in (np.float64(1), (1, {2}), (1, [None]))] == [False, False, True]
    assert math.isinf(eval(variables.code_edit("x", -math.inf).literal))
    assert variables.code_edit("x", "a'b").snippet == 'x = "a\'b"'


def test_names_in_any_scope() -> None:
    cell = "import a.b, c as d\nfrom e import f\ndef g(h):\n    global i\n    j = k.l\nclass m: pass\n"
    cell += "try: pass\nexcept E as n: pass"
    assert variables.names_in(ast.parse(cell)) == {"a", "d", "f", "g", "i", "j", "k", "m", "E", "n"}
