"""When to warm up, when to measure, when to profile: the phases of one run, decided step by step. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from gpulab.run import Choice, Settings

WARMUP = 3  # definitions.md: drop 3–5 steps
MEASURED = 12
TRACED = 5
EARLY_TRACED = 2
SECOND_WINDOW_AT = 40  # a run of unknown length that lives this long gets a full window in place of its early one
ROOM_FOR_TWO = 20  # an epoch this long has measured steps left between an early window and a full one
TRACE_LIMIT_S = 3.0  # the window ends at the next boundary after this long
TRACE_HARD_LIMIT_S = 30.0  # and within a step after this long
TRACE_EVENT_LIMIT = 1_000_000
NEVER = 1 << 62  # steps
TRACE_STEPLESS_LIMIT_S = 10.0  # of code without steps, where nothing else bounds it: at 100,000 events a second


@dataclass(frozen=True, slots=True)
class Window:
    """Profile `length` steps after `after` completed steps."""

    after: int
    length: int


@dataclass(frozen=True, slots=True)
class Schedule:
    """The phases of one run: `warmup` steps dropped, windows profiled, everything else measured."""

    warmup: int
    windows: tuple[Window, ...]
    choices: tuple[Choice, ...]

    def window_at(self, before: int, completed: int) -> Window | None:
        """The window that begins now that `completed` steps are done, where it was `before` at the last look."""
        return next((w for w in reversed(self.windows) if before < w.after <= completed), None)

    def next_change(self, completed: int) -> int:
        """No phase ends and no window begins before so many steps are done."""
        return min((n for n in (self.warmup, *(w.after for w in self.windows)) if n > completed), default=NEVER)


def plan(settings: Settings, total: int | None, *, certain: bool = True) -> Schedule:
    """The schedule for a run of `total` steps (None: unknown).

    A short run is divided so that each phase has something; a run of unknown length is profiled early for two steps,
    so that even six steps give a breakdown, and once more when it turns out to be long. So is one whose length is not
    `certain`: the loop may leave a loader in the middle of its epoch.
    """
    if total is not None and total < 3:
        total = None
    surely = total if certain else None
    warmup = settings.warmup if settings.warmup is not None else _warmup(surely)
    windows: tuple[Window, ...] = ()
    if settings.trace:
        windows = _windows(settings, total, warmup) if certain else _cautious(settings, total, warmup)
    known = _known(total, certain, settings.steps is not None)
    choices = [Choice("warm-up", _steps(warmup), _why(settings.warmup, f"run length: {known}"))]
    if windows:
        said = ", better ".join(f"{_steps(w.length)} after step {w.after}" for w in windows)
        choices.append(Choice("profiled window", said, _why(settings.trace_steps, f"run length: {known}")))
    return Schedule(warmup, windows, tuple(choices))


def _known(total: int | None, certain: bool, asked: bool) -> str:
    if total is None:
        return "unknown"
    return _steps(total) if certain else f"at most {_steps(total)}" if asked else f"an epoch has {_steps(total)}"


def _steps(count: int) -> str:
    return f"{count} step{'' if count == 1 else 's'}"


def _cautious(settings: Settings, total: int | None, warmup: int) -> tuple[Window, ...]:
    """Early, in case the loop is left soon, then where an epoch of `total` steps has room for a better window."""
    early, late = _windows(settings, None, warmup)
    if total is None:
        return early, late
    if settings.trace_steps is not None and early.after + settings.trace_steps <= total < ROOM_FOR_TWO:
        return (Window(early.after, settings.trace_steps), late)
    if total < ROOM_FOR_TWO:
        return early, late
    (main,) = _windows(settings, total, warmup)
    return early, main


def _why(asked: int | None, otherwise: str) -> str:
    return "asked for" if asked is not None else otherwise


def _warmup(total: int | None) -> int:
    if total is None or total < 12:
        return 1
    return WARMUP


def _windows(settings: Settings, total: int | None, warmup: int) -> tuple[Window, ...]:
    asked = settings.trace_steps
    if total is None:
        early = Window(warmup + 2, min(asked or EARLY_TRACED, EARLY_TRACED))
        return (early, Window(max(SECOND_WINDOW_AT, warmup + 20), asked or TRACED))
    room = max(1, total - warmup)
    length = min(asked or TRACED, max(1, room // 2))
    before = min(max(MEASURED, (room - length) // 3), 60)
    before = min(before, max(1, room - length - (1 if room - length > 2 else 0)))
    return (Window(warmup + before, length),)
