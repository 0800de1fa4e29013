"""Resolves each name of an arm in this cell: knob or variable, present value, and why it cannot be set, if so."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property

from msgspec import Struct
from msgspec.structs import replace

from gpulab.capture import threads
from gpulab.devices.machine import detect_device
from gpulab.errors import UsageError
from gpulab.knobs import catalogue, variable_reads, variables
from gpulab.knobs.description import main_can_be_imported, observed_loader, observed_module, start_method
from gpulab.knobs.edits import Edit, edit
from gpulab.knobs.knob import Kind, Knob, KnobEffects, Value, setting_text
from gpulab.knobs.loader_options import UNFIT_FOR_SPAWN, with_settings
from gpulab.knobs.observation import Observation, ObservedModule
from gpulab.knobs.variables import Plain, Variables, is_plain, walk
from gpulab.run import Change, Device, Run
from gpulab.tuning.code import Code
from gpulab.tuning.schedule import Arm, Plan, check_plan


class Setting(Struct, frozen=True):
    """One name of an arm. `current`: the cell's own value; None if it cannot be determined."""

    name: str
    value: Plain
    knob: Knob | None  # None: a variable
    current: Plain | None = None
    refusal: str = ""  # why it cannot be set
    used: bool = False  # variables only: whether the code contains a possible reader

    @property
    def kind(self) -> Kind:
        return "variable" if self.knob is None else self.knob.kind

    @property
    def knob_value(self) -> Value:
        assert isinstance(self.value, (bool, int, float, str))
        return self.value

    @property
    def text(self) -> str:
        return str(self.value) if self.knob is None else setting_text(self.value)

    @property
    def is_current(self) -> bool:
        return type(self.current) is type(self.value) and self.current == self.value


class ResolvedArm(Struct, frozen=True):
    """An arm whose names are resolved in this cell. `knobs` and `variables` hold the settings that can be applied.

    `observation` is of the code as written, if known; `certain`: it comes from a run just before.
    """

    settings: tuple[Setting, ...] = ()
    observation: Observation | None = None
    certain: bool = True

    @property
    def knobs(self) -> dict[Knob, Value]:
        return {one.knob: one.knob_value for one in self.settings if one.knob is not None and not one.refusal}

    @property
    def variables(self) -> dict[str, Plain]:
        return {one.name: one.value for one in self.settings if one.knob is None and not one.refusal}

    @property
    def texts(self) -> dict[str, str]:
        return {one.name: one.text for one in self.settings}

    @property
    def refusal(self) -> str:
        return "; ".join(f"{one.name}={one.text}: {one.refusal}" for one in self.settings if one.refusal)

    @property
    def failure(self) -> str:
        """The refusal, to be shown after the arm's label, which already names a single setting."""
        return self.settings[0].refusal if len(self.settings) == 1 else self.refusal

    def unchanged(self, base: Mapping[str, Plain] | None = None) -> str:
        """Why there is nothing to compare; empty if a setting differs. `base`: the settings of the other side."""
        others = base or {}
        same = [one.value == others[one.name] if one.name in others else one.is_current for one in self.settings]
        if not same or not all(same):
            return ""
        return f"the baseline has {'this' if len(same) == 1 else 'all of this'} already, so there is nothing to compare"

    def changes_training(self, checks: Iterable[Change], base: Mapping[str, Plain] | None = None) -> str:
        """Why the arm changes the training itself, not only its speed. `checks`: the checks of its run.

        `base`: the settings of the other side.
        """
        others = base or {}
        changed = [one for one in self._changed(checks) if one.name not in others or others[one.name] != one.value]
        reasons = [one.knob.changes_training for one in changed if one.knob is not None]
        names = ", ".join(f"`{one.name}`" for one in changed if one.knob is None)
        if names:
            reasons.append(f"your code computes with another {names}")
        return "; ".join(r for r in reasons if r)

    def edit(self, code: Code, checks: Iterable[Change]) -> Edit | None:
        """The edit that makes the arm permanent; None if the arm cannot be set or changed nothing."""
        if self.refusal or self.observation is None:
            return None
        lasting = [
            variables.code_edit(one.name, one.value)
            if one.knob is None
            else one.knob.code_edit(self.observation, one.knob_value)
            for one in self._changed(checks)
        ]
        return edit(code.text, lasting) if lasting else None

    def changes(self, effects: Mapping[str, KnobEffects], run: Run, changed: Observation) -> tuple[Change, ...]:
        """Whether each setting took effect in `run`; `changed`: what the code used in `run`, under the settings.

        Without a run of the baseline just before, each setting is also checked against what `run` showed.
        """
        if self.certain:
            return tuple(_change(one, self.observation, effects, run) for one in self.settings)
        bare = changed
        for knob in self.knobs:
            bare = knob.without(bare)
        imagined = with_settings(bare, {knob.name: value for knob, value in self.knobs.items()})
        before = self.observation or bare
        return tuple(_with_evidence(_change(one, before, effects, run), one, bare, imagined) for one in self.settings)

    def _changed(self, checks: Iterable[Change]) -> list[Setting]:
        idle = {c.name for c in checks if c.state == "no effect"}
        return [one for one in self.settings if one.name not in idle and not one.is_current]


