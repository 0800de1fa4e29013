"""What code is going to use, as far as it exists before it runs: what certainly cannot be set is said at once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from gpulab.devices.machine import detect_device
from gpulab.errors import UsageError
from gpulab.knobs import catalogue
from gpulab.knobs.dataloader.changes import UNFIT_FOR_SPAWN
from gpulab.knobs.dataloader.options import with_settings
from gpulab.knobs.dataloader.spawning import main_can_be_imported, start_method
from gpulab.knobs.knob import Knob, Value
from gpulab.knobs.observe.describe import observed_loader, observed_module
from gpulab.knobs.observe.object_walk import reached
from gpulab.knobs.observe.observation import Observation, ObservedLoader
from gpulab.knobs.variables import Plain
from gpulab.run import Device
from gpulab.tuning.plan import Code

if TYPE_CHECKING:
    from torch.utils.data import DataLoader


class Beforehand:
    """The DataLoaders and modules that are there already. Where the code builds loaders itself, those are not."""

    def __init__(self, code: Code) -> None:
        from torch.nn import Module
        from torch.utils.data import DataLoader

        self._code = code
        self._values = [code.namespace[name] for name in sorted(code.variables.read & code.namespace.keys())]
        self.builds_loaders = "DataLoader(" in code.text or any(_is_kind(v, DataLoader) for v in self._values)
        loaders = {id(o): o for o in self._reached() if isinstance(o, DataLoader)}
        self.loaders = _loaders(loaders.values())
        modules = [v for v in self._values if isinstance(v, Module) and next(v.parameters(), None) is not None]
        self._modules = tuple(observed_module(m, trained=False, autocast_dtype=None) for m in modules)

    def value_of(self, knob: Knob) -> Value | None:
        """The value that all loaders have; None where they differ or others may be used."""
        if knob.kind != "DataLoader option" or self.builds_loaders:
            return None
        values = {knob.value_in(observation) for observation in self._observations()}
        return values.pop() if len(values) == 1 else None

    def refuses(self, knob: Knob, value: Value, settings: Mapping[str, Value]) -> str:
        """Why it cannot be set to that value, whatever the code does; empty where that is not certain.

        `settings`: those that are set together.
        """
        if knob.kind == "DataLoader option":
            reasons = [
                knob.refuses(with_settings(observation, settings), value) for observation in self._observations()
            ]
            if reasons and all(reasons) and not self.builds_loaders:
                return reasons[0] or ""
            return self._unfit_dataset() if knob.starts_processes and value and self.builds_loaders else ""
        if not knob.refusal_rests_on or ("modules" in knob.refusal_rests_on and not self._modules):
            return ""
        if detect_device("auto").kind == "cuda":  # torch.cuda.is_available() starts the driver before the user's code
            return ""
        return knob.refuses(Observation(Device("cpu", "CPU"), modules=self._modules), value) or ""

    def _observations(self) -> Iterator[Observation]:
        yield from (Observation(Device("cpu", "CPU"), loaders=(loader,)) for loader in self.loaders)

    def _reached(self) -> Iterator[object]:
        for value in self._values:
            yield from reached(value)

    def _unfit_dataset(self) -> str:
        """The code builds its DataLoader, from a Dataset of the notebook."""
        from torch.utils.data import Dataset

        method = start_method()
        if method == "fork" or "multiprocessing_context" in self._code.text or main_can_be_imported():
            return ""
        kinds = [v if isinstance(v, type) else type(v) for v in self._values]
        local = any(_is_kind(kind, Dataset) and kind.__module__ == "__main__" for kind in kinds)
        return UNFIT_FOR_SPAWN.format(method=method) if local else ""


def refusals(settings: Mapping[str, Plain], code: Code) -> dict[str, str]:
    """Of the knobs among these settings: why they certainly cannot be set. A name may also be a variable's."""
    knobs = dict(_knobs(settings, code))
    if not knobs:
        return {}
    there = Beforehand(code)
    plain = {knob.name: value for knob, value in knobs.items()}
    found = {knob.name: there.refuses(knob, value, plain) for knob, value in knobs.items()}
    return {name: why for name, why in found.items() if why}


def _knobs(settings: Mapping[str, Plain], code: Code) -> Iterator[tuple[Knob, Value]]:
    for name, given in settings.items():
        if name in catalogue.KNOBS and name not in code.variables.names:
            knob = catalogue.KNOBS[name]
            with suppress(UsageError):  # said where the value is read
                yield knob, catalogue.value_of_knob(knob, given)


def _loaders(loaders: Iterable[DataLoader[Any]]) -> tuple[ObservedLoader, ...]:
    try:
        return tuple(map(observed_loader, loaders))
    except Exception:  # a user's own kind of DataLoader: what one of them is like is not known
        return ()


def _is_kind(value: object, kind: type) -> bool:
    return isinstance(value, type) and issubclass(value, kind)


__all__ = ["Beforehand", "refusals"]
