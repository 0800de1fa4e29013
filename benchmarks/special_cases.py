"""The special cases of the diagnosis and its predictions, each with what stands in its place when it is turned off."""

from __future__ import annotations

import importlib
import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any
from unittest.mock import patch

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from gpulab.diagnosis.catalogue import RULE_MODULES
from gpulab.diagnosis.finding import FindingKind
from gpulab.prediction.predict import PREDICTORS, Formula

_OFF = "turned off"


class Switch(Struct, frozen=True, eq=False):
    """One special case. With `off` in place of the attribute `where`, diagnoses are as if it had not been written.

    `needs_gpu`: no cell for the CPU can show what it serves.
    """

    name: str
    where: str  # module:attribute
    off: Any
    needs_gpu: bool = False

    @property
    def changes_figures(self) -> bool:
        """Whether the figures of a run have to be computed anew without it."""
        return self.where.startswith(("gpulab.analysis", "gpulab.user_code"))

    @contextmanager
    def turned_off(self) -> Iterator[None]:
        """The special case is back at the end."""
        with patch.object(*self._attribute(), self.off):
            yield

    @contextmanager
    def observe(self, note: Callable[[], None]) -> Iterator[None]:
        """As it is; `note` is called where the diagnosis would differ without it, or always where nothing tells."""
        owner, name = self._attribute()
        probe = _probe(getattr(owner, name), self.off, note)
        if probe is None:
            note()
            yield
            return
        with patch.object(owner, name, probe):
            yield

    def _attribute(self) -> tuple[Any, str]:
        module, _, attribute = self.where.partition(":")
        *path, last = attribute.split(".")
        owner: Any = importlib.import_module(module)
        for part in path:
            owner = getattr(owner, part)
        return owner, last


def _probe(value: Any, off: Any, note: Callable[[], None]) -> Any:
    """Does what `value` does, and calls `note` where `off` would answer otherwise; None for what is no function."""
    if isinstance(value, property):
        return property(_noting(value.fget, off.fget, note))
    if isinstance(value, FunctionType):
        return _noting(value, off, note)
    if isinstance(value, tuple) and any(isinstance(kind, FindingKind) and kind.rule is _nothing for kind in off):
        rules = zip(value, off, strict=True)
        return tuple(replace(k, rule=_noting(k.rule, _nothing, note)) if o.rule is _nothing else k for k, o in rules)
    if isinstance(value, dict) and _OFF in off.values():
        return {
            name: replace(formula, apply=_noting(formula.apply, _nothing, note)) if off[name] == _OFF else formula
            for name, formula in value.items()
        }
    return None


def _noting(function: Any, off: Any, note: Callable[[], None]) -> Callable[..., Any]:
    def called(*args: Any, **kwargs: Any) -> Any:
        try:
            answer = function(*args, **kwargs)
        except Exception:
            note()
            raise
        if not _same(answer, off(*args, **kwargs)):
            note()
        return answer

    return called


def _same(answer: Any, neutral: Any) -> bool:
    try:
        return answer is neutral or bool(type(answer) is type(neutral) and answer == neutral)
    except ValueError:  # arrays
        return False


# -- what stands in place of a special case ----------------------------------------------------------------------------


def _nothing(*_: Any) -> None:
    """Stands for a function that finds no case of its own."""


def _zero(*_: Any) -> float:
    return 0.0


def _one(*_: Any) -> int:
    return 1


def _empty(*_: Any) -> list[Any]:
    return []


def _no_words(*_: Any) -> str:
    return ""


def _no(*_: Any, **__: Any) -> bool:
    return False


def _yes(*_: Any) -> bool:
    return True


def _first(first: Any, *_: Any) -> Any:
    return first


def _no_settings(*_: Any) -> dict[str, Any]:
    return {}


_RULES = "gpulab.diagnosis."
_PREDICTION = "gpulab.prediction."

