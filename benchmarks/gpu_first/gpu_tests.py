"""tests/gpu under pytest, each test's outcome kept as soon as it is there."""

from __future__ import annotations

import importlib.util
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu_first.answer import Answer
from benchmarks.gpu_first.stage import Stage

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 90


def measure(answer: Answer, stage: Stage) -> None:
    """All tests that need a GPU; without one each file is skipped."""
    results = Outcomes(answer)
    arguments = [str(ROOT / "tests" / "gpu"), "-m", "gpu", "-p", "no:cacheprovider", "-rs", "--tb=short"]
    if importlib.util.find_spec("pytest_timeout") is not None:
        arguments += ["--timeout", str(TIMEOUT_S)]
    if importlib.util.find_spec("hypothesis") is None:  # tests/conftest.py needs it, the tests of the GPU do not
        arguments += ["--noconftest", "-o", f"pythonpath={ROOT / 'tests'}"]
    code = pytest.main(arguments, plugins=[results])
    answer.figure("exit_code", int(code))
    answer.figure("outcomes", dict(Counter(results.outcomes.values())))
    ran = sum(outcome in ("passed", "failed") for outcome in results.outcomes.values())
    if not ran:
        answer.unmeasured("tests/gpu", "passed", "no test has run" + ("; simulated" if stage.simulated else ""))


class Outcomes:
    """Hears pytest."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self.outcomes: dict[str, str] = {}
        self._seconds: dict[str, float] = {}

    def pytest_runtest_logreport(self, report: Any) -> None:
        """A test was set up, called or torn down; a failure of any of them is one of the test."""
        self._seconds[report.nodeid] = self._seconds.get(report.nodeid, 0.0) + report.duration
        if report.when == "call" or report.outcome != "passed":
            self._keep(report)
        if report.when == "teardown":
            self._answer.figure("seconds", self._seconds)

    def pytest_collectreport(self, report: Any) -> None:
        """A file that cannot be collected, or is skipped as a whole."""
        if report.outcome != "passed":
            self._keep(report)

    def _keep(self, report: Any) -> None:
        name = report.nodeid
        if self.outcomes.get(name) == "failed":
            return
        self.outcomes[name] = report.outcome
        if report.outcome == "skipped":
            self._answer.unmeasured(name, "passed", _reason(report))
        else:
            note = _reason(report) if report.outcome == "failed" else ""
            self._answer.check(name, "passed", report.outcome, agrees=report.outcome == "passed", note=note)


def _reason(report: Any) -> str:
    """The last line of what went wrong, or why it was skipped."""
    if isinstance(report.longrepr, tuple):
        return str(report.longrepr[2])
    crash = getattr(report.longrepr, "reprcrash", None)
    text = crash.message if crash is not None else str(report.longrepr)
    return " ".join(text.split())[:400]
