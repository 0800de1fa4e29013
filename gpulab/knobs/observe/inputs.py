"""What the model is given in a step: where no DataLoader tells, it shows whether two steps hold the same samples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from gpulab.knobs.observe.observation import Shape, StepInputs


class ObservedInputs:
    """Shapes of what is called to be trained, per backward pass, of whole steps: from one optimizer step to the next.

    `whole` is whether everything was watched since the last optimizer step.
    """

    def __init__(self) -> None:
        self.steps: set[StepInputs] = set()
        self._passes: list[tuple[Shape, ...]] = []
        self._shapes: dict[Shape | None, None] = {}
        self._whole = True

    def called(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        tensor = next(_tensors(args, kwargs), None)
        self._shapes[None if tensor is None else tuple(tensor.shape)] = None

    def backward(self) -> None:
        """A backward pass begins, through the calls since the last one."""
        if not self._shapes or None in self._shapes:
            self._whole = False
        self._passes.append(tuple(shape for shape in self._shapes if shape is not None))
        self._shapes.clear()

    def stepped(self, *, watching: bool) -> None:
        """An optimizer has stepped. `watching`: calls are watched from now on."""
        if self._whole and self._passes:
            self.steps.add(tuple(self._passes))
        self._passes.clear()
        self._shapes.clear()
        self._whole = watching

    def missed(self) -> None:
        self._whole = False

    @property
    def of_a_step(self) -> StepInputs | None:
        """What every step that was watched had; None where they differ, or none could be watched."""
        return next(iter(self.steps)) if len(self.steps) == 1 else None


def _tensors(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[Any]:
    """Those given as such or by name. The elements of a list are each a sample or not: they tell no batch."""
    from torch import Tensor

    for given in (*args, *kwargs.values()):
        for value in given.values() if isinstance(given, Mapping) else (given,):
            if isinstance(value, Tensor):
                yield value
