"""Finds everything mutable that a cell's code can reach from its names: the state to save.

The walk follows containers, attributes of restorable instances, bound methods, closures, defaults, and the globals that
the user's functions and classes use. It does not enter Python modules or arrays. Of a container with more than LARGE
elements it compares only the length, unless that is training state. No method of the user is called but the `__len__`
and `__iter__` of containers.

An object that represents something outside Python (an open file, a thread, a window) must not be restored: the outside
would not follow. So objects are restored only if their class is torch's (for training), a training library's or the
user's, or a plain namespace.
"""

from __future__ import annotations

import functools
import gc
from collections import deque
from collections.abc import Iterable
from functools import partial
from operator import attrgetter
from types import BuiltinMethodType, FunctionType, MethodType, ModuleType
from typing import Any

from msgspec import Struct

from gpulab.patching.randomness import Undo, imported_torch, is_generator, undo_of
from gpulab.snapshot.containers import (
    ABSENT,
    SCALARS,
    ChangeDetector,
    ObjectPath,
    attributes,
    cell_variable,
    is_iterator,
    name_in,
    position,
    slot_variable,
    slots,
    undo_attributes,
    undo_items,
    undo_variable,
)
from gpulab.snapshot.tensors import TensorPlace
from gpulab.user_code import TRAINING_LIBRARIES, global_names, is_users_class, is_users_code

LARGE = 10_000  # elements: like a dataset's list of files, unlike a list of parameters
LONG = 1_000  # elements: followed after all shorter containers
MOST = 200_000  # objects

_MODULE_DICTS = ("_parameters", "_buffers", "_modules")
_CODE = frozenset((FunctionType, MethodType, BuiltinMethodType, functools.partial, property, staticmethod, classmethod))


class Sort(Struct, frozen=True):
    """How objects of one type are treated. `put_back`: attribute by attribute."""

    put_back: bool
    users: bool  # a class that the user wrote
    has_users_names: bool  # its attributes are what the user would call them
    module: bool
    trainer: bool  # all its tensors are training state
    loader: bool


