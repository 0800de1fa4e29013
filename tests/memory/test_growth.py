"""Memory that grows is told with its owner and line; what only fills, is replaced or waits for collection is not."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gpulab.memory.growth import ALIKE, LEAST_BYTES, forget_runs, growing_line, growth_of_runs, steady_growth
from gpulab.memory.owners import Root, notebook_roots
from gpulab.memory.storages import live

MB = 10**6
SIZE = 400_000  # floats: 1.6 MB


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    gc.collect()
    forget_runs()
    yield
    forget_runs()


STRETCHES = st.lists(st.tuples(st.integers(0, 2), st.integers(-MB // 8, 4 * MB)), max_size=5)


@given(STRETCHES)
def test_steady_growth_is_like_that_of_each_stretch(stretches: list[tuple[int, int]]) -> None:
    points = [(0, 0)]
    for steps, count in stretches:
        points.append((points[-1][0] + steps, points[-1][1] + count))
    last = dict(points)
    rates = [(last[b] - last[a]) / (b - a) for a, b in pairwise(last)]
    each = steady_growth(points)
    grows = len(rates) > 1 and min(rates) > 0 and max(rates) <= ALIKE * min(rates)
    assert (each is not None) is (grows and last[max(last)] - last[0] >= LEAST_BYTES)
    if each is not None:
        assert min(rates) <= each * 1.000001 and each <= max(rates) * 1.000001


@given(st.integers(2 * LEAST_BYTES, MB * 100), st.integers(0, MB), st.sets(st.integers(1, 50), min_size=3))
def test_a_leak_is_steady_and_a_fill_is_not(each: int, base: int, steps: set[int]) -> None:
    points = [(step, base + each * step) for step in sorted(steps)]
    assert steady_growth(points) == each
    assert steady_growth([*points, (51, points[-1][1])]) is None
    assert steady_growth(points[:2]) is None and steady_growth([(n, count // each) for n, count in points]) is None


CODE = """\
history = []
for x in loader:
    loss = step(x)
    history.append(loss)
    self.log['a'][0] += loss
    cache[key] = loss
    twice.append(1)
    twice.append(2)
    s.append(x)
    total += loss
"""


@pytest.mark.parametrize(
    ("owner", "line"),
    [
        ("history", "line 4: history.append(loss)"),
        ("history[3]", "line 4: history.append(loss)"),
        ("train_step's variable history", "line 4: history.append(loss)"),
        ("f's variable g's variable history[…].grad", "line 4: history.append(loss)"),
        ("trainer.log['a: history'][1]", "line 5: self.log['a'][0] += loss"),
        ("module helpers.cache['a']", "line 6: cache[key] = loss"),
        ("cache['a']", "line 6: cache[key] = loss"),
        ("total", "line 10: total += loss"),
        ("sys.last_traceback: history in dead()", "line 4: history.append(loss)"),
        ("twice", ""),
        ("loader", ""),
        ("Out[3]", ""),
        ("train_step's variable seen", ""),
        ("", ""),
    ],
)
def test_the_line_that_adds_to_an_owner(owner: str, line: str) -> None:
    assert growing_line(CODE, owner) == line
    assert growing_line(f"%matplotlib inline\n{CODE}", owner) == ""
    assert growing_line(CODE, "history", above=2) == "line 6: history.append(loss)"


def block() -> torch.Tensor:
    return torch.ones(SIZE)


def in_a_cycle(names: dict[str, Any]) -> None:
    thing = SimpleNamespace(x=block())
    thing.self = thing


def once(names: dict[str, Any]) -> None:
    names["cache"] = names.get("cache") or [block() for _ in range(3)]


def filling(names: dict[str, Any]) -> None:
    kept = names.setdefault("kept", [])
    kept.append(block())
    del kept[:-2]


def beside_garbage(names: dict[str, Any]) -> None:
    names.setdefault("kept", []).append(block())
    for _ in range(3 * len(names["kept"]) ** 2):
        in_a_cycle(names)


LEAKS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "history": lambda names: names.setdefault("history", []).append(block()),
    "log": lambda names: names.setdefault("log", {}).setdefault("a", []).append((block(), 1)),
    "kept": beside_garbage,
    "m": lambda names: names.setdefault("m", SimpleNamespace(seen={})).seen.update({len(names["m"].seen): block()}),
}
CONTROLS: tuple[Callable[[dict[str, Any]], Any], ...] = (
    lambda names: names.update(x=block()),
    lambda names: names.setdefault("history", []).append(torch.ones(1000)),
    in_a_cycle,
    once,
    filling,
    lambda names: None,
)


def told(work: Callable[[dict[str, Any]], Any], names: dict[str, Any], runs: int = 5) -> list[str]:
    owners = []
    for _ in range(runs):
        work(names)
        growth = growth_of_runs("code", live(), lambda: [notebook_roots(None, names)], ())
        owners.append(growth.owner if growth is not None else "")
        if growth is not None:
            assert growth.bytes_each == pytest.approx(SIZE * 4, rel=0.01) and growth.count == 2  # runs that added
    return owners


@pytest.mark.parametrize("name", LEAKS)
def test_a_cell_that_keeps_more_is_told_at_its_third_run(name: str) -> None:
    names: dict[str, Any] = {"model": torch.nn.Linear(1000, 1000)}
    owners = told(LEAKS[name], names)
    assert owners[:2] == ["", ""] and all(owner.startswith(name) for owner in owners[2:])


def test_the_line_counts_what_is_above_the_code() -> None:
    """As in a cell below its magic, and as in the finding about a step."""
    names: dict[str, Any] = {"history": []}
    for _ in range(3):
        names["history"].append(block())
        growth = growth_of_runs("x = 1\nhistory.append(x)", live(), lambda: [notebook_roots(None, names)], (), above=1)
    assert growth is not None and growth.line == "line 3: history.append(x)"


@pytest.mark.parametrize("work", CONTROLS)
def test_a_cell_that_keeps_nothing_more_is_not_told(work: Callable[[dict[str, Any]], Any]) -> None:
    assert not any(told(work, {"model": torch.nn.Linear(1000, 1000)}))


def test_runs_keep_no_tensor_alive() -> None:
    names: dict[str, Any] = {}
    assert told(LEAKS["m"], names)[-1]
    references = [*map(weakref.ref, names["m"].seen.values())]
    names.clear()
    assert len(references) == 5 and not any(reference() is not None for reference in references)


def test_runs_of_other_cells_do_not_count() -> None:
    kept = []
    for number in range(5):
        kept.append(block())
        assert growth_of_runs(f"cell {number}", live(), lambda: [[Root("kept", kept)]], ()) is None
