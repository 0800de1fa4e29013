"""Where the traces recorded on real GPUs lie: outside the project, so a test that needs one is skipped without them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.paths import ROOT

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
RANKS = tuple(f"v100_dlrm_8ranks/rank{i}" for i in range(8))


def folder() -> Path:
    """GPULAB_TRACES, else shared/traces beside the checkout."""
    return Path(os.environ.get("GPULAB_TRACES") or ROOT.parent / "shared" / "traces")


def path(name: str) -> Path:
    """The file of that name. Skips the test where it is absent."""
    found = folder() / f"{name}.pt.trace.json.gz"
    if not found.is_file():
        pytest.skip(f"needs the real trace {found.name} (shared/traces beside the checkout, or GPULAB_TRACES)")
    return found
