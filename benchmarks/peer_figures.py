"""Ask HTA or the TensorBoard plugin for their own figures: what tests/golden/peer_figures.json holds.

It runs in the peers' environment (benchmarks/peers-requirements.txt) and imports nothing of gpulab:

    .venv-peers/bin/python benchmarks/peer_figures.py hta ../shared/traces

The plugin's last source is the commit before Kineto dropped it; it runs in gpulab's own environment:

    git clone https://github.com/pytorch/kineto .venv-peers/kineto
    git -C .venv-peers/kineto checkout 94979607~1
    PYTHONPATH=.venv-peers/kineto/tb_plugin .venv/bin/python benchmarks/peer_figures.py tensorboard ../shared/traces

    .venv/bin/python benchmarks/peer_figures.py join hta.json tensorboard.json > tests/golden/peer_figures.json
"""

from __future__ import annotations

import json
import logging
import math
import sys
import warnings
from pathlib import Path

SUFFIX = ".pt.trace.json.gz"
PARTS = {
    "Kernel": "kernel",
    "Memcpy": "memcpy",
    "Memset": "memset",
    "Communication": "communication",
    "Runtime": "runtime",
    "DataLoader": "dataloader",
    "CpuOp": "cpu_exec",
    "Other": "other",
    "Total": "total",
}


def main() -> None:
    """Print the figures of a folder of traces as JSON, by file name."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.CRITICAL)
    what, *paths = sys.argv[1:]
    if what == "join":
        hta_figures, plugin_figures = (json.loads(Path(p).read_text()) for p in paths)
        result = {n: {"tensorboard": f, "hta": hta_figures.get(n)} for n, f in plugin_figures.items()}
    else:
        folder = Path(paths[0])
        figures = {"hta": hta, "tensorboard": tensorboard}[what]
        files = sorted(folder.rglob(f"*{SUFFIX}"))
        result = {str(f.relative_to(folder)).removesuffix(SUFFIX): figures(f) for f in files}
    print(json.dumps(result, indent=1))


def hta(path: Path) -> dict[str, object] | None:
    """HTA's percentages and idle time per stream; None where it fails to read the file."""
    from hta.trace_analysis import TraceAnalysis

    try:
        analysis = TraceAnalysis(trace_files={0: str(path.resolve())})
    except TypeError:
        return None
    parts = analysis.get_temporal_breakdown(visualize=False).iloc[0]
    overlap = float(analysis.get_comm_comp_overlap(visualize=False).iloc[0]["comp_comm_overlap_pctg"])
    streams: dict[str, dict[str, float]] = {}
    for row in analysis.get_idle_time_breakdown(ranks=[0], visualize=False)[0].to_dict("records"):
        streams.setdefault(str(row["stream"]), {})[row["idle_category"]] = float(row["idle_time"])
    return {
        "idle_pct": float(parts["idle_time_pctg"]),
        "compute_pct": float(parts["compute_time_pctg"]),
        "non_compute_pct": float(parts["non_compute_time_pctg"]),
        "overlap_pct": None if math.isnan(overlap) else overlap,
        "streams_us": streams,
    }


def tensorboard(path: Path) -> dict[str, object]:
    """The plugin's overview of the first GPU, each step counted once."""
    from torch_tb_profiler.profiler.data import RunProfileData
    from torch_tb_profiler.profiler.event_parser import ProfileRole

    _, trace = RunProfileData._preprocess_file(str(path), None)
    trace["traceEvents"] = [e for e in trace["traceEvents"] if e.get("cat") != "gpu_user_annotation"]
    data = RunProfileData("worker", "0", trace)
    data.process()
    gpu, metrics = min(data.gpu_metrics_parser.gpu_ids), data.gpu_metrics_parser
    efficiency = metrics.avg_approximated_sm_efficiency_per_device[gpu]
    occupancy = metrics.avg_occupancy_per_device[gpu]
    return {
        "gpu_utilization": round(metrics.gpu_utilization[gpu], 6),
        "est_sm_efficiency": None if efficiency is None else round(efficiency, 6),
        "est_achieved_occupancy_pct": None if occupancy is None else round(occupancy, 3),
        "step_us": {PARTS[role.name]: round(data.avg_costs.costs[role], 2) for role in ProfileRole},
        "steps": len(data.steps_names),
    }


main()
