"""Who holds memory, which size fits into it, and whether a cure fits and at what price: as text and in a notebook."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from markupsafe import Markup
from msgspec.structs import asdict, replace

from gpulab.analysis.memory_peak import is_kept_by_python, what_frees
from gpulab.diagnosis.headline import Headline
from gpulab.formatting import percent, plural, settings_words, size
from gpulab.memory_record import ADDRESS_SPACE, Room, Survey
from gpulab.tuning.arms import BATCH
from gpulab.tuning.schedule import Arm
from gpulab.views.layout import Column, Row, Section, numbers
from gpulab.views.report.memory_sections import title_of
from gpulab.views.view import View
from gpulab.views.wording import or_dash, plain

if TYPE_CHECKING:
    from gpulab.tuning.fit import Fit, Probe, Proof
    from gpulab.views.comparison import Compared

_MOST_OWNERS = 20
_MOST_STATEMENTS = 3  # of an advice
_LEAST_BYTES = 1 << 20  # ours: less is no one's problem


@dataclass(frozen=True, slots=True, repr=False)
class Owners(View):
    """The owners of tensor memory. `freed`: bytes that came back, by device, if `names` were let go; else None."""

    result: Survey
    freed: Mapping[str, int] | None = None
    names: tuple[str, ...] = ()
    room: Room | None = None

    @property
    def headline(self) -> Headline:
        """The largest owner, or how much came back."""
        totals = self.result.total_bytes
        words = ", ".join(f"{size(count)} on {device}" for device, count in sorted(totals.items())) or "none"
        if self.freed is not None:
            back = ", ".join(f"{size(count)} on {device}" for device, count in self.freed.items() if count > 0)
            return Headline("freed", f"{back or 'Nothing'} came back.", f"Tensors now: {words}", "good")
        largest = max(
            ((row, device) for device, rows in self.result.owners.items() for row in rows),
            key=lambda pair: pair[0].bytes,
            default=None,
        )
        if largest is None:
            return Headline("owners", "No tensor is alive in this kernel.", "", "good")
        first, device = largest
        of = f"{size(totals[device])} in tensors on {device}"
        sentence = f"{plain(first.owner)} holds {size(first.bytes)} of the {of}."
        return Headline("owners", sentence, self._advice(), "notice")

    def _advice(self) -> str:
        """The statements that free what is probably kept by mistake: graphs, outputs and tracebacks; else variables."""
        rows = [row for rows in self.result.owners.values() for row in rows if row.bytes >= _LEAST_BYTES]
        rows = [
            row for row in rows if row.kind in ("variables", "saved activations") and what_frees(row.owner, *row.others)
        ]
        stray = [row for row in rows if row.kind == "saved activations" or is_kept_by_python(row.owner)] or rows[:1]
        statements = dict.fromkeys(what_frees(row.owner, *row.others) for row in stray[:_MOST_STATEMENTS])
        freed = sum(row.bytes for row in stray[:_MOST_STATEMENTS])
        return f"{'; '.join(statements)}: {size(freed)} come back" if stray else ""

    def _opening(self) -> str:
        return "tensor memory of this kernel"

    def _sections(self) -> tuple[Section, ...]:
        sections = []
        for device, rows in sorted(self.result.owners.items()):
            total = sum(row.bytes for row in rows)
            columns = (Column("owner", "cut"), *numbers("size", "share"), Column("what"), Column("to free it", "wrap"))
            shown = [row for row in rows[:_MOST_OWNERS] if row.bytes >= 0.001 * total]
            cells = tuple(
                Row(
                    (
                        plain(r.owner),
                        size(r.bytes),
                        percent(r.bytes / total),
                        title_of(r.kind),
                        plain(what_frees(r.owner, *r.others)),
                    ),
                    bar=r.bytes / total,
                )
                for r in shown
            )
            lines = [f"{size(total)} in {plural(len(rows), 'owner')}. Each storage counts once, with its nearest name."]
            if garbage := self.result.garbage_bytes.get(device):
                lines.append(f"{size(garbage)} were garbage in reference cycles, now collected.")
            if not self.result.is_whole:
                lines.append("The search for names took too long and was ended: some owners are missing.")
            if device == "cpu" and self.room is not None:
                lines.append(
                    f"Free: {size(self.room.free_bytes)} of {size(self.room.total_bytes)} ({self.room.limit})."
                )
            title = f"Who holds memory on {device}"
            sections.append(Section(title, columns, cells, tuple(lines), lead=True, wide=True, result=size(total)))
        return tuple(sections)

    def _figures(self) -> Mapping[str, object]:
        return {
            "schema": 1,
            "kind": "memory",
            "headline": self.headline,
            "owners": {device: [asdict(row) for row in rows] for device, rows in self.result.owners.items()},
            "garbage_bytes": self.result.garbage_bytes,
            "freed_bytes": self.freed,
            "whole": self.result.is_whole,
        }


@dataclass(frozen=True, slots=True, repr=False)
class Fitted(View):
    """The largest size that fits, and the cures that are predicted to make the present size fit."""

    result: Fit

    @property
    def headline(self) -> Headline:
        """The size, with its interval, and whether a run has proven it."""
        fit = self.result
        if fit.predicted is None:
            return Headline("fit", f"No {fit.name} could be predicted.", self._why(), "unknown")
        size_, low, high = fit.predicted
        words = f"predicted {size_:,} (95 %: {low:,} to {high:,}), with {percent(fit.free_fraction)} of the room free"
        if fit.proven is None:
            tried = any(probe.size and probe.size >= size_ for probe in fit.probes)
            if tried or not size_:
                return Headline("fit", f"No {fit.name} was proven to fit.", words, "notice")
            return Headline("fit", f"{fit.name}={size_:,} should fit.", f"{words}; not proven by a run", "notice")
        peak = fit.peak_of(fit.proven)
        of = f": peak {size(peak)} of {size(self._limit)}" if peak else ""
        return Headline("fit", f"{fit.name}={fit.proven:,} fits{of}.", words, "good")

    @property
    def _limit(self) -> float:
        """All that a peak may reach before memory runs out."""
        fit = self.result
        return fit.allowed_bytes + fit.free_fraction * fit.room.free_bytes

    def _why(self) -> str:
        failed = next((p.failure for p in reversed(self.result.probes) if p.failure), "")
        if any(p.fits and p.peak_bytes is None for p in self.result.probes):
            return "The peak of a run is not known here: that needs Linux or a GPU"
        return failed or "Fewer than two runs ended, or memory does not grow with the size"

    def _opening(self) -> str:
        fit = self.result
        runs = plural(len(fit.probes), "short run")
        return f"fit of {plain(fit.name)} (now {fit.before:,}) · {runs} · limit: {fit.room.limit}"

    def _sections(self) -> tuple[Section, ...]:
        fit = self.result
        rows = [_probe_cells(probe, self._limit) for probe in fit.probes]
        lines = [*map(plain, fit.notes)]
        if fit.line is not None:
            unit = "per sample" if fit.name == BATCH else f"times {plain(fit.name)}"
            lines.insert(
                0, f"Peak = {size(fit.line.m0_bytes)} + {size(fit.line.m1_bytes)} {unit}, through the short runs."
            )
        for cure in fit.cures:
            words = settings_words(Arm(cure.settings).texts)
            peak = f"{'measured' if cure.is_measured else 'predicted'} peak {size(cure.peak_bytes)}"
            lines.append(f"To keep {plain(fit.name)}={fit.before:,}: {words}, {peak}.")
        if fit.predicted and fit.proven and not fit.predicted[1] <= fit.proven <= fit.predicted[2]:
            lines.append("Runs near the limit corrected the prediction.")
        if fit.is_short and not fit.cures:
            lines.append(f"No setting is predicted to make {plain(fit.name)}={fit.before:,} fit.")
        return (Section("Runs", _PROBE_COLUMNS, tuple(map(Row, rows)), (*lines, *_counted(fit)), lead=True),)

    def _figures(self) -> Mapping[str, object]:
        return {"schema": 1, "kind": "fit", "headline": self.headline, "fit": asdict(self.result)}


_PROBE_COLUMNS = (Column("run", "cut"), *numbers("peak", "of the limit", "samples/s"), Column("", "wrap"))


def _counted(fit: Fit) -> tuple[str, ...]:
    """What a peak counts, where that is not the memory in use."""
    words = f"Peaks here are of address space, because {ADDRESS_SPACE} counts it. It is more than the memory in use."
    varies = "A later run may need more of it, because freed memory stays in pieces. --free 20% leaves more room."
    return (words, varies) if fit.room.limit == ADDRESS_SPACE else ()


def _probe_cells(probe: Probe, limit: float) -> tuple[str, ...]:
    speed = or_dash(probe.samples_per_s, lambda value: f"{value:,.0f}")
    peak = None if probe.shortage == "memory" else probe.peak_bytes  # it needed more than it reached
    share = or_dash(peak, lambda count: percent(count / limit))
    outcome = "fits" if probe.fits else plain(probe.failure)
    return settings_words(Arm(probe.settings).texts), or_dash(peak, size), share, speed, outcome


@dataclass(frozen=True, slots=True, repr=False)
class Cured(View):
    """A cure at the present size: whether it fits, and its price, at a size that fits without it."""

    fit: Fit
    proof: Proof
    compared: Compared | None

    @property
    def headline(self) -> Headline:
        """Whether it fits, then the price as the comparison says it."""
        probe, words = self.proof.probe, settings_words(Arm(self.proof.settings).texts)
        kept = "" if self.fit.name in self.proof.settings else f" with {self.fit.name}={self.fit.before:,}"
        if not probe.fits and probe.shortage == "memory":
            return Headline("cure", f"{words}{kept} does not fit.", plain(probe.failure), "bad")
        if not probe.fits:
            return Headline("cure", f"Whether {words}{kept} fits is not known.", plain(probe.failure), "unknown")
        peak = f": peak {size(probe.peak_bytes)}" if probe.peak_bytes else ""
        price = self.compared.headline if self.compared is not None else None
        beside = "" if price is None else f"Its price, at {self._base}: {price.sentence}"
        return Headline("cure", f"{words}{kept} fits{peak}.", beside, "good")

    @property
    def _base(self) -> str:
        """The setting without the fix, against which its price is measured."""
        size_ = self.proof.settings.get(self.fit.name, self.fit.base)
        return f"{self.fit.name}={size_}"

    def _opening(self) -> str:
        return f"what makes it fit: {settings_words(Arm(self.proof.settings).texts)}"

    def _picture(self) -> Markup:
        return self.compared._picture() if self.compared is not None else Markup()

    def _sections(self) -> tuple[Section, ...]:
        fit = self.fit
        limit = fit.allowed_bytes + fit.free_fraction * fit.room.free_bytes
        before = next((p for p in fit.probes if p.size == fit.before), None)
        outcome = "predicted not to fit" if before is None else "fits" if before.fits else plain(before.failure)
        dead = (f"{fit.name}={fit.before:,}: baseline", "–", "–", "–", outcome)
        ran = [p for p in fit.probes if p.size == fit.base][-1:]
        proof = self.proof.probe
        whole = replace(proof, settings={fit.name: fit.before, **proof.settings})
        rows = [dead, *(_probe_cells(p, limit) for p in ran), _probe_cells(whole, limit)]
        first = Section(
            "Does it fit?",
            _PROBE_COLUMNS,
            tuple(map(Row, rows)),
            (*_counted(fit), *map(plain, self.proof.notes)),
            lead=True,
        )
        return (first, *(self.compared._sections() if self.compared is not None else ()))

    def _figures(self) -> Mapping[str, object]:
        compared: Any = self.compared._figures() if self.compared is not None else None
        return {
            "schema": 1,
            "kind": "cure",
            "headline": self.headline,
            "settings": dict(self.proof.settings),
            "fits": self.proof.probe.fits,
            "peak_bytes": self.proof.probe.peak_bytes,
            "comparison": compared,
        }
