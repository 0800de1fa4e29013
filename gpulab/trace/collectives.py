"""What NCCL's kernels carry, from their arguments in a trace: kind, size, process group and sequence number.

Source: PyTorch's `ParamCommsUtils`, whose names Kineto writes to a kernel of NCCL or RCCL. A kernel that names no
collective has none of these columns; gloo's calls name none.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from gpulab.run import Collective
from gpulab.trace.events import Args, Value

# Bytes of an element, by c10's name of its type.
ELEMENT_BYTES = {
    **dict.fromkeys(("Byte", "Char", "Bool", "Float8_e4m3fn", "Float8_e5m2", "Float8_e4m3fnuz", "Float8_e5m2fnuz"), 1),
    **dict.fromkeys(("Short", "UInt16", "Half", "BFloat16"), 2),
    **dict.fromkeys(("Int", "UInt32", "Float", "ComplexHalf"), 4),
    **dict.fromkeys(("Long", "UInt64", "Double", "ComplexFloat"), 8),
    "ComplexDouble": 16,
}
# In the spellings of PyTorch's process groups: "_allgather_base", "all_gather_into_tensor_coalesced", "alltoallv", …
_KINDS = (
    ("allreduce", Collective.ALL_REDUCE),
    ("reducescatter", Collective.REDUCE_SCATTER),
    ("allgather", Collective.ALL_GATHER),
    ("alltoall", Collective.ALL_TO_ALL),
    ("broadcast", Collective.BROADCAST),
    ("reduce", Collective.REDUCE),
    ("gather", Collective.GATHER),
    ("scatter", Collective.SCATTER),
    ("send", Collective.SEND),
    ("recv", Collective.RECEIVE),
)


def collective_columns(args: Sequence[Args]) -> dict[str, list[Value]]:
    """One value per row, None where it carries nothing between ranks or the trace does not say.

    The size is nccl-tests': of the larger of what goes in and what comes out, in bytes.
    """
    if all(a.collective is None for a in args):
        return {}
    kinds = [_kind(a.collective) for a in args]
    has = [a.collective is not None for a in args]
    return {
        "collective": [None if kind is None else int(kind) for kind in kinds],
        "message_bytes": [None if k is None else _message_bytes(a) for a, k in zip(args, kinds, strict=True)],
        "group_size": [a.group_size if there else None for a, there in zip(args, has, strict=True)],
        "process_group": [_number(a.process_group) if there else None for a, there in zip(args, has, strict=True)],
        "collective_sequence": [a.sequence if there else None for a, there in zip(args, has, strict=True)],
    }


def _kind(name: Value) -> Collective | None:
    if not isinstance(name, str):
        return None
    spelled = name.lower().replace("_", "")
    return next((kind for part, kind in _KINDS if part in spelled), None)


def _message_bytes(args: Args) -> float | None:
    width = ELEMENT_BYTES.get(str(args.element_type))
    counts = [n for n in (args.elements_in, args.elements_out) if isinstance(n, int | float) and math.isfinite(n)]
    return float(max(counts)) * width if width is not None and counts and max(counts) > 0 else None


def _number(name: Value) -> int | None:
    """PyTorch numbers its groups; a name that is none is not kept."""
    return int(name) if isinstance(name, str) and name.isascii() and name.isdecimal() and len(name) < 10 else None
