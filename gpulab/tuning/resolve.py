"""What each name of an arm means in this cell: a knob or a variable, its current value, and why it cannot be set."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from msgspec import Struct, field
from msgspec.structs import replace

from gpulab.devices.machine import detect_device
from gpulab.errors import UsageError
from gpulab.knobs import catalogue, variable_reads, variables
from gpulab.knobs.description import main_can_be_imported, observed_loader, observed_module, start_method
from gpulab.knobs.edits import Edit, edit
from gpulab.knobs.knob import CodeEdit, Kind, Knob, KnobEffects, Value, written
from gpulab.knobs.loader_options import UNFIT_FOR_SPAWN, with_settings
from gpulab.knobs.observation import Observation, ObservedLoader
from gpulab.knobs.variables import Plain, Variables, walk
from gpulab.run import Change, Device, Run
from gpulab.tuning.plan import Arm, Code

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
        if why := knob.refused_here(value):
            return why
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
            yield from walk(value)

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
    reasons = {knob.name: there.refuses(knob, value, plain) for knob, value in knobs.items()}
    return {name: why for name, why in reasons.items() if why}


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


class ResolvedSetting(Struct, frozen=True):
    """One name of an arm. `current`: the value as the cell has it, None where it cannot be seen."""

    name: str
    value: Plain
    knob: Knob | None
    current: Plain | None = None
    refused: str = ""
    used: bool = False  # of a variable: the code has something that could read it

    @property
    def kind(self) -> Kind:
        return "variable" if self.knob is None else self.knob.kind

    @property
    def knob_value(self) -> Value:
        assert isinstance(self.value, (bool, int, float, str))
        return self.value

    @property
    def shown(self) -> str:
        return str(self.value) if self.knob is None else written(self.value)

    @property
    def is_current(self) -> bool:
        return type(self.current) is type(self.value) and self.current == self.value


class ResolvedArm(Struct, frozen=True):
    """An arm whose names are resolved in this cell."""

    names: tuple[ResolvedSetting, ...] = ()
    knobs: dict[Knob, Value] = field(default_factory=dict)
    variables: dict[str, Plain] = field(default_factory=dict)

    @property
    def refused(self) -> str:
        return "; ".join(f"{d.name}={d.shown}: {d.refused}" for d in self.names if d.refused)

    @property
    def failure(self) -> str:
        """The same beside the arm's label: the only setting of an arm is not named once more."""
        return self.names[0].refused if len(self.names) == 1 else self.refused

    def unchanged(self, base: Mapping[str, Plain] | None = None) -> str:
        """Why there is nothing to compare; empty where a setting differs. `base`: what the other side is set to."""
        others = base or {}
        same = [d.value == others[d.name] if d.name in others else d.is_current for d in self.names]
        if not same or not all(same):
            return ""
        return f"the baseline has {'this' if len(same) == 1 else 'all of this'} already, so there is nothing to compare"

    def changes_training(self, checks: Iterable[Change], base: Mapping[str, Plain] | None = None) -> str:
        """Why it is another training, and not only another speed. `checks`: what was seen in its run.

        `base`: settings that the side it is compared with has as well.
        """
        same = {name for name, value in (base or {}).items() for d in self.names if d.name == name and d.value == value}
        changed = [d for d in self._changed(checks) if d.name not in same]
        reasons = [d.knob.changes_training for d in changed if d.knob is not None]
        names = ", ".join(f"`{d.name}`" for d in changed if d.knob is None)
        if names:
            reasons.append(f"your code computes with another {names}")
        return "; ".join(r for r in reasons if r)

    def edit(self, code: Code, observation: Observation, checks: Iterable[Change]) -> Edit | None:
        """What makes it permanent; None where it cannot be set or changed nothing."""
        lasting = [] if self.refused else [_code_edit(d, observation) for d in self._changed(checks)]
        return edit(code.text, lasting) if lasting else None

    def _changed(self, checks: Iterable[Change]) -> list[ResolvedSetting]:
        idle = {c.name for c in checks if c.state == "no effect"}
        return [d for d in self.names if d.name not in idle and not d.is_current]


def check_names(arms: Sequence[Arm], code: Code) -> None:
    """Raises UsageError for a name that is neither a knob nor a variable of the code, or for a value that does not fit.

    Also where it is certain that no arm can be set. Before anything runs.
    """
    variables = code.variables
    for arm in arms:
        for name, given in arm.settings.items():
            if name not in catalogue.KNOBS:
                catalogue.decide(name, Observation(Device("cpu", "")), variables.has)
            if name not in catalogue.KNOBS or not _is_value(catalogue.KNOBS[name], given):
                variables.value(name, given)  # it may be meant for a variable of a knob's name
    refused = [_said(arm, refusals(arm.settings, code)) for arm in arms]
    if refused and all(refused):
        raise UsageError(f"{refused[0]}.")


def _is_value(knob: Knob, given: Plain) -> bool:
    try:
        catalogue.value_of_knob(knob, given)
    except UsageError:
        return False
    return True


def _said(arm: Arm, reasons: Mapping[str, str]) -> str:
    return "; ".join(f"{name}={arm.shown[name]}: {why}" for name, why in reasons.items())


def resolve_beforehand(arm: Arm, observation: Observation | None, code: Code) -> ResolvedArm:
    """For a run of code that has not just run as written; `observation`: what it used when it last did, as far
    as known.

    Only what is certain before the run speaks against a knob: the rest shows when it runs. Raises UsageError for a
    name that is neither a knob nor a variable of the code.
    """
    reasons = refusals(arm.settings, code)
    there = Beforehand(code)
    names = []
    for name, given in arm.settings.items():
        knob = _knob_of(name, observation, code.variables)
        if knob is None:
            names.append(_variable(name, given, code.variables))
        else:
            before = knob.value_in(observation) if observation is not None else there.value_of(knob)
            value = catalogue.value_of_knob(knob, given)
            names.append(ResolvedSetting(name, value, knob, before, reasons.get(name, "")))
    return _of(names)


