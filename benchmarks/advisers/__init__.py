"""Side by side on the planted cells and traces: gpulab, the TensorBoard plugin, PyTorch's pattern matcher, HTA."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct

from benchmarks.advisers.advice import contradicted, keys_of, names_truth
from benchmarks.advisers.asking import asked, hta
from benchmarks.harness import RESULTS
from benchmarks.planted import skipped
from benchmarks.planted.catalogue import CELLS
from benchmarks.planted.judging import NO_FINDING
from benchmarks.planted.traces import TRACES, file_of

ADVISERS = ("plugin", "matcher")
RANK = "rank0.pt.trace.json.gz"  # what is shown of a job's folder to tools that read one file


def measure() -> dict[str, object]:
    """A row for each case. gpulab's part is from the results of `planted`, which has to be run before."""
    ours = _ours()
    rows = [_of_trace(case, ours.get(case.name)) for case in TRACES]
    rows += [_of_cell(planted, ours.get(planted.name)) for planted in CELLS]
    return {"totals": totals(rows), "rows": rows}


def totals(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Of each adviser: cases it could be asked about, true causes named, contradicted advice, quiet on healthy ones."""
    found = {}
    for who in ("gpulab", *ADVISERS):
        answered = [r[who] for r in rows if r[who] is not None and "cannot" not in r[who]]
        sick = [a for a in answered if a["names_truth"] is not None]
        found[who] = {
            "asked": len(answered),
            "sick": len(sick),
            "names_truth": sum(a["names_truth"] for a in sick),
            "contradicted": sum(bool(a["contradicted"]) for a in answered),
        }
    return found


def _of_cell(planted: Any, ours: Mapping[str, Any] | None) -> dict[str, Any]:
    reason = skipped(planted)
    said: dict[str, Any] = {}
    figures: dict[str, Any] = {"cannot": reason}
    if not reason:
        with tempfile.TemporaryDirectory() as folder:
            trace = Path(folder, "cell.pt.trace.json")
            said = asked("of_cell", name=planted.name, trace=str(trace))
            figures = hta(trace) if trace.exists() else {"cannot": "has no trace"}
    causes = planted.causes
    truth = _Truth(causes, planted.accepted, not causes, planted.gpu)
    row = _row(planted.name, truth, said, ours, reason)
    return row | {"hta": figures}


def _of_trace(case: Any, ours: Mapping[str, Any] | None) -> dict[str, Any]:
    path = file_of(case)
    reason = "" if path is not None else "the trace is not here"
    said: dict[str, Any] = {}
    figures: dict[str, Any] = {"cannot": reason}
    if path is not None:
        file = path / RANK if path.is_dir() else path
        said, figures = asked("of_trace", trace=str(file)), hta(file)
    truth = _Truth(case.headline, case.headline, healthy=False, on_gpu=True, never=case.never)
    return _row(case.name, truth, said, ours, reason) | {"hta": figures}


class _Truth(Struct, frozen=True):
    """What is known of a case."""

    causes: tuple[str, ...]
    accepted: tuple[str, ...]
    healthy: bool
    on_gpu: bool
    never: tuple[str, ...] = ()

    def judged(self, keys: Collection[str]) -> dict[str, Any]:
        """These advices held against it."""
        return {
            "keys": list(keys),
            "names_truth": names_truth(keys, self.accepted) if self.causes else None,
            "contradicted": list(
                dict.fromkeys(
                    [
                        *contradicted(keys, self.causes, healthy=self.healthy, on_gpu=self.on_gpu),
                        *(key for key in keys if key in self.never),
                    ]
                )
            ),
        }


def _row(
    name: str, truth: _Truth, said: Mapping[str, Any], ours: Mapping[str, Any] | None, reason: str
) -> dict[str, Any]:
    row: dict[str, Any] = {"name": name, "causes": list(truth.causes), "healthy": truth.healthy, "gpulab": None}
    if ours is not None and "findings" in ours:
        judged = truth.judged([f["key"] for f in ours["findings"] if f["key"] not in NO_FINDING])
        first = ours["headline"] in truth.accepted if truth.causes else None
        row["gpulab"] = judged | {"headline": ours["headline"], "names_truth": first}
    for who in ADVISERS:
        answer = said.get(who, {"cannot": reason})
        row[who] = answer if "cannot" in answer else answer | truth.judged(keys_of(answer["advice"]))
    _tell(row)
    return row


def _ours() -> dict[str, Mapping[str, Any]]:
    """What gpulab said, by case, from the kept results."""
    found: dict[str, Mapping[str, Any]] = {}
    for name in ("planted_tuned", "planted_aside"):
        file = RESULTS / f"{name}.json"
        if file.exists():
            kept = json.loads(file.read_text(encoding="utf-8"))
            found |= {row["name"]: row for row in (*kept["rows"], *kept.get("traces", ()))}
    return found


def _tell(row: Mapping[str, Any]) -> None:
    """One line on stderr."""
    words = [f"{who}: {(row[who] or {}).get('keys', (row[who] or {}).get('cannot'))}" for who in ADVISERS]
    truth = "+".join(row["causes"]) or "healthy"
    print(f"  {row['name']:34} {truth:24} {'  '.join(words)}", file=sys.stderr, flush=True)
