"""Diagnoses with the user's thresholds and the errors of earlier predictions, and the summary of a run."""

from __future__ import annotations

import math
from collections.abc import Mapping

from msgspec import Struct
from msgspec.structs import replace

from gpulab.analysis.facts import Facts, facts
from gpulab.analysis.ranks import RankComparison, compare_ranks
from gpulab.analysis.step_shares import shares_on
from gpulab.diagnosis.catalogue import title_for
from gpulab.diagnosis.diagnose import diagnose
from gpulab.diagnosis.finding import Diagnosis
from gpulab.diagnosis.headline import headline
from gpulab.diagnosis.ranks import diagnose_ranks
from gpulab.errors import UsageError
from gpulab.prediction.prediction import NOTHING, PriorEvidence
from gpulab.run import Job, Ranks
from gpulab.run_summary import RunSummary
from gpulab.store.folders import configured
from gpulab.store.prediction_log import errors_here
from gpulab.thresholds import DEFAULT, Thresholds


def thresholds_of(changes: Mapping[str, float] | None = None) -> Thresholds:
    """The user's thresholds: the `[thresholds]` table in gpulab.toml, with `changes` applied.

    Raises UsageError for a file that cannot be read, an unknown name, and figures that contradict each other.
    """
    return DEFAULT.changed({**configured("thresholds"), **(changes or {})})


def thresholds_or_default() -> tuple[Thresholds, tuple[str, ...]]:
    """The thresholds for a report. If the file is invalid, the defaults and a sentence that says so."""
    try:
        return thresholds_of(), ()
    except UsageError as e:
        return DEFAULT, (f"Your thresholds were not used, the usual ones were: {e}",)


def learned_here(figures: Facts) -> PriorEvidence:
    """The errors of earlier predictions on the run's device."""
    return PriorEvidence(errors_here(figures.run))


def diagnosis_for_report(figures: Facts, learned: PriorEvidence = NOTHING) -> Diagnosis:
    """The diagnosis of a run. Never raises because of the user's files."""
    thresholds, notes = thresholds_or_default()
    diagnosis = diagnose(figures, thresholds, learned)
    return replace(diagnosis, notes=(*notes, *diagnosis.notes))


class DiagnosedJob(Struct, frozen=True):
    """The figures and the diagnosis of each rank, the comparison of ranks, and the diagnosis of the whole job.

    Nothing is predicted for a single rank: it may spend the saved time waiting for the others.
    """

    facts: Mapping[int, Facts]
    comparison: RankComparison
    each: Mapping[int, Diagnosis]
    diagnosis: Diagnosis


def diagnose_job(ranks: Ranks, thresholds: Thresholds) -> DiagnosedJob:
    of_ranks = {rank: facts(run) for rank, run in ranks.runs.items()}
    ranked = compare_ranks(of_ranks, ranks.problems, skew_notice=thresholds.skew_notice)
    each = {rank: diagnose(figures, thresholds, predict_cures=False) for rank, figures in of_ranks.items()}
    return DiagnosedJob(of_ranks, ranked, each, diagnose_ranks(ranked, each, thresholds))


_NO_JOB = Job("", 0, "torch.distributed")


def summarize(figures: Facts, diagnosis: Diagnosis) -> RunSummary:
    """A run's summary."""
    run, first = figures.run, diagnosis.first
    job = run.job or _NO_JOB
    idle, source = idle_fraction(figures)
    return RunSummary(
        id=run.id,
        name=run.settings.name,
        created=run.created,
        outcome=run.outcome,
        device=run.device.kind,
        device_name=run.device.name,
        gpu_count=_gpu_count(figures),
        wall_s=run.code_wall_ns / 1e9,
        step_count=len(run.steps),
        step_us=figures.typical_step_us.median if figures.typical_step_us is not None else None,
        idle_fraction=idle,
        idle_source=source,
        idle_reason="" if idle is not None else _why_not(figures),
        headline=headline(diagnosis).sentence,
        level=first.level,
        finding=first.key,
        cause=title_for(first),
        source_line=first.source_line,
        knob=first.knob or "",
        job_id=job.id,
        rank=job.rank if run.job is not None else None,
        world_size=job.world_size,
        node=job.node or run.environment.hostname,
        cluster_id=job.cluster_id,
        queue=job.queue,
        cpu_idle_fraction=_cpu_idle_fraction(figures),
    )


def idle_fraction(figures: Facts) -> tuple[float | None, str]:
    """The share of time in which the run's GPUs were idle, and its source; see `RunSummary`."""
    if figures.run.device.kind != "cuda":
        return None, ""
    devices = figures.trace.devices if figures.trace is not None else ()
    if devices:  # start-up excluded, since later steps have none
        return sum(shares_on(figures, device).idle for device in devices) / len(devices), "trace"
    curve = next((c for c in figures.curves if c.name == "gpu_utilization_pct" and math.isfinite(c.mean)), None)
    return (1 - min(100.0, curve.mean) / 100, "curve") if curve is not None else (None, "")


def _cpu_idle_fraction(figures: Facts) -> float | None:
    shares = figures.shares
    if figures.run.device.kind == "cuda" or figures.breakdown is None or shares is None:
        return None
    return 1 - shares.of("compute", "optimizer")


def _gpu_count(figures: Facts) -> int:
    if figures.run.device.kind != "cuda":
        return 0
    return max(1, len(figures.trace.devices) if figures.trace is not None else 1)


def _why_not(figures: Facts) -> str:
    if figures.run.device.kind != "cuda":
        return "ran on the CPU"
    return "without a trace and a utilization curve"
