"""Traces recorded elsewhere (GPULAB_TRACES), and what a diagnosis of each must and must not say."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from benchmarks.planted.judging import judged_trace, said
from benchmarks.planted.planted import PlantedTrace

VARIABLE = "GPULAB_TRACES"
SUFFIX = ".pt.trace.json.gz"
FEEDING = ("data_starved", "cpu_preprocessing", "storage_bound", "slow_collate")

TRACES = (
    PlantedTrace(
        "v100_resnet50_workers0", f"v100_resnet50_workers0{SUFFIX}",
        "num_workers=0; the same job with four workers took about 50 ms less per step",
        headline=("data_starved",),
        found=("unfused_optimizer", "no_mixed_precision"),
        recoverable_us=(50e3, 60e3),
    ),
    PlantedTrace(
        "v100_resnet50_workers4", f"v100_resnet50_workers4{SUFFIX}",
        "the same job with num_workers=4: the DataLoader takes 0.3 ms of a step",
        never=FEEDING,
    ),
    PlantedTrace(
        "h100_owlv2_starved", f"h100_owlv2_starved{SUFFIX}",
        "51 % of the time waits for data, so a larger batch would wait as well",
        headline=("data_starved",),
        never=("small_batch", "memory_underused"), never_settings=("batch_size",),
    ),
    PlantedTrace(
        "b200_moe_launch_bound", f"b200_moe_launch_bound{SUFFIX}",
        "busy 12.5 %: the host cannot launch fast enough",
        headline=("launch_bound",),
    ),
    PlantedTrace(
        "v100_ddp_healthy", f"v100_ddp_healthy{SUFFIX}", "busy 97 %",
        never=(*FEEDING, "launch_bound"),
    ),
    PlantedTrace(
        "mi300_resnet_healthy", f"mi300_resnet_healthy{SUFFIX}", "kernels run for 96.5 % of the time",
        never=(*FEEDING, "launch_bound"),
    ),
    PlantedTrace(
        "a100_8ranks_rank3", f"a100_8ranks_rank3{SUFFIX}",
        "22.6 % of the time is not compute, with NCCL on its own streams and 47 % of it hidden",
        headline=("exposed_communication",),
        never=FEEDING,
    ),
    PlantedTrace(
        "v100_dlrm_8ranks", "v100_dlrm_8ranks",
        "exchange between GPUs takes up to 59 % of a rank's time, and ranks idle from 34 to 76 %",
        headline=("exposed_communication", "straggler"),
        found=("straggler",),
        never=FEEDING,
    ),
)  # fmt: skip


def judged() -> dict[str, Any]:
    """Each trace read, diagnosed and held against what must be said of it."""
    return {"rows": [_row(case) for case in TRACES]}


def file_of(case: PlantedTrace) -> Path | None:
    """The trace or the folder of ranks; None where it is not there."""
    folder = os.environ.get(VARIABLE)
    path = Path(folder, case.path) if folder else None
    return path if path is not None and path.exists() else None


def _row(case: PlantedTrace) -> dict[str, Any]:
    row: dict[str, Any] = {"name": case.name, "because": case.because, "skipped": "", "failed": ""}
    path = file_of(case)
    if path is None:
        return row | {"skipped": f"needs the trace {case.path} in the folder that {VARIABLE} names"}
    import gpulab

    try:
        told = said(gpulab.diagnose(path))
    except Exception as e:
        return row | {"failed": f"{type(e).__name__}: {e}"}
    return row | told | judged_trace(case, told)
