"""How well predictions held on this machine: per knob and device, and the last ones one by one."""

from __future__ import annotations

import html as markup
import math
from collections.abc import Sequence

import numpy as np
from msgspec import Struct

from gpulab.formatting import factor, percent, plural, speed_figures
from gpulab.store.prediction_log import Board, Record
from gpulab.views.html import plain_table
from gpulab.views.text import aligned
from gpulab.views.wording import cut, plain

SHOWN = 10
WIDEST = 40
EMPTY = (
    "No prediction has been held against a measurement yet. Compare a setting, for example with "
    "%%gpuprofile --ab workers=2: what was predicted and what was measured is then kept here."
)
_DEVICE = "device"
_KNOBS = ("knob", "predictions", "median error", "inside the predicted range")
_LAST = ("when", "setting", "predicted: times as fast", "measured: times as fast", "off by", _DEVICE)
_NUMBERS = frozenset({"predictions", "median error", "off by"})
Table = tuple[tuple[str, ...], list[tuple[str, ...]]]


class ScoreboardView(Struct, frozen=True):
    """To display: as text, and as tables in a notebook."""

    board: Board

    def __repr__(self) -> str:
        return text(self.board)

    def _repr_html_(self) -> str:
        return html(self.board)

    @property
    def records(self) -> Sequence[Record]:
        """All of them, the oldest first."""
        return self.board.records


def text(board: Board) -> str:
    """For a terminal."""
    if not board.records:
        return "\n".join([EMPTY, *_remarks(board)])
    blocks = ["\n".join(aligned(*table, _NUMBERS)) for table in _tables(board)]
    return "\n\n".join([*blocks, "\n".join([_how(), *_remarks(board)])])


def html(board: Board) -> str:
    """For a notebook: escaped, inline styles only."""
    remarks = [_how(), *_remarks(board)] if board.records else [EMPTY, *_remarks(board)]
    tables = [plain_table(*table, _NUMBERS, "margin:0 0 0.8em") for table in _tables(board)] if board.records else []
    lines = [f'<p style="margin:0.3em 0">{markup.escape(line)}</p>' for line in remarks]
    return "".join([*tables, *lines])


def _tables(board: Board) -> tuple[Table, Table]:
    groups: dict[tuple[str, str], list[Record]] = {}
    for record in board.records:
        groups.setdefault((record.knob, record.device), []).append(record)
    several = len({device for _, device in groups}) > 1  # a prediction's interval knows the errors of its own only
    titles = (*_KNOBS, _DEVICE) if several else _KNOBS
    knobs = [
        (*_knob(knob, records), *([cut(plain(device), WIDEST)] if several else []))
        for (knob, device), records in sorted(groups.items())
    ]
    last = [_one(record) for record in reversed(board.records[-SHOWN:])]
    return (titles, knobs), (_LAST, last)


def _knob(knob: str, records: Sequence[Record]) -> tuple[str, ...]:
    errors = [off_by(r) for r in records if not r.only_sign]
    inside = sum(r.within for r in records)
    return (
        cut(plain(knob), WIDEST),
        f"{len(records):,}",
        percent(float(np.median(errors))) if errors else "only ranges",
        f"{inside:,} of {len(records):,}",
    )


def _one(record: Record) -> tuple[str, ...]:
    low, high = record.predicted_interval
    predicted = speed_figures(record.predicted, record.predicted_interval)
    if record.only_sign:
        predicted = f"{factor(1 / high)} to {factor(1 / low)}"
    return (
        plain(record.when[:16].replace("T", " ")),
        cut(plain(record.value), WIDEST),
        predicted,
        speed_figures(record.measured, record.measured_interval),
        "–" if record.only_sign else percent(off_by(record)),
        cut(plain(record.device), WIDEST),
    )


def off_by(record: Record) -> float:
    """How far the prediction was from the measurement, in either direction, as a fraction."""
    return math.expm1(abs(math.log(record.error)))


def _how() -> str:
    return (
        "Times as fast: of the cell with the setting, against the cell as written. In brackets: the predicted range, "
        "which should hold the measured figure in 19 of 20 cases, and the measured 95 % interval. Errors seen here "
        "make later ranges wider or narrower."
    )


def _remarks(board: Board) -> list[str]:
    lines = [f"Left out: {plural(board.undecided, 'comparison')} that decided nothing."] if board.undecided else []
    lines += [f"{plural(board.damaged, 'line')} of the file could not be read."] if board.damaged else []
    return lines + ([plain(board.problem)] if board.problem else [])
