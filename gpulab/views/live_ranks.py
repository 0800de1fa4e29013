"""A job's ranks while they run, one row each. All ranks have equally long steps, so the picture shows who waits for
whom.

A notebook has HTML without a script, renewed in place; a terminal has a line of text per rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import Struct

from gpulab.analysis.collectives import RankWaits
from gpulab.formatting import duration, number, percent, while_s
from gpulab.views.bars import Segment
from gpulab.views.page import macros
from gpulab.views.widgets import Output
from gpulab.views.wording import PARTS, plain

SILENT_S = 5.0  # a rank that is silent for longer has a note


class RankRow(Struct, frozen=True):
    """The latest figures of one rank; None: unknown. `waits` are shares of the rank's time."""

    rank: int
    node: str
    step_count: int
    step_us: float | None
    data_wait_us: float | None
    busy: tuple[str, float] | None
    waits: RankWaits | None
    silence_s: float
    has_ended: bool


def sentence(rows: Sequence[RankRow], straggler: int | None) -> str:
    """Which rank holds up the others, in one sentence."""
    if not rows:
        return "The ranks start."
    if any(r.waits is not None for r in rows) and straggler is not None:
        late = next(r for r in rows if r.rank == straggler)
        assert late.waits is not None
        took = f", {duration(late.waits.delays * late.step_us)} in each step" if late.step_us is not None else ""
        return f"The others wait for rank {straggler}: {percent(late.waits.delays)} of the time{took}."
    if any(r.waits is not None for r in rows):
        return "No rank holds up the others."
    if max(r.step_count for r in rows) == 0:
        return "No step has ended yet."
    return "Who waits for whom is not known yet."


def text(rows: Sequence[RankRow], straggler: int | None) -> str:
    """One line for each rank below the sentence."""
    lines = [sentence(rows, straggler)]
    lines += [f"  rank {r.rank}: {'; '.join(_figures(r))}" for r in rows]
    return "\n".join(lines)


def markup(rows: Sequence[RankRow], straggler: int | None, elapsed_s: float, note: str = "") -> str:
    """HTML for a notebook's output, with inline styles and no script, for any theme. `note`: the state of the job."""
    lines = [
        {
            "name": f"rank {row.rank}{f' · {row.node}' if row.node else ''}",
            "figures": " · ".join(_figures(row)),
            "parts": _parts(row) if row.step_count else [],
            "colour": PARTS["core_wait"].colour if row.rank == straggler else "",
        }
        for row in rows
    ]
    data, others, works = (Segment(label, 0, colour) for label, colour in _KEY)
    key = [data, *([others] if any(row.waits is not None for row in rows) else []), works]
    stands = " · ".join(filter(None, (note, while_s(elapsed_s))))
    return str(macros("running.html").ranks(sentence(rows, straggler), lines, key if rows else [], stands))


_KEY = (
    ("waits for its own input", PARTS["data_wait"].colour),
    ("waits for other ranks", PARTS["communication"].colour),
    ("works", PARTS["compute"].colour),
)


def _parts(row: RankRow) -> list[Segment]:
    """The parts of the rank's time, as shares."""
    others = row.waits.waits if row.waits is not None else 0.0
    data = row.data_wait_us / row.step_us if row.step_us and row.data_wait_us is not None else 0.0
    data = min(data, 1.0 - others)
    shares = (data, others, max(0.0, 1.0 - data - others))
    return [Segment(label, share, colour) for (label, colour), share in zip(_KEY, shares, strict=True)]


def _figures(row: RankRow) -> list[str]:
    words = [f"step {number(row.step_count)}"]
    if row.step_us is not None:
        words.append(f"{duration(row.step_us)} per step")
    if row.waits is not None and row.step_us is not None:
        words.append(f"waits {duration(row.waits.waits * row.step_us)} for others")
        words.append(f"makes them wait {duration(row.waits.delays * row.step_us)}")
    if row.data_wait_us:
        words.append(f"{duration(row.data_wait_us)} for its own input")
    if row.busy is not None:
        words.append(f"{row.busy[0]} {percent(row.busy[1])}")
    if row.has_ended:
        words.append("has ended")
    elif row.silence_s > SILENT_S:
        words.append(f"last heard {while_s(row.silence_s)} ago")
    return words


class LiveRanksOutput(Output):
    """An output of a notebook that is renewed in place, and replaced by the report in the end."""

    def show_ranks(self, rows: Sequence[RankRow], straggler: int | None, elapsed_s: float, note: str = "") -> None:
        """Never raises: a view that fails must not cost the user the run."""
        plain_text = "\n".join(filter(None, (text(rows, straggler), plain(note))))
        self.show({"text/html": markup(rows, straggler, elapsed_s, note), "text/plain": plain_text})

    def replace(self, bundle: Mapping[str, object]) -> bool:
        """Put something else in the output's place. False if there is no such output."""
        return bool(self) and self.show(bundle)
