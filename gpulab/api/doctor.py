"""The doctor's findings as plain text, for someone who has never heard our words."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence

from gpulab.devices.doctor import Check

WIDTH = 100
MARKS: Mapping[str, str] = {"ok": "ok", "limited": "partly", "refused": "no", "absent": "no"}


def render(checks: Sequence[Check], width: int = WIDTH) -> str:
    """One aligned block per finding, a summary on top; no colour. Lines fit `width`,
    save where one word, such as a path, is longer."""
    name_width = max((len(c.name) for c in checks), default=0)
    mark_width = max(len(mark) for mark in MARKS.values())
    lines = ["gpulab doctor: what can be measured on this machine", ""]
    lines += _filled(_summary(checks), width, "")
    lines.append("")
    for check in checks:
        head = f"  {MARKS[check.state]:<{mark_width}}  {_clean(check.name):<{name_width}}  "
        lines += _filled(_clean(check.evidence), width, head)
        if check.next_step:
            lines += _filled("→ " + _clean(check.next_step), width, " " * len(head))
    return "\n".join(lines) + "\n"


def _summary(checks: Sequence[Check]) -> str:
    return " ".join(_sentences({c.name: c.state for c in checks}))


def _sentences(states: Mapping[str, str]) -> Iterator[str]:
    curves = any(name.endswith(" curves") and state != "absent" for name, state in states.items())
    counters = any(name.endswith("hardware counters") and state == "ok" for name, state in states.items())
    tried = states.get("GPU work in the trace")
    traced = tried == "ok"
    if curves or tried in ("ok", "refused"):
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
    return "is estimated from the trace, not measured" if traced else "cannot be told"


def _filled(text: str, width: int, head: str) -> list[str]:
    return textwrap.wrap(
        text, width, initial_indent=head, subsequent_indent=" " * len(head), break_long_words=False
    ) or [head.rstrip()]


def _clean(text: str) -> str:
    return "".join(ch if ch.isprintable() else " " for ch in text)
