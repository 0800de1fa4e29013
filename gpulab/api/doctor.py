"""`gpulab doctor`: what this machine can measure, as text and in a notebook, for someone who is new to the terms."""

from __future__ import annotations

import argparse
import html as markup
import textwrap
from collections.abc import Iterator, Mapping, Sequence

from msgspec import Struct

from gpulab.devices.doctor import Check, State, examine
from gpulab.store.folders import Store
from gpulab.views.view import Answer
from gpulab.views.waiting import waiting

WIDTH = 100
MARKS: Mapping[str, str] = {"ok": "ok", "limited": "partly", "refused": "no", "absent": "no"}
_COLOURS: Mapping[State, str] = {"ok": "#1E7B45", "limited": "#B3541E", "refused": "#5B6B7F", "absent": "#5B6B7F"}


def examine_machine(options: argparse.Namespace) -> Answer:
    """Do `gpulab doctor`."""
    with waiting("checking this machine"):
        return Answer(Examination(examine(Store(options.store).root)))


class Examination(Struct, frozen=True):
    """The results of all checks, to `display`."""

    checks: Sequence[Check]

    def __repr__(self) -> str:
        """One aligned block per check, a summary on top; no colour. Only a long word, such as a path, is wider."""
        name_width = max((len(c.name) for c in self.checks), default=0)
        mark_width = max(map(len, MARKS.values()))
        lines = ["gpulab doctor: what can be measured on this machine", "", *_filled(_summary(self.checks), ""), ""]
        for check in self.checks:
            head = f"  {MARKS[check.state]:<{mark_width}}  {_clean(check.name):<{name_width}}  "
            lines += _filled(_clean(check.evidence), head)
            if check.next_step:
                lines += _filled("→ " + _clean(check.next_step), " " * len(head))
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        """The same for a notebook: escaped, inline styles only, in the notebook's own colours."""
        summary = markup.escape(_summary(self.checks))
        rows = "".join(map(_row, self.checks))
        return (
            f'<p style="margin:0 0 6px;font-weight:600;max-width:60em">{summary}</p>'
            f'<table style="border-collapse:collapse;margin:0;font-size:13px">{rows}</table>'
        )


def _row(check: Check) -> str:
    cell = "padding:3px 14px 3px 0;border:0;vertical-align:top;text-align:left;background:transparent"
    mark = f"background:{_COLOURS[check.state]};color:#FFFFFF;border-radius:3px;padding:0 6px"
    evidence, next_step = markup.escape(_clean(check.evidence)), markup.escape(_clean(check.next_step))
    step = f'<div style="opacity:0.8">→ {next_step}</div>' if next_step else ""
    return (
        f'<tr style="background:transparent"><td style="{cell}"><span style="{mark}">{MARKS[check.state]}</span></td>'
        f'<td style="{cell};white-space:nowrap;font-weight:500">{markup.escape(_clean(check.name))}</td>'
        f'<td style="{cell};max-width:560px;overflow-wrap:anywhere">{evidence}{step}</td></tr>'
    )


def _summary(checks: Sequence[Check]) -> str:
    return " ".join(_sentences({c.name: c.state for c in checks}))


def _sentences(states: Mapping[str, str]) -> Iterator[str]:
    curves = any(name.endswith(" curves") and state != "absent" for name, state in states.items())
    counters = any(name.endswith("hardware counters") and state == "ok" for name, state in states.items())
    trial = states.get("GPU work in the trace")
    traced = trial == "ok"
    if curves or trial in ("ok", "refused"):
        yield "Step times, time spent waiting for data and operators can be measured."
        yield "GPU kernels are traced one by one." if traced else "GPU kernels cannot be traced."
        yield f"GPU utilization, memory and power {'can be drawn' if curves else 'cannot be read'}."
        yield f"How much of the GPU works {_depth(counters, traced)}."
    else:
        yield "There is no NVIDIA GPU to measure here, so the CPU is profiled as the device:"
        yield "step times, time spent waiting for data, operators, CPU load and memory."
    todo = sum(state == "limited" for state in states.values())
    if todo:
        points = "One point" if todo == 1 else f"{todo} points"
        yield f'{points} below could be better (marked "{MARKS["limited"]}").'


def _depth(counters: bool, traced: bool) -> str:
    if counters:
        return "is measured by its hardware counters"
    return "is estimated from the trace, not measured" if traced else "is not known"


def _filled(text: str, head: str) -> list[str]:
    indent = " " * len(head)
    lines = textwrap.wrap(text, WIDTH, initial_indent=head, subsequent_indent=indent, break_long_words=False)
    return lines or [head.rstrip()]


def _clean(text: str) -> str:
    return "".join(ch if ch.isprintable() else " " for ch in text)
