"""A recorded script that starts its own ranks: they are recorded too, by way of the environment that they inherit."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from pathlib import Path

FOLLOW = "GPULAB_FOLLOW"
JOB = "GPULAB_JOB"  # the same in all ranks that one script has started; `capture.job` reads it
_FOLDER = str(Path(__file__).parent / "follow")
_PATH = "PYTHONPATH"


@contextmanager
def followed_ranks(
    options: Sequence[str], job_id: str, environment: MutableMapping[str, str] = os.environ
) -> Iterator[None]:
    """Inside, processes that become ranks run under `gpulab record` with these options.

    Nothing is followed where this process is a rank itself: whoever has started it records the others.
    """
    if is_rank(environment) or FOLLOW in environment:
        yield
        return
    before = {name: environment.get(name) for name in (FOLLOW, JOB, _PATH)}
    environment[FOLLOW] = "\n".join(options)
    environment[JOB] = job_id
    environment[_PATH] = os.pathsep.join(filter(None, (_FOLDER, before[_PATH])))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                environment.pop(name, None)
            else:
                environment[name] = value


def is_rank(environment: Mapping[str, str]) -> bool:
    """Whether a launcher has started this process as one of several."""
    return any(name in environment for name in ("LOCAL_RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK"))
