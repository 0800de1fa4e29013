"""Put a training back to where it was, so that the same cell can run again from the same start.

A snapshot holds references to all that the code can reach (see `reachable`), the shallow contents of each container
and instance, the values of the tensors that train, and all random numbers. Restoring puts everything back in place:
every object keeps its identity, views into parameters stay views. Objects that the code made since then are let go.

Take and restore it outside of a capture and of knobs: what these have attached to objects would be remembered as the
user's, or taken out.
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

MOST_NAMES = 20  # in a list of places

_SHELL = frozenset(("In", "Out", "get_ipython", "exit", "quit", "open"))


class Restored(Struct, frozen=True):
    """What a restore could not put back, by names as the user would write them.

    `iterators`: those that the code has taken from; `changed`: large containers and large tensors that it has changed.
    Both make a cell that does not behave the same twice. `could_not`: other state that stays, with the reason.
    """

    iterators: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    could_not: tuple[str, ...] = ()


class State:
    """Made by `State.of`. `bytes`: memory that the copies take."""

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
        """All that code using these names (None: all names that the user has) and `roots` can reach, as it is now.

        Raises TooLarge where the copies do not fit into free memory: `of_random` still can be had. Raises DeviceLost
        where an error of a GPU stays.
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
        """Only what the names mean, and the global random numbers: where all would be too large."""
        return cls(namespace, names)

    @property
    def bytes(self) -> int:
        return self._tensors.bytes if self._tensors is not None else 0

    def restore(self) -> Restored:
        """Put everything back in place; names that meant nothing are removed. As often as needed.

        Raises DeviceLost, and touches nothing then, where an error of a GPU stays.
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
        """Shut down the persistent workers that the code started. Those that were there before stay, and are named."""
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
    """The names of those that differ from the last time."""
    return tuple(dict.fromkeys(str(one.place) for one in detectors if one.changed()))[:MOST_NAMES]


def _users_names(namespace: dict[str, Any]) -> list[str]:
    return [name for name in namespace if not name.startswith("_") and name not in _SHELL]