def resolve_arm(arm: Arm, observation: Observation, code: Code) -> ResolvedArm:
    """By the catalogue's rule. What cannot be set says why, and is not set.

    `observation`: of the run of the baseline just before. Raises UsageError for a name that is neither a knob nor a
    variable of the code.
    """
    together = {
        name: value
        for name, value in arm.settings.items()
        if name in catalogue.KNOBS and isinstance(value, (bool, int, float, str))
    }
    imagined = with_settings(observation, together)
    return _of([_decide(name, given, observation, imagined, code) for name, given in arm.settings.items()])


def _of(names: list[ResolvedSetting]) -> ResolvedArm:
    able = [d for d in names if not d.refused]
    return ResolvedArm(
        tuple(names),
        {d.knob: d.knob_value for d in able if d.knob is not None},
        {d.name: d.value for d in able if d.knob is None},
    )


def changes(
    arm: ResolvedArm, observation: Observation, effects: Mapping[str, KnobEffects], run: Run
) -> tuple[Change, ...]:
    """Whether each change took effect in a run in which it was made. `observation`: of the code as written."""
    return tuple(_change(d, observation, effects, run) for d in arm.names)


def changes_unseen(
    arm: ResolvedArm,
    written: Observation | None,
    changed: Observation,
    effects: Mapping[str, KnobEffects],
    run: Run,
) -> tuple[Change, ...]:
    """The same where the code did not just run as written: `changed` is the observation of `run`, changes and all.

    It also tells what speaks against a setting that was tried.
    """
    bare = changed
    for knob in arm.knobs:
        bare = knob.without(bare)
    imagined = with_settings(bare, {knob.name: value for knob, value in arm.knobs.items()})
    verified = changes(arm, written or bare, effects, run)
    return tuple(_judged(c, d, bare, imagined) for c, d in zip(verified, arm.names, strict=True))


def outside_of(code: Code, values: Mapping[str, Plain]) -> dict[str, Plain]:
    """Those that are no literals of the code: they are set in its namespace. Slow: looks at all that it uses."""
    literals = code.variables.literals if values else {}
    return {name: value for name, value in values.items() if name not in literals}


def _change(decided: ResolvedSetting, observation: Observation, by_name: Mapping[str, KnobEffects], run: Run) -> Change:
    name, kind, knob = decided.name, decided.kind, decided.knob
    show = str if knob is None else written
    current, value = "" if decided.current is None else show(decided.current), show(decided.value)
    if decided.refused:
        return Change(name, value, current, kind, "no effect", decided.refused)
    effects = by_name[name]
    if knob is None:
        seen = variable_reads.verify(decided.value, decided.current, decided.used, effects, run)
        return Change(name, value, current, kind, seen.state, seen.evidence)
    try:
        result = knob.verify(observation, decided.knob_value, effects, run)
    except Exception as e:  # a fault of ours must not cost the run its report
        return Change(name, value, current, kind, "cannot tell", f"gpulab failed to look ({type(e).__name__}: {e})")
    more = (words for words in (*effects.refused, *effects.notes) if words not in result.evidence)
    evidence = "; ".join(dict.fromkeys([result.evidence, *more]))
    return Change(name, value, current, kind, result.state, evidence)


def _judged(change: Change, decided: ResolvedSetting, bare: Observation, imagined: Observation) -> Change:
    knob = decided.knob
    if knob is None or decided.refused:
        return change
    if not change.found:
        change = replace(change, found=_value_before(knob, decided.knob_value, change, bare))
    why = knob.refuses(imagined, decided.knob_value)
    if not why or (change.state == "took effect" and knob.kind == "DataLoader option"):
        return change
    if change.state == "took effect":
        return replace(change, state="cannot tell", evidence=f"{why}; {change.evidence}")
    return replace(change, evidence=why)


def _value_before(knob: Knob, value: Value, change: Change, bare: Observation) -> str:
    """What the code had before: loaders were seen so, and what was switched was not so before."""
    if knob.kind == "DataLoader option":
        before = knob.value_in(bare)
        return "" if before is None else written(before)
    return written(not value) if isinstance(value, bool) and change.state == "took effect" else ""


def _knob_of(name: str, observation: Observation | None, own: Variables) -> Knob | None:
    """By the catalogue's rule where there is an observation; else a literal of the code is meant before a knob."""
    if observation is not None:
        return catalogue.decide(name, observation, own.has).knob
    return None if name in own.literals else catalogue.KNOBS.get(name)


def _decide(name: str, given: Plain, observation: Observation, imagined: Observation, code: Code) -> ResolvedSetting:
    knob = catalogue.decide(name, observation, code.variables.has).knob
    try:
        if knob is None:
            return _variable(name, given, code.variables)
        value = catalogue.value_of_knob(knob, given)
    except UsageError as e:
        return ResolvedSetting(name, given, knob, refused=str(e))
    return ResolvedSetting(name, value, knob, knob.value_in(observation), knob.refuses(imagined, value) or "")


def _variable(name: str, given: Plain, own: Variables) -> ResolvedSetting:
    return ResolvedSetting(name, own.value(name, given), None, own.present(name), used=name in own.used)


def _code_edit(decided: ResolvedSetting, observation: Observation) -> CodeEdit:
    if decided.knob is None:
        return variables.code_edit(decided.name, decided.value)
    return decided.knob.code_edit(observation, decided.knob_value)
