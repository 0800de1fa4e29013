"""Each slow test says why: those over 20 s are listed after a run, with the reason of their marker or without.

A time is never asserted: on a busy machine any test may be listed, and none fails by it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import pytest

SLOW_S = 20.0

_seconds: defaultdict[str, float] = defaultdict(float)
_reasons: dict[str, str] = {}


def note_reasons(items: Sequence[pytest.Item]) -> None:
    """Reports carry the reason from the process that runs the test to the one that prints."""
    for item in items:
        if (marker := item.get_closest_marker("slow")) is not None:
            (reason,) = marker.args
            item.user_properties.append(("slow", reason))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _seconds[report.nodeid] += report.duration
    _reasons.update((report.nodeid, str(value)) for name, value in report.user_properties if name == "slow")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    slow = sorted((name for name in _seconds if _seconds[name] > SLOW_S), key=lambda name: -_seconds[name])
    if slow:
        terminalreporter.section(f"over {SLOW_S:.0f} s")
    for name in slow:
        reason = _reasons.get(name, 'warning: no reason. Make it faster, or mark it: @pytest.mark.slow("why")')
        terminalreporter.line(f"{_seconds[name]:4.0f} s  {name}: {reason}", yellow=name not in _reasons)
