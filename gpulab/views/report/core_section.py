"""The section about processor cores: what the program may use, what it got, and who had the rest."""

from __future__ import annotations

from gpulab.analysis.facts import Facts
from gpulab.analysis.host.core_time import CoreShare
from gpulab.formatting import number, percent, plural
from gpulab.views.layout import PAIRS, Section


def core_section(facts: Facts) -> Section | None:
    """None where nothing was read."""
    cores = facts.cores
    if cores is None:
        return None
    rows = [("cores that this program may use", _usable(cores))]
    for what, count in (
        ("used by this program and its workers", cores.got_cores),
        ("used by all other programs", cores.others_cores),
    ):
        if count is not None:
            rows.append((what, f"{number(round(count, 2))} (mean during the steps)"))
    if cores.thread_wait_fraction is not None:
        rows.append(
            ("training ready to go on, and no core free", f"{percent(cores.thread_wait_fraction)} of the steps' time")
        )
    if cores.throttled_fraction is not None and cores.quota_cores is not None:
        rows.append(("quota used up", f"in {percent(cores.throttled_fraction)} of its periods"))
    return Section.table("Processor cores", PAIRS, rows, aside=True)


def _usable(cores: CoreShare) -> str:
    count = "unknown" if cores.cores is None else number(cores.cores)
    if cores.quota_cores is None or (cores.cores is not None and cores.quota_cores >= cores.cores):
        return count
    return f"{number(cores.quota_cores)}: the quota of its container, on {plural(cores.cores or 0, 'core')}"
