"""Makes a knob's value permanent: a diff of the user's cell if the place is found, else a snippet.

The cell is edited as text, so that its formatting, comments and IPython lines stay as they are. A change is offered
only if the new text parses to the old code with just that value changed.
"""

from __future__ import annotations

import ast
import difflib
import io
import re
import tokenize
from collections.abc import Iterator, Sequence
from functools import reduce

from msgspec import Struct

from gpulab.knobs.knob import CodeEdit, LoopEnd
from gpulab.knobs.variables import literal_places, replace_nodes

_IPYTHON = re.compile(r"(?P<indent>\s*)(?:[%!?]|(?P<target>[^\W\d][\w,\s]*=)\s*[%!]|.*\?\s*$)")
_DATA_LOADER = (  # parameters that may be given by position, in that order
    "dataset",
    "batch_size",
    "shuffle",
    "sampler",
    "batch_sampler",
    "num_workers",
    "collate_fn",
    "pin_memory",
    "drop_last",
)
_TRAINS = ("backward", "step")
_FSTRING_END = getattr(tokenize, "FSTRING_END", tokenize.STRING)  # from Python 3.12 on
_CONTEXT = 2  # lines around a change
ELSEWHERE = "# And, where it belongs:"  # precedes snippets without a place in the cell


class Edit(Struct, frozen=True):
    """An edit that makes values permanent. `text`: a unified diff of the cell (`is_diff`) with notes, or a snippet.

    `cell`: the cell with every value changed that could be located.
    """

    text: str
    is_diff: bool
    cell: str


def edit(cell: str, edits: Sequence[CodeEdit]) -> Edit:
    """The edit that keeps all these values. A value that cannot be located in the cell becomes a snippet."""
    changed, unplaced, notes = cell, list[CodeEdit](), list[str]()
    for code_edit in edits:
        result = _changed(changed, code_edit)
        if result is None:
            unplaced.append(code_edit)
            continue
        changed, note = result
        if note and note not in notes:
            notes.append(note)
    title = ", ".join(p.title or f"{p.keyword}={p.literal}" for p in edits if p not in unplaced)
    snippets = list(dict.fromkeys(one.snippet for one in _with_one_loop_end(unplaced)))
    if changed == cell:
        return Edit("\n\n".join(snippets) or "# Your code already has these values.", False, cell)
    parts = [*(f"# {note}" for note in notes), diff(cell, changed, "your code", f"your code with {title}")]
    if snippets:
        parts += [ELSEWHERE, *snippets]
    return Edit("\n".join(parts), True, changed)


def diff(old: str, new: str, old_title: str, new_title: str) -> str:
    """The unified diff of two texts of a cell."""
    lines = difflib.unified_diff(old.split("\n"), new.split("\n"), old_title, new_title, n=_CONTEXT, lineterm="")
    return "\n".join(lines)


def _with_one_loop_end(edits: list[CodeEdit]) -> list[CodeEdit]:
    """Merge all edits of the end of the loop into one that does the work of all."""
    ends = [one.loop_end for one in edits if one.loop_end is not None]
    if len(ends) < 2:
        return edits
    ending = [one for one in edits if one.loop_end is not None]
    lines = "\n".join(one.lines for one in ending if one.lines)
    joined = CodeEdit(lines, loop_end=reduce(LoopEnd.joined_with, ends))
    return [joined if one is ending[0] else one for one in edits if one is ending[0] or one.loop_end is None]


# -- one value ---------------------------------------------------------------------------------------------------------