NO_SETTINGS = ResolvedArm()


def check(code: Code, plan: Plan) -> None:
    """Raise UsageError if the plan cannot work here, or another thread measures. Runs nothing.

    Also if every arm is known to be impossible or to change nothing, judged by the existing objects or by what an
    earlier run of the code used.
    """
    check_plan(plan)
    arms = check_arms(plan.arms, code)
    observation = observation_of(code)
    if observation is not None:
        arms = [resolve(arm, code, observation) for arm in plan.arms]
    reasons = [(arm.failure if arm.certain else "") or arm.unchanged() for arm in arms]
    if all(reasons):
        raise UsageError(f"{plan.arms[0].label}: {reasons[0]}.")
    detect_device(plan.device)
    with threads.measuring():
        pass


def check_arms(arms: Sequence[Arm], code: Code) -> list[ResolvedArm]:
    """The arms as far as they can be resolved before anything runs.

    Raises UsageError for a name that is neither a knob nor a variable of the code, for a value that does not fit, and
    if certainly no arm can be set.
    """
    objects = Objects(code)
    resolved = [resolve(arm, code, objects) for arm in arms]
    if resolved and all(arm.refusal for arm in resolved):
        raise UsageError(f"{resolved[0].refusal}.")
    return resolved


def resolve(arm: Arm, code: Code, evidence: Observation | Objects) -> ResolvedArm:
    """The arm in this cell. Raises UsageError for a name that is neither a knob nor a variable of the code.

    `evidence` is the observation of a run just before: then a setting that is impossible has a `refusal`. Or it is the
    objects that exist before any run: then only certain reasons refuse a setting, and a value that does not fit raises
    UsageError.
    """
    own = code.variables
    observation = evidence.observation if isinstance(evidence, Objects) else evidence
    settings = []
    for name, value in arm.settings.items():
        knob = _knob_of(name, value, observation, own)
        try:
            if knob is None:
                settings.append(Setting(name, own.value(name, value), None, own.present(name), used=name in own.used))
            else:
                settings.append(Setting(name, knob.parse(value), knob))
        except UsageError as e:
            if isinstance(evidence, Objects):
                raise
            settings.append(Setting(name, value, knob, refusal=str(e)))
    together = {one.name: one.knob_value for one in settings if one.knob is not None and not one.refusal}
    imagined = with_settings(evidence, together) if isinstance(evidence, Observation) else None

    def checked(setting: Setting) -> Setting:
        knob, value = setting.knob, together.get(setting.name)
        if knob is None or value is None:
            return setting
        if isinstance(evidence, Objects):
            why = "" if setting.name in own.names else evidence.refuses(knob, value, together)
            return replace(setting, current=evidence.value_of(knob), refusal=why)
        assert imagined is not None
        return replace(setting, current=knob.value_in(evidence), refusal=knob.refuses(imagined, value) or "")

    return ResolvedArm(tuple(map(checked, settings)), observation, isinstance(evidence, Observation))


