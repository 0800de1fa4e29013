"""Computes the cost of parameter updates: operators in Optimizer.step and zero_grad, and the device's part of it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import Literal

import numpy as np
from msgspec import Struct

from gpulab.analysis.breakdown import Breakdown
from gpulab.analysis.kernels import DeviceWork, median_per_step_us
from gpulab.analysis.operators import SHORT_NS
from gpulab.intervals import Intervals, covers, intersect, measure, union
from gpulab.run import Int64, Timeline
from gpulab.timeline.labels import OPERATORS, CallTree, Labels, What, distinct, labels

Pass = tuple[int, int]  # tensors read, tensors written

NUMBER_BYTES = 4
SCALE: Pass = (1, 1)
ADD: Pass = (2, 1)
_LERP, _ADD_SQUARE, _ROOT, _ADD_QUOTIENT = (2, 1), (2, 1), (1, 1), (3, 1)

_MOMENTUM = "SGD with momentum"
_ADAM: tuple[Pass, ...] = (_LERP, SCALE, _ADD_SQUARE, _ROOT, SCALE, SCALE, _ADD_QUOTIENT)
_PASSES: Mapping[str, tuple[Pass, ...]] = {
    "SGD": (ADD,),
    _MOMENTUM: (SCALE, ADD, ADD),
    "Adam": _ADAM,
    "AdamW": (SCALE, *_ADAM),
    "Adagrad": (_ADD_SQUARE, _ROOT, SCALE, _ADD_QUOTIENT),
}
_FUSED: Mapping[str, Pass] = {"SGD": (2, 1), _MOMENTUM: (3, 2), "Adam": (4, 3), "AdamW": (4, 3), "Adagrad": (3, 2)}
_FOREACH_ONLY: Mapping[str, tuple[Pass, ...]] = {"Adagrad": (SCALE,)}


class UpdateBytes(Struct, frozen=True):
    """Bytes that one update moves of each 32-bit parameter: operator after operator, and in one fused operation."""

    unfused_bytes: int
    fused_bytes: int

    @property
    def fused_fraction(self) -> float:
        return self.fused_bytes / self.unfused_bytes


def bytes_of(*passes: Pass) -> int:
    return NUMBER_BYTES * sum(reads + writes for reads, writes in passes)


def bytes_of_update(
    name: str, *, has_momentum: bool = False, further_adds: int = 0, foreach: bool = False
) -> UpdateBytes | None:
    """The bytes for a class of torch.optim; None if PyTorch cannot fuse it. `has_momentum` matters only for SGD.

    `further_adds` are the additional passes of weight decay and Nesterov's momentum.
    """
    kind = _MOMENTUM if name == "SGD" and has_momentum else name
    if kind not in _PASSES:
        return None
    passes = (*_PASSES[kind], *[ADD] * further_adds, *(_FOREACH_ONLY.get(kind, ()) if foreach else ()))
    return UpdateBytes(bytes_of(*passes), bytes_of(_FUSED[kind]))


FUSED_ADAM_BYTES = bytes_of(_FUSED["Adam"])


Style = Literal["for-loop", "foreach", "fused"]

_ANNOTATION = re.compile(r"Optimizer\.(?:step|zero_grad)#(\w+)\.")
# Bytes that each step moves per 32-bit parameter apart from the update, for any number of samples, relative to those of
# a fused Adam: both passes read parameters, and the backward pass writes gradients, whose memory is fetched first.
ABOUT_PARAMETERS = 16 / FUSED_ADAM_BYTES
ZEROING = ("aten::zero_", "aten::_foreach_zero_")


class OptimizerWork(Struct, frozen=True):
    """The optimizer's work per step, times in µs. `name` is the class ("SGD"); `style`: how it updates, or None.

    `operators` are those directly inside Optimizer.step, `zeroing` the calls that set gradients to 0. `host_us` is the
    training thread's time in both, `idle_us` the part in which the GPU did nothing, `device_us` the time of work
    launched in both (0 on a CPU, like `idle_us`). `has_momentum`: some state is scaled in place, as in SGD with
    momentum. `further_adds`: passes over all parameters for weight decay and Nesterov's momentum; 0 if fused.
    """

    name: str
    style: Style | None
    operators: float
    host_us: float
    idle_us: float
    device_us: float
    zeroing: float
    zero_host_us: float
    zero_idle_us: float
    zero_device_us: float
    calling_share: float
    has_momentum: bool
    further_adds: int
    step_times: Intervals
    zero_times: Intervals

    @property
    def per_parameter(self) -> float:
        """The cost of the parameters in a step, as a multiple of the update; a lower bound: computing reads them."""
        return 1 + ABOUT_PARAMETERS if self.style == "fused" else 1.0

    @property
    def update_bytes(self) -> UpdateBytes | None:
        """Bytes that an update moves per parameter; None for a class that PyTorch cannot fuse.

        A fused SGD does not show whether it has momentum: it is counted with momentum, as it is mostly used.
        """
        has_momentum = self.has_momentum or self.style == "fused"
        foreach = self.style == "foreach"
        return bytes_of_update(self.name, has_momentum=has_momentum, further_adds=self.further_adds, foreach=foreach)


def optimizer_work(timeline: Timeline, account: Breakdown, work: DeviceWork | None = None) -> OptimizerWork | None:
    """The optimizer's work in the accounted steps; None if no step has an optimizer's mark."""
    windows = account.host_windows
    spans = labels(timeline)
    stepping, zeroing = spans.stepping, spans.zeroing
    if not len(stepping) and not len(zeroing):
        return None
    operators = np.flatnonzero(spans.of(*OPERATORS) & spans.named(lambda name: name.startswith("aten::")))
    inside = operators[covers(windows, timeline.start_ns[operators])]
    count = len(windows)
    within_steps = intersect(stepping, union(windows[:, 0], windows[:, 1]))
    names = _counted(timeline, inside, stepping)
    name = _name(spans)
    zeroed = _counted(timeline, inside, zeroing)
    return OptimizerWork(
        name=name,
        style=_style(names),
        operators=sum(names.values()) / count,
        host_us=median_per_step_us(windows, stepping),
        idle_us=_idle_us(work, stepping),
        device_us=_launched_us(work, stepping),
        zeroing=sum(zeroed[n] for n in ZEROING) / count,
        zero_host_us=median_per_step_us(windows, zeroing),
        zero_idle_us=_idle_us(work, zeroing),
        zero_device_us=_launched_us(work, zeroing),
        calling_share=_calling_share(timeline, inside, within_steps),
        has_momentum=any(names[n] for n in ("aten::mul_", "aten::_foreach_mul_")),
        further_adds=_further_adds(name, names),
        step_times=stepping,
        zero_times=zeroing,
    )


def _counted(timeline: Timeline, operators: Int64, times: Intervals) -> Counter[str]:
    """How often each operator began within these times."""
    within = operators[covers(times, timeline.start_ns[operators])]
    count = np.bincount(timeline.name_id[within], minlength=len(timeline.names))
    return Counter({timeline.names[i]: int(count[i]) for i in np.flatnonzero(count).tolist()})


def _calling_share(timeline: Timeline, operators: Int64, stepping: Intervals) -> float:
    """The share of the update outside operators that are long enough to compute."""
    if not len(stepping):
        return 0.0
    own = CallTree.of(timeline, operators[covers(stepping, timeline.start_ns[operators])]).self_ns(timeline)
    return max(0.0, 1 - float(own[own >= SHORT_NS].sum()) / (measure(stepping) or 1))


def _style(names: Counter[str]) -> Style | None:
    if any(n.startswith("aten::_fused_") for n in names):
        return "fused"
    if any(n.startswith("aten::_foreach_") for n in names):
        return "foreach"
    return "for-loop" if names else None


def _further_adds(name: str, names: Counter[str]) -> int:
    """Additional passes: weight decay adds into a new tensor; so does Nesterov's momentum, unless it uses foreach.

    SGD with momentum scales each tensor once, and adds to it twice without Nesterov's.
    """
    foreach = _style(names) == "foreach"
    operators = "aten::_foreach_" if foreach else "aten::"
    new, in_place, scaled = (names[operators + n] for n in ("add", "add_", "mul_"))
    is_nesterov = name == "SGD" and scaled > 0 and (in_place > 2 * scaled if foreach else new > scaled)
    return int(new > 0) + int(is_nesterov)


def _name(spans: Labels) -> str:
    marks = spans.training(What.UPDATE, What.ZEROING)
    matches = (_ANNOTATION.match(spans.names[i]) for i in distinct(spans.name_id[marks]))
    return next((m[1] for m in matches if m is not None), "")


def _idle_us(work: DeviceWork | None, times: Intervals) -> float:
    return 0.0 if work is None else work.per_step_us(intersect(work.idle, times))


def _launched_us(work: DeviceWork | None, times: Intervals) -> float:
    return 0.0 if work is None else work.us(work.launched_in(times))