_OF_RULES = (
    Switch("one pause may be chance", "gpulab.analysis.calls:_LEAST", 1),
    Switch("a pause in most steps is part of the step", "gpulab.analysis.calls:_typical_us", _zero),
    Switch("workers that wait may outnumber the cores", f"{_RULES}loading:mostly_waits", _no),
    Switch("putting together is cured in collate_fn first", f"{_RULES}loading:_of_whole_batches", _no_words),
    Switch("the line where the longest part is written", f"{_RULES}loading:_function_line", _no_words),
    Switch("calls of operators are most of a step on a CPU", f"{_RULES}idle_gpu:_mostly_calls", _nothing),
    Switch("copies for another order of axes on a CPU", f"{_RULES}operations:_layout_on_cpu", _nothing),
    Switch("attention on a CPU", f"{_RULES}operations:attention_on_cpu", _nothing),
    Switch("chains of small operations on a CPU", f"{_RULES}operations:pointwise_on_cpu", _nothing),
    Switch("a compiled model has no chains", f"{_RULES}operations:_is_compiled", _no),
    Switch("Python without a name is an open question", f"{_RULES}no_cause:_unexplained", _nothing),
    Switch(
        "the peak of memory is hidden by an earlier run",
        "gpulab.analysis.device_peaks:peak_is_hidden",
        _no,
        needs_gpu=True,
    ),
    Switch("a part of the model computes on the CPU", f"{_RULES}idle_gpu:_partly", _nothing, needs_gpu=True),
    Switch("a GPU that training did not use", f"{_RULES}idle_gpu:_unused", _nothing, needs_gpu=True),
    Switch("no names of formats", f"{_RULES}operations:_unknown_formats", _nothing, needs_gpu=True),
    Switch("no peaks of that GPU", f"{_RULES}operations:_unknown_units", _nothing, needs_gpu=True),
    Switch(
        "memory requested anew shows that it was too little", f"{_RULES}device:_too_little", _no_words, needs_gpu=True
    ),
    Switch("an optimizer whose idle time is withheld", f"{_RULES}optimizer:_withheld", _nothing, needs_gpu=True),
    Switch("a clock held down", f"{_RULES}device:slowed_fraction", _nothing, needs_gpu=True),
    Switch("meters that were not read", f"{_RULES}device:_unread", _nothing, needs_gpu=True),
    Switch(
        "waiting for the GPU costs no more than its idle time",
        f"{_RULES}idle_gpu:_not_for_data_us",
        lambda _: math.inf,
        needs_gpu=True,
    ),
    Switch("long gaps are no launch", f"{_RULES}idle_gpu:not_launching_us", _zero, needs_gpu=True),
    Switch("a rank's own cause says why it is late", "gpulab.diagnosis.ranks:_own", _nothing, needs_gpu=True),
    Switch("a cause that most ranks have", "gpulab.diagnosis.ranks:_common", _nothing, needs_gpu=True),
)

_OF_RANKING = (
    Switch("pauses that matter once the first cause is cured", "gpulab.diagnosis.diagnose:_once_cured", _empty),
    Switch(
        "a trace without Python's stacks", "gpulab.diagnosis.diagnose:_without_lines", lambda *_: (), needs_gpu=True
    ),
    Switch("too few steps", "gpulab.diagnosis.finding:RuleContext.too_few_steps", property(_no)),
    Switch("the machine's memory is full", "gpulab.diagnosis.finding:RuleContext.host_memory_full", property(_no)),
    Switch("symptoms go where their cause is", "gpulab.diagnosis.headline:_without_symptoms", _first),
    Switch(
        "an upper bound is worth less", "gpulab.diagnosis.headline:_WORTH", {"measured": 1, "likely": 1, "possible": 1}
    ),
    Switch("a hint is no cause", "gpulab.diagnosis.headline:_is_hint", _no),
    Switch("no more than a cure is predicted to bring", "gpulab.diagnosis.diagnose:_bounded", _first),
    Switch(
        "no setting that is predicted to bring nothing",
        "gpulab.diagnosis.diagnose:_without_useless_setting",
        _first,
    ),
    Switch("no word about a small difference", "gpulab.diagnosis.diagnose:HARDLY_LESS", math.inf),
)

