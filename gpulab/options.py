"""Checks and parsers for options of several commands; `--steps 0` and `steps=0` fail with the same message."""

from __future__ import annotations

import difflib
import math
import os
from argparse import Namespace
from collections.abc import Callable, Collection, Iterable
from typing import TypeVar, overload

from gpulab.errors import UsageError

Number = TypeVar("Number", int, float)

CLIMB_BUDGET_S = 300.0
CLIMB_SEEDS = 3  # for the band of the loss; run only if a setting changes the loss
DEFAULT_BUDGET_S = 60.0  # for a comparison of one setting with the baseline
ROW_BUDGET_S = 45.0  # for a comparison in a bench, where a click continues an undecided one
FURTHER_BUDGET_S = 30.0  # added for each further setting
LEAST_FREE = 0.1  # share of the free memory that a search for the largest size leaves
STOPPED_BY = "To stop: the button beside the bar, or the notebook's own."
LAST, SLOWEST = "last", "slowest"  # words for --only-ranks
QUICK_VARIABLE = "GPULAB_QUICK"  # environment variable
QUICK_NOTE = f"{QUICK_VARIABLE} is set: runs are as short as possible, so no comparison is decided."
QUICK_RUN_STEPS = 12  # of a profiled run
QUICK_MEASURED, QUICK_TRACED = 4, 3  # steps of a run with its trace in an experiment
QUICK_STEPS, QUICK_PAIRS, QUICK_BUDGET_S = 2, 1, 6.0  # counted steps of a block, pairs of blocks, seconds of a climb


def is_quick() -> bool:
    """Whether `GPULAB_QUICK=1` is set: for tests and quick tours each measurement is as short as possible.

    Requested steps, pairs, trials and seconds are then upper bounds; comparisons stay undecided.
    """
    return os.environ.get(QUICK_VARIABLE, "") not in ("", "0")


@overload
def at_most(value: Number, quick: Number) -> Number: ...
@overload
def at_most(value: Number | None, quick: Number) -> Number | None: ...
def at_most(value: Number | None, quick: Number) -> Number | None:
    """The requested value; in quick mode at most `quick`."""
    if not is_quick():
        return value
    return quick if value is None else min(value, quick)


_SYNONYMS = {  # names of options in other tools
    "--all": ("--verbose", "--full", "--details", "--long"),
    "--steps": ("--max-steps", "--iterations", "--iters", "--num-steps"),
    "--ranks": ("--nproc", "--nproc-per-node", "--world-size", "--gpus"),
    "--html": ("--output", "--out"),
    "--name": ("--label", "--tag"),
    "--budget": ("--timeout", "--max-time"),
}


def nearest_option(word: str, valid: Collection[str]) -> str | None:
    """The valid option nearest to an unknown one: by its meaning, then by its first letter, then by its spelling."""
    name = word.replace("_", "-").lower()
    meanings = {other: option for option, others in _SYNONYMS.items() if option in valid for other in others}
    if len(name) == 2:
        names = {option: option for option in sorted(valid)} | meanings
        return next((option for other, option in names.items() if other.startswith(f"-{name}")), None)
    return meanings.get(name) or next(iter(difflib.get_close_matches(name[:100], sorted(valid), n=1)), None)


def without_comment(line: str) -> str:
    """A line up to a ` #` outside quotes, as copied from a text; `run#3` is a word."""
    quote = ""
    for i, letter in enumerate(line):
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "\"'":
            quote = letter
        elif letter == "#" and (i == 0 or line[i - 1].isspace()):
            return line[:i].rstrip()
    return line


def check_without(options: Namespace, names: Iterable[str], other: str) -> None:
    """Raises UsageError if one of the options `names` is combined with --`other`."""
    for name in names:
        value = getattr(options, name)
        if value is not None and value is not False:  # 0 counts as set (--warmup 0)
            raise UsageError(f"--{name.replace('_', '-')} and --{other} cannot be combined: drop one.")


def only_ranks_type(text: str) -> str:
    """A comma-separated list of rank numbers, "last" and "slowest". Raises UsageError."""
    words = [word.strip() for word in text.split(",")]
    if not all(word in (LAST, SLOWEST) or (word.isascii() and word.isdecimal()) for word in words):
        raise UsageError(f"--only-ranks expects rank numbers, last or slowest, e.g. 0,last, got {text!r}.")
    return ",".join(dict.fromkeys(word if word in (LAST, SLOWEST) else str(int(word)) for word in words))


def check_only_ranks(only: str | None, world_size: int | None) -> None:
    """Raises UsageError for a rank that does not exist, or if there is only one rank."""
    if only is None:
        return
    if world_size is None:
        raise UsageError("--only-ranks needs several ranks: add --ranks N.")
    absent = next((word for word in only.split(",") if word.isdecimal() and int(word) >= world_size), None)
    if absent is not None:
        raise UsageError(f"--only-ranks {absent}: with {world_size} ranks, numbers run from 0 to {world_size - 1}.")


def check_whole_number(option: str, value: object, least: int) -> None:
    """Check an argument in Python; None is allowed. Raises UsageError."""
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < least):
        raise UsageError(f"{option} must be an integer ≥ {least}, got {value!r}.")


def check_seconds(option: str, value: object) -> None:
    """Check an argument in Python. Raises UsageError."""
    if not isinstance(value, int | float) or isinstance(value, bool) or math.isnan(value) or value <= 0:
        raise UsageError(f"{option} must be a number of seconds > 0, got {value!r}.")


def whole_number_type(option: str, least: int) -> Callable[[str], int]:
    """An argparse type for an integer; argparse passes a UsageError on unchanged."""

    def read(text: str) -> int:
        digits = text.strip()
        whole = digits.isascii() and digits.isdecimal()
        check_whole_number(option, int(digits) if whole and int(digits) >= least else text, least)
        return int(digits)

    return read


def number_type(option: str, what: str, fits: Callable[[float], bool]) -> Callable[[str], float]:
    """An argparse type for a number. `what` describes it in the message; if it is a share, "30%" means 0.3."""

    def read(text: str) -> float:
        is_percent = "share" in what and text.endswith("%")
        try:
            value = float(text.removesuffix("%")) / 100 if is_percent else float(text)
        except ValueError:
            value = math.nan
        if not fits(value):
            raise UsageError(f"{option} must be {what}, got {text!r}.")
        return value

    return read


def seconds_type(option: str) -> Callable[[str], float]:
    """An argparse type for a number of seconds."""
    return number_type(option, "a number of seconds > 0", lambda seconds: seconds > 0)


def price_type(option: str) -> Callable[[str], float]:
    """An argparse type for a price per hour."""
    return number_type(option, "a number > 0", lambda price: 0 < price < math.inf)


def share_type(option: str) -> Callable[[str], float]:
    """An argparse type for a share from 0 to 1: "0.3" or "30%"."""
    return number_type(option, "a share from 0 to 1, e.g. 0.3 or 30%", lambda share: 0 <= share <= 1)


def port_type(text: str) -> int:
    """An argparse type for `--port`."""
    if text.isascii() and text.isdecimal() and len(text) < 6 and 1 <= int(text) <= 65_535:
        return int(text)
    raise UsageError(f"--port must be an integer from 1 to 65535, got {text[:100]!r}.")
