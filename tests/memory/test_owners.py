"""Owners by the names that a user would delete: who they are, that deleting them frees memory, that no code runs."""

from __future__ import annotations

import gc
import sys
import threading
import traceback
import weakref
from collections import deque
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gpulab.memory.owners import Owner, Root, Walk, error_roots, model_roots, notebook_roots, other_roots
from gpulab.memory.storages import live, storages_of
from gpulab.memory.survey import search
from gpulab.user_code import CELL_WITHOUT_IPYTHON

SIZE = 1000
SETUP = """
import collections, dataclasses, functools, threading, types
import numpy, torch
def block():
    return torch.ones(1000)
"""


WORK = """
def work():
    batch = block()
    mine = locals()
    ready.set()
    done.wait()
    seen.append(mine)
"""


@pytest.fixture
def names() -> Iterator[dict[str, Any]]:
    """A notebook's names; the module `__main__` is theirs while the test runs."""
    module, before = ModuleType("__main__"), sys.modules["__main__"]
    sys.modules["__main__"] = module
    run(SETUP, vars(module))
    yield vars(module)
    sys.modules["__main__"] = before


def run(code: str, names: dict[str, Any]) -> None:
    exec(compile(code, CELL_WITHOUT_IPYTHON, "exec"), names)


def owners(stages: list[list[Root]], *tensors: torch.Tensor) -> list[Owner]:
    """Of these tensors, or of all."""
    now = live().bytes
    sizes = {storage.key: storage.bytes for t in tensors for storage in storages_of(t)} if tensors else now
    walk = Walk(sizes)
    for roots in stages:
        walk.follow(roots)
    return walk.owners(sizes)


def largest(names: dict[str, Any], shell: Any = None) -> Owner:
    others = [root for root in other_roots() if not root.name.startswith("module tests.")]
    return owners([notebook_roots(shell, names), error_roots(shell), others])[0]


@pytest.mark.parametrize(
    ("code", "name"),
    [
        ("kept = block()", "kept"),
        ("kept = types.SimpleNamespace(a=types.SimpleNamespace(b=block()))", "kept.a.b"),
        ("kept = {'a': [block(), 1], 2: 3}", "kept['a'][0]"),
        ("kept = {('a', 1): block()}", "kept[…]"),
        ("kept = {block(): 1}", "kept (key)"),
        ("kept = [block() for _ in range(60)]", "kept"),
        ("kept = collections.deque([0, block()])", "kept[1]"),
        ("kept = {0, types.MappingProxyType({'a': block()})} if False else {1, (2, block())}", "kept{…}[1]"),
        ("kept = collections.namedtuple('Pair', 'a b')(1, block())", "kept.b"),
        ("@dataclasses.dataclass\nclass Best:\n    weights: object\nkept = Best(block())", "kept.weights"),
        ("class S:\n    __slots__ = '__a', 'b'\n    def __init__(s):\n        s.__a = block()\nkept = S()", "kept.__a"),
        ("def outer():\n    x = block()\n    return lambda: x\nkept = outer()", "kept's variable x"),
        ("def kept(x=block()): ...", "kept (default)[0]"),
        ("def kept(*, x=block()): ...", "kept (default)['x']"),
        ("def kept(): ...\nkept.cache = block()", "kept.cache"),
        ("@functools.lru_cache\ndef kept(i):\n    return block()\nkept(1)", "kept"),
        ("kept = functools.partial(print, block())", "kept[0]"),
        ("def numbers():\n    x = block()\n    yield x\nkept = numbers()\nnext(kept)", "kept (suspended)"),
        ("class Model:\n    cache = block()", "Model.cache"),
        ("class Model:\n    def step(self): ...\nm = Model()\nm.x = block()\nkept = m.step\ndel m", "kept.x"),
        ("kept = threading.local()\nkept.x = block()", "kept[…]['x']"),
        ("kept = block().numpy()", "kept"),
        ("kept = numpy.empty(2, object)\nkept[1] = block()", "kept[…]"),
        ("class Array(numpy.ndarray): ...\nkept = block().numpy().view(Array)", "kept"),
        ("kept = types.MappingProxyType({'a': block()})", "kept['a']"),
        ("x = block().requires_grad_()\nkept = (x * 2).exp().sum()\ndel x", "kept"),
        ("kept = torch.nn.Linear(1, 1)\nkept.cache = block()", "kept.cache"),
        ("kept = torch.nn.ModuleDict({'a': torch.nn.Linear(100, 10)})", "kept.a.weight"),
        ("kept = ValueError(block())", "kept.args[0]"),
    ],
)  # fmt: skip
def test_names_of_holders(code: str, name: str, names: dict[str, Any]) -> None:
    run(code, names)
    owner = largest(names)
    assert owner.name == name and not owner.others


