"""Our figures of the public traces against those that HTA and the TensorBoard plugin themselves gave for them.

`benchmarks/peer_figures.py` recorded theirs; where the definitions differ, the difference is named.
"""

from __future__ import annotations

import functools
import json
from typing import Any

import pytest

from gpulab.analysis.facts import Facts, facts
from gpulab.analysis.ranks import compare_ranks
from gpulab.intervals import measure
from gpulab.run import Ranks, Run
from gpulab.thresholds import DEFAULT
from gpulab.timeline.labels import WORK, labels
from gpulab.trace import files
from tests.support import loaded_traces, real_traces
from tests.support.paths import TESTS

FIGURES: dict[str, Any] = json.loads((TESTS / "golden" / "peer_figures.json").read_text())
WITHOUT_STEP = "b200_moe_launch_bound"  # one window: the plugin's is that of the operators, 1 % shorter
# HTA leaves out what the last of several steps launched, and cuts finer times to whole microseconds.
HTA_CUTS_PCT = {
    "v100_resnet50_workers4": 0.2,
    "a100_8ranks_rank3": 0.2,
    "v100_ddp_healthy": 1.1,
    "h100_owlv2_starved": 0.5,
    "b200_moe_launch_bound": 1.0,
}


@functools.cache
def figures(name: str) -> Facts:
    run = files.load(real_traces.path(name))
    assert isinstance(run, Run)
    return facts(run)


@pytest.mark.parametrize("name", loaded_traces.ALL)
def test_figures_of_the_plugin(name: str) -> None:
    """Utilization, efficiency, occupancy and the waiting for data, which only its last source sees on new traces."""
    theirs, ours = FIGURES[name]["tensorboard"], figures(name)
    assert ours.breakdown is not None and ours.trace is not None and ours.trace.kernels is not None
    near = 0.0015 if name == WITHOUT_STEP else 3e-4
    assert ours.breakdown.kernel_busy_fraction == pytest.approx(theirs["gpu_utilization"], abs=near)
    assert ours.trace.est_sm_efficiency == pytest.approx(theirs["est_sm_efficiency"], abs=near)
    occupancy_pct = theirs["est_achieved_occupancy_pct"]
    assert ours.trace.kernels.est_achieved_occupancy_pct == pytest.approx(occupancy_pct, abs=0.01)
    waiting = theirs["step_us"]["dataloader"] / theirs["step_us"]["total"]
    assert ours.breakdown.share["data_wait"] == pytest.approx(waiting, abs=0.0015)
    assert len(ours.breakdown.steps) == theirs["steps"]
    if name not in (WITHOUT_STEP, "a100_alexnet_sync_events"):  # no step marks: the plugin counts other time as well
        assert ours.breakdown.mean_step_us == pytest.approx(theirs["step_us"]["total"], rel=1e-3)


@pytest.mark.parametrize("name", [n for n in loaded_traces.ALL if FIGURES[n]["hta"]])
def test_idle_time_of_hta(name: str) -> None:
    """What no item of the device covers, in HTA's window."""
    timeline = figures(name).run.timeline
    assert timeline is not None
    covered = labels(timeline).times(labels(timeline).of(*WORK))
    idle_pct = 100 * (1 - measure(covered) / (covered[-1, 1] - covered[0, 0]))
    assert idle_pct == pytest.approx(FIGURES[name]["hta"]["idle_pct"], abs=HTA_CUTS_PCT.get(name, 0.006))


def test_overlap_of_hta() -> None:
    """The share of communication that computing hides, of each rank of a job."""
    job = files.load(real_traces.path(real_traces.RANKS[0]).parent)
    assert isinstance(job, Ranks)
    compared = compare_ranks({rank: facts(run) for rank, run in job.runs.items()}, skew_notice=DEFAULT.skew_notice)
    ours = {r.rank: 100 * r.overlapped_us / r.communication_us for r in compared.ranks}
    theirs = {rank: FIGURES[f"v100_dlrm_8ranks/rank{rank}"]["hta"]["overlap_pct"] for rank in range(8)}
    assert ours == pytest.approx(theirs, abs=0.006)
