"""Names the owners of memory: follows references from the notebook's names, its outputs and its last exception.

The walk reads attributes from the objects' own dictionaries and slots, so no code of the user runs. A storage belongs
to the nearest name; every other name that also keeps it alive is listed, because all of them must go to free it.
"""

from __future__ import annotations

import gc
import sys
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from inspect import CO_OPTIMIZED
from time import perf_counter_ns
from types import (
    BuiltinFunctionType,
    CodeType,
    FrameType,
    FunctionType,
    GeneratorType,
    GetSetDescriptorType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
    SimpleNamespace,
    TracebackType,
)
from typing import Any, NamedTuple

from gpulab.memory.storages import (
    Key,
    attribute,
    gradient,
    is_tensor_type,
    saved,
    storages_of,
    torch_module,
    unobserved,
)
from gpulab.user_code import is_users_class, is_users_file

LONGEST_NS = 3_000_000_000  # of a walk
MOST = 2_000_000  # objects
_SPLIT = 0.9  # a name is followed inwards as long as one part of it holds this share
_LISTED = 50  # elements of a container that are named one by one
_ATOMS = frozenset(  # by id: a class need not be hashable
    map(id, (int, float, bool, str, bytes, bytearray, complex, type(None), range, slice, CodeType, BuiltinFunctionType))
)
_LONGEST_NAME = 100  # ours: of a path inwards
LAST_ERROR = "sys.last_traceback"


class Root(NamedTuple):
    """Where a walk begins: a name as the user writes it, and its object. `group`: what lets go of it at once."""

    name: str
    thing: Any
    group: str = ""


class Owner(NamedTuple):
    """One owner of storages. `root`: the name at which the walk to them began, `name`: what holds them inside of it.

    `others`: names that keep all or some of them alive too. `graph`: through autograd.
    """

    name: str
    keys: frozenset[Key]
    others: tuple[str, ...]
    graph: bool
    root: str


class _Node(NamedTuple):
    thing: Any
    parent: int  # -1: a root
    label: str


def model_roots(namespace: Mapping[str, Any]) -> list[Root]:
    """The names of modules: parameters belong to their model rather than to its optimizer."""
    torch = torch_module()
    kind = torch.nn.Module if torch is not None else ()
    return [Root(name, thing) for name, thing in list(namespace.items()) if issubclass(type(thing), kind)]


def notebook_roots(shell: Any, namespace: Mapping[str, Any]) -> list[Root]:
    """The names of a notebook and its outputs; of a script only its names.

    The nearest comes first: a value that has a name is not told as an output.
    """
    hidden = getattr(shell, "user_ns_hidden", {})
    outputs = namespace.get("Out") if shell is not None else None
    roots = [
        Root(name, thing)
        for name, thing in list(namespace.items())
        if not (name in hidden and hidden[name] is thing) and not _is_history(name) and name not in ("In", "Out")
    ]
    if isinstance(outputs, dict):
        roots += [Root(f"Out[{number}]", thing, "out") for number, thing in list(outputs.items())]
    if shell is not None:
        roots += [Root(name, thing, "out") for name, thing in list(namespace.items()) if _is_history(name)]
        hook = getattr(shell, "displayhook", None)
        roots += [Root(name, getattr(hook, name, None), "out") for name in ("_", "__", "___")]
    return roots


def _is_history(name: str) -> bool:
    """Whether IPython keeps outputs, inputs or its own names in it: `_`, `__`, `_5`, `_i5`, `_dh`."""
    rest = name.lstrip("_")
    return not rest or rest.isdigit() or rest in ("i", "ii", "iii", "dh", "ih", "oh") or rest[1:].isdigit()


