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
    before = environment.get(_PATH)
    path = os.pathsep.join(filter(None, (_FOLDER, before)))
    with setting_names(environment, {**names, FOLLOW: "\n".join(options)}):
        environment[_PATH] = path
        try:
            yield
        finally:
            _put_back(environment, path, before)


def _put_back(environment: MutableMapping[str, str], ours: str, before: str | None) -> None:
    """The path as it was; where the code inside has set another, that one stays, without our folder."""
    present = environment.get(_PATH)
    if present is None:
        return
    if present != ours:
        before = os.pathsep.join(part for part in present.split(os.pathsep) if part != _FOLDER)
    if before:
        environment[_PATH] = before
    else:
        del environment[_PATH]


def is_rank(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether a launcher has started this process as one of several."""
    return any(name in environment for name in ("LOCAL_RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK"))
