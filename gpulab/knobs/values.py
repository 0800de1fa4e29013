"""How the text after `--set NAME=` becomes a value, with an error that names the nearest valid one."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence

from gpulab.errors import UsageError

_SWITCH = {"true": "on", "yes": "on", "1": "on", "false": "off", "no": "off", "0": "off"}


def written(value: object) -> str:
    """A value as a user writes it: a switch is on or off."""
    return ("on" if value else "off") if isinstance(value, bool) else str(value)


def choice(name: str, text: str, options: Sequence[str], spellings: Mapping[str, str]) -> str:
    """One of a few words. Raises UsageError."""
    word = text.strip().lower()
    word = spellings.get(word, word)
    if word in options:
        return word
    nearest = difflib.get_close_matches(word, options, n=1, cutoff=0)[0]
    raise UsageError(f"{name}={text}: no value of {name}. Nearest: {name}={nearest} (of {', '.join(options)})")


def switch(name: str, text: str) -> bool:
    return choice(name, text, ("on", "off"), _SWITCH) == "on"


def whole_number(name: str, text: str, least: int) -> int:
    """A whole number from `least` on. Raises UsageError."""
    try:
        number = float(text)
        whole = round(number)
    except (ValueError, OverflowError):
        number, whole = float("nan"), least
    if number == whole and whole >= least:
        return whole
    nearest = max(least, whole)
    raise UsageError(f"{name}={text}: not a whole number from {least} on. Nearest: {name}={nearest}")
