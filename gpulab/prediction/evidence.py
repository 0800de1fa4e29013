"""What a prediction may rest on beyond the run itself: earlier predictions held against the truth, short runs."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct, field


class PriorEvidence(Struct, frozen=True):
    """What earlier runs on this machine say beyond the run itself.

    `errors`: of each knob, measured over predicted ratio of the predictions that were held against a measurement on
    this machine. `sizes`: median step (µs) and peak memory (bytes; None unknown) by batch size, from short runs.
    `values_before`: the value of each name as the code has it, where that was seen.
    """

    errors: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    sizes: Mapping[int, tuple[float, int | None]] = field(default_factory=dict)
    values_before: Mapping[str, str] = field(default_factory=dict)


NOTHING = PriorEvidence()
