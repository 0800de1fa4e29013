"""The report of a distributed job: all ranks side by side, then the rank that matters most in full."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec
from markupsafe import Markup

from gpulab.analysis.facts import Facts
from gpulab.analysis.ranks import RankComparison, RankFacts
from gpulab.diagnosis.finding import Diagnosis
from gpulab.diagnosis.headline import Headline, headline
from gpulab.formatting import decapitalized, duration, duration_range, percent, picked, plural
from gpulab.run import TRACE_DROPPED, Ranks
from gpulab.views.layout import TEXTS, Column, Section, numbers, present
from gpulab.views.report.findings import documents, finding_sections
from gpulab.views.report.report import SCHEMA, report_document
from gpulab.views.report.sections import device, sections
from gpulab.views.report.timeline_page import timeline_section
from gpulab.views.report.trace_sections import exchanges_section
from gpulab.views.run_figure import picture
from gpulab.views.view import View
from gpulab.views.wording import plain

_MOST_ENDS = 3


@dataclass(frozen=True, slots=True)
class RankedReport(View):
    """The report of a job: the facts of each rank and the diagnosis, with their views."""

    ranks: Ranks
    facts: Mapping[int, Facts]
    comparison: RankComparison
    each: Mapping[int, Diagnosis]
    diagnosis: Diagnosis

    @property
    def headline(self) -> Headline:
        """The first finding's sentence, its evidence and its level."""
        return headline(self.diagnosis)

    @property
    def spotlight(self) -> int:
        """The rank shown in full: the rank that the others wait for, else the first with a trace, else the first."""
        if self.comparison.straggler is not None:
            return self.comparison.straggler
        return next((rank for rank, figures in self.facts.items() if figures.breakdown), next(iter(self.facts)))

    def _figures(self) -> dict[str, object]:
        comparison = self.comparison
        return {
            "schema": SCHEMA,
            "source": "ranks",
            "ranks": {"path": self.ranks.path, "present": list(self.facts), "world_size": self.ranks.world_size},
            "integrity": picked(comparison.integrity, "state", "checks"),
            "straggler": comparison.straggler,
            "collectives": comparison.collectives,
            "mismatch": comparison.mismatch,
            "exchanges": comparison.exchanges,
            "communication_us": {r.rank: _communication(r) for r in comparison.ranks},
            "problems": self.ranks.problems,
            "per_rank": {rank: report_document(facts, self.each[rank]) for rank, facts in self.facts.items()},
            "headline": self.headline,
            **documents(self.diagnosis),
        }

    def _opening(self) -> str:
        return job_opening(self.ranks, self.facts)

    def _more(self) -> str:
        stored = next(iter(self.ranks.runs.values())).job
        return f"The rest: gpulab report {stored.id if stored is not None else 'FOLDER'} --all"

    def _picture(self) -> Markup:
        return picture(self.facts[self.spotlight])

    def _timeline(self) -> Markup:
        rank = self.facts[self.spotlight]
        return timeline_section(rank.run, rank.breakdown)

    def _sections(self) -> tuple[Section, ...]:
        rank = self.spotlight
        figures = sections(self.facts[rank])
        return present(
            *finding_sections(
                self.diagnosis,
                below_headline=True,
                source=next(iter(self.ranks.runs.values())).source,
                ranks=self.ranks.world_size,
            ),
            _side_by_side(self.comparison, self.facts),
            _exchanges(self.comparison),
            _problems(self.ranks),
            *(msgspec.structs.replace(s, title=f"Rank {rank}: {decapitalized(s.title)}") for s in figures),
        )


def job_opening(ranks: Ranks, facts: Mapping[int, Facts]) -> str:
    """One line: the job, the number of ranks, the ranks that ended early, the device."""
    first = next(iter(facts.values()))
    of = f" of {ranks.world_size}" if ranks.world_size else ""
    parts = [plain(first.run.settings.name), plain(Path(ranks.path).name or ranks.path), f"{len(facts)}{of} ranks"]
    parts.append(_early_ends(ranks))
    return " · ".join([*filter(None, parts), device(first.run)])


