"""What a cell reads of its notebook comes along as source, or is refused by name with the line to write."""

from __future__ import annotations

import argparse
import ast
import linecache
import math
import textwrap
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gpulab.errors import UsageError
from gpulab.launch.notebook_source import notebook_source


class Notebook:
    """A namespace whose cells ran one after the other, as IPython runs them."""

    def __init__(self) -> None:
        self.names: dict[str, Any] = {"__name__": "__main__", "__builtins__": __builtins__}
        self.cells: list[str] = []

    def run(self, text: str) -> None:
        cell = textwrap.dedent(text)
        file = f"/tmp/ipykernel_1/{len(self.cells)}.py"
        linecache.cache[file] = (len(cell), None, cell.splitlines(keepends=True), file)
        exec(compile(cell, file, "exec"), self.names)
        self.cells.append(cell)

    def source(self, cell: str) -> str:
        return notebook_source(ast.parse(textwrap.dedent(cell)), self.names, self.cells)

    def run_elsewhere(self, cell: str) -> dict[str, Any]:
        """The cell in a process that has nothing but the source."""
        fresh: dict[str, Any] = {"__name__": "__main__"}
        exec(self.source(cell), fresh)
        exec(textwrap.dedent(cell), fresh)
        return fresh


@pytest.fixture
def notebook() -> Iterator[Notebook]:
    made = Notebook()
    yield made
    for number in range(len(made.cells)):
        linecache.cache.pop(f"/tmp/ipykernel_1/{number}.py", None)


def test_imports_values_functions_and_classes_come_along(notebook: Notebook) -> None:
    notebook.run(
        """
        import math, os.path as p
        from torch import nn
        from torch.nn import functional as F
        lr, sizes = 0.5, [3, (4,)]
        """
    )
    notebook.run(
        """
        from dataclasses import dataclass
        def scale(x, by=lr):
            return helper(x) * by
        def helper(x): return x + math.pi
        @dataclass
        class Config:
            width: int = 3
        class Net(nn.Module):
            def __init__(self, config):
                super().__init__()
                self.layer = nn.Linear(config.width, 1)
        config = Config(7)
        """
    )
    made = notebook.run_elsewhere(
        "net = Net(config)\nvalue = scale(1.0)\nplace = p.join('a', 'b')\nsmall = F.relu(net.layer.weight)"
    )
    assert made["net"].layer.weight.shape == (1, 7) and made["value"] == (1 + math.pi) * 0.5
    assert made["place"] == "a/b" and "sizes" not in notebook.source("scale(1)")


def test_only_what_is_read_comes_along(notebook: Notebook) -> None:
    notebook.run("import torch\nmodel = torch.nn.Linear(2, 2)\nx = torch.zeros(3)\nn = 4")
    assert notebook.source("model = None\nfor x in range(n): pass\nprint([x for x in [1]])") == "n = 4\n"
    assert notebook.source("def f(model): return model\nf(1)") == "\n"


def test_the_latest_definition_counts(notebook: Notebook) -> None:
    notebook.run("def f(): return 1\nclass A: a = 1")
    notebook.run("def f(): return g()\ndef g(): return 2\nclass A:\n    a = 2")
    notebook.run("def g(): return 3")
    made = notebook.run_elsewhere("result = f(), A.a")
    assert made["result"] == (3, 2)


def test_other_names_for_the_same(notebook: Notebook) -> None:
    notebook.run(
        "import torch\nrelu = torch.relu\nLinear = torch.nn.Linear\ndef f(): return 5\ng = f\nsquare = lambda x: x * x"
    )
    made = notebook.run_elsewhere("result = g(), square(3), relu(torch.tensor(-1.0)).item(), Linear(1, 1).in_features")
    assert made["result"] == (5, 9, 0.0, 1)
    notebook.run("def f(): return 6")
    assert notebook.run_elsewhere("result = f(), g()")["result"] == (6, 5), "another name keeps the older function"


@pytest.mark.parametrize(
    "value",
    [
        *({1, 2}, frozenset(), range(3), argparse.Namespace(lr=0.1, name="x"), types.SimpleNamespace(a=[1])),
        *(torch.float32, torch.device("cpu")),
    ],
    ids=repr,
)
def test_values_come_along_as_they_are(notebook: Notebook, value: object) -> None:
    notebook.names["value"] = value
    assert notebook.run_elsewhere("copy = value")["copy"] == value


plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(max_size=20)
    | st.binary(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=4) | st.tuples(inner, inner) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=12,
)


@given(plain)
def test_any_plain_value_comes_along(value: object) -> None:
    notebook = Notebook()
    notebook.names["value"] = value
    copy = notebook.run_elsewhere("copy = value")["copy"]
    assert copy == value and type(copy) is type(value)


def test_what_lives_in_the_notebook_is_refused_by_name(notebook: Notebook) -> None:
    notebook.run("import torch\nfrom torch.utils.data import DataLoader")
    notebook.run("x = torch.ones(3)\nloader = DataLoader([1, 2, 3], batch_size=1)\nnet = torch.nn.Linear(2, 2)")
    with pytest.raises(UsageError) as refused:
        notebook.source("for batch in loader:\n    net(x)")
    said = str(refused.value)
    assert "loader (a DataLoader), net (a Linear) and x (a Tensor)" in said
    for line in ("x = torch.ones(3)", "loader = DataLoader([1, 2, 3], batch_size=1)", "net = torch.nn.Linear(2, 2)"):
        assert f"\n    {line}" in said


NET = "import torch\nnet = torch.nn.Linear(2, 2)\ndef train():\n    return net(torch.zeros(2))"
DEFAULT = "import torch\nstart = torch.zeros(2)\ndef train(x=start): return x"
ODD = "class Odd:\n    def __reduce__(self): raise SystemExit('pickled')\nodd = Odd()"
WRAPPED = "def careless(f):\n    def wrapper(*a): return f(*a)\n    return wrapper\n@careless\ndef other(): return 1"


@pytest.mark.parametrize(
    ("earlier", "cell", "words"),
    [
        (NET, "train()", r"net \(a Linear\)"),
        (DEFAULT, "train()", r"start \(a Tensor\)"),
        (WRAPPED, "other()", r"other \(a function\)"),
        ("def maker(n): return lambda: n\nmade = maker(3)", "made()", r"made \(a function\)"),
        ("get_ipython = len", "get_ipython().system('ls')", "remove magics"),
        ("rows = list(range(200_000))", "print(rows)", r"rows \(a list\)"),
        ("ring = []\nring.append(ring)", "print(ring)", r"ring \(a list\)"),
        (ODD, "print(odd)", r"odd \(a Odd\)"),
    ],
    ids=["read by a function", "a default", "wrapped", "a closure", "magics", "long", "a ring", "pickles itself"],
)
def test_what_has_no_source_is_refused(notebook: Notebook, earlier: str, cell: str, words: str) -> None:
    notebook.run(earlier)
    with pytest.raises(UsageError, match=words):
        notebook.source(cell)


def test_what_the_cell_makes_itself_is_its_own(notebook: Notebook) -> None:
    notebook.run("import torch\nmodel = torch.nn.Linear(2, 2)\ndef train(): return model")
    cell = "model = torch.nn.Linear(3, 3)\nresult = train()"
    assert "model =" not in notebook.source(cell)
    assert notebook.run_elsewhere(cell)["result"].in_features == 3


def test_each_part_comes_after_what_it_needs_at_once(notebook: Notebook) -> None:
    notebook.run("from pathlib import Path\nROOT = Path('data')\nclass A: n = 1")
    notebook.run("from dataclasses import dataclass\n@dataclass\nclass Config:\n    width: int = 3\nconfig = Config(5)")
    notebook.run("class B(A):\n    root = ROOT\ndef f(c=config, p=ROOT): return c.width, str(p), B.n, str(B.root)")
    notebook.run("class A: n = 1  # run again")
    assert notebook.run_elsewhere("result = f()")["result"] == (5, "data", 1, "data")


def test_functions_made_by_functions(notebook: Notebook) -> None:
    notebook.run(
        """
        import functools
        def careful(f):
            @functools.wraps(f)
            def wrapper(*a): return f(*a) + 1
            return wrapper
        @careful
        def train(): return 1
        """
    )
    assert notebook.run_elsewhere("result = train()")["result"] == 2


def test_submodules_come_along(notebook: Notebook) -> None:
    notebook.run("import xml.dom.minidom")
    assert "import xml.dom.minidom" in notebook.source("xml.dom.minidom.parseString('<a/>')")
