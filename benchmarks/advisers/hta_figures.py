"""HTA's figures about one trace, as JSON; runs in an environment of its own that has HTA and nothing of ours."""

from __future__ import annotations

import json
import logging
import math
import sys
import warnings
from pathlib import Path


def main() -> None:
    """`python hta_figures.py TRACE`."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.CRITICAL)
    from hta.trace_analysis import TraceAnalysis

    analysis = TraceAnalysis(trace_files={0: str(Path(sys.argv[1]).resolve())})
    parts = analysis.get_temporal_breakdown(visualize=False).iloc[0]
    overlap = float(analysis.get_comm_comp_overlap(visualize=False).iloc[0]["comp_comm_overlap_pctg"])
    idle = analysis.get_idle_time_breakdown(ranks=[0], visualize=False)[0]
    host = float(idle.loc[idle["idle_category"] == "host_wait", "idle_time"].sum())
    total = float(idle["idle_time"].sum())
    print(
        json.dumps(
            {
                "idle_pct": float(parts["idle_time_pctg"]),
                "compute_pct": float(parts["compute_time_pctg"]),
                "non_compute_pct": float(parts["non_compute_time_pctg"]),
                "overlap_pct": None if math.isnan(overlap) else overlap,
                "host_wait_share_of_idle": host / total if total else None,
            }
        )
    )


main()