def _changed(text: str, code_edit: CodeEdit) -> tuple[str, str] | None:
    """The cell with one value changed, and a note about it; None if the place is not found."""
    tree = parse(text)
    if tree is None or not code_edit.keyword or "\r" in text:
        return None
    lines, note = _Text(text), ""
    places: Sequence[ast.expr]
    if code_edit.call:
        calls = _calls(tree, code_edit.call)
        places = feeding = _feeding(tree, calls) if code_edit.call == "DataLoader" else calls
        if not all(_set_keyword(lines, tree, call, code_edit) for call in reversed(feeding)):
            return None
        if code_edit.call == "DataLoader" and len(calls) == len(feeding) > 1:
            note = (
                f"All {len(calls)} DataLoader calls are changed: your code does not show which one feeds the training."
            )
    else:
        places = literal_places(tree).get(code_edit.keyword, [])
        for place in reversed(places):
            lines.put(place, code_edit.literal)
        replace_nodes(tree, dict.fromkeys(places, ast.parse(code_edit.literal, mode="eval").body))
    return (lines.text, note) if places and _same(parse(lines.text), tree) else None


def _set_keyword(lines: _Text, tree: ast.Module, call: ast.Call, code_edit: CodeEdit) -> bool:
    """Set the keyword of one call in the text and in the tree. False if the result would be uncertain."""
    if any(isinstance(a, ast.Starred) for a in call.args):
        return False
    present = next((k for k in call.keywords if k.arg == code_edit.keyword), None)
    by_position = code_edit.call == "DataLoader" and code_edit.keyword in _DATA_LOADER
    position = _DATA_LOADER.index(code_edit.keyword) if by_position else len(call.args)
    old = present.value if present is not None else next(iter(call.args[position:]), None)
    literal = code_edit.literal if old is None else code_edit.literal_for(lines.of(old))
    value = ast.parse(literal, mode="eval").body
    if old is not None:
        lines.put(old, literal)
        replace_nodes(tree, {old: value})
    elif code_edit.wraps or any(k.arg is None for k in call.keywords):  # **options may have it
        return False
    else:
        lines.add(call, f"{code_edit.keyword}={literal}")
        call.keywords.append(ast.keyword(code_edit.keyword, value))
    return True


def _same(a: ast.Module | None, b: ast.Module) -> bool:
    return a is not None and ast.dump(a) == ast.dump(b)


# -- which calls -------------------------------------------------------------------------------------------------------


def _calls(tree: ast.Module, name: str) -> list[ast.Call]:
    """All calls of `name`, of `….name` and of its import aliases, in order of the text."""
    aliases = {name} | {
        a.asname
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for a in node.names
        if a.name == name and a.asname
    }
    calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and _has_name(n.func, name, aliases)]
    return sorted(calls, key=lambda call: (call.lineno, call.col_offset))


def _has_name(function: ast.expr, name: str, aliases: set[str]) -> bool:
    if isinstance(function, ast.Attribute):
        return function.attr == name
    return isinstance(function, ast.Name) and function.id in aliases


def _feeding(tree: ast.Module, calls: list[ast.Call]) -> list[ast.Call]:
    """Of several DataLoader calls, those that feed a training loop; all if none does."""
    if len(calls) < 2:
        return calls
    iterated = [loop.iter for loop in ast.walk(tree) if isinstance(loop, ast.For | ast.AsyncFor) and _trains(loop)]
    names = {n.id for node in iterated for n in ast.walk(node) if isinstance(n, ast.Name)}
    inside = {id(n) for node in iterated for n in ast.walk(node)}
    assigned = _assigned(tree)
    return [call for call in calls if id(call) in inside or names & assigned.get(id(call), set())] or calls


def _trains(loop: ast.For | ast.AsyncFor) -> bool:
    """Whether the loop's body has a backward pass or a step."""
    nodes = (n for statement in loop.body for n in ast.walk(statement))
    return any(isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute) and n.func.attr in _TRAINS for n in nodes)


