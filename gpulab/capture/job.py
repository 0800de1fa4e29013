"""Which job this process is a rank of, as PyTorch says it, or the launcher that has started it.

Sources: PyTorch, "torchrun", environment variables; Slurm, `srun`, output environment variables; Open MPI and MPICH,
environment variables of a process; Kubernetes, "Indexed Job"; the variables that Kubeflow's PyTorchJob sets.
"""

from __future__ import annotations

import os
import platform
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from msgspec.structs import replace

from gpulab.run import Job, Launcher

JOB = "GPULAB_JOB"  # set by `gpulab record` for the ranks that a script starts itself
UNNAMED = "none"  # torchrun's id of a job that nobody has given one

_RANKS: tuple[tuple[Launcher, str, str, str], ...] = (  # the variable of the rank, of how many, of the rank on the node
    ("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK"),
    ("Slurm", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
    ("MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("MPI", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
    ("Kubernetes", "JOB_COMPLETION_INDEX", "", ""),
)
_MPI_JOBS = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "PMI_JOBID")


def current_job(environment: Mapping[str, str] = os.environ) -> Job | None:
    """The job, from `torch.distributed` once it is initialised, else from the launcher's environment variables.

    None for a process that is none of several and belongs to no cluster's job.
    """
    job = _from_environment(environment)
    rank_and_size = _from_torch()
    if rank_and_size is None:
        return job
    rank, size = rank_and_size
    if job is not None and (job.rank, job.world_size) == (rank, size):
        return job
    local = _number(environment, "LOCAL_RANK")
    return _job(environment, rank, "torch.distributed", size, local)


class RunOfJob:
    """The job of one run of this process. A rank may record several runs, and each belongs with those of the others."""

    def __init__(self) -> None:
        self._number = 0

    def current(self) -> Job | None:
        """The job; its id says which of the runs this is, from the second on."""
        job = current_job()
        if job is None:
            return None
        if not self._number:
            _begun[job.id] += 1
            self._number = _begun[job.id]
        return job if self._number == 1 else replace(job, id=f"{job.id}.run{self._number}")


_begun: Counter[str] = Counter()  # runs, by job


def cluster_id(environment: Mapping[str, str] = os.environ) -> str:
    """Of the cluster's job that this process is in; empty outside of one."""
    array, task = environment.get("SLURM_ARRAY_JOB_ID"), environment.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{task}" if array and task else environment.get("SLURM_JOB_ID", "")


def _from_environment(environment: Mapping[str, str]) -> Job | None:
    for launcher, rank_name, size_name, local_name in _RANKS:
        rank, size = _number(environment, rank_name), _number(environment, size_name)
        if rank is None or (size is None and size_name):
            continue
        if launcher == "torchrun" and "TORCHELASTIC_RUN_ID" not in environment:
            launcher = "Kubernetes" if "KUBERNETES_SERVICE_HOST" in environment else "torch.distributed"
        if launcher == "torch.distributed" and size == 1:
            continue  # RANK=0 WORLD_SIZE=1, as scripts set it by habit
        return _job(environment, rank, launcher, size, _number(environment, local_name))
    return None


def _job(environment: Mapping[str, str], rank: int, launcher: Launcher, size: int | None, local: int | None) -> Job:
    id_, node, cluster = _id(environment, launcher), platform.node(), cluster_id(environment)
    return Job(id_, rank, launcher, size, local, node, cluster, environment.get("SLURM_JOB_PARTITION", ""))


def _from_torch() -> tuple[int, int] | None:
    """Rank and number of ranks of the default group; None where there is none, or no torch was imported."""
    distributed = sys.modules.get("torch.distributed")
    try:
        if distributed is None or not distributed.is_available() or not distributed.is_initialized():
            return None
        rank, size = int(distributed.get_rank()), int(distributed.get_world_size())
    except Exception:  # it is destroyed at this moment
        return None
    return (rank, size) if size > 1 else None


def torchrun_job_id(run_id: str, environment: Mapping[str, str] = os.environ) -> str:
    """The job's id in ranks that torchrun starts under this `run_id` from a process with this environment."""
    return _id({**environment, "TORCHELASTIC_RUN_ID": run_id, "TORCHELASTIC_RESTART_COUNT": "0"}, "torchrun")


def _id(environment: Mapping[str, str], launcher: Launcher) -> str:
    """The same in all ranks: from the cluster and the launcher, else from the process that has started them."""
    step = environment.get("SLURM_STEP_ID", "")
    names = [environment[JOB]] if environment.get(JOB) else []
    names += [f"slurm-{cluster_id(environment)}.{step}"] if cluster_id(environment) else []
    elastic = environment.get("TORCHELASTIC_RUN_ID", UNNAMED)
    restarts = environment.get("TORCHELASTIC_RESTART_COUNT", "0")
    if elastic != UNNAMED:
        names.append(elastic if restarts == "0" else f"{elastic}.{restarts}")
    elif launcher == "torchrun":
        one_node = environment.get("LOCAL_WORLD_SIZE") == environment.get("WORLD_SIZE")
        meeting = f"{environment.get('MASTER_ADDR', '')}:{environment.get('MASTER_PORT', '')}"
        names.append((f"{platform.node()}-{_parent()}" if one_node else meeting) + f".{restarts}")
    elif launcher == "MPI":
        names += [environment[name] for name in _MPI_JOBS if name in environment][:1]
    elif launcher == "Kubernetes":
        address = environment.get("MASTER_ADDR") or environment.get("HOSTNAME", "").rpartition("-")[0]
        names += [address] if address else []
    return "-".join(names) or f"{platform.node()}-{_parent()}"


def _parent() -> str:
    """The process that has started this one, which no later process is mistaken for."""
    parent = os.getppid()
    return f"{parent}.{_began(parent)}"


def _began(process: int) -> int:
    """When a process began, in the system's own count; 0 where that cannot be told."""
    try:
        return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return 0


def _number(environment: Mapping[str, str], name: str) -> int | None:
    value = environment.get(name, "") if name else ""
    return int(value) if value.isdecimal() else None