def error_roots(shell: Any = None) -> list[Root]:
    """The exceptions that Python and IPython keep, whose tracebacks keep the variables of dead calls."""
    errors = [getattr(sys, "last_exc", None), getattr(sys, "last_value", None)]
    traces = [getattr(sys, "last_traceback", None)]
    handler = getattr(shell, "InteractiveTB", None)
    errors.append(getattr(handler, "evalue", None))
    traces.append(getattr(handler, "tb", None))
    return [Root(LAST_ERROR, thing, "traceback") for thing in (*traces, *errors) if thing is not None]


def other_roots() -> list[Root]:
    """The user's own modules, and what the other threads are working on."""
    main = sys.modules.get("__main__")
    roots = [
        _root_of(name, module)
        for name, module in list(sys.modules.items())
        if _is_module(module) and module is not main and name != "__mp_main__" and _is_users(module)
    ]
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    here = threading.get_ident()
    for number, frame in sys._current_frames().items():
        if number != here:
            frames = [each for each in _stack(frame) if is_users_file(each.f_code.co_filename)]
            thread = f"thread {names.get(number, number)}"
            roots += [Root(f"{thread}{label}", value) for each in frames for label, value in _frame(each)]
    return roots


def library_roots() -> list[Root]:
    """The variables of every library, where caches may be."""
    return [
        _root_of(name, module)
        for name, module in list(sys.modules.items())
        if _is_module(module) and name not in ("__main__", "sys", "gc") and not _is_users(module)
    ]


