"""When to warm up, when to measure, when to profile: the phases of one run, decided step by step. Pure."""

from __future__ import annotations

from msgspec import Struct
from msgspec.structs import replace

from gpulab.run import Choice, Settings

WARMUP = 3  # definitions.md, "Honest comparison"
MEASURED = 12
TRACED = 5
EARLY_TRACED = 2
SECOND_WINDOW_AT = 40  # a run of unknown length that lives this long gets a full window in place of its early one
ROOM_FOR_TWO = 20  # an epoch this long has measured steps left between an early window and a full one
TRACE_LIMIT_S = 3.0  # the window ends at the next boundary after this long
TRACE_HARD_LIMIT_S = 30.0  # and within a step after this long
TRACE_EVENT_LIMIT = 1_000_000
NEVER = 1 << 62  # steps
# CUPTI may stay after a session and slow CUDA calls as long as the process lives (pitfalls.md, "torch.profiler"), so on
# a GPU so many steps are measured before the first one: at least, and where an epoch is long.
GPU_MEASURED, GPU_MOST_MEASURED = 8, 30
GPU_FEWEST_MEASURED = 3  # where steps are long: so many have to do after `GPU_PATIENCE_S`
GPU_PATIENCE_S = 10.0
# The profiler waits for the GPU before it starts, so a window's first step finds an empty queue: it does not count.
GPU_LEAD_IN = 1
TRACE_STEPLESS_LIMIT_S = 10.0  # of code without steps, where nothing else bounds it: at 100,000 events a second


class Window(Struct, frozen=True):
    """Profile `length` steps after `after` completed steps, and `lead_in` before those, which do not count."""

    after: int
    length: int
    lead_in: int = 0


class Schedule(Struct, frozen=True):
    """The phases of one run: `warmup` steps dropped, windows profiled, everything else measured."""

    warmup: int
    windows: tuple[Window, ...]
    choices: tuple[Choice, ...]
    sooner_after: int = NEVER  # steps: on a GPU the first window need not come later where they take long

    def window_at(self, before: int, completed: int) -> Window | None:
        """The window that begins now that `completed` steps are done, where it was `before` at the last look."""
        return next((w for w in reversed(self.windows) if before < w.after <= completed), None)

    def next_change(self, completed: int) -> int:
        """No phase ends and no window begins before so many steps are done."""
        return min((n for n in (self.warmup, *(w.after for w in self.windows)) if n > completed), default=NEVER)


def plan(settings: Settings, total: int | None, *, certain: bool = True, on_gpu: bool = False) -> Schedule:
    """The schedule for a run of `total` steps (None: unknown).

    A short run is divided so that each phase has something; a run of unknown length is profiled early for two steps,
    so that even six steps give a breakdown, and once more when it turns out to be long. So is one whose length is not
    `certain`: the loop may leave a loader in the middle of its epoch. On a GPU the first window comes later.
    """
    if total is not None and total < 3:
        total = None
    surely = total if certain else None
    warmup = settings.warmup if settings.warmup is not None else _warmup(surely)
    windows: tuple[Window, ...] = ()
    if settings.trace:
        windows = _windows(settings, total, warmup, on_gpu) if certain else _cautious(settings, total, warmup, on_gpu)
    length = _length(total, certain, settings.steps is not None)
    choices = [Choice("warm-up", _steps(warmup), _why(settings.warmup, f"chosen for a run in which {length}"))]
    if windows:
        why = _why(settings.trace_steps, f"chosen for a run in which {length}")
        choices.append(Choice("traced window", _windows_text(windows), why))
    sooner_after = warmup + GPU_FEWEST_MEASURED if on_gpu and windows else NEVER
    return Schedule(warmup, windows, tuple(choices), sooner_after)


def _length(total: int | None, certain: bool, asked: bool) -> str:
    if total is None:
        return "the number of steps is unknown"
    if certain or asked:
        return f"{'at most ' if not certain else ''}{_steps(total)} {'runs' if total == 1 else 'run'}"
    return f"an epoch has {_steps(total)}"


def _windows_text(windows: tuple[Window, ...]) -> str:
    """What is profiled: of two windows the second, where the loop comes that far."""
    first, *later = (f"{_steps(w.length)} after step {w.after}" for w in windows)
    return f"{first}; in their place {later[0]}, if the loop comes that far" if later else first


def _steps(count: int) -> str:
    return f"{count} step{'' if count == 1 else 's'}"


def _cautious(settings: Settings, total: int | None, warmup: int, on_gpu: bool) -> tuple[Window, ...]:
    """Early, in case the loop is left soon, then where an epoch of `total` steps has room for a better window."""
    early, late = _windows(settings, None, warmup, on_gpu)
    if total is None:
        return early, late
    if on_gpu:
        early = _early_on_gpu(early, total, warmup)
    if settings.trace_steps is not None and early.after + settings.trace_steps <= total < ROOM_FOR_TWO:
        return (replace(early, length=settings.trace_steps), late)
    if total < ROOM_FOR_TWO:
        return early, late
    (main,) = _windows(settings, total, warmup, on_gpu)
    return (early, main) if early.after + early.lead_in + early.length < main.after else (main,)


def _early_on_gpu(early: Window, total: int, warmup: int) -> Window:
    """After a tenth of an epoch; soon enough for the window to fit where the epoch is short."""
    wanted = min(max(GPU_MEASURED, total // 10), GPU_MOST_MEASURED)
    room = total - warmup - early.lead_in - early.length - 1
    return replace(early, after=warmup + max(2, min(wanted, room)))


def _why(asked: int | None, otherwise: str) -> str:
    return "asked for" if asked is not None else otherwise


def _warmup(total: int | None) -> int:
    if total is None or total < 12:
        return 1
    return WARMUP


def _windows(settings: Settings, total: int | None, warmup: int, on_gpu: bool) -> tuple[Window, ...]:
    asked, lead_in = settings.trace_steps, GPU_LEAD_IN if on_gpu else 0
    if total is None:
        measured = GPU_MEASURED if on_gpu else 2
        early = Window(warmup + measured, min(asked or EARLY_TRACED, EARLY_TRACED), lead_in)
        return (early, Window(max(SECOND_WINDOW_AT, warmup + 20), asked or TRACED, lead_in))
    room = max(1, total - warmup)
    length = min(asked or TRACED, max(1, room // 2))
    lead_in = min(lead_in, max(0, room - length - GPU_FEWEST_MEASURED - 1))
    room -= lead_in
    before = min(max(MEASURED, (room - length) // 3), 60)
    before = min(before, max(1, room - length - (1 if room - length > 2 else 0)))
    return (Window(warmup + before, length, lead_in),)