def test_a_users_module_and_a_threads_variable(names: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("helpers")
    run("import torch\nstate = {'a': torch.ones(1000)}", vars(module))
    monkeypatch.setitem(sys.modules, "helpers", module)
    assert largest(names).name == "module helpers.state['a']"
    monkeypatch.delitem(sys.modules, "helpers")
    vars(module).clear()
    ready, done = threading.Event(), threading.Event()
    names.update(ready=ready, done=done)
    run(WORK, names)
    names["seen"] = []
    thread = threading.Thread(target=names["work"], name="prefetch")
    thread.start()
    ready.wait()
    assert largest(names).name == "thread prefetch: batch in work()"
    done.set()
    thread.join()
    assert "batch" in names["seen"][0], "the dictionary that locals() returned is the user's"


def failing(names: dict[str, Any]) -> BaseException:
    run("def dead():\n    batch = block()\n    raise ValueError(1)\n", names)
    try:
        run("dead()", names)
    except ValueError as e:
        return e
    raise AssertionError


def test_the_dead_calls_of_a_traceback(names: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    error = failing(names)
    *_, (dead, _) = traceback.walk_tb(error.__traceback__)
    batch = weakref.ref(dead.f_locals["batch"])
    monkeypatch.setattr(sys, "last_traceback", error.__traceback__, raising=False)
    monkeypatch.setattr(sys, "last_value", error, raising=False)
    owner = largest(names)
    assert owner.name == "sys.last_traceback: batch in dead()" and not owner.others
    names["error"] = error
    assert largest(names).name == "error: batch in dead()" and largest(names).others == ("sys.last_traceback",)
    dead.clear()
    assert batch() is None, "the walk's copies of a frame's variables keep nothing alive"


def test_outputs_of_a_shell(names: dict[str, Any]) -> None:
    x = torch.ones(SIZE)
    hook = SimpleNamespace(_=x, __="", ___="")
    shell = SimpleNamespace(user_ns_hidden={"hidden": x}, displayhook=hook)
    names.update(Out={3: x}, _3=x, _=x, __="", _oh={3: x}, hidden=x)
    owner = largest(names, shell)
    assert owner.name == "Out[3]" and not owner.others
    names["shown"] = x
    owner = largest(names, shell)
    assert owner.name == "shown" and {other.partition("[")[0] for other in owner.others} == {"Out", "_3", "_", "_oh"}
    del names["shown"], names["Out"], names["_oh"], names["_3"]
    assert largest(names, shell).name == "_"


# -- deleting all names frees it; all but one do not -------------------------------------------------------------------

KINDS = (list, dict, deque, SimpleNamespace, set)


class Holder:
    """In a set too."""

    def __init__(self) -> None:
        self.things: list[Any] = []


def build(tree: list[tuple[int, list[int]]], roots: list[int], count: int) -> tuple[dict[str, Any], list[Any]]:
    """Containers that refer to each other or to tensors (numbers below `count`); names of the first of them."""
    tensors = [torch.ones(SIZE + i) for i in range(count)]
    holders: list[Any] = [{0: list, 1: dict, 2: Holder, 3: deque, 4: SimpleNamespace}[kind]() for kind, _ in tree]
    for holder, (kind, children) in zip(holders, tree, strict=True):
        for number, child in enumerate(children):
            thing = tensors[child] if child < count else holders[(child - count) % len(holders)]
            if kind in (0, 3):
                holder.append(thing)
            elif kind == 1:
                holder[number] = thing
            elif kind == 2:
                holder.things.append(thing)
            else:
                setattr(holder, f"a{number}", thing)
    return {f"n{i}": holders[root % len(holders)] for i, root in enumerate(roots)}, [weakref.ref(t) for t in tensors]


GRAPHS = st.lists(st.tuples(st.integers(0, 4), st.lists(st.integers(0, 12), max_size=3)), min_size=1, max_size=7)


@settings(max_examples=60)
@given(GRAPHS, st.lists(st.integers(0, 6), min_size=1, max_size=4))
def test_others_are_the_names_that_must_all_go(tree: list[tuple[int, list[int]]], roots: list[int]) -> None:
    names, tensors = build(tree, roots, 4)
    gc.collect()
    alive = [one() for one in tensors if one() is not None]
    found = owners([[Root(name, thing) for name, thing in names.items()]], *alive) if alive else []
    of = {storages_of(t)[0].key: i for i, ref in enumerate(tensors) if (t := ref()) is not None}
    assert sorted(key for owner in found for key in owner.keys) == sorted(of), "each storage has one owner"
    told = [({owner.name[:2], *owner.others}, [of[key] for key in owner.keys]) for owner in found]
    del names, alive, found
    for holders, held in told:
        for spared in (None, *holders):
            names, tensors = build(tree, roots, 4)
            for name in holders - {spared}:
                del names[name]
            gc.collect()
            assert any(tensors[i]() is not None for i in held) is (spared is not None)


# -- nothing runs, nothing stays ---------------------------------------------------------------------------------------

RAN: list[str] = []


def trap(name: str) -> Any:
    def method(self: object, *args: object) -> Any:
        RAN.append(name)
        raise RuntimeError(name)

    return method


TRAPS = {
    name: trap(name)
    for name in (
        *("__getattr__", "__getattribute__", "__len__", "__iter__", "__eq__", "__hash__", "__bool__", "__contains__"),
        *("__getitem__", "__reversed__", "__instancecheck__", "__subclasscheck__", "__dir__"),
        *("items", "keys", "values", "get", "__torch_function__", "__array__", "__index__", "__next__", "__call__"),
    )
} | {name: property(trap(name)) for name in ("__dict__", "__class__", "grad", "grad_fn", "layout", "base", "args")}


def hostile(base: type, x: torch.Tensor) -> Any:
    """An object of a class all of whose methods raise, which holds the tensor."""
    kind = type("Hostile", (base,), {**TRAPS, "__torch_function__": classmethod(TRAPS["__torch_function__"])})
    if base is torch.Tensor:
        return x.as_subclass(kind)
    if issubclass(base, tuple | frozenset):
        return base.__new__(kind, [x])
    thing: Any = base.__new__(kind)
    if base is dict:
        dict.__setitem__(thing, "a", x)
    elif base is list:
        list.append(thing, x)
    elif base is deque:
        deque.append(thing, x)
    elif base is set:
        set.add(thing, x)
    elif base is torch.nn.Module:
        object.__setattr__(thing, "_parameters", {"x": x})
    elif base is ValueError:
        return base.__new__(kind, x)
    else:
        object.__setattr__(thing, "x", x)
    return thing


BASES = (object, dict, list, tuple, deque, set, frozenset, ValueError, torch.Tensor, torch.nn.Module, SimpleNamespace)


@pytest.mark.parametrize("base", BASES)
def test_no_code_of_the_users_runs(base: type) -> None:
    x = torch.ones(SIZE)
    things = [hostile(base, x)]
    RAN.clear()
    (owner,) = owners([[Root("thing", things[0]), *model_roots({"a": things[0]})]], x)
    assert owner.name.startswith("thing") and not RAN
    (owner,) = owners([[Root("things", things)]], x)
    assert owner.name.startswith("things[0]") and not RAN


def test_classes_with_a_metaclass_and_keys() -> None:
    x = torch.ones(SIZE)
    meta = type("Meta", (type,), {**TRAPS, "__hash__": None})
    kind = type.__call__(meta, "Kind", (), {})
    thing = object.__new__(kind)
    object.__setattr__(thing, "x", x)
    key = type("Key", (), {"__eq__": object.__eq__, "__hash__": object.__hash__})()
    RAN.clear()
    assert owners([[Root("thing", [thing, {key: 1}, kind])]], x)[0].name == "thing[0].x" and not RAN
    type.__setattr__(kind, "cache", x)
    owners([[Root("kind", kind)]], x)
    assert not RAN


def test_a_walk_keeps_nothing_alive() -> None:
    class Thing:
        pass

    thing = Thing()
    thing.self, thing.x = thing, [torch.ones(SIZE)]  # type: ignore[attr-defined]
    of, tensor = weakref.ref(thing), weakref.ref(thing.x[0])  # type: ignore[attr-defined]
    assert owners([[Root("thing", thing)]], thing.x[0])[0].name == "thing.x[0]"  # type: ignore[attr-defined]
    del thing
    gc.collect()
    assert of() is None and tensor() is None


@pytest.mark.parametrize("each", [False, True])
def test_deep_nesting(each: bool) -> None:
    x = torch.ones(SIZE)
    tensors, chain = [x], list[Any]([x])
    for _ in range(10_000):
        if each:
            tensors.append(torch.ones(SIZE))
        chain = [chain, tensors[-1]]
    (owner,) = owners([[Root("chain", chain)]], *tensors)
    assert owner.name.startswith("chain") and len(owner.name) < 200 and len(owner.keys) == len(tensors)
    while type(chain[0]) is list:  # from outside, one at a time
        chain = chain[0]


def test_a_walk_does_not_enter_a_shell() -> None:
    x = torch.ones(SIZE)
    shell, key = SimpleNamespace(x=x), storages_of(x)[0].key
    walk = Walk([key], barriers=(shell,))
    walk.follow([Root("helper", [shell, sys.modules])])
    assert walk.missing == {key}


def test_a_walk_that_is_cut_says_so() -> None:
    x = torch.ones(SIZE)
    walk = Walk([storages_of(x)[0].key], longest_ns=-1)
    walk.follow([Root("x", [x])])
    assert walk.is_cut and walk.missing and not walk.owners({})


def test_what_else_holds_it_is_searched_although_all_has_a_name() -> None:
    tensor = torch.ones(300_000)
    (storage,) = storages_of(tensor)
    sizes, first = {storage.key: storage.bytes}, [Root("a", tensor)]
    (owner,) = search(sizes, [first, [Root("b", [tensor])]]).owners(sizes)
    assert (owner.name, owner.others) == ("a", ("b",))
    libraries = [Root("module library", [tensor])]
    (owner,) = search(sizes, [first, [], [], [], libraries]).owners(sizes)
    assert owner.others == ()
    (owner,) = search(sizes, [[], [], [], [], libraries]).owners(sizes)
    assert owner.root == "module library"
