"""The words of a command: split as a shell does, options in any place, each mistake answered in one sentence."""

from __future__ import annotations

import argparse
import difflib
import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from gpulab.errors import UsageError
from gpulab.store.folders import Store
from gpulab.store.lookup import shown


class Parser(argparse.ArgumentParser):
    """An argument parser that raises instead of leaving Python, knows only whole options and takes them anywhere."""

    def __init__(self, prog: str, usage: str) -> None:
        super().__init__(prog=prog, usage=f"{prog} {usage}", add_help=False, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{self.prog}: {message}.")

    def read(self, words: Sequence[str]) -> argparse.Namespace:
        """The options and words. Raises UsageError."""
        options, unknown = self.parse_known_intermixed_args(list(words))
        if unknown:
            raise UsageError(self._unknown(unknown[0]))
        return options

    def _unknown(self, word: str) -> str:
        option = word.partition("=")[0]
        if not word.startswith("-"):
            return f"{self.prog}: {shown(word)!r} is one word too many."
        near = difflib.get_close_matches(shown(option), sorted(self._option_string_actions), n=1, cutoff=0.0)
        return f"{self.prog} has no option {shown(option)!r}" + (f"; the nearest is {near[0]}." if near else ".")


def split(line: str, command: str) -> list[str]:
    """The words of a line; quotes keep what they enclose together. Raises UsageError for one that is not closed."""
    reader = shlex.shlex(line, posix=True, punctuation_chars=False)
    reader.whitespace_split = True
    reader.commenters = ""
    if os.name == "nt":
        reader.escape = ""  # there it separates folders
    try:
        return list(reader)
    except ValueError as e:
        raise UsageError(f"{command} {shown(line)}: {str(e).lower()}.") from None


def take_store(words: Sequence[str], prog: str) -> tuple[Store, list[str]]:
    """The store that `--store DIR` among the words of a terminal names, else the default one, and the other words.

    Raises UsageError where DIR is missing.
    """
    store, rest, waiting = Store(), [], iter(words)
    for word in waiting:
        option, given, folder = word.partition("=")
        if option != "--store":
            rest.append(word)
            continue
        folder = folder if given else next(waiting, "")
        if not folder:
            raise UsageError(f"{prog}: --store takes a folder.")
        store = Store(Path(folder))
    return store, rest
