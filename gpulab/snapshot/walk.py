"""Everything changeable that a cell's code can reach from its names: what a state has to remember.

Followed are containers, attributes of the instances that are put back, bound methods, closures, defaults, and of
functions and classes that the user wrote the globals they use. Not entered are modules, arrays, and containers of more
than LARGE elements, of which only the length is watched. Nothing of the user's is called.

An object that stands for something outside of Python (an open file, a thread, a window) must not be turned back: the
thing itself would not follow. So only three sorts are put back: what torch trains with, by its base class; objects of
the libraries that people train with; and objects of classes that the user wrote.
"""

from __future__ import annotations

import dis
import functools
from collections import deque
from collections.abc import Iterable
from operator import attrgetter
from types import BuiltinMethodType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from msgspec import Struct

from gpulab.snapshot.containers import (
    ABSENT,
    SCALARS,
    Kept,
    KeptAttributes,
    KeptCell,
    KeptItems,
    KeptName,
    Length,
    ObjectPath,
    attributes,
    is_iterator,
    position,
)
from gpulab.snapshot.tensors import Met
from gpulab.torch_hooks.randomness import imported_torch, is_generator
from gpulab.user_code import TRAINING_LIBRARIES, is_users_class, is_users_code

LARGE = 10_000  # elements; a dataset's list of files, not a training's list of parameters
LONG = 1_000  # elements: looked at after all that is shorter
MOST = 200_000  # objects

_MODULE_DICTS = ("_parameters", "_buffers", "_modules")


class Sort(Struct, frozen=True):
    """How objects of one type are treated. `put_back`: attribute by attribute."""

    put_back: bool
    users: bool  # a class that the user wrote
    plain: bool  # a bare holder of attributes
    module: bool
    trainer: bool  # each tensor of it is state
    loader: bool