def _stack(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _root_of(name: str, module: ModuleType) -> Root:
    names = SimpleNamespace()
    vars(names).update(_members(module))
    return Root(f"module {name}", names)


def _is_module(thing: object) -> bool:
    return issubclass(type(thing), ModuleType)


def _members(module: ModuleType) -> dict[str, Any]:
    """The names of a module, also of a lazy one, which would import others."""
    names: dict[str, Any] = vars(ModuleType)["__dict__"].__get__(module)
    return names


def _is_users(module: ModuleType) -> bool:
    names = _members(module)
    file = names.get("__file__")
    if file is None:
        return names.get("__spec__") is None and names.get("__loader__") is None
    return isinstance(file, str) and is_users_file(file)


class Walk:
    """Follows references from roots to the storages of `keys`; it does not enter `barriers`, such as a shell."""

    def __init__(self, keys: Iterable[Key], longest_ns: int = LONGEST_NS, barriers: Iterable[object] = ()) -> None:
        self.missing = set(keys)  # not reached so far
        self.is_cut = False
        self._keys = frozenset(self.missing)
        self._until_ns = perf_counter_ns() + longest_ns
        self._nodes: list[_Node] = []  # each after its parent
        self._tops: list[int] = []  # the root of each
        self._index: dict[int, int] = {}
        self._also: dict[int, list[int]] = {}  # further parents
        self._leaves: dict[int, list[tuple[Key, bool]]] = {}  # storages by node, and whether through autograd
        self._roots: dict[int, Root] = {}
        self._graph: set[Any] = set()
        self._barriers = {id(thing) for thing in (*barriers, sys.modules)}

    def follow(self, roots: Iterable[Root]) -> None:
        """Walk from these roots, all at once, the nearest objects first."""
        queue: deque[int] = deque()
        for root in roots:
            entry = len(self._nodes)  # a node of its own, because several names may be of one object
            self._nodes.append(_Node(None, -1, root.name))
            self._tops.append(entry)
            self._roots[entry] = root
            self._reach(root.thing, entry, "", queue)
        while queue:
            if len(self._nodes) > MOST or perf_counter_ns() > self._until_ns:
                self.is_cut = True
                return
            number = queue.popleft()
            thing = self._nodes[number].thing
            kind = type(thing)
            if is_tensor_type(kind):
                self._tensor(thing, number)
            with suppress(Exception):  # an object that breaks when it is read
                for label, child in _children(thing, kind):
                    self._reach(child, number, label, queue)

    def _reach(self, thing: Any, parent: int, label: str, queue: deque[int]) -> None:
        if id(type(thing)) in _ATOMS or id(thing) in self._barriers:
            return
        index = self._index.get(id(thing))
        if index is not None:
            self._also.setdefault(index, []).append(parent)
            return
        number = self._index[id(thing)] = len(self._nodes)
        self._nodes.append(_Node(thing, parent, label))
        self._tops.append(self._tops[parent])
        queue.append(number)

    def _tensor(self, tensor: Any, number: int) -> None:
        reached = [(storage.key, False) for storage in storages_of(tensor)]
        with suppress(Exception):
            with unobserved():
                base = attribute(tensor, "_base")
            reached += [(s.key, False) for s in storages_of(base)] if base is not None else []
        for hidden in saved(tensor, self._graph):
            reached += [(storage.key, True) for storage in storages_of(hidden)]
        reached = [entry for entry in reached if entry[0] in self._keys]
        if reached:
            self._leaves[number] = reached
            self.missing.difference_update(key for key, _ in reached)

    def owners(self, sizes: Mapping[Key, int]) -> list[Owner]:
        """The owners of the storages that were reached, the largest first. `sizes` has all keys of the walk."""
        masks, nearest = self._masks(), self._nearest()
        holders: dict[Key, int] = {}
        for number, reached in self._leaves.items():
            for key, _ in reached:
                holders[key] = holders.get(key, 0) | masks.get(number, 0)
        result = []
        for number, keys in self._by_root(nearest).items():
            keys = [key for key in keys if key in sizes]
            mask = 0
            for key in keys:
                mask |= holders[key]
            root, name = self._roots[number], self._inwards(number, keys, nearest, sizes)
            others = [
                other.name
                for i, other in enumerate(self._roots.values())
                if mask >> i & 1 and other.name != root.name and not (root.group and other.group == root.group)
            ]
            graph = sum(sizes[k] for k in keys if nearest[k][1]) > sum(sizes[k] for k in keys) / 2
            result.append(Owner(name, frozenset(keys), tuple(dict.fromkeys(others)), graph, root.name))
        return sorted(result, key=lambda owner: -sum(sizes[key] for key in owner.keys))

    def by_root(self) -> dict[str, list[Key]]:
        """The storages by the name at which the walk to them began."""
        result: dict[str, list[Key]] = {}
        for number, keys in self._by_root(self._nearest()).items():
            result.setdefault(self._roots[number].name, []).extend(keys)
        return result

    def name_of(self, root: str, keys: list[Key], sizes: Mapping[Key, int]) -> str:
        """The name of the innermost part of that root which holds nearly all of these storages."""
        nearest = self._nearest()
        number = next(number for number, each in self._roots.items() if each.name == root)
        return self._inwards(number, [key for key in keys if self._tops[nearest[key][0]] == number], nearest, sizes)

    def _nearest(self) -> dict[Key, tuple[int, bool]]:
        """The nearest node of each storage, and whether only autograd's graph leads to it."""
        nearest: dict[Key, tuple[int, bool]] = {}
        for number, reached in self._leaves.items():
            for key, graph in reached:
                if key not in nearest or (nearest[key][1] and not graph):
                    nearest[key] = number, graph
        return nearest

    def _by_root(self, nearest: Mapping[Key, tuple[int, bool]]) -> dict[int, list[Key]]:
        by_root: dict[int, list[Key]] = {}
        for key, (number, _) in nearest.items():
            by_root.setdefault(self._tops[number], []).append(key)
        return by_root

    def _inwards(self, root: int, keys: list[Key], of: Mapping[Key, tuple[int, bool]], sizes: Mapping[Key, int]) -> str:
        """The name of the innermost part of a root that holds nearly all of its storages."""
        total = sum(sizes[key] for key in keys)
        under: dict[int, int] = {}
        for key in keys:
            number = of[key][0]
            under[number] = under.get(number, 0) + sizes[key]
            while (number := self._nodes[number].parent) >= 0 and number not in under:
                under[number] = 0
        children: dict[int, list[int]] = {}
        for number in sorted(under, reverse=True)[:-1]:
            parent = self._nodes[number].parent
            under[parent] += under[number]
            children.setdefault(parent, []).append(number)
        name, here = self._nodes[root].label, root
        while here in children:
            largest = max(children[here], key=lambda child: under[child])
            if under[largest] < _SPLIT * total or len(name) > _LONGEST_NAME:
                break
            here = largest
            name += self._nodes[here].label
        return name

    def _masks(self) -> dict[int, int]:
        """For each node that leads to a storage, the roots that reach it, as bits."""
        useful: set[int] = set()
        waiting = list(self._leaves)
        while waiting:
            number = waiting.pop()
            if number in useful:
                continue
            useful.add(number)
            waiting += self._parents(number)
        down: dict[int, list[int]] = {}
        for number in useful:
            for parent in self._parents(number):
                down.setdefault(parent, []).append(number)
        masks = {root: 1 << i for i, root in enumerate(self._roots)}
        queue = deque(root for root in self._roots if root in useful)
        while queue:
            number = queue.popleft()
            for child in down.get(number, ()):
                joined = masks.get(child, 0) | masks[number]
                if joined != masks.get(child, 0):
                    masks[child] = joined
                    queue.append(child)
        return masks

    def _parents(self, number: int) -> list[int]:
        parent = self._nodes[number].parent
        return [*([parent] if parent >= 0 else []), *self._also.get(number, ())]


# -- what an object refers to ------------------------------------------------------------------------------------------


# The classes' own functions are called, because a subclass of the user's may have others.
_SEQUENCES: tuple[Any, ...] = (list, tuple, deque)
_SETS: tuple[Any, ...] = (set, frozenset)
_class_members = vars(type)["__dict__"].__get__
_bases = vars(type)["__mro__"].__get__
_class_name = vars(type)["__name__"].__get__


def _children(thing: Any, kind: type) -> Iterator[tuple[str, Any]]:
    if issubclass(kind, dict):
        yield from _items(thing)
        if kind is not dict:
            yield from _attributes(thing, kind)
    elif issubclass(kind, _SEQUENCES):
        base = next(base for base in _SEQUENCES if issubclass(kind, base))
        few = base.__len__(thing) <= _LISTED
        names = _fields(kind)
        for i, element in enumerate(base.__iter__(thing)):
            yield (f".{names[i]}" if i < len(names) else f"[{i}]" if few else "[…]"), element
        if kind is not base:
            yield from _attributes(thing, kind)
    elif issubclass(kind, _SETS):
        base = next(base for base in _SETS if issubclass(kind, base))
        yield from (("{…}", element) for element in base.__iter__(thing))
        if kind is not base:
            yield from _attributes(thing, kind)
    elif kind is FunctionType:
        yield from _function(thing)
    elif kind is MethodType:
        yield "", thing.__self__
        yield "", thing.__func__
    elif issubclass(kind, type):
        if is_users_class(thing):
            members = list(_class_members(thing).items())
            yield from ((f".{name}", value) for name, value in members if not name.startswith("__"))
    elif issubclass(kind, ModuleType):
        return  # a root of its own, if it is the user's
    elif kind is FrameType:
        yield from _frame(thing)
    elif kind is TracebackType:
        yield from (("", frame) for frame in _dead_frames(thing))
    elif issubclass(kind, BaseException):
        own = vars(BaseException)
        yield from (("", own[name].__get__(thing)) for name in ("__traceback__", "__cause__", "__context__"))
        yield ".args", own["args"].__get__(thing)
        yield from _attributes(thing, kind)
    elif kind is GeneratorType:
        yield from ((" (suspended)", each) for each in gc.get_referents(thing))
    elif _is_array_type(kind):
        yield from _array(thing)
        yield from _attributes(thing, kind)
    else:
        named = list(_attributes(thing, kind))
        yield from named
        if not is_tensor_type(kind):
            ids = {id(child) for _, child in named}
            referents = (child for child in gc.get_referents(thing) if not issubclass(type(child), type))
            yield from (("", child) for child in referents if id(child) not in ids)


def _fields(kind: type) -> tuple[str, ...]:
    """The names of a named tuple's elements."""
    fields = next((_class_members(base)["_fields"] for base in _bases(kind) if "_fields" in _class_members(base)), ())
    return fields if type(fields) is tuple else ()


def _is_array_type(kind: type) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and issubclass(kind, numpy.ndarray)


def _array(array: Any) -> Iterator[tuple[str, Any]]:
    """What an array shares its memory with, and its elements if they are objects."""
    kind = sys.modules["numpy"].ndarray
    yield "", kind.base.__get__(array)
    if kind.dtype.__get__(array).hasobject:
        yield from (("[…]", element) for element in kind.flat.__get__(array))


def _dead_frames(trace: TracebackType | None) -> Iterator[FrameType]:
    """The frames of a traceback from the user's first one on: those before it belong to the notebook and still run."""
    users = False
    while trace is not None:
        users = users or is_users_file(trace.tb_frame.f_code.co_filename)
        if users:
            yield trace.tb_frame
        trace = trace.tb_next


def _items(mapping: dict[Any, Any]) -> Iterator[tuple[str, Any]]:
    few = dict.__len__(mapping) <= _LISTED
    for key, value in list(dict.items(mapping)):
        plain = type(key) is str or type(key) is int
        yield (f"[{key!r}]" if plain and few else "[…]"), value
        if id(type(key)) not in _ATOMS:
            yield " (key)", key


_DESCRIPTORS = (id(GetSetDescriptorType), id(MemberDescriptorType))


def _attributes(thing: Any, kind: type) -> Iterator[tuple[str, Any]]:
    """The values in an object's dictionary and slots, and the gradient of a tensor."""
    torch = torch_module()
    inner = ("_parameters", "_buffers", "_modules") if torch and issubclass(kind, torch.nn.Module) else ()
    own: dict[str, Any] = {}
    for base in _bases(kind):
        members = _class_members(base)
        if id(type(members.get("__dict__"))) in _DESCRIPTORS:
            own = own or members["__dict__"].__get__(thing, kind) or {}
        for name, member in list(members.items()) if "__slots__" in members else ():
            if type(member) is MemberDescriptorType:
                with suppress(Exception):  # an empty slot
                    yield f".{_as_written(name, base)}", member.__get__(thing, kind)
    for name, value in list(own.items()):
        if name in inner:
            yield from ((f".{part}", child) for part, child in list(value.items()))
        else:
            yield f".{name}", value
    if is_tensor_type(kind):
        yield from ((".grad", each) for each in gradient(thing))


def _as_written(slot: str, owner: type) -> str:
    """The name of a slot without its class, which Python adds to private names."""
    prefix = f"_{_class_name(owner).lstrip('_')}"
    return slot.removeprefix(prefix) if slot.startswith(f"{prefix}__") else slot


def _function(function: FunctionType) -> Iterator[tuple[str, Any]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        with suppress(ValueError):  # an empty cell
            yield f"'s variable {name}", cell.cell_contents
    yield " (default)", function.__defaults__
    yield " (default)", function.__kwdefaults__
    yield from ((f".{name}", value) for name, value in vars(function).items())


_OWN_REFERENCES = 3  # the frame, the variable, and the argument of `getrefcount`


def _frame(frame: FrameType) -> Iterator[tuple[str, Any]]:
    """The variables of a call. Reading them makes a copy, which must not keep them alive."""
    code = frame.f_code
    if not code.co_flags & CO_OPTIMIZED:
        return  # its variables are those of a module or of the notebook
    values = frame.f_locals
    items = list(values.items())
    if sys.version_info < (3, 13) and sys.getrefcount(values) <= _OWN_REFERENCES:  # else it is the user's `locals()`
        values.clear()
    yield from ((f": {name} in {code.co_name}()", value) for name, value in items)
