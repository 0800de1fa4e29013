"""The report of a distributed job: its ranks side by side, then the rank that deserves the closest look."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from gpulab.analysis.facts import Facts
from gpulab.analysis.ranks import RankComparison, RankFacts
from gpulab.diagnosis.finding import Diagnosis
from gpulab.diagnosis.headline import Headline, headline
from gpulab.formatting import NOT_MEASURABLE, duration, percent, plural
from gpulab.run import Ranks
from gpulab.views.layout import Column, Row, Section
from gpulab.views.report import document, figure
from gpulab.views.report.findings import documents, finding_sections
from gpulab.views.report.sections import device, sections
from gpulab.views.report.timeline_page import timeline_section
from gpulab.views.view import View
from gpulab.views.wording import plain


@dataclass(frozen=True, slots=True)
class RankedReport(View):
    """What a job's traces say: the facts of each rank and the diagnosis, with their views."""

    ranks: Ranks
    facts: Mapping[int, Facts]
    comparison: RankComparison
    each: Mapping[int, Diagnosis]
    diagnosis: Diagnosis

    @property
    def headline(self) -> Headline:
        """The first finding's sentence, its evidence and its level."""
        return headline(self.diagnosis.first)

    @property
    def spotlight(self) -> int:
        """The rank shown in full: the one the others wait for, else the first."""
        return self.comparison.straggler if self.comparison.straggler is not None else next(iter(self.facts))

    def json(self) -> dict[str, object]:
        """The figures of every rank as plain data for `json.dumps`; None is "not measurable"."""
        found = self.comparison
        figures: dict[str, object] = {
            "schema": document.SCHEMA,
            "source": "ranks",
            "ranks": {"path": self.ranks.path, "present": list(self.facts), "world_size": self.ranks.world_size},
            "integrity": document.integrity(found.integrity),
            "straggler": found.straggler,
            "collectives": found.collectives,
            "mismatch": found.mismatch,
            "communication_us": {r.rank: _communication(r) for r in found.ranks},
            "problems": [dataclasses.asdict(p) for p in self.ranks.problems],
            "per_rank": {rank: document.document(known, self.each[rank]) for rank, known in self.facts.items()},
            "headline": dataclasses.asdict(self.headline),
            **documents(self.diagnosis),
        }
        return {key: document.finite(value) for key, value in figures.items()}

    def _opening(self) -> str:
        return job_opening(self.ranks, self.facts)

    def _picture(self) -> bytes:
        return figure.draw(self.facts[self.spotlight], None)

    def _timeline(self) -> str:
        rank = self.facts[self.spotlight]
        return timeline_section(rank.run, rank.breakdown)

    def _sections(self) -> tuple[Section, ...]:
        shown = self.spotlight
        found = sections(self.facts[shown])
        return (
            *finding_sections(self.diagnosis, below_headline=True),
            _side_by_side(self.comparison),
            *_problems(self.ranks),
            *(dataclasses.replace(s, title=f"Rank {shown}: {s.title[:1].lower()}{s.title[1:]}") for s in found),
        )


def job_opening(ranks: Ranks, facts: Mapping[int, Facts]) -> str:
    """Which job, how many of its ranks, on which device: one line."""
    first = next(iter(facts.values()))
    of = f" of {ranks.world_size}" if ranks.world_size else ""
    return " · ".join([plain(Path(ranks.path).name or ranks.path), f"{len(facts)}{of} ranks", device(first.run)])


def _communication(rank: RankFacts) -> dict[str, float | None]:
    return {
        "total": rank.communication_us,
        "exposed": rank.exposed_us,
        "overlapped": rank.overlapped_us,
        "waiting": rank.waiting_us,
        "transfer": rank.transfer_us,
    }


def _side_by_side(found: RankComparison) -> Section:
    columns = (
        Column("rank"),
        Column("step", "number"),
        Column("GPU busy", "number"),
        Column("computing", "number"),
        Column("exchanging data", "number"),
        Column("hidden", "number"),
        Column("waiting for others", "number"),
        Column("moving data", "number"),
    )
    rows = tuple(_rank_row(rank, found.straggler) for rank in found.ranks)
    lines = ["Per step. Exchanging data: communication kernels run, hidden where compute runs beside them."]
    if found.mismatch is None:
        lines.append(
            f"The same {plural(found.collectives or 0, 'communication kernel')} of every rank side by side: the rank "
            "that arrives last needs only the time to move the data, the others wait for it within theirs."
        )
    else:
        lines.append(f"Waiting cannot be told from moving data: {plain(found.mismatch)}.")
    return Section("Ranks side by side", columns, rows, tuple(lines), wide=True)


def _rank_row(rank: RankFacts, straggler: int | None) -> Row:
    account = rank.breakdown
    cells = (
        f"{rank.rank}" + (" (last)" if rank.rank == straggler else ""),
        duration(rank.step_us),
        percent(account.busy_fraction) if account.busy_fraction is not None else NOT_MEASURABLE,
        percent(account.share["compute"]),
        duration(rank.communication_us),
        duration(rank.overlapped_us),
        duration(rank.waiting_us),
        duration(rank.transfer_us),
    )
    return Row(cells)


def _problems(ranks: Ranks) -> tuple[Section, ...]:
    if not ranks.problems:
        return ()
    rows = tuple(Row((plain(p.what), plain(p.reason))) for p in ranks.problems)
    return (Section("What is wrong with these traces", (Column("", "wrap"), Column("", "wrap")), rows, wide=True),)


__all__ = ["RankedReport", "job_opening"]
