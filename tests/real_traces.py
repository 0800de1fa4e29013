"""Where the real GPU traces lie, for tests that read them: they are not part of the project."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

SINGLE = (
    "v100_resnet50_workers0",
    "v100_resnet50_workers4",
    "a100_8ranks_rank3",
    "v100_ddp_healthy",
    "a100_alexnet_sync_events",
    "h100_owlv2_starved",
    "b200_moe_launch_bound",
    "mi300_resnet_healthy",
)
DLRM = tuple(f"v100_dlrm_8ranks/rank{rank}" for rank in range(8))
ALL = SINGLE + DLRM


def folder() -> Path | None:
    """GPULAB_TRACES, else shared/traces beside the checkout; None where neither is a folder."""
    beside = Path(__file__).resolve().parents[2] / "shared" / "traces"
    place = Path(os.environ.get("GPULAB_TRACES", beside))
    return place if place.is_dir() else None


def path(name: str) -> Path:
    """The file of that trace; skips the test where the traces are absent."""
    place = folder()
    if place is None:
        pytest.skip("the real traces are not here: set GPULAB_TRACES to their folder, or put it at ../shared/traces")
    return place / f"{name}.pt.trace.json.gz"
