"""Tab completion in lines of the magics: options, commands, settings with their values, and names of runs."""

from __future__ import annotations

import re
from collections.abc import Sequence

from IPython.core.completer import CompletionContext, SimpleCompletion, SimpleMatcherResult

from gpulab.arguments import HELP_WORDS, WORD
from gpulab.commands import PROFILE, Command, Option, at
from gpulab.errors import GpulabError
from gpulab.knobs.catalogue import KNOBS
from gpulab.knobs.knob import setting_text

MOST_RUNS = 50  # the newest

_PROFILE_LINE = re.compile(r"\s*(?:(?P<cell>%%)|(?:.*=\s*)?%)gpuprofile\s+(?P<rest>.*)", re.DOTALL)
_COMMAND_LINE = re.compile(r"\s*%gpulab\s+(?P<rest>.*)", re.DOTALL)


def completions(context: CompletionContext) -> SimpleMatcherResult:
    """The completions in IPython's form; Python names and files are suppressed."""
    before = context.line_with_cursor[: context.cursor_position]
    texts = fitting(before, context.token, first_line=context.cursor_line == 0)
    return {"completions": [SimpleCompletion(word, type=kind) for word, kind in texts], "suppress": bool(texts)}


def fitting(before: str, token: str, *, first_line: bool = True) -> list[tuple[str, str]]:
    """Completions for `token`, the end of `before`, each with its kind; empty if the line is no magic."""
    magic, line = _PROFILE_LINE.match(before), _COMMAND_LINE.match(before)
    texts: Sequence[tuple[str, str]] = ()
    if magic is not None:
        used, word = _words(magic["rest"])
        is_cell = bool(magic["cell"]) and first_line
        texts = _of_command(PROFILE, used, word, all_options=is_cell)
    elif line is not None:
        used, word = _words(line["rest"])
        commands = {command.name: command for command in at("notebook")}
        if not used:
            texts = [(name, "command") for name in commands]
        elif used[0] in commands:
            texts = _of_command(commands[used[0]], used[1:], word, all_options=True)
    placed = ((_in_place_of(token, before, text), kind) for text, kind in texts)
    return [(text, kind) for text, kind in placed if text is not None]


def _of_command(command: Command, used: list[str], word: str, *, all_options: bool) -> Sequence[tuple[str, str]]:
    """Completions after a command; `all_options`: options are offered before a dash is typed."""
    verbs = {verb.name: verb for verb in command.verbs}
    if used and used[0] in verbs:
        return _of_command(verbs[used[0]], used[1:], word, all_options=True)
    options = {name: option for option in command.options for name in option.names}
    name, begun = _option_and_value(used, word)
    if name in options and options[name].values:
        return _values(options[name], begun)
    words = next((option for option in command.options if option.values and not option.names[0].startswith("-")), None)
    if words is not None and not word.startswith("-"):
        return _values(words, word)
    if verbs and not used and not word.startswith("-"):
        return [(verb, "command") for verb in verbs]
    if not word.startswith("-") and (word or not all_options):
        return ()
    names = [name for name in (*options, *HELP_WORDS) if name.startswith("-")]
    return [(name, "option") for name in names if name not in used]


def _values(option: Option, begun: str) -> Sequence[tuple[str, str]]:
    match option.values:
        case "settings" | "sweep":
            return _settings(begun, several_values=option.values == "sweep")
        case "knobs":
            return [(name, "setting") for name in KNOBS]
        case "runs":
            return _runs()
        case words:
            return [(word, "value") for word in words]


def _settings(begun: str, *, several_values: bool) -> Sequence[tuple[str, str]]:
    """Settings with their "=", and after "=" the values; for a sweep only values not listed yet."""
    pair = begun if several_values else begun.rpartition(",")[2]
    name, equals, value = pair.strip().partition("=")
    if not equals:
        return [(f"{knob}=", "setting") for knob in KNOBS]
    if name not in KNOBS:
        return ()
    used = value.split(",")[:-1] if several_values else ()
    return [(text, "value") for text in map(setting_text, KNOBS[name].options) if text not in used]


def _runs() -> Sequence[tuple[str, str]]:
    """Names of the newest runs, and ids of those without a name."""
    from gpulab.api.runs import runs

    try:
        rows = runs.rows(MOST_RUNS)
    except GpulabError:  # a store that cannot be read: the command itself says so
        return ()
    names = [row.run.name if row.run is not None else row.id for row in rows]
    return [(_quoted(name), "run") for name in dict.fromkeys(["latest", *names])]


def _quoted(name: str) -> str:
    return name if re.fullmatch(r"[\w.:=-]+", name) else "'" + name.replace("'", "'\\''") + "'"


def _words(rest: str) -> tuple[list[str], str]:
    """The complete words, and the one at the cursor."""
    words = WORD.findall(rest)
    if not words or rest[-1:].isspace():
        return words, ""
    return words[:-1], words[-1]


def _option_and_value(used: Sequence[str], word: str) -> tuple[str, str]:
    """The option whose value is at the cursor, and the beginning of that value."""
    name, equals, value = word.partition("=")
    if name.startswith("--") and equals:
        return name, value
    return (used[-1], word) if used and used[-1].startswith("--") else ("", "")


def _in_place_of(token: str, before: str, text: str) -> str | None:
    """The replacement for IPython's token that results in `text`; None if it does not fit.

    IPython's token begins after its delimiters, among them "=" and ","; a name in quotes begins before them.
    """
    begun = _longest_overlap(before, text)
    return text[len(begun) - len(token) :] if len(begun) >= len(token) else None


def _longest_overlap(before: str, text: str) -> str:
    """The longest prefix of `text` that is a suffix of `before` and starts at a word."""
    for size in range(min(len(text), len(before)), -1, -1):
        start = len(before) - size
        if before.endswith(text[:size]) and (start == 0 or before[start - 1] in " \t=,"):
            return text[:size]
    return ""