def _knob_of(name: str, value: Plain, observation: Observation | None, own: Variables) -> Knob | None:
    """The knob that a name denotes; None for a variable.

    With an observation `catalogue.decide` chooses. Without one, a literal of the code takes precedence over a knob.
    """
    knob = catalogue.KNOBS.get(name)
    if observation is not None or knob is None:
        return catalogue.decide(name, observation or Observation(Device("cpu", "")), own.has)
    if name in own.literals and _fits(own.value, name, value):
        return None
    return knob if _fits(knob.parse, value) else None  # a variable may have a knob's name


def _fits(read: Callable[..., object], *value: object) -> bool:
    try:
        read(*value)
    except UsageError:
        return False
    return True


class Objects:
    """The DataLoaders and modules that exist before the code runs, and the observation of an earlier run, if any.

    Loaders that the code itself will build are not included.
    """

    def __init__(self, code: Code, observation: Observation | None = None) -> None:
        self.observation = observation
        self._text = code.text
        read = code.variables.read & code.namespace.keys()
        self._values = [code.namespace[name] for name in sorted(read)]

    @cached_property
    def _loaders(self) -> list[Observation]:
        from torch.utils.data import DataLoader

        loaders = {id(o): o for value in self._values for o in walk(value) if isinstance(o, DataLoader)}
        try:
            return [Observation(Device("cpu", "CPU"), loaders=(observed_loader(o),)) for o in loaders.values()]
        except Exception:  # a DataLoader subclass of the user's may raise: nothing is known about it
            return []

    @cached_property
    def _builds_loaders(self) -> bool:
        from torch.utils.data import DataLoader

        return "DataLoader(" in self._text or any(_is_kind(value, DataLoader) for value in self._values)

    @cached_property
    def _modules(self) -> tuple[ObservedModule, ...]:
        from torch.nn import Module

        modules = [v for v in self._values if isinstance(v, Module) and next(v.parameters(), None) is not None]
        return tuple(observed_module(m) for m in modules)

    def value_of(self, knob: Knob) -> Value | None:
        """The value that all loaders have; None if they differ or the code may use others."""
        if self.observation is not None:
            return knob.value_in(self.observation)
        if knob.kind != "DataLoader option" or self._builds_loaders:
            return None
        values = {knob.value_in(loader) for loader in self._loaders}
        return values.pop() if len(values) == 1 else None

    def refuses(self, knob: Knob, value: Value, settings: Mapping[str, Value]) -> str:
        """Why the knob cannot be set to that value, whatever the code does; empty if that is not certain.

        `settings`: all knobs that are set together.
        """
        if why := knob.machine_refuses(value):
            return why
        if knob.kind == "DataLoader option":
            reasons = [knob.refuses(with_settings(loader, settings), value) for loader in self._loaders]
            if reasons and all(reasons) and not self._builds_loaders:
                return reasons[0] or ""
            return self._unfit_dataset() if knob.starts_processes and value and self._builds_loaders else ""
        if not knob.refusal_rests_on or ("modules" in knob.refusal_rests_on and not self._modules):
            return ""
        if detect_device("auto").kind == "cuda":  # torch.cuda.is_available() starts the driver before the user's code
            return ""
        return knob.refuses(Observation(Device("cpu", "CPU"), modules=self._modules), value) or ""

    def _unfit_dataset(self) -> str:
        """Why a Dataset that the notebook defines cannot be sent to spawned workers; empty if it can."""
        from torch.utils.data import Dataset

        method = start_method()
        if method == "fork" or "multiprocessing_context" in self._text or main_can_be_imported():
            return ""
        kinds = [v if isinstance(v, type) else type(v) for v in self._values]
        local = any(_is_kind(kind, Dataset) and kind.__module__ == "__main__" for kind in kinds)
        return UNFIT_FOR_SPAWN.format(method=method) if local else ""


