"""The jobs that waste GPUs: the worst first, each with its cause and the line of code."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from gpulab.analysis.fleet import Fleet, FleetJob
from gpulab.diagnosis.headline import Headline
from gpulab.formatting import duration, percent, plural
from gpulab.thresholds import DEFAULT
from gpulab.views.layout import Column, Row, Section, numbers, present
from gpulab.views.view import View
from gpulab.views.wording import PARTS, cut, plain

_WIDEST = 18
_MOMENT = len("20261120-101500")
_WASTED = "Jobs by wasted {device} time"
_ON_THE_CPU = (
    "Jobs without a GPU count with the CPU as their one device; it idles where it neither computes nor updates weights."
)
_AT_LEAST = "≥ : known by the utilization curve or of some ranks only, so it is at least that much."


@dataclass(frozen=True, slots=True, repr=False)
class FleetView(View):
    """The jobs of one or more stores. `conditions`: which jobs are included, in words.

    `cpu`: jobs without a GPU count as well, with the CPU as their device.
    """

    fleet: Fleet
    places: tuple[str, ...] = ()
    conditions: str = ""
    unreadable: tuple[tuple[str, str], ...] = ()  # run and reason
    cpu: bool = False

    @property
    def _device(self) -> str:
        return "device" if self.cpu else "GPU"

    @property
    def jobs(self) -> Sequence[FleetJob]:
        """The jobs by wasted GPU hours, the largest first, without the jobs whose waste is unknown."""
        return self.fleet.jobs

    @property
    def headline(self) -> Headline:
        """How much the jobs waste together, and the job that wastes most."""
        fleet = self.fleet
        if not fleet.jobs:
            return self._nothing()
        least = "at least " if any(job.at_least for job in fleet.jobs) else ""
        share = fleet.idle_fraction
        sentence = (
            f"{_these(len(fleet.jobs))} held {self._device}s for {_hours(fleet.gpu_hours)}; for {least}"
            f"{_hours(fleet.wasted_gpu_hours)} of it ({percent(share)}) the {self._device}s idled."
        )
        worst = fleet.jobs[0]
        evidence = f"{_label(worst)} wastes most, {_wasted(worst)}: {_why(worst)}"
        return Headline(
            "fleet", sentence, evidence, "bad" if share is not None and share > DEFAULT.idle_notice else "good"
        )

    def _nothing(self) -> Headline:
        unmeasured = self.fleet.unmeasured
        if not unmeasured:
            where = f" ({self.conditions})" if self.conditions else ""
            return Headline("fleet", f"There is no such job{where}.", f"Looked in {', '.join(self.places)}.", "unknown")
        return Headline(
            "fleet",
            f"No job here shows how long its {self._device}s idled.",
            _reasons(unmeasured, last="."),
            "unknown",
        )

    def _figures(self) -> dict[str, object]:
        fleet = self.fleet
        return {
            "schema": 1,
            "source": "fleet",
            "places": list(self.places),
            "asked": self.conditions,
            "gpu_hours": fleet.gpu_hours,
            "wasted_gpu_hours": fleet.wasted_gpu_hours,
            "idle_fraction": fleet.idle_fraction,
            "jobs": fleet.jobs,
            "unmeasured": fleet.unmeasured,
            "unreadable": [{"run": run, "reason": why} for run, why in self.unreadable],
        }

    def __repr__(self) -> str:
        return self.text()

    def _opening(self) -> str:
        count = len(self.fleet.jobs) + len(self.fleet.unmeasured)
        conditions = f" · {self.conditions}" if self.conditions else ""
        return plain(f"fleet · {plural(count, 'job')} in {cut(', '.join(self.places), 60)}{conditions}")

    def _more(self) -> str:
        return "The rest: gpulab fleet … --all, or --html FILE as a page; --export FILE.csv for a table."

    def _sections(self) -> tuple[Section, ...]:
        jobs = self.fleet.jobs
        return present(
            self._by_waste(),
            self._groups("By cause", lambda job: job.cause),
            self._groups("By user", lambda job: job.user) if len({job.user for job in jobs}) > 1 else None,
            self._groups("By queue", lambda job: job.queue or "–") if any(job.queue for job in jobs) else None,
            self._not_measurable(),
            self._unreadable(),
        )

    def _by_waste(self) -> Section | None:
        jobs = self.fleet.jobs
        if not jobs:
            return None
        rows = tuple(Row((*_cells(job), _why(job))) for job in jobs)
        lines = (*((_AT_LEAST,) if any(job.at_least for job in jobs) else ()), *((_ON_THE_CPU,) if self.cpu else ()))
        return Section(
            _WASTED.format(device=self._device),
            (*_job(self._device), Column("why", "wrap")),
            rows,
            lines,
            lead=True,
            wide=True,
        )

    def _not_measurable(self) -> Section | None:
        jobs = self.fleet.unmeasured
        if not jobs:
            return None
        cells = [
            (_label(one), duration(one.wall_s * 1e6), _gpus(one), plain(one.user), plain(one.reason)) for one in jobs
        ]
        job, _, _, _, devices, user = _job(self._device)
        columns = (job, *numbers("took"), devices, user, Column("why not", "wrap"))
        return Section.table("Not measurable", columns, cells, wide=True, result=_reasons(jobs))

    def _unreadable(self) -> Section | None:
        if not self.unreadable:
            return None
        cells = [(plain(run), plain(why)) for run, why in self.unreadable]
        columns = (Column("run", "cut"), Column("why", "wrap"))
        return Section.table("Cannot be read", columns, cells, result=plural(len(cells), "run"))

    def _groups(self, title: str, by: Callable[[FleetJob], str]) -> Section | None:
        groups: dict[str, list[FleetJob]] = defaultdict(list)
        for job in self.jobs:
            groups[by(job)].append(job)
        if not groups:
            return None
        wasted = {name: sum(job.wasted_gpu_hours or 0.0 for job in group) for name, group in groups.items()}
        most = max(wasted.values()) or 1.0
        rows = []
        for name in sorted(groups, key=lambda name: (-wasted[name], name)):
            total = sum(job.gpu_hours for job in groups[name])
            idle = percent(wasted[name] / total if total else None)
            figures = (f"{len(groups[name]):,}", _hours(total), _hours(wasted[name]), idle)
            rows.append(Row((plain(name), *figures), wasted[name] / most, PARTS["data_wait"].colour))
        first = rows[0].cells
        columns = (Column("", "cut"), *numbers("jobs", f"{self._device} time", "wasted", "idle"))
        return Section(title, columns, tuple(rows), result=f"{first[0]}: {first[3]} wasted by {_jobs(int(first[1]))}")


def _job(device: str) -> tuple[Column, ...]:
    return (Column("job", "cut"), *numbers("wasted", "idle", "held", f"{device}s"), Column("user"))


def _cells(job: FleetJob) -> tuple[str, ...]:
    least = "≥ " if job.at_least else ""
    idle = f"{least}{percent(job.idle_fraction)}"
    return (_label(job), _wasted(job), idle, _hours(job.gpu_hours), _gpus(job), plain(job.user))


def _label(job: FleetJob) -> str:
    """The job's name and id; of a run's id only the time, which is enough to find the run."""
    id_ = job.id[:_MOMENT] if job.runs[0] == job.id else job.id
    return plain(f"{cut(job.name, _WIDEST)} {id_}" if job.name and job.name != job.id else job.id)


def _wasted(job: FleetJob) -> str:
    return ("≥ " if job.at_least else "") + _hours(job.wasted_gpu_hours)


def _gpus(job: FleetJob) -> str:
    """The number of GPUs, and the number of ranks if not all ranks are in the store."""
    some = f" ({job.ranks} of {job.world_size} ranks)" if job.ranks < job.world_size else ""
    return f"{job.gpus or '–'}{some}"


def _why(job: FleetJob) -> str:
    where = f" {job.source_line.strip()}." if job.source_line else ""
    rank = f"rank {job.rank}: " if job.rank is not None else ""
    cure = f" Try it: --set {job.knob}" if job.knob and job.level == "bad" else ""
    return plain(f"{rank}{job.headline}{where}{cure}")


def _hours(hours: float | None) -> str:
    """GPU time: an hour on two GPUs is two hours."""
    return duration(None if hours is None else hours * 3600e6)


def _these(count: int) -> str:
    return f"These {count:,} jobs" if count != 1 else "This job"


def _jobs(count: int) -> str:
    return plural(count, "job")


def _reasons(jobs: Iterable[FleetJob], last: str = "") -> str:
    counts: dict[str, int] = defaultdict(int)
    for job in jobs:
        counts[job.reason] += 1
    return "; ".join(f"{_jobs(count)}: {plain(reason)}" for reason, count in counts.items()) + last
