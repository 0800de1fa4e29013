"""`gpulab.predict` and `gpulab.scoreboard`: predicted speedups of settings, and how accurate earlier ones were."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence

import numpy as np
from msgspec import Struct

from gpulab.analysis.facts import facts
from gpulab.api.diagnose import learned_here
from gpulab.api.reading import runs
from gpulab.diagnosis.diagnose import diagnose
from gpulab.diagnosis.finding import Diagnosis
from gpulab.errors import UsageError
from gpulab.formatting import decapitalized, factor, percent, plural, speed_figures
from gpulab.knobs.catalogue import KNOBS, parse_settings
from gpulab.knobs.knob import setting_text
from gpulab.prediction.predict import predict as predict_settings
from gpulab.prediction.prediction import Prediction
from gpulab.run import Run
from gpulab.store.prediction_log import Board, Record, Scoreboard
from gpulab.views.predictions import Predicted
from gpulab.views.view import Answer, Listing
from gpulab.views.wording import cut, plain

NO_RUN = "There is no run yet: put %%gpuprofile above a training cell first."


def scoreboard() -> ScoreboardView:
    """How accurate predictions were on this machine: the errors per setting, and the latest predictions."""
    return ScoreboardView(Scoreboard().read())


def predict(run: Run | str | None = None, settings: Mapping[str, object] | None = None) -> Predicted:
    """The expected speedup of settings before they are tried; None: all settings that the run's findings name.

    `run`: a run, its name or its id; None: the latest run of the baseline. Raises UsageError for an unknown setting or
    value, and if there is no run; StoreError if no run has that name.
    """
    if not isinstance(run, Run):
        run = _latest() if run is None else runs[run]
    figures = facts(run)
    evidence = learned_here(figures)
    diagnosis = diagnose(figures, evidence=evidence, predict_cures=settings is None)
    if settings is not None:
        texts = {name: _text(name, value) for name, value in settings.items()}
        return Predicted(run.name, (predict_settings(figures, texts, evidence),), _doubt(diagnosis), run.source)
    by_settings: dict[tuple[tuple[str, str], ...], Prediction] = {}
    for finding in diagnosis.findings:
        if finding.prediction is not None and finding.settings:
            by_settings.setdefault(finding.settings, finding.prediction)
    return Predicted(run.name, tuple(by_settings.values()), _doubt(diagnosis), run.source)


def predict_last(options: argparse.Namespace) -> Answer:
    """Do `%gpulab predict` for the last run of the baseline. Raises UsageError."""
    run = _latest()
    values = parse_settings([" ".join(options.settings)], lambda name: False) if options.settings else None
    return Answer(predict(run, values))


def show_scoreboard() -> Answer:
    """Do `%gpulab scoreboard`."""
    return Answer(scoreboard())


def _latest() -> Run:
    """The last run of a baseline: the speedup of a setting is relative to a run without settings.

    If every run of this process has settings, the last run. Raises UsageError without any run.
    """
    if not len(runs):
        raise UsageError(NO_RUN)
    baselines = [run for run in runs.own if not run.settings.knobs]
    return baselines[-1] if baselines else runs[-1]


def _doubt(diagnosis: Diagnosis) -> str:
    """Why predictions from this run may be wrong; empty if no reason is known."""
    shared = diagnosis.of("cpu_shared")
    if shared is None:
        return ""
    return f"This run was disturbed: {decapitalized(shared.summary)} An undisturbed run may give another prediction."


def _text(name: str, value: object) -> str:
    if name not in KNOBS:
        raise UsageError(f"Unknown setting {name!r}. Settings: {', '.join(KNOBS)}.")
    return setting_text(KNOBS[name].parse(value))


MOST_ROWS = 10
WIDEST = 40
EMPTY = (
    "No prediction has been compared with a measurement yet. Compare a setting, for example with "
    "%%gpuprofile --ab workers=2: the predicted and the measured speedup are then kept here."
)
HOW = (
    "Speedup vs. baseline. In brackets: the predicted range, which should contain the measured speedup in 19 of 20 "
    "cases, and the measured 95 % interval. Errors seen here widen or narrow later ranges."
)
_DEVICE = "device"
_KNOBS = ("setting", "predictions", "median error", "inside the predicted range")
_LAST = ("when", "setting", "predicted speedup", "measured speedup", "off by", _DEVICE)
_NUMBERS = ("predictions", "median error", "off by")


class ScoreboardView(Struct, frozen=True):
    """A view of the accuracy of predictions per setting and device, and of the latest predictions one by one."""

    board: Board

    @property
    def records(self) -> Sequence[Record]:
        """All records, the oldest first."""
        return self.board.records

    @property
    def listing(self) -> Listing:
        """The tables, and remarks about them."""
        board = self.board
        remarks = (
            [f"Left out: {plural(board.undecided, 'comparison')} that stayed undecided."] if board.undecided else []
        )
        remarks += [f"{plural(board.damaged, 'line')} of the file could not be read."] if board.damaged else []
        remarks += [plain(board.problem)] if board.problem else []
        if not board.records:
            return Listing((), (EMPTY, *remarks))
        groups: dict[tuple[str, str], list[Record]] = {}
        for record in board.records:
            groups.setdefault((record.knob, record.device), []).append(record)
        several = len({device for _, device in groups}) > 1  # an interval uses only errors of its own device
        knobs = [
            (*_knob(knob, records), *([cut(plain(device), WIDEST)] if several else []))
            for (knob, device), records in sorted(groups.items())
        ]
        last = [_one(record) for record in reversed(board.records[-MOST_ROWS:])]
        titles = (*_KNOBS, _DEVICE) if several else _KNOBS
        return Listing(((titles, knobs), (_LAST, last)), (HOW, *remarks), _NUMBERS)

    def __repr__(self) -> str:
        return repr(self.listing)

    def _repr_html_(self) -> str:
        return self.listing._repr_html_()


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
