"""What a prediction may rest on beyond the run itself: earlier predictions held against the truth, short runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Known:
    """What is known beyond the run itself.

    `errors`: of each knob, measured over predicted ratio of the predictions that were held against a measurement on
    this machine. `sizes`: median step (µs) and peak memory (bytes; None unknown) by batch size, from short runs.
    `found`: the value of each name as the code has it, where that is known.
    """

    errors: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    sizes: Mapping[int, tuple[float, int | None]] = field(default_factory=dict)
    found: Mapping[str, str] = field(default_factory=dict)


NOTHING = Known()
