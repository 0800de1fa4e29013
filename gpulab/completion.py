"""Tab in the magics' lines: options, commands, knobs with their values, and the names of runs, nothing else."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Sequence

from IPython.core.completer import CompletionContext, SimpleCompletion, SimpleMatcherResult

from gpulab.errors import GpulabError
from gpulab.knobs.catalogue import KNOBS
from gpulab.knobs.knob import written

RUNS_SHOWN = 50  # the newest: a longer list helps nobody

_PROFILE_LINE = re.compile(r"\s*(?:(?P<cell>%%)|(?:.*=\s*)?%)gpuprofile\s+(?P<rest>.*)", re.DOTALL)
_COMMAND_LINE = re.compile(r"\s*%gpulab\s+(?P<rest>.*)", re.DOTALL)
_SETTING_OPTIONS = frozenset({"--ab", "--set", "--sweep"})
_KNOB_LISTS = frozenset({"--without", "--allow"})
_CONDITIONS = ("--name", "--device", "--since", "--outcome", "--text")
_COMMAND_OPTIONS: dict[str, tuple[str, ...]] = {
    "climb": ("--budget", "--rungs", "--seeds", "--steps", "--pairs", "--without", "--allow", "--no-save"),
    "headspace": ("--budget", "--steps", "--pairs"),
    "runs": ("--all", *_CONDITIONS),
}
_VERB_OPTIONS: dict[str, tuple[str, ...]] = {
    "name": (),
    "delete": ("--yes", *_CONDITIONS),
    "export": ("--tensorboard", *_CONDITIONS),
}
_OUTCOMES = ("completed", "stopped", "interrupted", "failed")
_DEVICES = ("auto", "cpu", "cuda")


class LineCompletion:
    """What fits at the cursor of a magic's line. `parser` is that of `%%gpuprofile`, `commands` those of `%gpulab`."""

    def __init__(self, parser: argparse.ArgumentParser, commands: Iterable[str]) -> None:
        self._options = sorted(parser._option_string_actions)
        self._commands = tuple(commands)

    def completions(self, context: CompletionContext) -> SimpleMatcherResult:
        """What a matcher of IPython gives: without the Python names and files that would fit as well."""
        before = context.line_with_cursor[: context.cursor_position]
        fitting = self.fitting(before, context.token, first_line=context.cursor_line == 0)
        return {"completions": [SimpleCompletion(word, type=kind) for word, kind in fitting], "suppress": bool(fitting)}

    def fitting(self, before: str, token: str, *, first_line: bool = True) -> list[tuple[str, str]]:
        """Texts in place of `token`, the end of `before`, each with its kind; empty where the line is not ours."""
        magic = _PROFILE_LINE.match(before)
        if magic is not None:
            texts = self._of_profile(magic["rest"], bool(magic["cell"]) and first_line)
        else:
            command = _COMMAND_LINE.match(before)
            texts = self._of_command(command["rest"]) if command is not None else ()
        placed = ((_in_place_of(token, before, text), kind) for text, kind in texts)
        return [(text, kind) for text, kind in placed if text is not None]

    def _of_profile(self, rest: str, is_cell: bool) -> Sequence[tuple[str, str]]:
        used, word = _words(rest)
        option, begun = _option_and_value(used, word)
        if option in _SETTING_OPTIONS:
            return _settings(begun, several_values=option == "--sweep")
        if option == "--device":
            return [(device, "value") for device in _DEVICES]
        if word.startswith("-") or (is_cell and not word):
            return [(name, "option") for name in self._options if name not in used]
        return ()

    def _of_command(self, rest: str) -> Sequence[tuple[str, str]]:
        used, word = _words(rest)
        if not used:
            return [(name, "command") for name in self._commands]
        command, option = used[0], _option_and_value(used, word)[0]
        if option in _KNOB_LISTS:
            return [(name, "setting") for name in KNOBS]
        if option == "--outcome":
            return [(name, "value") for name in _OUTCOMES]
        if option == "--device":
            return [(device, "value") for device in _DEVICES[1:]]
        if command == "predict":
            return _settings(word, several_values=False)
        if command == "report" and len(used) == 1:
            return _runs()
        if command == "runs":
            return _of_runs(used[1:], word)
        return _unused(_COMMAND_OPTIONS.get(command, ()), used)


def _of_runs(used: Sequence[str], word: str) -> Sequence[tuple[str, str]]:
    if not used and not word.startswith("-"):
        return [(verb, "command") for verb in _VERB_OPTIONS]
    options = _VERB_OPTIONS.get(used[0], _COMMAND_OPTIONS["runs"]) if used else _COMMAND_OPTIONS["runs"]
    takes_run = bool(used) and (used[0] == "delete" or (used[0] == "name" and len(used) == 1))
    return _runs() if takes_run and not word.startswith("-") else _unused(options, used)


def _settings(begun: str, *, several_values: bool) -> Sequence[tuple[str, str]]:
    """Knobs with their "=", and behind it the knob's values; of a sweep those that are not there yet."""
    pair = begun if several_values else begun.rpartition(",")[2]
    name, given, value = pair.strip().partition("=")
    if not given:
        return [(f"{knob}=", "setting") for knob in KNOBS]
    if name not in KNOBS:
        return ()
    used = value.split(",")[:-1] if several_values else ()
    return [(text, "value") for text in map(written, KNOBS[name].options) if text not in used]


def _runs() -> Sequence[tuple[str, str]]:
    """Names of the newest runs, and ids of those without a name."""
    from gpulab.api.reading import runs

    try:
        rows = runs.rows(RUNS_SHOWN)
    except GpulabError:  # a store that cannot be read: the command itself says so
        return ()
    names = [row.run.name if row.run is not None else row.id for row in rows]
    return [(_quoted(name), "run") for name in dict.fromkeys(["latest", *names])]


def _quoted(name: str) -> str:
    return name if re.fullmatch(r"[\w.:=-]+", name) else "'" + name.replace("'", "'\\''") + "'"


def _unused(options: Iterable[str], used: Sequence[str]) -> Sequence[tuple[str, str]]:
    return [(option, "option") for option in options if option not in used]


def _words(rest: str) -> tuple[list[str], str]:
    """The words that are complete, and the one at the cursor."""
    words = re.findall(r"""(?:[^\s'"]|'[^']*(?:'|$)|"[^"]*(?:"|$))+""", rest)
    if not words or rest[-1:].isspace():
        return words, ""
    return words[:-1], words[-1]


def _option_and_value(used: Sequence[str], word: str) -> tuple[str, str]:
    """The option whose value stands at the cursor, and what is written of that value."""
    name, given, value = word.partition("=")
    if name.startswith("--") and given:
        return name, value
    return (used[-1], word) if used and used[-1].startswith("--") else ("", "")


def _in_place_of(token: str, before: str, text: str) -> str | None:
    """What takes the place of IPython's token, so that `text` stands there; None where another word is written.

    IPython's token begins behind its delimiters, "=" and "," among them; a name in quotes reaches further back.
    """
    begun = _longest_overlap(before, text)
    return text[len(begun) - len(token) :] if len(begun) >= len(token) else None


def _longest_overlap(before: str, text: str) -> str:
    """The longest beginning of `text` with which `before` ends, where that beginning is a word's."""
    for size in range(min(len(text), len(before)), -1, -1):
        start = len(before) - size
        if before.endswith(text[:size]) and (start == 0 or before[start - 1] in " \t=,"):
            return text[:size]
    return ""
