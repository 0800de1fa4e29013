"""Put a training back to where it was, so that the same cell can run again from the same start.

A snapshot holds references to all that the code can reach (see `reachable`), the shallow contents of each container
and instance, the values of the tensors that train, and all random numbers. Restoring puts everything back in place:
every object keeps its identity, views into parameters stay views. Objects that the code made meanwhile are let go.

Take and restore it outside of a capture and of knobs: what these have hung into objects would be remembered as the
user's, or taken out.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

from msgspec import Struct

from gpulab.devices import gpus
from gpulab.snapshot.containers import Kept, KeptItems, KeptName, ObjectPath, position
from gpulab.snapshot.tensors import Tensors
from gpulab.snapshot.walk import MOST, Reachable
from gpulab.torch_hooks.randomness import Randomness, Undo, undo_of

NAMED = 20  # at most, of a kind

_SHELL = frozenset(("In", "Out", "get_ipython", "exit", "quit", "open"))


class Restored(Struct, frozen=True):
    """What a restore found, by names as the user would write them.

    `changed_besides`: what the code had changed besides the training's state: its own lists, dicts, sets, other
    tensors, and iterators it has taken from. `put_back`: those of them whose contents were put back all the same; what
    is left makes a cell that does not behave the same twice. `could_not`: state that stays as it is, with the reason.
    `taken_from`: iterators among what is left.
    """

    changed_besides: tuple[str, ...] = ()
    put_back: tuple[str, ...] = ()
    could_not: tuple[str, ...] = ()
    taken_from: tuple[str, ...] = ()

    @property
    def left(self) -> tuple[str, ...]:
        """What changed and was not put back."""
        return tuple(name for name in self.changed_besides if name not in self.put_back)


class State:
    """Made by `State.of`. `bytes`: memory that the copies take, `gpu_bytes`: on each GPU of that."""

    def __init__(self, namespace: dict[str, Any], names: Iterable[str] | None) -> None:
        self._namespace = namespace
        self._all = names is None
        chosen = _users_names(namespace) if names is None else list(dict.fromkeys(names))
        self._names = [KeptName(namespace, name, ObjectPath(name)) for name in chosen]
        self._own_names = frozenset(chosen)
        self._kept: list[Kept] = []
        self._reached = Reachable()
        self._tensors: Tensors | None = None
        self._undo: list[tuple[ObjectPath, Undo]] = []
        self._random = Randomness()
        self.bytes = 0
        self.gpu_bytes: dict[int, int] = {}

    @classmethod
    def of(cls, namespace: dict[str, Any], names: Iterable[str] | None, roots: Iterable[object] = ()) -> State:
        """All that code using these names (None: all names that the user has) and `roots` can reach, as it is now.

        Raises TooLarge where the copies do not fit into free memory: `of_random` still can be had. Raises DeviceLost
        where an error of a GPU stays.
        """
        state = cls(namespace, names)
        reached = state._reached
        named = [(namespace[name], ObjectPath(name)) for name in state._own_names if name in namespace]
        reached.follow([*named, *((x, ObjectPath(type(x).__name__)) for x in roots)])
        state._kept = reached.kept
        undone = [(place, undo_of(x)) for x, place in reached.generators]
        state._undo = [(place, undo) for place, undo in undone if undo is not None]
        if reached.tensors:
            tensors = state._tensors = Tensors(reached.tensors.values())
            tensors.copy()
            state.bytes, state.gpu_bytes = tensors.bytes, tensors.gpu_bytes
        return state

    @classmethod
    def of_random(cls, namespace: dict[str, Any], names: Iterable[str] | None) -> State:
        """Only what the names mean, and the global random numbers: where all would be too large."""
        return cls(namespace, names)

    def restore(self, *, keep_new: bool = False) -> Restored:
        """Put everything back in place; names that meant nothing are removed unless `keep_new`. As often as needed.

        Raises DeviceLost, and touches nothing then, where an error of a GPU stays.
        """
        could_not = [*self._close_loaders(), *self._beyond()]
        gpus.synchronize()
        taken_from = self._taken_from()
        left = [*taken_from, *(x.place for x in self._reached.lengths if x.changed())]
        put_back: list[ObjectPath] = []
        if self._tensors is not None:
            besides, not_copied = self._tensors.changed()
            put_back += besides
            left += not_copied
        for name in self._names:
            if not (keep_new and name.is_new):
                name.put_back()
        if self._all and not keep_new:
            for new in _users_names(self._namespace):
                if new not in self._own_names:
                    del self._namespace[new]
        for kept in self._kept:
            try:
                if not (keep_new and isinstance(kept, KeptName) and kept.is_new) and kept.put_back():
                    put_back += [kept.place] if _is_users(kept) else []
            except Exception as e:  # an object of the user's may refuse anything
                could_not.append(f"`{kept.place}`: {e}")
        if self._tensors is not None:
            could_not += [*self._tensors.could_not, *self._tensors.put_back()]
        could_not += self._put_back_random()
        back, stays = _named(put_back), _named(left)
        return Restored(tuple(dict.fromkeys((*stays, *back))), back, tuple(could_not), _named(taken_from))

    # -- details -------------------------------------------------------------------------------------------------

    def _put_back_random(self) -> list[str]:
        failed = []
        for place, undo in self._undo:
            try:
                undo()
            except Exception as e:
                failed.append(f"`{place}`: {e}")
        reason = self._random.put_back()
        return failed if reason is None else [*failed, reason]

    def _close_loaders(self) -> list[str]:
        """Shut down the persistent workers that the code started; those that were there before stay."""
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

    def _taken_from(self) -> list[ObjectPath]:
        taken = []
        for i, (iterator, before, place) in enumerate(self._reached.iterators):
            now = position(iterator)
            if now != before:
                taken.append(place)
                self._reached.iterators[i] = (iterator, now, place)
        return taken

    def _beyond(self) -> list[str]:
        return [f"what lies beyond the first {MOST:,} objects"] if self._reached.cut else []


def _is_users(kept: Kept) -> bool:
    """Whether the user would ask about it: a container of theirs."""
    return kept.place.users and isinstance(kept, KeptItems)


def _named(places: list[ObjectPath]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(str(place) for place in places))[:NAMED]


def _users_names(namespace: dict[str, Any]) -> list[str]:
    return [name for name in namespace if not name.startswith("_") and name not in _SHELL]
