"""Cells on memory layout, written without a look at the rules and kept aside."""

from __future__ import annotations

from benchmarks.planted.planted import Planted

FRESH_LAYOUT: tuple[Planted, ...] = (
    Planted(
        "cells_found_again_next_frame", ("layout",),
        "the scores are copied to have their columns in rows, and back, in each of five rounds",
        ((
            """    turned = scores.transpose(-2, -1).contiguous()
    return normalise_rows(turned).transpose(-2, -1).contiguous()
""",
            "    return F.log_softmax(scores, dim=-2)\n",
        ),),
        batch=8, steps=20, warmup=5,
    ),
    Planted(
        "lightning_thermal_drone_upscaled", ("layout",),
        "each part has its input copied to its own memory format, which the part after it undoes",
        (("drift_format=torch.contiguous_format", "drift_format=torch.channels_last"),),
        framework="lightning", batch=8, steps=16, warmup=4,
    ),
)  # fmt: skip
