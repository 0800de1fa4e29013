"""Restores the state of a training, so that the same cell can run again from the same start.

A snapshot holds references to everything that the code can reach (see `walk`), the shallow contents of each container
and instance, the values of training tensors, and all random states. A restore happens in place: every object keeps its
identity, views into parameters stay views. Objects that the code created since the snapshot are released.

Take and restore a snapshot outside captures and knobs: their attachments to objects would be saved as the user's, or
removed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

from msgspec import Struct

from gpulab.devices import gpus
from gpulab.patching.randomness import Randomness
from gpulab.snapshot.containers import ChangeDetector, ObjectPath, name_in, undo_all, undo_variable
from gpulab.snapshot.tensors import Tensors
from gpulab.snapshot.walk import MOST, Reachable

MOST_NAMES = 20  # listed in a message

_SHELL = frozenset(("In", "Out", "get_ipython", "exit", "quit", "open"))


class Restored(Struct, frozen=True):
    """What a restore could not put back, by names as the user would write them.

    `iterators`: iterators that the code has consumed; `changed`: large containers and tensors that it changed. With
    either, a cell does not behave the same twice. `could_not`: other state that stays, with the reason.
    """

    iterators: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    could_not: tuple[str, ...] = ()


class State:
    """A snapshot, created by `State.of`. `bytes`: memory of the copies."""

    def __init__(self, namespace: dict[str, Any], names: Iterable[str] | None) -> None:
        self._namespace = namespace
        self._all = names is None
        self._names = _users_names(namespace) if names is None else list(dict.fromkeys(names))
        self._reached = Reachable()
        self._reached.undos += [(ObjectPath(name), undo_variable(name_in(namespace, name))) for name in self._names]
        self._tensors: Tensors | None = None
        self._random = Randomness()

    @classmethod
    def of(cls, namespace: dict[str, Any], names: Iterable[str] | None, roots: Iterable[object] = ()) -> State:
        """The present state of all that code with these names (None: all of the user's names) and `roots` can reach.

        Raises TooLarge if the copies do not fit into free memory; `of_random` still works then. Raises DeviceLost if a
        GPU has a persistent error.
        """
        state = cls(namespace, names)
        reached = state._reached
        values = [(namespace[name], ObjectPath(name)) for name in state._names if name in namespace]
        reached.follow([*values, *((x, ObjectPath(type(x).__name__)) for x in roots)])
        if reached.tensors:
            state._tensors = Tensors(reached.tensors.values())
            state._tensors.copy()
        return state

    @classmethod
    def of_random(cls, namespace: dict[str, Any], names: Iterable[str] | None) -> State:
        """Only the bindings of the names, and the global random states, if the full state is too large."""
        return cls(namespace, names)

    @property
    def bytes(self) -> int:
        return self._tensors.bytes if self._tensors is not None else 0

    def restore(self) -> Restored:
        """Restore everything in place and remove names that were unbound. Can be called repeatedly.

        Raises DeviceLost, and changes nothing, if a GPU has a persistent error.
        """
        reached, tensors = self._reached, self._tensors
        could_not = self._close_loaders()
        if reached.cut:
            could_not.append(f"what lies beyond the first {MOST:,} objects")
        gpus.synchronize()
        iterators = _changed(reached.iterators)
        changed = _changed([*reached.lengths, *(tensors.not_copied if tensors is not None else ())])
        could_not += undo_all(reached.undos)
        if self._all:
            for name in set(_users_names(self._namespace)).difference(self._names):
                del self._namespace[name]
        if tensors is not None:
            could_not += [*tensors.could_not, *tensors.put_back()]
        reason = self._random.put_back()
        if reason is not None:
            could_not.append(reason)
        return Restored(iterators, changed, tuple(could_not))

    def _close_loaders(self) -> list[str]:
        """Shut down persistent workers that the code started. Returns a sentence part for each older set that stays."""
        lasting = []
        for loader, iterator, place in self._reached.loaders:
            present = vars(loader).get("_iterator")
            if present is not None and present is not iterator:
                shut_down = getattr(present, "_shutdown_workers", None)
                if callable(shut_down):
                    with contextlib.suppress(Exception):  # workers that died by themselves
                        shut_down()
            if iterator is not None:
                lasting.append(f"the random numbers in the persistent workers of `{place}`, which were running before")
        return lasting


def _changed(detectors: list[ChangeDetector]) -> tuple[str, ...]:
    """The names of the detectors whose objects have changed."""
    return tuple(dict.fromkeys(str(one.place) for one in detectors if one.changed()))[:MOST_NAMES]


def _users_names(namespace: dict[str, Any]) -> list[str]:
    return [name for name in namespace if not name.startswith("_") and name not in _SHELL]
