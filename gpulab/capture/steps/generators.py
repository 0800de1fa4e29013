"""Whether what is raised here goes through a generator: one of an earlier cell has ended then, and gives nothing more.

`batches = cycle(loader)` in one cell and `next(batches)` in the next is common, and so is a loader within `tqdm`.
"""

from __future__ import annotations

import inspect
import sys
from types import FrameType

GENERATORS = inspect.CO_GENERATOR | inspect.CO_ASYNC_GENERATOR


def frames() -> frozenset[FrameType]:
    """All that run on this thread now: those of the caller, its caller and so on."""
    found, frame = set(), inspect.currentframe()
    while frame is not None:
        found.add(frame)
        frame = frame.f_back
    return frozenset(found)


def inside_generator(outside: frozenset[FrameType]) -> bool:
    """Whether a generator runs between the caller and the frames `outside`."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame not in outside:
        if frame.f_code.co_flags & GENERATORS:
            return True
        frame = frame.f_back
    return False
