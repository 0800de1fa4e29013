"""What a user calls to ask before a knob is turned: predictions of a run, and how well earlier ones held."""

from __future__ import annotations

from collections.abc import Mapping

from gpulab.analysis.facts import facts
from gpulab.api.arguments import Parser, split
from gpulab.api.profile import runs
from gpulab.diagnosis.diagnose import diagnose
from gpulab.errors import UsageError
from gpulab.knobs.catalogue import KNOBS, parse_settings
from gpulab.knobs.values import written
from gpulab.prediction.predict import Known, predict
from gpulab.prediction.prediction import Prediction
from gpulab.run import Run
from gpulab.store.prediction_log import Scoreboard
from gpulab.tuning.predictions import errors_here
from gpulab.views.prediction_log import ScoreboardView
from gpulab.views.predictions import Predicted

NO_RUN = "There is no run yet: put %%gpuprofile above a training cell first."


def scoreboard() -> ScoreboardView:
    """The predictions that were held against a measurement here: per knob how far they were off, and the last ones."""
    return ScoreboardView(Scoreboard().read())


def foretell(run: Run, settings: Mapping[str, object] | None = None) -> Predicted:
    """What settings of the knobs would bring to a run, before they are tried; None: all that its findings name.

    Raises UsageError for a name or value that is no knob's.
    """
    known, figures = Known(errors_here(run)), facts(run)
    if settings is not None:
        texts = {name: _text(name, value) for name, value in settings.items()}
        return Predicted(run.name, (predict(figures, texts, known),))
    found = diagnose(figures, evidence=known).findings
    made: dict[tuple[tuple[str, str], ...], Prediction] = {}
    for finding in found:
        if finding.prediction is not None and finding.settings:
            made.setdefault(finding.settings, finding.prediction)
    return Predicted(run.name, tuple(made.values()))


def magic_predict(line: str) -> None:
    """`%gpulab predict [KNOB=VALUE …]`: of the last run. Raises UsageError."""
    if not len(runs):
        raise UsageError(NO_RUN)
    values = parse_settings([line], lambda name: False).values if line.strip() else None
    _display(foretell(runs[-1], values))


def magic_scoreboard(line: str) -> None:
    """`%gpulab scoreboard`. Raises UsageError."""
    Parser("%gpulab scoreboard", "").read(split(line, "%gpulab scoreboard"))
    _display(scoreboard())


def _text(name: str, value: object) -> str:
    if name not in KNOBS:
        raise UsageError(f"{name} is no knob: {', '.join(KNOBS)}.")
    return written(KNOBS[name].parse(written(value)))


def _display(shown: object) -> None:
    from IPython.display import display

    display(shown)  # type: ignore[no-untyped-call]


__all__ = ["foretell", "magic_predict", "magic_scoreboard", "scoreboard"]