def _is_kind(value: object, kind: type) -> bool:
    return isinstance(value, type) and issubclass(value, kind)


# -- whether the settings took effect ----------------------------------------------------------------------------------


def _change(setting: Setting, observation: Observation | None, by_name: Mapping[str, KnobEffects], run: Run) -> Change:
    knob, show = setting.knob, str if setting.knob is None else setting_text
    change = Change(
        name=setting.name,
        value=setting.text,
        found="" if setting.current is None else show(setting.current),
        kind=setting.kind,
        state="no effect",
        evidence=setting.refusal,
    )
    if setting.refusal:
        return change
    effects = by_name[setting.name]
    if knob is None:
        result = variable_reads.verify(setting.value, setting.current, setting.used, effects, run)
        return replace(change, state=result.state, evidence=result.evidence)
    assert observation is not None
    try:
        result = knob.verify(observation, setting.knob_value, effects, run)
    except Exception as e:  # a fault of gpulab must not cost the run its report
        return replace(change, state="cannot tell", evidence=f"gpulab failed to check it ({type(e).__name__}: {e})")
    more = (words for words in (*effects.refusals, *effects.notes) if words not in result.evidence)
    return replace(change, state=result.state, evidence="; ".join(dict.fromkeys([result.evidence, *more])))


def _with_evidence(change: Change, setting: Setting, bare: Observation, imagined: Observation) -> Change:
    """The check with the code's own value, as the run shows it, and with the reason that refuses the setting."""
    knob = setting.knob
    if knob is None or setting.refusal:
        return change
    value, acted = setting.knob_value, change.state == "took effect"
    if not change.found and knob.kind == "DataLoader option":
        before = knob.value_in(bare)
        change = replace(change, found="" if before is None else setting_text(before))
    elif not change.found and isinstance(value, bool) and acted:
        change = replace(change, found=setting_text(not value))
    why = knob.refuses(imagined, value)
    if not why or (acted and knob.kind == "DataLoader option"):
        return change
    if acted:
        return replace(change, state="cannot tell", evidence=f"{why}; {change.evidence}")
    return replace(change, evidence=why)


# -- what code was observed to use -------------------------------------------------------------------------------------

MOST_OBSERVATIONS = 50


class _Memory(Struct, frozen=True):
    """What code used in its last run without settings, and, for each name it reads, a test for the same object."""

    observation: Observation
    same: Mapping[str, Callable[[object], bool]]


_observations: dict[str, _Memory] = {}  # by the text of cells that ran as written in this process


def remember(code: Code, observation: Observation) -> None:
    """Remember what this code used in a run without settings."""
    names = code.namespace
    same = {name: _sameness(names[name]) for name in code.variables.read if name in names}
    _observations.pop(code.text, None)
    _observations[code.text] = _Memory(observation, same)
    for old in list(_observations)[:-MOST_OBSERVATIONS]:
        del _observations[old]


def observation_of(code: Code) -> Observation | None:
    """What this code used in its last run without settings; None without one, or if it now reads other objects."""
    remembered = _observations.get(code.text)
    names = code.namespace
    if remembered is None or not all(name in names and same(names[name]) for name, same in remembered.same.items()):
        return None
    return remembered.observation


def _sameness(value: object) -> Callable[[object], bool]:
    if is_plain(value):
        return lambda now: type(now) is type(value) and now == value
    try:
        there = weakref.ref(value)
    except TypeError:  # a list or dict of objects
        place = id(value)
        return lambda now: id(now) == place
    return lambda now: there() is now
