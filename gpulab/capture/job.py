"""Finds the job of which this process is a rank: from PyTorch, or from the launcher that has started it.

Sources: PyTorch, "torchrun", environment variables; Slurm, `srun`, output environment variables; Open MPI and MPICH,
environment variables of a process; Kubernetes, "Indexed Job"; the variables that Kubeflow's PyTorchJob sets.
"""

from __future__ import annotations

import os
import platform
import re
import sys
import zlib
from collections import Counter
from collections.abc import Mapping, MutableMapping
from contextlib import ExitStack
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from msgspec import Struct, field
from msgspec.structs import replace

from gpulab.patching.attributes import replaced
from gpulab.run import Job, Launcher
from gpulab.store.run_format import ARRIVAL, Arrivals

JOB = "GPULAB_JOB"  # set by `gpulab record` for the ranks that a script starts itself
UNNAMED = "none"  # torchrun's default id of a job
_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")  # of torchrun --standalone; its first 8 digits suffice

_RANKS: tuple[tuple[Launcher, str, str, str], ...] = (  # variables: the rank, the number of ranks, the rank on the node
    ("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK"),
    ("Slurm", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
    ("MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("MPI", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
    ("Kubernetes", "JOB_COMPLETION_INDEX", "", ""),
)
_MPI_JOBS = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "PMI_JOBID")


def current_job(environment: Mapping[str, str] = os.environ) -> Job | None:
    """The job, from `torch.distributed` once it is initialised, else from the launcher's environment variables.

    None for a process that is neither one of several ranks nor in a cluster's job.
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
    """The job of one run of this process. A rank may have several runs: the n-th of all ranks belong together."""

    def __init__(self) -> None:
        self._number = 0

    def current(self) -> Job | None:
        """The job; from the second run on its id contains the run's number."""
        job = current_job()
        if job is None:
            return None
        if not self._number:
            _begun[job.id] += 1
            self._number = _begun[job.id]
        return job if self._number == 1 else replace(job, id=f"{job.id}.run{self._number}")


_begun: Counter[str] = Counter()  # number of runs, by job


def cluster_id(environment: Mapping[str, str] = os.environ) -> str:
    """The id of the cluster's job in which this process runs; empty outside of one."""
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
            continue  # RANK=0 WORLD_SIZE=1, which scripts set by habit
        return _job(environment, rank, launcher, size, _number(environment, local_name))
    return None


def _job(environment: Mapping[str, str], rank: int, launcher: Launcher, size: int | None, local: int | None) -> Job:
    id_, node, cluster = _id(environment, launcher), platform.node(), cluster_id(environment)
    return Job(id_, rank, launcher, size, local, node, cluster, environment.get("SLURM_JOB_PARTITION", ""))


def _from_torch() -> tuple[int, int] | None:
    """Rank and number of ranks of the default group; None if there is no such group, or torch is not imported."""
    distributed = sys.modules.get("torch.distributed")
    try:
        if distributed is None or not distributed.is_available() or not distributed.is_initialized():
            return None
        rank, size = int(distributed.get_rank()), int(distributed.get_world_size())
    except Exception:  # the group is just being destroyed
        return None
    return (rank, size) if size > 1 else None


def torchrun_job_id(run_id: str, environment: Mapping[str, str] = os.environ) -> str:
    """The job's id in the ranks that torchrun starts with this `run_id` from a process with this environment."""
    return _id({**environment, "TORCHELASTIC_RUN_ID": run_id, "TORCHELASTIC_RESTART_COUNT": "0"}, "torchrun")


def _id(environment: Mapping[str, str], launcher: Launcher) -> str:
    """An id that all ranks share: from the cluster and the launcher, else from their parent process."""
    step = environment.get("SLURM_STEP_ID", "")
    names = [environment[JOB]] if environment.get(JOB) else []
    names += [f"slurm-{cluster_id(environment)}.{step}"] if cluster_id(environment) else []
    elastic = environment.get("TORCHELASTIC_RUN_ID", UNNAMED)
    restarts = environment.get("TORCHELASTIC_RESTART_COUNT", "0")
    if elastic != UNNAMED:
        name = elastic.split("-")[0] if _UUID.fullmatch(elastic) else elastic
        names.append(name if restarts == "0" else f"{name}.{restarts}")
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
    """The parent process, by its number and start time, so that no later process is mistaken for it."""
    parent = os.getppid()
    return f"{parent}.{_began(parent)}"


def _began(process: int) -> int:
    """When a process began, in the system's clock ticks; 0 if unknown."""
    try:
        return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return 0


def _number(environment: Mapping[str, str], name: str) -> int | None:
    value = environment.get(name, "") if name else ""
    return int(value) if value.isdecimal() else None


_NO_RANKS = ("torch.utils.data.", "multiprocessing.", "concurrent.", "joblib.", "gpulab.")


class StartedProcesses:
    """Counts the processes that the user's code starts, from `install` on."""

    def __init__(self) -> None:
        self.count = 0

    def install(self, undo: ExitStack) -> None:
        """Count every start until `undo`."""
        own = os.getpid()

        def wrap(original: Any) -> Any:
            def start(process: BaseProcess) -> None:
                if os.getpid() == own and not _module(process).startswith(_NO_RANKS):
                    self.count += 1
                original(process)

            return start

        undo.enter_context(replaced(BaseProcess, "start", wrap))


def _module(process: BaseProcess) -> str:
    """The module of the function that the process runs."""
    return str(getattr(getattr(process, "_target", None), "__module__", None) or type(process).__module__)


BUFFER = "TORCH_FR_BUFFER_SIZE"
ENTRIES = 64
MOST_ENTRIES = 256  # a larger buffer would take too long to read
_BY_HOST = ("gloo:", "mpi:", "ucc:")


class _Entry(Struct):
    collective_seq_id: int = -1
    time_created_ns: int = 0
    profiling_name: str = ""
    pg_name: str = ""
    process_group: tuple[str, ...] | str = ""


class _Dump(Struct):
    entries: list[_Entry] = field(default_factory=list)


_DECODER = msgspec.json.Decoder(_Dump)


def keep_few(environment: MutableMapping[str, str] = os.environ) -> None:
    """Limit PyTorch's flight recorder in this process, unless torch is imported already or the user has set a size."""
    if "torch" not in sys.modules:
        environment.setdefault(BUFFER, str(ENTRIES))


def arrivals(environment: MutableMapping[str, str] = os.environ) -> Arrivals:
    """The arrivals at the newest collectives on the host, in order; empty if PyTorch does not record them."""
    nothing: Arrivals = np.empty(0, ARRIVAL)
    bindings: Any = sys.modules.get("torch._C._distributed_c10d")
    dump = getattr(bindings, "_dump_fr_trace_json", None)
    size = environment.get(BUFFER, "")
    if dump is None or not (size.isdecimal() and 0 < int(size) <= MOST_ENTRIES):
        return nothing
    try:
        entries = _DECODER.decode(dump()).entries
    except Exception:  # a private function, which may differ between versions
        return nothing
    rows = [
        (zlib.crc32(repr(e.pg_name or e.process_group).encode()), e.collective_seq_id, e.time_created_ns)
        for e in entries
        if e.profiling_name.startswith(_BY_HOST) and e.collective_seq_id >= 0
    ]
    return np.array(rows, ARRIVAL) if rows else nothing