def _assigned(tree: ast.Module) -> dict[int, set[str]]:
    """For each node in the value of an assignment, by id: the names on the left."""
    assigned: dict[int, set[str]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            pairs = [pair for target in node.targets for pair in _pairs(target, node.value)]
        elif isinstance(node, ast.AnnAssign | ast.NamedExpr) and node.value is not None:
            pairs = [(node.target, node.value)]
        else:
            continue
        for target, value in pairs:
            names = {n.id for n in ast.walk(target) if isinstance(n, ast.Name)}
            for inner in ast.walk(value):
                assigned.setdefault(id(inner), set()).update(names)
    return assigned


def _pairs(target: ast.expr, value: ast.expr) -> Iterator[tuple[ast.expr, ast.expr]]:
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
        yield from zip(target.elts, value.elts, strict=True)
    else:
        yield target, value


# -- text --------------------------------------------------------------------------------------------------------------


class _Text:
    """A cell's text, edited at the positions of its tree's nodes. One change at a time, or from the end backwards."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._starts = [0, *(m.end() for m in re.finditer("\n", text))]

    def of(self, node: ast.expr) -> str:
        begin, end = self._span(node)
        return self.text[begin:end]

    def put(self, node: ast.expr, literal: str) -> None:
        begin, end = self._span(node)
        self.text = self.text[:begin] + literal + self.text[end:]

    def add(self, call: ast.Call, argument: str) -> None:
        """Append an argument to a call, on a separate line if the last argument is on one."""
        begin, end = self._span(call)
        if not call.args and not call.keywords:
            return self._insert(end - 1, argument)
        last, comma = (at + begin for at in _end_of_arguments(self.text[begin:end]))
        indent = self._before_last(call)
        if indent.strip():
            return self._insert(last, f", {argument}")
        had_comma = comma > last
        addition = f"\n{indent}{argument}{',' if had_comma else ''}"
        line_end = self.text.find("\n", comma, end)  # a comment may precede it
        self._insert(line_end if line_end >= 0 else comma, addition)
        if not had_comma:
            self._insert(last, ",")

    def _before_last(self, call: ast.Call) -> str:
        """The text before the last argument on its line, without that argument's opening brackets."""
        nodes: list[ast.expr | ast.keyword] = [*call.args, *call.keywords]
        at = max(self._offset(n.lineno, n.col_offset) for n in nodes)
        return self.text[self.text.rfind("\n", 0, at) + 1 : at].rstrip("([{")

    def _insert(self, at: int, what: str) -> None:
        self.text = self.text[:at] + what + self.text[at:]

    def _span(self, node: ast.expr) -> tuple[int, int]:
        assert node.end_lineno is not None and node.end_col_offset is not None
        return self._offset(node.lineno, node.col_offset), self._offset(node.end_lineno, node.end_col_offset)

    def _offset(self, line: int, column: int) -> int:
        """The offset in characters: `ast` counts columns in bytes."""
        start = self._starts[line - 1]
        return start + len(self.text[start:].split("\n", 1)[0].encode()[:column].decode(errors="ignore"))


def _end_of_arguments(call: str) -> tuple[int, int]:
    """Offsets in a call's text: the end of its last argument, and of the comma after it (the same without a comma)."""
    starts = [0, *(m.end() for m in re.finditer("\n", call))]
    ends = [
        (starts[token.end[0] - 1] + token.end[1], token.string)
        for token in tokenize.generate_tokens(io.StringIO(call).readline)
        if token.type in (tokenize.OP, tokenize.NAME, tokenize.NUMBER, tokenize.STRING, _FSTRING_END)
    ]
    (before, _), (last, sign) = ends[-3], ends[-2]
    return (before, last) if sign == "," else (last, last)


def parse(text: str) -> ast.Module | None:
    """The cell's tree, with IPython's own lines masked; None if it is no Python."""
    lines = text.split("\n")
    for _ in range(len(lines) + 1):
        try:
            return ast.parse("\n".join(lines))
        except SyntaxError as e:
            if e.lineno is None or not _mask(lines, e.lineno - 1):
                return None
        except (ValueError, RecursionError, MemoryError):
            return None
    return None


def _mask(lines: list[str], number: int) -> bool:
    """Replace an IPython line, with its continuation lines, by a statement."""
    match = _IPYTHON.match(lines[number]) if number < len(lines) else None
    if match is None:
        return False
    continued = lines[number].rstrip().endswith("\\")
    lines[number] = match["indent"] + (f"{match['target']}None" if match["target"] else "pass")
    while continued and number + 1 < len(lines):
        number += 1
        continued = lines[number].rstrip().endswith("\\")
        lines[number] = ""
    return True
