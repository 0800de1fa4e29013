"""Which job and rank a process is, as each launcher says it; and that all ranks of one job say the same job."""

from __future__ import annotations

import os
import platform
from collections import Counter
from pathlib import Path

import pytest
from msgspec.structs import replace

import gpulab
from gpulab.capture import job as job_module
from gpulab.capture.job import _began, cluster_id, current_job
from gpulab.run import Job
from gpulab.store.folders import Store

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "n1"}
SLURM = {"SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_LOCALID": "0"}


@pytest.mark.parametrize(
    "environment",
    [{}, {"RANK": "0", "WORLD_SIZE": "1"}, {"RANK": "0"}, {"RANK": "x", "WORLD_SIZE": "4"}, {"SLURM_JOB_ID": "77"}],
)
def test_a_process_by_itself_is_no_rank(environment: dict[str, str]) -> None:
    assert current_job(environment) is None
    assert cluster_id(environment) == environment.get("SLURM_JOB_ID", "")


ELASTIC = {**TORCHRUN, "TORCHELASTIC_RUN_ID": "abc"}
MPI = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "PMIX_NAMESPACE": "prte-9"}
KUBERNETES = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "job-master-0", "KUBERNETES_SERVICE_HOST": "10.0.0.1"}
ARRAY = {**SLURM, "SLURM_ARRAY_JOB_ID": "70", "SLURM_ARRAY_TASK_ID": "3"}


@pytest.mark.parametrize(
    ("environment", "job"),
    [
        (ELASTIC, Job("abc", 3, "torchrun", 4, 1)),
        ({**ELASTIC, "TORCHELASTIC_RESTART_COUNT": "2"}, Job("abc.2", 3, "torchrun", 4, 1)),
        ({**ELASTIC, "TORCHELASTIC_RUN_ID": "none", "MASTER_PORT": "5"}, Job("n1:5.0", 3, "torchrun", 4, 1)),
        (SLURM, Job("slurm-77.0", 1, "Slurm", 2, 0, cluster_id="77")),
        ({**SLURM, **ELASTIC}, Job("slurm-77.0-abc", 3, "torchrun", 4, 1, cluster_id="77")),
        (ARRAY, Job("slurm-70_3.0", 1, "Slurm", 2, 0, cluster_id="70_3")),
        (MPI, Job("prte-9", 1, "MPI", 2)),
        ({"PMI_RANK": "1", "PMI_SIZE": "2", "PMI_JOBID": "kvs_8"}, Job("kvs_8", 1, "MPI", 2)),
        (KUBERNETES, Job("job-master-0", 1, "Kubernetes", 2)),
        ({"JOB_COMPLETION_INDEX": "5", "HOSTNAME": "sweep-5"}, Job("sweep", 5, "Kubernetes")),
    ],
)
def test_what_each_launcher_says(environment: dict[str, str], job: Job) -> None:
    found = current_job(environment)
    assert found is not None and found.node == platform.node()
    assert replace(found, node="") == replace(job, node="")


def test_ranks_without_a_name_are_told_by_who_started_them() -> None:
    environment = {"RANK": "1", "WORLD_SIZE": "2"}
    found = current_job(environment)
    assert found is not None and found.launcher == "torch.distributed"
    assert found.id == f"{platform.node()}-{os.getppid()}.{_began(os.getppid())}"
    assert _began(2**30) == 0


def test_a_second_run_of_a_rank_is_another_job(monkeypatch: pytest.MonkeyPatch, own_store: Path) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "TORCHELASTIC_RUN_ID": "twice"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(job_module, "_begun", Counter())
    for name in ("first", "second"):
        with gpulab.profile(name, show=False, live=False, trace=False):
            gpulab.step()
    with gpulab.profile(show=False, live=False, trace=False, save=False):
        gpulab.step()
    jobs = {entry.name: entry.job.id for entry in Store(own_store / "runs").list() if entry.job is not None}
    assert jobs == {"first": "twice", "second": "twice.run2"}
