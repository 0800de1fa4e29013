"""What the diagnosis of a window of 600,000 events takes, rule by rule: the issue allows 1 s for all of it."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

from benchmarks import synthetic_trace

REPEATS = 5
EVENTS = 900_000  # in the file; two of three are spans


def measure() -> dict[str, object]:
    """Seconds, medians: of a whole diagnosis, of all rules, of the costliest five, of the figures that they read."""
    from gpulab.analysis.facts import facts
    from gpulab.diagnosis.context import RuleContext
    from gpulab.diagnosis.diagnose import diagnose
    from gpulab.diagnosis.rules.catalogue import kinds
    from gpulab.thresholds import DEFAULT
    from gpulab.trace.load import load_run

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tests.support.synthetic.json"
        synthetic_trace.write(path, EVENTS)
        run = load_run(path)
    rules = [kind.rule for kind in kinds() if kind.rule is not None]
    figures = _median_s(lambda: facts(run))
    known = facts(run)
    context, whole = RuleContext(known, DEFAULT), _median_s(lambda: diagnose(known))
    by_rule = {rule.__name__: _median_s(lambda rule=rule: rule(context)) for rule in rules}  # type: ignore[misc]
    costliest = dict(sorted(by_rule.items(), key=lambda pair: -pair[1])[:5])
    assert run.timeline is not None
    return {
        "events": len(run.timeline),
        "rules": len(rules),
        "diagnosis_s": whole,
        "rules_s": sum(by_rule.values()),
        "costliest_s": costliest,
        "figures_s": figures,
    }


def _median_s(work: object) -> float:
    assert callable(work)
    times = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return sorted(times)[REPEATS // 2]