def _early_ends(ranks: Ranks) -> str:
    """ "rank 1 failed"; empty if all ranks reached the end of the code."""
    ends = {p.what: p.key.partition("_")[0] for p in ranks.problems if p.key in ("interrupted_rank", "failed_rank")}
    if len(ends) == len(ranks.runs) > 1 and len(set(ends.values())) == 1:
        return f"all {next(iter(ends.values()))}"
    first = dict(sorted(ends.items(), key=lambda item: item[1] != "failed")[:_MOST_ENDS])
    more = [f"{len(ends) - len(first)} more ended early"] if len(ends) > len(first) else []
    return ", ".join([*(f"{rank} {end}" for rank, end in first.items()), *more])


def _communication(rank: RankFacts) -> dict[str, float | None]:
    return {
        "total": rank.communication_us,
        "exposed": rank.exposed_us,
        "overlapped": rank.overlapped_us,
        "waiting": rank.waiting_us,
        "transfer": rank.transfer_us,
    }


def _side_by_side(comparison: RankComparison, facts: Mapping[int, Facts]) -> Section:
    columns = (
        Column("rank"),
        *numbers("traced step, mean", "GPU busy", "computing", "exchanging data"),
        *numbers("hidden", "waiting for others", "moving data"),
    )
    compared = {rank.rank: _rank_cells(rank, comparison.straggler) for rank in comparison.ranks}
    untraced = {rank: _untraced_cells(rank, f) for rank, f in facts.items() if rank not in compared and f.run.job}
    cells = [row for _, row in sorted({**untraced, **compared}.items())]
    lines = ["Per step. Communication is hidden where compute overlaps it."]
    if comparison.mismatch is None:
        kernels = plural(comparison.collectives or 0, "communication kernel")
        lines.append(
            f"Each of {kernels} is compared over all ranks. The last rank to arrive only moves data; what the others "
            "need beyond that is waiting."
        )
    else:
        lines.append(f"Waiting and moving data are not separable: {plain(comparison.mismatch)}.")
    steps = [rank.step_us for rank in comparison.ranks if rank.step_us is not None]
    takes = duration_range(min(steps), max(steps)) if len(steps) > 1 else duration(next(iter(steps), None))
    result = f"{plural(len(steps), 'rank')}, a traced step takes {takes}" if steps else ""
    return Section.table("Ranks side by side", columns, cells, lines, wide=True, result=result)


def _exchanges(comparison: RankComparison) -> Section | None:
    if not comparison.exchanges:
        return None
    return exchanges_section(comparison.exchanges, "per step", waits_included=comparison.mismatch is not None)


def _rank_cells(rank: RankFacts, straggler: int | None) -> tuple[str, ...]:
    account = rank.breakdown
    return (
        f"{rank.rank}" + (" (last)" if rank.rank == straggler else ""),
        duration(rank.step_us),
        percent(account.busy_fraction),
        percent(rank.computing_share),
        duration(rank.communication_us),
        duration(rank.overlapped_us),
        duration(rank.waiting_us),
        duration(rank.transfer_us),
    )


def _untraced_cells(rank: int, facts: Facts) -> tuple[str, ...]:
    step = facts.typical_step_us
    return (f"{rank}", duration(step.median if step is not None else None), *["no trace"] * 6)


def _problems(ranks: Ranks) -> Section | None:
    if not ranks.problems:
        return None
    cells = ((plain(p.what), plain(p.reason)) for p in ranks.problems)
    first, keys = ranks.problems[0], {problem.key for problem in ranks.problems}
    if keys <= {"interrupted_rank", "failed_rank"}:
        result = f"{plain(first.what)}: {plain(first.reason)}"
        return Section.table("Ranks that ended early", TEXTS, cells, wide=True, result=result)
    title = "Traces that are not kept" if keys == {TRACE_DROPPED} else "What is wrong with these traces"
    return Section.table(title, TEXTS, cells, wide=True, result=plain(first.what))
