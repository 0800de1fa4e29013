"""Diagnoses as the doors give them: with the user's own thresholds, and with what this machine has learned."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct
from msgspec.structs import replace

from gpulab.analysis.facts import Facts, facts
from gpulab.analysis.ranks import RankComparison, compare_ranks
from gpulab.diagnosis.diagnose import diagnose
from gpulab.diagnosis.finding import Diagnosis
from gpulab.diagnosis.ranks import diagnose_ranks
from gpulab.errors import UsageError
from gpulab.prediction.prediction import NOTHING, PriorEvidence
from gpulab.run import Ranks
from gpulab.store.folders import configured
from gpulab.store.prediction_log import errors_here
from gpulab.thresholds import DEFAULT, Thresholds


def thresholds_of(given: Mapping[str, float] | None = None) -> Thresholds:
    """The user's thresholds: those of the `[thresholds]` table in gpulab.toml, over them what is `given`.

    Raises UsageError for a file that cannot be read, a name that is none, and figures that contradict each other.
    """
    return DEFAULT.changed({**configured("thresholds"), **(given or {})})


def thresholds_or_default() -> tuple[Thresholds, tuple[str, ...]]:
    """The same for a report, which a broken file must not lose: then the usual ones, and a sentence that says so."""
    try:
        return thresholds_of(), ()
    except UsageError as e:
        return DEFAULT, (f"Your thresholds were not used, the usual ones were: {e}",)


def learned_here(figures: Facts) -> PriorEvidence:
    """How far earlier predictions were off on the run's device."""
    return PriorEvidence(errors_here(figures.run))


def diagnosis_for_report(figures: Facts, learned: PriorEvidence = NOTHING) -> Diagnosis:
    """What was found about a run. Never raises for the user's own files."""
    thresholds, notes = thresholds_or_default()
    diagnosis = diagnose(figures, thresholds, learned)
    return replace(diagnosis, notes=(*notes, *diagnosis.notes))


class Job(Struct, frozen=True):
    """The figures of each rank, their comparison, what was found about each by itself, and about the job as a whole.

    Nothing is predicted of a rank: what one of them saves the others may wait for all the same.
    """

    facts: Mapping[int, Facts]
    comparison: RankComparison
    each: Mapping[int, Diagnosis]
    diagnosis: Diagnosis


def diagnose_job(ranks: Ranks, thresholds: Thresholds) -> Job:
    of_ranks = {rank: facts(run) for rank, run in ranks.runs.items()}
    ranked = compare_ranks(of_ranks, ranks.problems, skew_notice=thresholds.skew_notice)
    each = {rank: diagnose(figures, thresholds, predict_cures=False) for rank, figures in of_ranks.items()}
    return Job(of_ranks, ranked, each, diagnose_ranks(ranked, each, thresholds))
