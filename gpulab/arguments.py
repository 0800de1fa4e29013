"""The words of a command: what it takes, how they are read, and the answer to a mistake, with the nearest word."""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Collection, Sequence
from typing import Any, Literal, NamedTuple, NoReturn

from gpulab.errors import UsageError
from gpulab.options import meant_option

Door = Literal["both", "notebook", "terminal"]
HELP_WORDS = ("-h", "--help")


class Option(NamedTuple):
    """An option or a word of a command, as argparse takes it. `values`: what Tab offers, words or a kind of them."""

    names: tuple[str, ...]
    argparse: dict[str, Any]
    values: tuple[str, ...] | Literal["settings", "sweep", "knobs", "runs", ""] = ""


class Command(NamedTuple):
    """A command: `run` is "module:function"; it is called with the options, if there are any, and may give an `Answer`.

    `more` stands below the options in its help. `verbs` are commands of their own behind its name: `runs delete`.
    """

    name: str
    summary: str
    run: str
    options: tuple[Option, ...] = ()
    door: Door = "both"
    usage: str = "[options]"
    more: str = ""
    verbs: tuple[Command, ...] = ()


class HelpRequest(Exception):
    """Help is asked for; its text is what to print."""


class Parser(argparse.ArgumentParser):
    """Reads the words of a command. It raises instead of leaving Python, and knows only whole options, in any place."""

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
        """The options and words; `prog` is how the command was given. Raises UsageError and HelpRequest."""
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
        """What to type for help: a cell magic without a cell cannot be asked."""
        return f"{self.prog.replace('%%', '%')} --help"


class _Help(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *given: object) -> NoReturn:
        raise HelpRequest(parser.format_help().rstrip())


def _more(command: Command, prog: str) -> str:
    """What stands below the options: the verbs, or a text."""
    calls = {f"{verb.name} {verb.usage}": verb.summary for verb in command.verbs}
    width = max(map(len, calls), default=0)
    lines = [f"  {prog} {call:<{width}}  {summary}" for call, summary in calls.items()]
    return "\n".join(["more:", *lines]) if lines else command.more


def unknown_option(prog: str, word: str, words: Sequence[str], valid: Collection[str]) -> str:
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
        return f"{prog} has no option {option}; settings are --set {setting} or, to compare, --ab {setting}."
    near = meant_option(option, valid)
    hint = f"did you mean {near}?" if near else "--help lists them."
    return f"{prog} has no option {option[:100]}; {hint}"


def split(line: str, prog: str) -> list[str]:
    """The words of a line; quotes keep what they enclose together. Raises UsageError for one that is not closed."""
    reader = shlex.shlex(line, posix=True, punctuation_chars=False)
    reader.whitespace_split = True
    reader.commenters = ""
    if os.name == "nt":
        reader.escape = ""  # there it separates folders
    try:
        return list(reader)
    except ValueError as e:
        raise UsageError(f"{prog} {line[:100]}: {str(e).lower()}.") from None
