"""What Kineto writes beside a device row of a live window: bytes of a copy, blocks per SM, estimated occupancy, …"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from gpulab.run import Float64, Int64
from gpulab.trace.columns import extra_columns
from gpulab.trace.events import Args

_DECODE = msgspec.json.Decoder(Args).decode


def device_columns(events: list[Any], rows: Int64) -> dict[str, Float64]:
    """The columns that a trace file has, too: one value per event, NaN off `rows`. No column where Kineto wrote none.

    Empty where the events of this PyTorch have no `metadata_json`, or the session did not ask for it.
    """
    if not len(rows) or not hasattr(events[0], "metadata_json"):
        return {}
    written = extra_columns([_arguments(events[row].metadata_json()) for row in rows.tolist()])
    columns = {name: np.full(len(events), np.nan) for name in written}
    for name, values in written.items():
        columns[name][rows] = values
    return columns


def _arguments(members: str) -> Args:
    """The members of a JSON object, written without its braces; nothing of it where it is no JSON."""
    try:
        return _DECODE(f"{{{members}}}")
    except (msgspec.DecodeError, UnicodeEncodeError):
        return Args()


__all__ = ["device_columns"]
