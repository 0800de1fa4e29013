"""Numbers that an option takes ("--steps 50", `steps=50`): read and refused in one way, wherever they are given."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeVar

from gpulab.errors import UsageError

T = TypeVar("T")


def read_whole_number(option: str, text: str | None, least: int, default: T) -> int | T:
    """The number that a line gives; `default` where the option is absent. Raises UsageError."""
    if text is None:
        return default
    digits = text.strip()
    if not (digits.isascii() and digits.isdecimal() and int(digits) >= least):
        raise _no_whole_number(option, text, least)
    return int(digits)


def check_whole_number(option: str, value: object, least: int) -> None:
    """What Python gives for the same option; None is an absent one. Raises UsageError."""
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < least):
        raise _no_whole_number(option, value, least)


def whole_number_type(option: str, least: int) -> Callable[[str], int]:
    """The same as a `type` for argparse, which passes a UsageError on unchanged."""
    return lambda text: read_whole_number(option, text, least, least)


def read_seconds(option: str, text: str | None, default: float) -> float:
    """The seconds that a line gives; `default` where the option is absent. Raises UsageError."""
    if text is None:
        return default
    try:
        seconds = float(text)
    except ValueError:
        raise _no_seconds(option, text) from None
    check_seconds(option, seconds)
    return seconds


def check_seconds(option: str, value: object) -> None:
    """What Python gives for the same option. Raises UsageError."""
    if not isinstance(value, int | float) or isinstance(value, bool) or math.isnan(value) or value <= 0:
        raise _no_seconds(option, value)


def _no_whole_number(option: str, given: object, least: int) -> UsageError:
    return UsageError(f"{option} takes a whole number of at least {least}, not {given!r}.")


def _no_seconds(option: str, given: object) -> UsageError:
    return UsageError(f"{option} takes a number of seconds above 0, not {given!r}.")


__all__ = ["check_seconds", "check_whole_number", "read_seconds", "read_whole_number", "whole_number_type"]
