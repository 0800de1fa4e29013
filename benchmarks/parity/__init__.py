"""Expert parity: public trainings, the best setting that a search over all knobs finds, and what a climb reaches.

`python -m benchmarks.parity --only nanogpt` measures one training. Each keeps its result in a file of its own, and what
is in there is not measured again: a bench that was cut short is called again. A search is made once; `--again` climbs
and judges anew.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.harness import RESULTS, Figure, in_limited_process
from benchmarks.parity.catalogue import TRAININGS, Training
from benchmarks.parity.limits import LONGER, Limits
from benchmarks.parity.staging import missing

RESULTS_FOLDER = RESULTS / "parity"
SHARE = 0.95  # of the best speed
WANTED = 9  # trainings in ten
LATEST = 1.03  # times the climb's budget: its last step, and putting everything back
SPARE_S = 300.0  # beside the limits: a training that compiles or hangs is ended after that


@dataclass(frozen=True, slots=True)
class Part:
    """One process. `takes` are further arguments, from what is kept so far; without one that `may_fail` it goes on."""

    name: str
    limit_s: Callable[[Limits], float]
    takes: Callable[[dict[str, Any]], dict[str, Any]] = lambda results: {}
    may_fail: bool = False


PARTS = (
    Part("compiling", lambda limits: limits.compiled_s + SPARE_S, may_fail=True),
    Part(
        "search",
        lambda limits: LONGER * limits.search_s + SPARE_S,
        lambda results: {"compiling": results["compiling"]},
    ),
    Part("climb", lambda limits: limits.climb_s + SPARE_S),
    Part(
        "judgement",
        lambda limits: limits.judgement_s + SPARE_S,
        lambda results: {"best": results["search"]["best"], "kept": results["climb"]["kept"]},
    ),
)


def measure() -> dict[str, object]:
    """All trainings whose checkout is here; a finished one is not measured again."""
    return summary(row_of(training) for training in TRAININGS)


def summary(rows: Iterable[dict[str, Any]]) -> dict[str, object]:
    """How many reached the best, and each row."""
    rows = list(rows)
    return {
        "trainings": len(rows),
        "reached": sum(bool(row.get("reached")) for row in rows),
        "tried": sum("skipped" not in row for row in rows),
        "target": {"share": SHARE, "trainings": WANTED, "climb_s": Limits().climb_s},
        "rows": rows,
    }


def row_of(
    training: Training,
    limits: Limits | None = None,
    *,
    folder: Path = RESULTS_FOLDER,
    again: bool = False,
    until: str = PARTS[-1].name,
) -> dict[str, Any]:
    """One training, each part in a process of its own; what its file has already is not measured again.

    `until` names the last part that is measured now.
    """
    limits = limits or Limits()
    row: dict[str, Any] = {"key": training.key, "title": training.title}
    file = folder / f"{training.key}{_suffix()}.json"
    results: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    if again:
        results = {part: results[part] for part in ("compiling", "search") if part in results}
    row |= {"repository": training.repository, "commit": training.commit}
    wanted = [part.name for part in PARTS]
    why = "" if all(name in results for name in wanted[: wanted.index(until) + 1]) else missing(training)
    if why:
        _tell(training, f"skipped: {why}")
        return row | {"skipped": why}
    for part in PARTS[: wanted.index(until) + 1]:
        if part.name in results:
            continue
        _tell(training, part.name)
        arguments = {"key": training.key, "limits": asdict(limits), **part.takes(results)}
        try:
            results[part.name] = in_limited_process(
                "benchmarks.parity.parts", part.name, arguments, limit_s=part.limit_s(limits)
            )
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as e:
            if not part.may_fail:
                _tell(training, f"{part.name} failed: {e}")
                return row | {"failed": f"{part.name}: {type(e).__name__}"}
            results[part.name] = {"failed": type(e).__name__}
        results["measured"] = f"{datetime.now(UTC):%Y-%m-%d}"
        _write(file, {**results, "training": row})
    missed = [part.name for part in PARTS if part.name not in results]
    return row | ({"failed": f"not measured: {', '.join(missed)}"} if missed else judgement_row(results))


def judgement_row(results: dict[str, Any]) -> dict[str, Any]:
    """What the table says of a training that is finished."""
    search, climb, judgement = results["search"], results["climb"], results["judgement"]
    by = {_sorted(arm["settings"]): arm for arm in judgement["arms"]}
    ours, share = by.get(_sorted(climb["kept"])), judgement["share"]
    settled = bool(search["best"]) or not search["thin"]  # that nothing helps is shown only where all was measured
    same_loss = ours["same_loss"] if ours is not None else not climb["kept"]
    return {
        "step_ms": search["step_ms"],
        "best": search["best"],
        "best_now": by.get(_sorted(search["best"])),
        "kept": climb["kept"],
        "kept_now": ours,
        "share": share,
        "same_loss": same_loss,
        "ended": climb["ended"],
        "sentence": climb["headline"]["sentence"],
        "seconds": climb["seconds"],
        "search_s": search["seconds"],
        "thin": search["thin"],
        "reached": bool(
            settled
            and share is not None
            and share["ratio"] >= SHARE
            and same_loss
            and climb["seconds"] <= LATEST * Limits().climb_s
        ),
    }


def _sorted(settings: dict[str, Any]) -> tuple[tuple[str, str], ...]:
    from gpulab.knobs.knob import setting_text

    return tuple(sorted((name, v if isinstance(v, str) else setting_text(v)) for name, v in settings.items()))


def _suffix() -> str:
    import torch

    return "_gpu" if torch.cuda.is_available() else ""


def _write(file: Path, results: dict[str, Any]) -> None:
    """As a whole or not at all."""
    file.parent.mkdir(parents=True, exist_ok=True)
    half = file.with_suffix(".part")
    half.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    os.replace(half, file)


def _tell(training: Training, what: str) -> None:
    print(f"  {training.key}: {what}", file=sys.stderr, flush=True)


def figures(results: Mapping[str, Any]) -> Iterator[Figure]:
    """How many reached the best, then each training: both settings, and the share."""
    reached, of = results["reached"], results["tried"]
    yield Figure.share("reached the best, in time and at the same loss", reached, of, "reached")
    for row in results["rows"]:
        if "reached" in row:
            best, climbed = (_words(row[which]) for which in ("best", "kept"))
            about = (
                f"{row['title']}: best {best} ({_ratio(row['best_now'])}), climb {climbed} ({_ratio(row['kept_now'])})"
            )
            interval = row["share"] and (row["share"]["interval"] if best != climbed else None)
            yield Figure(about, row["share"] and row["share"]["ratio"], "%", interval, "share")


def notes(results: Mapping[str, Any]) -> Iterator[str]:
    """What was measured too briefly, and what is not finished."""
    for row in results["rows"]:
        if "reached" not in row:
            yield f"- {row['title']} is not finished: {row.get('skipped') or row.get('failed')}"
        elif row["thin"]:
            yield f"- {row['title']}: fewer than 5 pairs of {', '.join(row['thin'])}, which shows nothing of them"


def _words(settings: Mapping[str, object]) -> str:
    shown = {True: "on", False: "off"}
    pairs = sorted((n, shown[v] if isinstance(v, bool) else str(v)) for n, v in settings.items())
    return ", ".join(f"{name}={value}" for name, value in pairs) or "as written"


def _ratio(arm: Mapping[str, Any] | None) -> str:
    """Of an arm of the judgement; none where nothing is set."""
    if arm is None:
        return "1"
    return str(arm["failure"] or "–") if arm["ratio"] is None else f"{arm['ratio']:.2f}"
