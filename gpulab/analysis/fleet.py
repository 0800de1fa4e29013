"""Finds the jobs that waste GPUs: summaries of runs by job, ordered by the GPU hours in which a GPU did nothing."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from msgspec import Struct
from msgspec.structs import replace

from gpulab.run_summary import RunSummary


class OwnedSummary(Struct, frozen=True):
    """A run's summary, its owner, and its store."""

    summary: RunSummary
    user: str
    store: str = ""


class FleetJob(Struct, frozen=True):
    """The ranks of one job together; a run by itself is a job of one rank.

    `gpu_hours` is the sum over ranks of time times GPUs; `wasted_gpu_hours` the part in which the GPUs did nothing.
    Both cover the recorded ranks; None is "not measurable", for the `reason`. `at_least`: for some rank the time is
    known only from the utilization curve or not at all. Headline, line and knob are those of the rank that wastes most.
    """

    id: str
    name: str
    user: str
    queue: str
    created: str
    device_name: str
    ranks: int
    world_size: int
    gpus: int
    wall_s: float
    gpu_hours: float
    wasted_gpu_hours: float | None
    idle_fraction: float | None
    at_least: bool
    reason: str
    headline: str
    level: str
    cause: str
    source_line: str
    knob: str
    rank: int | None  # whose headline this is; None if the job is one run
    runs: tuple[str, ...]


class Fleet(Struct, frozen=True):
    """`jobs` by wasted GPU hours, the largest first; for jobs in `unmeasured` these are unknown."""

    jobs: tuple[FleetJob, ...]
    unmeasured: tuple[FleetJob, ...]

    @property
    def gpu_hours(self) -> float:
        """GPU hours of the jobs whose waste is known."""
        return sum(job.gpu_hours for job in self.jobs)

    @property
    def wasted_gpu_hours(self) -> float:
        return sum(job.wasted_gpu_hours or 0.0 for job in self.jobs)

    @property
    def idle_fraction(self) -> float | None:
        """Wasted share of these jobs' GPU hours; None if nothing ran."""
        return self.wasted_gpu_hours / self.gpu_hours if self.gpu_hours else None


def fleet(runs: Iterable[OwnedSummary]) -> Fleet:
    """Group the runs by job, within one user and store, because a launcher's id may be in use elsewhere, too.

    A rank that was recorded several times counts each time, because it held its GPUs each time.
    """
    groups: dict[str, list[OwnedSummary]] = defaultdict(list)
    for run in runs:
        of = f"job {run.summary.job_id}" if run.summary.job_id else f"run {run.summary.id}"
        groups[f"{of} of {run.user} in {run.store}"].append(run)
    jobs = [_job(group) for group in groups.values()]
    measured = [job for job in jobs if job.wasted_gpu_hours is not None]
    measured.sort(key=lambda job: (-(job.wasted_gpu_hours or 0.0), -job.gpu_hours, job.id))
    unmeasured = sorted((job for job in jobs if job.wasted_gpu_hours is None), key=lambda job: (job.created, job.id))
    return Fleet(tuple(measured), tuple(unmeasured[::-1]))


def _job(group: Sequence[OwnedSummary]) -> FleetJob:
    ranks = sorted((run.summary for run in group), key=lambda s: (s.rank or 0, s.created))
    wasted = [s.wasted_gpu_hours for s in ranks if s.wasted_gpu_hours is not None]
    worst = max(ranks, key=lambda s: (s.wasted_gpu_hours or 0.0, s.wall_s))
    measured_hours = sum(s.gpu_hours for s in ranks if s.wasted_gpu_hours is not None)
    sources = {s.idle_source for s in ranks}
    return FleetJob(
        id=worst.cluster_id or worst.job_id or worst.id,
        name=next((s.name for s in ranks if s.name), ""),
        user=group[0].user,
        queue=next((s.queue for s in ranks if s.queue), ""),
        created=min(s.created for s in ranks),
        device_name=worst.device_name,
        ranks=len({s.rank for s in ranks}),
        world_size=max(s.world_size or 1 for s in ranks),
        gpus=sum(s.gpu_count for s in ranks),
        wall_s=max(s.wall_s for s in ranks),
        gpu_hours=sum(s.gpu_hours for s in ranks),
        wasted_gpu_hours=sum(wasted) if wasted else None,
        idle_fraction=sum(wasted) / measured_hours if measured_hours else None,
        at_least=bool(wasted) and sources != {"trace"},
        reason="" if wasted else worst.idle_reason,
        headline=worst.headline,
        level=worst.level,
        cause=worst.cause,
        source_line=worst.source_line,
        knob=worst.knob,
        rank=worst.rank if len(ranks) > 1 else None,
        runs=tuple(s.id for s in ranks),
    )


def on_the_cpu(run: RunSummary) -> RunSummary:
    """A run without a GPU as one whose only device is the CPU; any other run unchanged."""
    if run.device == "cuda":
        return run
    if run.cpu_idle_fraction is None:
        return replace(run, gpu_count=1, idle_reason="without a trace")
    return replace(run, gpu_count=1, idle_fraction=run.cpu_idle_fraction, idle_source="trace", idle_reason="")