class Reachable:
    """The objects that a walk from the roots has reached, grouped by the way they are restored."""

    def __init__(self) -> None:
        self.undos: list[tuple[ObjectPath, Undo]] = []  # for everything except tensors
        self.tensors: dict[int, TensorPlace] = {}
        self.lengths: list[ChangeDetector] = []  # of large containers
        self.iterators: list[ChangeDetector] = []
        self.loaders: list[tuple[Any, Any, ObjectPath]] = []  # with the former persistent iterator of each
        self.cut = False  # there were more than MOST objects
        self._visited: dict[int, object] = {}  # keeps the objects alive, so that no id is reused
        self._names: set[tuple[int, str]] = set()
        self._classes: set[type] = set()
        self._sorts: dict[type, Sort] = {}
        self._near: deque[tuple[Any, ObjectPath, bool]] = deque()
        self._far: deque[tuple[Any, ObjectPath, bool]] = deque()

    def follow(self, roots: Iterable[tuple[Any, ObjectPath]]) -> None:
        """Visit everything reachable from these objects."""
        self._enter(roots)
        while self._near or self._far:
            self._visit(*(self._near or self._far).popleft())

    def _enter(self, things: Iterable[tuple[Any, ObjectPath]], training: bool = False, owner: Any = ()) -> None:
        """Queue these objects; the elements of a long `owner` come after all others."""
        queue = self._far if len(owner) > LONG and not training else self._near
        queue.extend((x, place, training) for x, place in things if type(x) not in SCALARS and x is not ABSENT)

    def _visit(self, thing: Any, place: ObjectPath, training: bool) -> None:
        kind = type(thing)
        if id(thing) in self._visited:
            if training and id(thing) in self.tensors:
                self.tensors[id(thing)].training = True
            return
        if len(self._visited) >= MOST:
            self.cut = True
            return
        self._visited[id(thing)] = thing
        torch = imported_torch()
        if torch is not None and issubclass(kind, torch.Tensor):
            self.tensors[id(thing)] = TensorPlace(thing, place, training or thing.requires_grad)
            if thing.is_leaf and thing.grad is not None:
                self._enter([(thing.grad, place.attribute("grad"))], True)
            if fields := attributes(thing):
                self._dict(fields, place.attribute("__dict__", users=False), False)
        elif issubclass(kind, dict | list | tuple | set | frozenset | deque):
            self._container(thing, kind, place, training)
        elif is_generator(kind):
            undo = undo_of(thing)
            if undo is not None:
                self.undos.append((place, undo))
        elif kind is FunctionType:
            self._function(thing, place)
        elif kind in _CODE:
            self._enter((x, place) for x in gc.get_referents(thing))
        elif issubclass(kind, type):
            self._class(thing)
        elif kind is not ModuleType and self._sort(kind).put_back:
            self._instance(thing, kind, place, training)
        elif place.users and is_iterator(kind):
            self.iterators.append(ChangeDetector(place, partial(position, thing)))

    # -- containers and instances --------------------------------------------------------------------------------

    def _container(self, container: Any, kind: type, place: ObjectPath, training: bool) -> None:
        if len(container) > LARGE and not training:
            self.lengths.append(ChangeDetector(place, partial(len, container)))
            return
        if issubclass(kind, dict):
            self._dict(container, place, training)
        else:
            if issubclass(kind, list | deque | set):
                self.undos.append((place, undo_items(container)))
            self._enter(((x, place.item(i)) for i, x in enumerate(container)), training, container)
        if attributes(container) and self._sort(kind).put_back:
            self._instance(container, kind, place, training)

    def _dict(self, container: dict[Any, Any], place: ObjectPath, training: bool) -> None:
        self.undos.append((place, undo_items(container)))
        items = list(dict.items(container))
        self._enter(((x, place.item(k)) for k, x in items), training, container)
        self._enter(((k, place) for k, _ in items), False, container)

    def _instance(self, owner: Any, kind: type, place: ObjectPath, training: bool) -> None:
        sort = self._sort(kind)
        place = ObjectPath(place.piece, place.parent, place.users and sort.has_users_names)
        self.undos.append((place, undo_attributes(owner)))
        training = training or sort.trainer
        fields = dict(attributes(owner) or {})
        if sort.loader:
            self.loaders.append((owner, fields.get("_iterator"), place))
        if sort.module:
            for name in _MODULE_DICTS:
                self._module_dict(fields.pop(name, None), place, training=name != "_modules")
        fields.update((slot.__name__, slot_variable(slot, owner).value) for slot in slots(kind))
        self._enter(((x, place.attribute(name)) for name, x in fields.items()), training)
        if sort.users:
            self._class(kind)

    def _module_dict(self, container: dict[str, Any] | None, place: ObjectPath, training: bool) -> None:
        if container is not None and id(container) not in self._visited:
            self._visited[id(container)] = container
            self.undos.append((place, undo_items(container)))
            self._enter(((x, place.attribute(str(name))) for name, x in container.items()), training)

    # -- code ----------------------------------------------------------------------------------------------------

    def _function(self, function: FunctionType, place: ObjectPath) -> None:
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            if id(cell) not in self._visited:
                self._visited[id(cell)] = cell
                variable = cell_variable(cell)
                self.undos.append((ObjectPath(name), undo_variable(variable)))
                self._enter([(variable.value, ObjectPath(name))])
        self._enter((default, place) for default in (function.__defaults__, function.__kwdefaults__))
        if is_users_code(function.__code__):
            if function.__dict__:
                self.undos.append((place, undo_attributes(function)))
                self._enter((x, place.attribute(name)) for name, x in function.__dict__.items())
            self._globals(function)

    def _globals(self, function: FunctionType) -> None:
        namespace, names = function.__globals__, global_names(function.__code__)
        for name in {*(names.reads | names.calls_read).intersection(namespace), *names.calls_assign}:
            if (id(namespace), name) not in self._names:
                self._names.add((id(namespace), name))
                variable = name_in(namespace, name)
                self.undos.append((ObjectPath(name), undo_variable(variable)))
                self._enter([(variable.value, ObjectPath(name))])

    def _class(self, kind: type) -> None:
        """Follow the globals that methods use. The class itself is not restored."""
        if kind in self._classes or not self._sort(kind).users:
            return
        self._classes.add(kind)
        place = ObjectPath(kind.__name__)
        for base in kind.__mro__:
            if self._sort(base).users:
                self._enter((x, place) for x in vars(base).values() if type(x) in _CODE)

    def _sort(self, kind: type) -> Sort:
        sort = self._sorts.get(kind)
        if sort is None:
            sort = self._sorts[kind] = sort_of(kind)
        return sort


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
    """Classifies a type: decides what a snapshot covers."""
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
    return Sort(put_back, users, (users or plain) and not module, module, trainer, loader)


def _is_torchs(kind: type, bases: tuple[str, ...]) -> bool:
    """Whether the type derives from one of these torch classes; False while torch is not imported."""
    torch = imported_torch()
    return torch is not None and any(issubclass(kind, attrgetter(base)(torch)) for base in bases)


def _package(kind: type) -> str:
    return str(kind.__module__).partition(".")[0]


def _part_of(home: str, parts: tuple[str, ...]) -> bool:
    return any(home == part or home.startswith(part + ".") for part in parts)
