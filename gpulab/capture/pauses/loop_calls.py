"""What a trainer's loop calls beside its steps (callbacks, evaluation, logging, schedulers), timed where it calls.

What such a call does inside (`torch.save` in a checkpoint callback) is a part of it and not a pause of its own.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

from msgspec import Struct

from gpulab.capture.stacks.stack import Spot
from gpulab.formatting import duration
from gpulab.run import PauseKind
from gpulab.user_code import is_users_code

_LIGHTNING = ("lightning.pytorch", "pytorch_lightning")
_SCHEDULERS = ("LRScheduler", "SequentialLR", "ChainedScheduler", "ReduceLROnPlateau", "CosineAnnealingWarmRestarts")

CALLS: tuple[tuple[PauseKind, str, str, str], ...] = (
    *(("evaluation", f"{at}.loops.evaluation_loop", "_EvaluationLoop", "run") for at in _LIGHTNING),
    *(
        ("logging", f"{at}.trainer.connectors.logger_connector.logger_connector", "_LoggerConnector", "log_metrics")
        for at in _LIGHTNING
    ),
    ("evaluation", "transformers.trainer", "Trainer", "evaluate"),
    ("logging", "transformers.trainer", "Trainer", "log"),
    ("callback", "transformers.trainer_callback", "CallbackHandler", "call_event"),
    *(("callback", "torch.optim.lr_scheduler", owner, "step") for owner in _SCHEDULERS),
)
# Lightning names each thing that it does.
ACTIONS = tuple((f"{at}.profilers.profiler", "Profiler", "profile") for at in _LIGHTNING)
_LEAST_TOLD = 0.05  # ours, of a call: a smaller part of it is not named

_ACTION = re.compile(r"\[Callback\](?P<callback>\w+).*\.(?P<hook>\w+)")


class Part(Struct, frozen=True):
    """A call inside of a timed one that would be a pause by itself."""

    kind: PauseKind
    took_ns: int
    name: str
    is_innermost: bool = True  # it has made no such call itself


def kind_of_call(kind: PauseKind, parts: Sequence[Part], took_ns: int) -> PauseKind:
    """A callback that saves is there for saving, whatever else it does; else what takes at least half of it counts."""
    if kind != "callback":
        return kind
    if any(part.kind == "checkpoint_save" for part in parts):
        return "checkpoint_save"
    return next((part.kind for part in parts if 2 * part.took_ns >= took_ns), kind)


def with_part(detail: str, parts: Sequence[Part], took_ns: int) -> str:
    """What takes longest inside is named, with all of its time."""
    sums: dict[str, int] = {}
    for part in parts:
        if part.is_innermost:
            sums[part.name] = sums.get(part.name, 0) + part.took_ns
    name, longest_ns = max(sums.items(), key=lambda item: item[1], default=("", 0))
    if not name or longest_ns < _LEAST_TOLD * took_ns:
        return detail
    return f"{detail}, of it {duration(longest_ns / 1e3)} in {name}"


def callback_name(action: str) -> str:
    """Of Lightning's name for what it does: the callback and its hook; empty for what is no callback's."""
    match = _ACTION.fullmatch(action)
    return f"{match['callback']}.{match['hook']}" if match is not None else ""


def event_detail(owner: str, args: tuple[Any, ...]) -> tuple[str, Spot | None]:
    """The event that transformers hands to its callbacks, with the user's one that hears it, and where that is."""
    if owner != "CallbackHandler" or len(args) < 2:
        return "", None
    handler, event = args[:2]
    users = [(callback, spot) for callback in handler.callbacks if (spot := method_spot(callback, event))]
    names = ", ".join(type(callback).__name__ for callback, _ in users) or "callbacks"
    return f"{names}.{event}", users[0][1] if len(users) == 1 else None


def method_spot(callback: Any, name: str) -> Spot | None:
    """Where a method of the user's is written; None for a library's."""
    code = getattr(getattr(type(callback), name, None), "__code__", None)
    if code is None or not is_users_code(code):
        return None
    return code.co_filename, code.co_firstlineno, code.co_qualname


def calling_callback(frame: FrameType | None) -> Any:
    """The callback that Lightning's loop over its callbacks is at, in the frame that entered an action."""
    return None if frame is None else frame.f_locals.get("callback")


@contextmanager
def both(action: Any, ours: Any) -> Iterator[Any]:
    """An action of Lightning's, timed by us."""
    with ours, action as name:
        yield name
