"""The report's account of the DataLoader from inside: what making a batch takes, and what the loop waits for."""

from __future__ import annotations

from gpulab.analysis.facts import Facts
from gpulab.analysis.loader import LoadingFacts, WorkerRow
from gpulab.diagnosis.loading import sampled
from gpulab.formatting import duration, percent, plural, rate
from gpulab.views.layout import Column, Row, Section, numbers
from gpulab.views.wording import Part

TITLE = "Inside the DataLoader"
WORTH_SAYING = 0.05  # of a part's time, or of the wait

_READ = Part("read", "the dataset gets its items: opens, reads and decodes them", "#E69F00")
_READ_ALL = Part("read and transform", "the dataset's __getitem__, with whatever it does to an item", "#E69F00")
_TRANSFORM = Part("transform", "the dataset's transforms change the items", "#D55E00")
_COLLATE = Part("collate", "items become one batch (collate_fn)", "#56B4E9")
_HAND_OVER = Part("hand over", "from the worker to the main process, which waits for it; or its sampler", "#CC79A7")
_PIN = Part("pin memory", "copied into page-locked memory", "#999933")
_COPY = Part("copying to the GPU", "in a traced step, after the DataLoader", "#0072B2")


def loading_sections(facts: Facts) -> tuple[Section, ...]:
    """What one batch takes, and each worker where there are several; nothing where batches were not timed inside."""
    inside = facts.loading
    if inside is None:
        return ()
    return (_batch(inside), *((_workers(inside.workers),) if len(inside.workers) > 1 else ()))


def _batch(inside: LoadingFacts) -> Section:
    shown = [
        (_TRANSFORM if inside.transform_us else None, inside.transform_us, inside.transform_waited_fraction),
        (_COLLATE, inside.collate_us, None),
        (_HAND_OVER, inside.hand_over_us, None),
        (_PIN if inside.pin_us else None, inside.pin_us, None),
        (_COPY, inside.copy_us, None),
    ]
    read = _READ if inside.transform_us else _READ_ALL
    rows = [_row(read, inside.read_us, inside.read_waited_fraction, inside.batch_us)]
    rows += [
        _row(part, us, waited, inside.batch_us) for part, us, waited in shown if part is not None and us is not None
    ]
    columns = (Column(""), *numbers("per batch"), Column("meaning", "wrap"))
    lines, result = tuple(line for line in _lines(inside) if line), f"{duration(inside.batch_us)} per batch"
    return Section(TITLE, columns, tuple(rows), lines, wide=True, result=result)


def _row(part: Part, us: float, waited: float | None, batch_us: float) -> Row:
    meaning = part.meaning
    if waited is not None and waited >= WORTH_SAYING:
        meaning += f"; blocked on I/O or locks for {duration(waited * us)} of it"
    share = min(1.0, us / batch_us) if batch_us > 0 else 0.0
    return Row((part.label, duration(us), meaning), bar=share, colour=part.colour)


def _lines(inside: LoadingFacts) -> list[str]:
    items = "" if inside.items_per_batch is None else f" of {plural(round(inside.items_per_batch), 'item')}"
    core = inside.core_wait_fraction
    return [
        f"One batch{items} takes {duration(inside.batch_us)} to load (median of {sampled(inside)}), {_where(inside)}.",
        _waiting(inside),
        f"For {percent(core)} of the loading time the code waited for a CPU core."
        if core is not None and core >= WORTH_SAYING
        else "",
        "" if inside.transform_us else "The dataset has no separate transform, so its transforms count as read.",
        "" if inside.pin_us is not None else "The time for pinning could not be measured.",
    ]


def _where(inside: LoadingFacts) -> str:
    if [row.worker for row in inside.workers] == [-1]:
        return "in the main process, which blocks meanwhile"
    count = len(inside.workers)
    return "in one worker process" if count == 1 else f"in each of {count:,} worker processes"


def _waiting(inside: LoadingFacts) -> str:
    """What the loop's wait was for, the longest first."""
    wait = inside.wait
    if wait is None or wait.total_us <= 0:
        return ""
    parts = {
        (_READ if inside.transform_us else _READ_ALL).label: wait.read_us,
        _TRANSFORM.label: wait.transform_us,
        _COLLATE.label: wait.collate_us,
        _HAND_OVER.label: wait.hand_over_us,
        _PIN.label: wait.pin_us,
    }
    longest = sorted(((us, name) for name, us in parts.items() if us >= WORTH_SAYING * wait.total_us), reverse=True)
    shares = ", ".join(f"{percent(us / wait.total_us)} {name}" for us, name in longest)
    return f"The wait for a batch splits into: {shares}."


def _workers(workers: tuple[WorkerRow, ...]) -> Section:
    cells = (
        (
            str(row.worker),
            f"{row.batches:,}",
            *(duration(us) for us in (row.batch_us, row.read_us, row.transform_us, row.collate_us, row.hand_over_us)),
            percent(row.waited_fraction),
            rate(row.items_per_s, "items"),
            percent(row.idle_fraction),
        )
        for row in workers
    )
    columns = numbers(
        "worker", "batches", "per batch", "read", "transform", "collate", "hand over",
        "blocked on I/O", "while it works", "idle",
    )  # fmt: skip
    line = "An idle worker has prefetched as far as it may: training doesn't wait for it."
    idle = [row.idle_fraction for row in workers if row.idle_fraction is not None]
    result = f"{len(workers):,}" + (f", idle for {percent(min(idle))} of their time or more" if idle else "")
    return Section.table("Workers of the DataLoader", columns, cells, (line,), result=result)