class Reachable:
    def __init__(self) -> None:
        self.kept: list[Kept] = []
        self.lengths: list[Length] = []
        self.tensors: dict[int, Met] = {}
        self.generators: list[tuple[Any, ObjectPath]] = []
        self.iterators: list[tuple[Any, object, ObjectPath]] = []
        self.loaders: list[tuple[Any, Any, ObjectPath]] = []  # with the persistent iterator each had
        self.cut = False  # there was more than MOST
        self._met: dict[int, object] = {}  # holds what was met, so that no id returns
        self._names: set[tuple[int, str]] = set()
        self._classes: set[type] = set()
        self._sorts: dict[type, Sort] = {}
        self._near: deque[tuple[Any, ObjectPath, bool]] = deque()
        self._far: deque[tuple[Any, ObjectPath, bool]] = deque()

    def follow(self, roots: Iterable[tuple[Any, ObjectPath]]) -> None:
        """Go through everything that these objects lead to."""
        self._near.extend((x, place, False) for x, place in roots)
        while self._near or self._far:
            self._visit(*(self._near or self._far).popleft())

    def _visit(self, thing: Any, place: ObjectPath, training: bool) -> None:
        kind = type(thing)
        if kind in SCALARS:
            return
        if id(thing) in self._met:
            if training and id(thing) in self.tensors:
                self.tensors[id(thing)].training = True
            return
        if len(self._met) >= MOST:
            self.cut = True
            return
        self._met[id(thing)] = thing
        torch = imported_torch()
        if torch is not None and issubclass(kind, torch.Tensor):
            self.tensors[id(thing)] = Met(thing, place, training or thing.requires_grad)
            if thing.is_leaf and thing.grad is not None:
                self._near.append((thing.grad, place.attribute("grad"), True))
            if held := attributes(thing):
                self._keep_dict(held, place.attribute("__dict__", users=False), False)
        elif issubclass(kind, dict | list | tuple | set | frozenset | deque):
            self._container(thing, kind, place, training)
        elif is_generator(kind):
            self.generators.append((thing, place))
        elif kind in _CODE:
            self._code(thing, place)
        elif issubclass(kind, type):
            self._class(thing)
        elif kind is not ModuleType and self._sort(kind).put_back:
            self._instance(thing, kind, place, training)
        elif place.users and is_iterator(kind):
            self.iterators.append((thing, position(thing), place))

    # -- tensors and containers ----------------------------------------------------------------------------------

    def _container(self, container: Any, kind: type, place: ObjectPath, training: bool) -> None:
        if len(container) > LARGE and not training:
            self.lengths.append(Length(container, place))
            return
        if issubclass(kind, dict):
            self._keep_dict(container, place, training)
        else:
            if issubclass(kind, list | deque | set):
                self.kept.append(KeptItems(container, place))
            self._enter(
                ((x, place.item(i)) for i, x in enumerate(container) if type(x) not in SCALARS), training, container
            )
        if attributes(container) and self._sort(kind).put_back:
            self._instance(container, kind, place, training)

    def _keep_dict(self, container: dict[Any, Any], place: ObjectPath, training: bool) -> None:
        self.kept.append(KeptItems(container, place))
        items = list(dict.items(container))
        self._enter(((x, place.item(k)) for k, x in items if type(x) not in SCALARS), training, container)
        self._enter(((k, place) for k, _ in items if type(k) not in SCALARS), False, container)

    def _enter(self, elements: Iterable[tuple[Any, ObjectPath]], training: bool, owner: Any) -> None:
        queue = self._far if len(owner) > LONG and not training else self._near
        queue.extend((x, place, training) for x, place in elements)

    # -- instances -----------------------------------------------------------------------------------------------

    def _instance(self, owner: Any, kind: type, place: ObjectPath, training: bool) -> None:
        sort = self._sort(kind)
        place = ObjectPath(place.piece, place.parent, place.users and (sort.users or sort.plain) and not sort.module)
        kept = KeptAttributes(owner, place)
        self.kept.append(kept)
        training = training or sort.trainer
        held = dict(attributes(owner) or {})
        if sort.loader:
            self.loaders.append((owner, held.get("_iterator"), place))
        if sort.module:
            for name in _MODULE_DICTS:
                self._module_dict(held.pop(name, None), place, training=name != "_modules")
        values = [(x, place.attribute(name)) for name, x in held.items()]
        values += [(slot.value, slot.place) for slot in kept.slots]
        self._near.extend((x, at, training) for x, at in values if type(x) not in SCALARS and x is not ABSENT)
        if sort.users:
            self._class(kind)

    def _module_dict(self, container: dict[str, Any] | None, place: ObjectPath, training: bool) -> None:
        if container is not None and id(container) not in self._met:
            self._met[id(container)] = container
            self.kept.append(KeptItems(container, place))
            self._near.extend(
                (x, place.attribute(str(name)), training) for name, x in container.items() if x is not None
            )

    # -- code ----------------------------------------------------------------------------------------------------

    def _code(self, thing: Any, place: ObjectPath) -> None:
        kind = type(thing)
        if kind is MethodType:
            self._near.extend(((thing.__self__, place, False), (thing.__func__, place, False)))
        elif kind is BuiltinMethodType:
            owner = thing.__self__
            if owner is not None and type(owner) is not ModuleType:
                self._near.append((owner, place, False))
        elif kind is functools.partial:
            self._near.extend((x, place, False) for x in (thing.func, thing.args, thing.keywords))
        elif kind is property:
            self._near.extend((f, place, False) for f in (thing.fget, thing.fset) if f is not None)
        elif kind is FunctionType:
            self._function(thing, place)
        else:  # staticmethod, classmethod
            self._near.append((thing.__func__, place, False))

    def _function(self, function: FunctionType, place: ObjectPath) -> None:
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            if id(cell) not in self._met:
                self._met[id(cell)] = cell
                variable = KeptCell(cell, ObjectPath(name))
                self.kept.append(variable)
                self._near.append((variable.value, variable.place, False))
        for default in (function.__defaults__, function.__kwdefaults__):
            self._near.append((default, place, False))
        if is_users_code(function.__code__):
            if function.__dict__:
                self.kept.append(KeptAttributes(function, place))
                self._near.extend((x, place.attribute(name), False) for name, x in function.__dict__.items())
            self._globals(function)

    def _globals(self, function: FunctionType) -> None:
        namespace = function.__globals__
        read, assigned = _global_names(function.__code__)
        for name in read | assigned:
            has_value = name in namespace
            if (id(namespace), name) in self._names or not (has_value or name in assigned):
                continue
            self._names.add((id(namespace), name))
            self.kept.append(KeptName(namespace, name, ObjectPath(name)))
            if has_value:
                self._near.append((namespace[name], ObjectPath(name), False))

    def _class(self, kind: type) -> None:
        """The globals that methods use. Of the class itself nothing is put back."""
        if kind in self._classes or not self._sort(kind).users:
            return
        self._classes.add(kind)
        place = ObjectPath(kind.__name__)
        for base in kind.__mro__:
            if self._sort(base).users:
                self._near.extend((x, place, False) for x in vars(base).values() if type(x) in _CODE)

    def _sort(self, kind: type) -> Sort:
        sort = self._sorts.get(kind)
        if sort is None:
            sort = self._sorts[kind] = sort_of(kind)
        return sort


