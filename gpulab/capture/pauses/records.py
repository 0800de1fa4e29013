"""What was noticed of the user's own lines in a run, as columns of its record: stack samples, pauses, their places."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gpulab.capture.pauses.hooks import recompiled_because
from gpulab.capture.pauses.pauses import Heard
from gpulab.capture.pauses.source_lines import Naming
from gpulab.capture.pauses.stack_sampler import Seen
from gpulab.run import Pause, Place, StackSamples


@dataclass(frozen=True, slots=True)
class Noticed:
    pauses: tuple[Pause, ...]
    stack: StackSamples | None
    places: tuple[Place, ...]


def noticed(origin_ns: int, heard: list[Heard], seen: Seen | None, naming: Naming) -> Noticed:
    """On the run's clock; what was heard before the run began (its own start) is left out."""
    because = recompiled_because() if any(kind == "compile" for kind, *_ in heard) else {}
    pauses = tuple(
        Pause(kind, start - origin_ns, end - origin_ns, naming.number(spot), because.get(detail, detail))
        for kind, start, end, spot, detail in heard
        if start >= origin_ns
    )
    stack = None
    if seen is not None and seen.t_ns:
        count = min(len(seen.t_ns), len(seen.spots), len(seen.after))
        place = np.array([naming.number(spot) for spot in seen.spots[:count]], dtype=np.int32)
        t_ns = np.array(seen.t_ns[:count], dtype=np.int64) - origin_ns
        after = np.array(seen.after[:count], dtype=np.uint8)
        calls = np.array([spot in seen.callers for spot in seen.spots[:count]], dtype=np.uint8)
        stack = StackSamples(t_ns, place, seen.began_ns - origin_ns, after, calls)
    return Noticed(pauses, stack, naming.places)
