"""What a user calls to ask before a knob is turned: predictions of a run, and how well earlier ones held."""

from __future__ import annotations

from collections.abc import Mapping

from gpulab.analysis.facts import facts
from gpulab.api.arguments import Parser, split
from gpulab.api.diagnose import learned_here
from gpulab.api.reading import runs
from gpulab.api.scoreboard import ScoreboardView
from gpulab.diagnosis.diagnose import diagnose
from gpulab.diagnosis.finding import Diagnosis
from gpulab.errors import UsageError
from gpulab.formatting import decapitalized
from gpulab.knobs.catalogue import KNOBS, parse_settings
from gpulab.knobs.values import written
from gpulab.prediction.predict import predict as predict_settings
from gpulab.prediction.prediction import Prediction
from gpulab.run import Run
from gpulab.store.prediction_log import Scoreboard
from gpulab.views.predictions import Predicted

PREDICT_HELP = """\
%gpulab predict                    what each knob that the findings name should bring
%gpulab predict KNOB=VALUE[,…]     what this setting should bring

Predicts from the last run of the cell as written; nothing runs. Each prediction is a speed (times as fast) and a range
that should hold the truth in 19 of 20 cases.

To measure a setting, write above the cell: %%gpuprofile --ab KNOB=VALUE"""
SCOREBOARD_HELP = """\
%gpulab scoreboard   the predictions made here, beside what comparisons measured

For each knob: how many predictions, how far they were off, and how many measured figures lay inside the predicted
range. Below: the latest predictions one by one. Comparisons that decided nothing are left out."""

NO_RUN = "There is no run yet: put %%gpuprofile above a training cell first."


def scoreboard() -> ScoreboardView:
    """The predictions that were held against a measurement here: per knob how far they were off, and the last ones."""
    return ScoreboardView(Scoreboard().read())


def predict(run: Run | str | None = None, settings: Mapping[str, object] | None = None) -> Predicted:
    """What settings of the knobs would bring to a run, before they are tried; None: all that its findings name.

    `run` may be the name or id of a run; without it, the latest one as written. Raises UsageError for a name or value
    that is no knob's, and where there is no run; StoreError where none has that name.
    """
    if not isinstance(run, Run):
        run = _latest() if run is None else runs[run]
    figures = facts(run)
    evidence = learned_here(figures)
    diagnosis = diagnose(figures, evidence=evidence, predict_cures=settings is None)
    if settings is not None:
        texts = {name: _text(name, value) for name, value in settings.items()}
        return Predicted(run.name, (predict_settings(figures, texts, evidence),), _doubt(diagnosis))
    by_settings: dict[tuple[tuple[str, str], ...], Prediction] = {}
    for finding in diagnosis.findings:
        if finding.prediction is not None and finding.settings:
            by_settings.setdefault(finding.settings, finding.prediction)
    return Predicted(run.name, tuple(by_settings.values()), _doubt(diagnosis))


def magic_predict(line: str) -> None:
    """`%gpulab predict [KNOB=VALUE …]`: of the last run as written. Raises UsageError."""
    if _asks_for_help(line):
        print(PREDICT_HELP)
        return
    run = _latest()
    values = parse_settings([line], lambda name: False) if line.strip() else None
    _display(predict(run, values))


def magic_scoreboard(line: str) -> None:
    """`%gpulab scoreboard`. Raises UsageError."""
    if _asks_for_help(line):
        print(SCOREBOARD_HELP)
        return
    Parser("%gpulab scoreboard", "").read(split(line, "%gpulab scoreboard"))
    _display(scoreboard())


def _asks_for_help(line: str) -> bool:
    return line.strip() in ("-h", "--help")


def _latest() -> Run:
    """The last run of code as written: what a knob brings is asked of that, and not of a run in which knobs are turned.

    Where every run of this process has a knob turned, the last one. Raises UsageError without any run.
    """
    if not len(runs):
        raise UsageError(NO_RUN)
    as_written = [run for run in runs.own if not run.settings.knobs]
    return as_written[-1] if as_written else runs[-1]


def _doubt(diagnosis: Diagnosis) -> str:
    """What makes the run a bad ground for predictions; empty where nothing is known to."""
    shared = diagnosis.of("cpu_shared")
    if shared is None:
        return ""
    return f"This run was disturbed: {decapitalized(shared.summary)} An undisturbed run may give another prediction."


def _text(name: str, value: object) -> str:
    if name not in KNOBS:
        raise UsageError(f"{name} is no knob: {', '.join(KNOBS)}.")
    return written(KNOBS[name].parse(written(value)))


def _display(shown: object) -> None:
    from IPython.display import display

    display(shown)  # type: ignore[no-untyped-call]
