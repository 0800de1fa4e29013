"""The same start for each run of an experiment: the user's state is restored before each run and at the end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gpulab.errors import DeviceLost
from gpulab.formatting import size
from gpulab.knobs.catalogue import KNOBS
from gpulab.snapshot.state import State
from gpulab.snapshot.tensors import TooLarge
from gpulab.tuning.code import Code


class Start:
    """A snapshot of what the code uses. `whole`: it covers the whole state, so that losses can be compared.

    `notes` say what could not be restored; `used_up` are iterators that the code consumes.
    """

    def __init__(self, code: Code) -> None:
        self.notes: list[str] = []
        self.used_up: list[str] = []
        self.lost: DeviceLost | None = None  # the GPU takes no more work: nothing can be restored
        self._namespace = code.namespace
        self._before = set(code.namespace)
        self._new_names: dict[str, Any] = {}
        self.whole = True
        try:
            state = State.of(code.namespace, code.names, roots=code.roots)
        except TooLarge as e:
            state = State.of_random(code.namespace, code.names)
            self._words, self.whole = str(e), False
        else:
            copied = f" ({size(state.bytes)})" if state.bytes >= 2**20 else ""
            what = "Weights, optimizer, random numbers and data order"
            self._words = f"{what} were restored before each run and at the end{copied}."
        self._state: State | None = state
        self.bytes = state.bytes  # of the copy, which takes room

    @property
    def words(self) -> str:
        """What was restored, or why not."""
        return self._words + (f" Not restored: {quoted(self.used_up)}." if self.used_up else "")

    def used_up_words(self, *, loads: bool) -> str:
        """A warning if the code consumes iterators; `loads`: a DataLoader option is compared."""
        names = self.used_up
        if not names:
            return ""
        goes, it = ("go", "them") if len(names) > 1 else ("goes", "it")
        words = (
            f"Your code uses up {quoted(names)}, which {goes} on where the last run ended: no two runs see the same "
            "data."
        )
        if not loads:
            return words
        return (
            f"{words} A DataLoader inside {it} applies new options only when it restarts, so the runs may not differ "
            "as they should."
        )

    def note(self, words: str) -> None:
        if words not in self.notes:
            self.notes.append(words)

    def restore(self) -> bool:
        """Restore the state. False if nothing can run any more."""
        if self._state is None:
            return False
        try:
            restored = self._state.restore()
        except DeviceLost as e:
            self.lose(e)
            return False
        for what in restored.could_not:
            self.note(f"Could not be restored: {what}.")
        self.used_up += [name for name in restored.iterators if name not in self.used_up]
        if names := restored.changed:
            self.note(f"Your code changed {quoted(names)}, which cannot be restored: it may not behave the same twice.")
        return True

    def lose(self, lost: DeviceLost) -> None:
        """Record that the GPU is lost: nothing can be restored any more."""
        self.lost, self._state = lost, None
        self.note(f"Not restored: {lost}")

    def keep_new_names(self) -> None:
        """Names that the code has created by now are kept at the end."""
        self._new_names = dict(self._namespace)

    def end(self) -> None:
        """Restore everything for the last time. Removes names that later runs added, such as Dynamo's."""
        self.restore()
        self._state = None  # releases the cell's former objects
        for knob in KNOBS.values():
            knob.forget()
        for name in set(self._namespace) - self._before - set(self._new_names):
            del self._namespace[name]
        self._namespace.update((n, v) for n, v in self._new_names.items() if n not in self._before)


def quoted(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)
