"""Parses and executes commands, prints their help, and answers mistakes with the nearest valid word."""

from __future__ import annotations

import argparse
import difflib
import os
import re
import shlex
import sys
from collections.abc import Callable, Collection, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from gpulab.commands import COMMANDS, Command, Door, at
from gpulab.errors import UsageError
from gpulab.options import nearest_option

if TYPE_CHECKING:
    from gpulab.views.view import Answer

PREFIX: dict[Door, str] = {"notebook": "%gpulab", "terminal": "gpulab"}  # what a user types before a command
HELP_WORDS = ("-h", "--help")
WORD = re.compile(r"""(?:[^\s'"]|'[^']*(?:'|$)|"[^"]*(?:"|$))+""")  # a word of a line, quoted parts included


class HelpRequest(Exception):
    """The user asked for help; the text is what to print."""


class Parser(argparse.ArgumentParser):
    """A parser that raises instead of exiting. Options must be unabbreviated, and may stand anywhere."""

    def __init__(self, command: Command, prog: str) -> None:
        super().__init__(
            prog=prog,
            usage=f"{prog} {command.usage if command.options else ''}".rstrip().replace("%", "%%"),
            description=f"{command.summary[0].upper()}{command.summary[1:]}.",
            epilog=_more(command, prog),
            formatter_class=argparse.RawDescriptionHelpFormatter,
            add_help=False,
            allow_abbrev=False,
        )
        self.set_defaults(prog=prog)
        for option in command.options:
            self.add_argument(*option.names, **option.argparse)
        self.add_argument(*HELP_WORDS, action=_Help, nargs=0, help="show this text")

    def read(self, words: Sequence[str]) -> argparse.Namespace:
        """The options and words, plus `prog`, the command as typed. Raises UsageError and HelpRequest."""
        in_order = "--" in words or any(action.nargs == argparse.REMAINDER for action in self._actions)
        parse = self.parse_known_args if in_order else self.parse_known_intermixed_args
        options, unknown = parse(list(words))
        if not unknown:
            return options
        if not unknown[0].startswith("-"):
            raise UsageError(f"Unexpected argument {unknown[0][:100]!r}. See `{self._help}`.")
        raise UsageError(unknown_option(self.prog, unknown[0], words, self._option_string_actions))

    def error(self, message: str) -> NoReturn:
        missing = message.removeprefix("the following arguments are required: ")
        if missing != message:
            usage = self.format_usage().removeprefix("usage: ").strip()
            raise UsageError(f"{missing.split(',')[0]} is missing. Usage: `{usage}`.")
        raise UsageError(f"{message}. See `{self._help}`.")

    @property
    def _help(self) -> str:
        """What to type for help: a cell magic needs a cell, the line magic does not."""
        return f"{self.prog.replace('%%', '%')} --help"


class _Help(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *values: object) -> NoReturn:
        raise HelpRequest(parser.format_help().rstrip())


def _more(command: Command, prog: str) -> str:
    """The text below the options: the verbs, or `more`."""
    calls = {f"{verb.name} {verb.usage}": verb.summary for verb in command.verbs}
    width = max(map(len, calls), default=0)
    lines = [f"  {prog} {call:<{width}}  {summary}" for call, summary in calls.items()]
    return "\n".join(["more:", *lines]) if lines else command.more


def overview(door: Door) -> str:
    """The list of commands, as `--help` prints it."""
    prefix, commands = PREFIX[door], at(door)
    width = max(len(command.name) for command in commands)
    lines = [f"{prefix} {command.name:<{width}}  {command.summary}" for command in commands]
    details = f"{prefix} COMMAND --help has details. {prefix} --version prints the version."
    return "\n".join(["Find out why a GPU idles.", "", *lines, "", details])