_OF_PREDICTIONS = (
    Switch("calls are most of a step", f"{_PREDICTION}batches:MOSTLY_CALLS", math.inf),
    Switch("starting workers anew in short epochs", f"{_PREDICTION}batches:_restarting", _no_settings),
    Switch("handing over varies", f"{_PREDICTION}step:HANDING", (1.0, 1.0)),
    Switch("starting workers varies", f"{_PREDICTION}step:STARTING", (1.0, 1.0)),
    Switch("workers that stay make the first batch", f"{_PREDICTION}batches:first_batch_us", _nothing),
    Switch("processes that are no copies", f"{_PREDICTION}batches:_forks", _yes),
    Switch("what a fused step takes may be off", f"{_PREDICTION}kernels:FUSED_DOUBT", (1.0, 1.0)),
    Switch("an optimizer's Python", f"{_PREDICTION}kernels:PYTHON_US", 0.0),
    Switch("an optimizer gathers its tensors", f"{_PREDICTION}kernels:PER_TENSOR_US", 0.0),
    Switch("an operator's begin is not moving", f"{_PREDICTION}kernels:BEGIN_US", 0.0),
    Switch("a pause empties caches", f"{_PREDICTION}predict:COLD", (0.0, 0.0, 0.0)),
    Switch("few pauses may be chance", f"{_PREDICTION}predict:FEW", 0.0),
    Switch("what a GPU works remains", f"{_PREDICTION}predict:_busy_ns", _zero, needs_gpu=True),
    Switch("the trace of a full GPU hides its waits", f"{_PREDICTION}step:HIDDEN", math.inf, needs_gpu=True),
    Switch(
        "autocast keeps some operations", f"{_PREDICTION}kernels:_FULL_PRECISION", re.compile("(?!)"), needs_gpu=True
    ),
    Switch(
        "a launch into a full queue waits",
        f"{_PREDICTION}replay:_into_a_full_queue",
        lambda *_: np.empty(0, np.intp),
        needs_gpu=True,
    ),
    Switch(
        "a synchronizing call that had nothing to wait for",
        f"{_PREDICTION}replay:_on_idle_device",
        lambda *_: np.empty((4, 0), np.int64),
        needs_gpu=True,
    ),
    Switch(
        "a copy waits for itself",
        f"{_PREDICTION}replay:_with_own_copy",
        lambda *_: np.empty((4, 0), np.int64),
        needs_gpu=True,
    ),
)

_OF_FIGURES = (
    Switch("steps that wait by turns count by rounds", "gpulab.analysis.facts:steps_per_round", _one),
    Switch("more operators around a softmax than scale, mask, cast and dropout", "gpulab.analysis.chains:_BETWEEN", 4),
    Switch(
        "library names in a trace other than torch and gpulab",
        "gpulab.user_code:LIBRARIES",
        frozenset({"torch", "gpulab"}),
    ),
)

SPECIAL_CASES = (*_OF_RULES, *_OF_RANKING, *_OF_PREDICTIONS, *_OF_FIGURES)


# -- a rule or a predictor as a whole ----------------------------------------------------------------------------------


def _rules() -> Iterator[Switch]:
    for module in RULE_MODULES:
        for kind in module.FINDINGS:
            if kind.rule is not None:
                off = tuple(replace(k, rule=_nothing) if k is kind else k for k in module.FINDINGS)
                yield Switch(f"rule {kind.key}", f"{module.__name__}:FINDINGS", off)  # type: ignore[attr-defined]


def _predictors() -> Iterator[Switch]:
    for name, formula in PREDICTORS.items():
        if isinstance(formula, Formula):
            off = {**PREDICTORS, name: _OFF}
            yield Switch(f"predictor {name}", "gpulab.prediction.predict:PREDICTORS", off)


SWITCHES = (*SPECIAL_CASES, *_rules(), *_predictors())
