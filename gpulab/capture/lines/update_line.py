"""Where in the user's code an iteration's last update of the parameters is asked for.

A loop without a DataLoader gives no other sign of where its iterations begin: what it does after the update, and what
prepares the next batch, lie in the same stretch between two updates.
"""

from __future__ import annotations

from types import FrameType

from gpulab.capture.lines.places import Stack, users_stack
from gpulab.capture.stacks.stack import Spot

_MET = 32  # updates that are looked at: by then a loop has shown all its optimizers


class UpdateLine:
    """Learns from the first updates of a run. Only names and numbers are kept of a frame."""

    def __init__(self) -> None:
        self._latest: Stack = ()
        self._met = 0
        self.learned = False  # enough updates were looked at
        self.step_lines: set[Spot] = set()  # within a loop over whole steps: where one asks for data or updates

    def met(self, frame: FrameType | None) -> None:
        """An optimizer was just asked to step from here; of several in one function the last counts."""
        if self.learned:
            return
        self._met += 1
        self.learned = self._met >= _MET
        stack = users_stack(frame)[::-1]
        self.step_lines.update(stack)
        if not self._latest or _later(stack, self._latest):
            self._latest = stack

    @property
    def lines(self) -> Stack:
        """From the loop to the update, the outermost first; empty without an optimizer."""
        return self._latest

    def asked(self, frame: FrameType | None) -> None:
        """A loader was just asked for a new iterator from here."""
        if len(self.step_lines) < _MET:
            self.step_lines.update(users_stack(frame))


def _later(stack: Stack, reference: Stack) -> bool:
    """Both from the outermost line inwards: whether the first line in which they differ comes later in the first."""
    for (file, line, function), (its_file, its_line, its_function) in zip(stack, reference, strict=False):
        if (file, function) != (its_file, its_function) or line < its_line:
            return False
        if line > its_line:
            return True
    return False