_CODE = frozenset((FunctionType, MethodType, BuiltinMethodType, functools.partial, property, staticmethod, classmethod))


def _global_names(code: CodeType) -> tuple[frozenset[str], frozenset[str]]:
    """The global names that this code, with all functions inside it, reads and assigns."""
    read, assigned = set(), set()
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            read.add(str(instruction.argval))
        elif instruction.opname in ("STORE_GLOBAL", "DELETE_GLOBAL"):
            assigned.add(str(instruction.argval))
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            for names, more in zip((read, assigned), _global_names(inner), strict=True):
                names.update(more)
    return frozenset(read), frozenset(assigned)


TORCH_PARTS = ("torch.amp", "torch.cuda.amp", "torch.nn", "torch.optim", "torch.utils.data")
OUTSIDE = (  # threads, processes, files, windows, kernels
    *("IPython", "_io", "_thread", "asyncio", "concurrent", "ctypes", "enum", "io", "ipykernel", "ipywidgets"),
    *("logging", "matplotlib", "multiprocessing", "pandas", "pathlib", "queue", "socket", "sqlite3", "ssl"),
    *("subprocess", "tempfile", "threading", "traitlets", "zmq"),
)
OUTSIDE_PARTS = (
    "accelerate.tracking",
    "lightning.fabric.loggers",
    "lightning.pytorch.callbacks.progress",
    "lightning.pytorch.loggers",
    "pytorch_lightning.callbacks.progress",
    "pytorch_lightning.loggers",
    "transformers.integrations",
    "transformers.utils.notebook",
)
PLAIN = ("types.SimpleNamespace", "argparse.Namespace")

# The base classes of what torch trains with
MODULES = ("nn.Module",)
TRAINERS = ("optim.Optimizer", "optim.lr_scheduler.LRScheduler", "amp.GradScaler")
LOADERS = ("utils.data.DataLoader",)
DATA = ("utils.data.Dataset", "utils.data.Sampler")


def sort_of(kind: type) -> Sort:
    """Decides what is put back: the border of what a state covers."""
    home, package = str(kind.__module__), _package(kind)
    users, plain = is_users_class(kind), f"{home}.{kind.__qualname__}" in PLAIN
    module, trainer, loader, data = (_is_torchs(kind, bases) for bases in (MODULES, TRAINERS, LOADERS, DATA))
    if module or trainer or loader or data:
        put_back = True
    elif issubclass(kind, BaseException | type) or any(_package(base) in OUTSIDE for base in kind.__mro__):
        put_back = False
    elif plain or users:
        put_back = True
    elif _part_of(home, TORCH_PARTS):
        put_back = all(base.__name__ != "_BaseDataLoaderIter" for base in kind.__mro__)
    else:
        put_back = package in TRAINING_LIBRARIES and not _part_of(home, OUTSIDE_PARTS)
    return Sort(put_back, users, plain, module, trainer, loader)


def _is_torchs(kind: type, bases: tuple[str, ...]) -> bool:
    """Whether it derives from one of these classes of torch; no while torch is not imported."""
    torch = imported_torch()
    return torch is not None and any(issubclass(kind, attrgetter(base)(torch)) for base in bases)


def _package(kind: type) -> str:
    return str(kind.__module__).partition(".")[0]


def _part_of(home: str, parts: tuple[str, ...]) -> bool:
    return any(home == part or home.startswith(part + ".") for part in parts)
