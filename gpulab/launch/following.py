"""A recorded script that starts its own ranks: they are recorded too, by way of the environment that they inherit."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from gpulab.knobs.variables import setting_names

FOLLOW = "GPULAB_FOLLOW"
_FOLDER = str(Path(__file__).parent / "follow")
_PATH = "PYTHONPATH"


@contextmanager
def followed_ranks(
    options: Sequence[str], names: Mapping[str, str], environment: MutableMapping[str, str] = os.environ
) -> Iterator[None]:
    """Inside, processes that become ranks run under `gpulab record` with these options, and see these variables.

    Nothing is followed where this process is a rank itself: whoever has started it records the others.
    """
    if is_rank(environment) or FOLLOW in environment:
        yield
        return
    path = os.pathsep.join(filter(None, (_FOLDER, environment.get(_PATH))))
    with setting_names(environment, {**names, FOLLOW: "\n".join(options), _PATH: path}):
        yield


def is_rank(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether a launcher has started this process as one of several."""
    return any(name in environment for name in ("LOCAL_RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK"))
