"""The sections about what the run itself noticed: pauses in which nothing was trained, and alerts of the live view."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from gpulab.formatting import duration, plain_values
from gpulab.intervals import measure, union_of
from gpulab.run import Pause, PauseKind, Run
from gpulab.views.layout import Column, Section, numbers, present
from gpulab.views.wording import plain

KINDS: Mapping[PauseKind, str] = MappingProxyType(
    {
        "checkpoint_save": "saving",
        "evaluation": "evaluation",
        "logging": "logging",
        "callback": "callbacks",
        "compile": "compiling",
        "gc": "collecting garbage",
    }
)
_LEAST_SHARE, _LEAST_NS = 0.001, 10_000_000  # of the run's time: less together is nobody's concern

_NOTE = "The training stood still during these, within a step or between steps. One pause may lie within another."
_NO_STEPS = "No training step was found, so these times are of the whole code. One pause may lie within another."
_SHORT = "Pauses under 1 ms count in the sum, but have no line of their own."


def pause_sections(run: Run) -> tuple[Section, ...]:
    """The section of pauses and that of alerts, where there were any."""
    return present(_pauses(run), _alerts(run))


def _pauses(run: Run) -> Section | None:
    rows = [row for kind in KINDS if (row := _row(run, kind)) is not None]
    if not rows:
        return None
    columns = (Column(""), *numbers("times", "together", "longest"), Column("started by", "wrap"))
    note = _NOTE if len(run.steps) else _NO_STEPS
    lines = (note, _SHORT) if run.more_pauses else (note,)
    result = ", ".join(f"{kind} {together}" for kind, _, together, *_ in rows)
    return Section.table("Pauses", columns, rows, lines, wide=True, result=result)


def _row(run: Run, kind: PauseKind) -> tuple[str, ...] | None:
    kept = [p for p in run.pauses if p.kind == kind]
    more = [s for s in run.more_pauses if s.kind == kind]
    count = len(kept) + sum(s.count for s in more)
    together_ns = total_ns(kept) + sum(s.total_ns for s in more)
    if not count or together_ns < max(_LEAST_NS, _LEAST_SHARE * run.code_wall_ns):
        return None
    longest = max(kept, key=lambda p: p.end_ns - p.start_ns, default=None)
    return (
        KINDS[kind],
        f"{count:,}",
        duration(together_ns / 1e3),
        duration((longest.end_ns - longest.start_ns) / 1e3) if longest else "< 1 ms",
        _place(run, longest) if longest else "",
    )


def total_ns(pauses: list[Pause]) -> int:
    """The time that these cover; two that overlap count once."""
    return measure(union_of((p.start_ns, p.end_ns) for p in pauses))


def _place(run: Run, pause: Pause) -> str:
    where = plain(str(run.places[pause.place])) if pause.place >= 0 else "unknown"
    return f"{where} ({plain(pause.detail)})" if pause.detail else where


def _alerts(run: Run) -> Section | None:
    if not run.alerts:
        return None
    cells = (
        (
            duration(alert.since_ns / 1e3),
            "the end" if alert.until_ns is None else duration(alert.until_ns / 1e3),
            plain(alert.words),
        )
        for alert in run.alerts
    )
    columns = (*numbers("from", "to"), Column("", "wrap"))
    result = plain(run.alerts[0].words)
    return Section.table("Alerts while it ran", columns, cells, ("Times since the start of the run.",), result=result)


def pauses_document(run: Run) -> dict[str, object]:
    """The same as plain data: each kept pause, what was only counted, and the alerts. Times in µs."""
    return {
        "pauses": [
            {
                "kind": p.kind,
                "start_us": p.start_ns / 1e3,
                "end_us": p.end_ns / 1e3,
                "source_line": str(run.places[p.place]) if p.place >= 0 else None,
                "detail": p.detail,
            }
            for p in run.pauses
        ],
        "more_pauses": [plain_values(s) for s in run.more_pauses],
        "alerts": [
            {
                "key": a.key,
                "words": a.words,
                "since_us": a.since_ns / 1e3,
                "until_us": None if a.until_ns is None else a.until_ns / 1e3,
            }
            for a in run.alerts
        ],
    }
