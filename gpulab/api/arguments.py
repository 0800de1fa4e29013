"""The words of a command: split as a shell does, options in any place, each mistake answered in one sentence."""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NoReturn

from gpulab.errors import UsageError
from gpulab.options import meant_option
from gpulab.store.folders import Store
from gpulab.store.lookup import shortened


def unknown_option(asked: str, word: str, words: Sequence[str], valid: Collection[str]) -> str:
    """A sentence about an option that a command has not: how its knob is set, the one that is meant, or its help."""
    option, _, value = word.partition("=")
    knob = None
    if "--set" in valid and option.startswith("--"):
        from gpulab.knobs.catalogue import example, knob_called

        knob = knob_called(option[2:].replace("-", "_"))
    if knob is not None:
        after = words[list(words).index(word) + 1 :][:1]
        value = value or (after[0] if after and not after[0].startswith("-") else "")
        setting = f"{knob}={value}" if value else example(knob)
        return f"{asked} has no option {option}; settings are --set {setting} or, to compare, --ab {setting}."
    near = meant_option(option, valid)
    hint = f"did you mean {near}?" if near else "--help lists them."
    return f"{asked} has no option {shortened(option)}; {hint}"


class Parser(argparse.ArgumentParser):
    """An argument parser that raises instead of leaving Python, knows only whole options and takes them anywhere."""

    def __init__(self, prog: str, usage: str) -> None:
        super().__init__(prog=prog, usage=f"{prog} {usage}", add_help=False, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{self.prog}: {message}. `{self.prog} --help` has examples.")

    def read(self, words: Sequence[str]) -> argparse.Namespace:
        """The options and words. Raises UsageError."""
        options, unknown = self.parse_known_intermixed_args(list(words))
        if unknown:
            raise UsageError(self._unknown(unknown[0], words))
        return options

    def _unknown(self, word: str, words: Sequence[str]) -> str:
        if not word.startswith("-"):
            return f"{self.prog}: unexpected argument {shortened(word)!r}. Drop it, or see `{self.prog} --help`."
        return unknown_option(self.prog, word, words, self._option_string_actions)


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
        raise UsageError(f"{command} {shortened(line)}: {str(e).lower()}.") from None


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