def command_of(words: Sequence[str], door: Door) -> tuple[Command, Parser, Sequence[str]]:
    """The command that the words begin with, its parser, and the other words.

    Raises UsageError naming the nearest command, and HelpRequest if only help is requested.
    """
    prefix, commands = PREFIX[door], {command.name: command for command in at(door)}
    if not words:
        raise UsageError(f"A command is missing: {', '.join(commands)}. See `{prefix} --help`.")
    first, *rest = words
    if first in HELP_WORDS:
        raise HelpRequest(overview(door))
    if first == "--version":
        raise HelpRequest(f"gpulab {sys.modules['gpulab'].__version__}")
    if first.startswith("-"):
        raise UsageError(unknown_option(prefix, first, words, (*HELP_WORDS, "--version")))
    if first not in commands:
        raise UsageError(_no_command(first, door))
    command, prog = commands[first], f"{prefix} {first}"
    for verb in command.verbs:
        if rest[:1] == [verb.name]:
            return verb, Parser(verb, f"{prog} {verb.name}"), rest[1:]
    return command, Parser(command, prog), rest


def _no_command(word: str, door: Door) -> str:
    names = [command.name for command in at(door)]
    if any(word == command.name for command in COMMANDS):
        elsewhere = f"In a notebook: %gpulab {word}." if door == "terminal" else f"At a terminal: gpulab {word}."
        return f"There is no command {word!r} here. {elsewhere}"
    near = difflib.get_close_matches(word[:100], names, n=1, cutoff=0.5)
    hint = f"Did you mean {near[0]}?" if near else f"There are: {', '.join(names)}. See `{PREFIX[door]} --help`."
    return f"There is no command {word[:100]!r}. {hint}"


def perform(words: Sequence[str], door: Door) -> tuple[Answer, argparse.Namespace]:
    """Execute the command of a line. Raises UsageError, HelpRequest and what the command raises."""
    command, parser, rest = command_of(words, door)
    options = parser.read(rest)
    from gpulab.views.view import Answer

    module, _, function = command.run.partition(":")
    run: Callable[..., Answer | None] = getattr(import_module(module), function)
    answer = run(options) if command.options else run()
    return answer or Answer(), options


def text_of(answer: Answer, options: argparse.Namespace) -> str:
    """What a command prints; also writes the page of `--html`. Raises StoreError if that fails."""
    from gpulab.store.files import write_whole
    from gpulab.views.view import View, as_json
    from gpulab.views.wording import plain

    view, sentences = answer.content, list(answer.notes)
    if isinstance(view, View):
        page: Path | None = getattr(options, "html", None)
        if page is not None:
            write_whole(page, view.html().encode())
            sentences.append(f"Page written to {plain(str(page))}")
        if answer.silent:
            return ""
        if getattr(options, "json", False):
            return as_json(view)
        if not sentences:
            return view.text(full=getattr(options, "all", False))
    else:
        sentences += [str(view)] if view else []
    return "".join(f"{line}\n" for line in sentences)


def unknown_option(prog: str, word: str, words: Sequence[str], valid: Collection[str]) -> str:
    """The error message for an unknown option: the form of a setting, the nearest option, or how to get help."""
    option, _, value = word.partition("=")
    knob = None
    if "--set" in valid and option.startswith("--"):
        from gpulab.knobs.catalogue import example, knob_by_alias

        knob = knob_by_alias(option[2:].replace("-", "_"))
    if knob is not None:
        after = words[list(words).index(word) + 1 :][:1]
        value = value or (after[0] if after and not after[0].startswith("-") else "")
        setting = f"{knob}={value}" if value else example(knob)
        return f"{prog} has no option {option}; settings are --set {setting} or, to compare, --ab {setting}."
    near = nearest_option(option, valid)
    hint = f"did you mean {near}?" if near else "--help lists them."
    return f"{prog} has no option {option[:100]}; {hint}"


def split(line: str, prog: str) -> list[str]:
    """The words of a line; quoted text is one word. Raises UsageError for an open quote."""
    reader = shlex.shlex(line, posix=True, punctuation_chars=False)
    reader.whitespace_split = True
    reader.commenters = ""
    if os.name == "nt":
        reader.escape = ""  # on Windows a backslash separates folders
    try:
        return list(reader)
    except ValueError as e:
        raise UsageError(f"{prog} {line[:100]}: {str(e).lower()}.") from None
