"""In which number formats the GPU's matrix kernels multiply: the time that faster formats could shorten."""

from __future__ import annotations

import numpy as np
from msgspec import Struct

from gpulab.analysis.gpu.device_work import DeviceWork, names_tell
from gpulab.run import Category
from gpulab.timeline import spans
from gpulab.timeline.kernel_names import reading
from gpulab.timeline.launches import replay_of

_FORMATS = ("", "fp32", "tf32", "narrow", "unknown")


class PrecisionUse(Struct, frozen=True):
    """Shares of the time of all kernels but communication, by the format of matrix kernels; `half_able` is the share
    of kernels that only move data, which halves where the data does: not the optimizer's, which stays as it is.
    `unknown` is the share of matrix kernels whose names tell neither format nor use of tensor cores: Triton's.

    `own` is the share of matrix kernels of full precision that no operator of PyTorch started, and that no setting of
    PyTorch reaches: they are in no other share.

    `costliest` names the float32 kernel with the most time, up to its arguments, `costliest_tf32` the one in TF32.
    """

    fp32: float
    tf32: float
    narrow: float
    half_able: float
    costliest: str
    costliest_tf32: str = ""
    unknown: float = 0.0
    own: float = 0.0
    costliest_own: str = ""


def precision_use(work: DeviceWork) -> PrecisionUse | None:
    """None where kernel names do not tell formats (another maker's GPU), or no kernel ran."""
    if not len(work.rows) or not names_tell(work.timeline):
        return None
    matrix = work.of("matrix")
    name = work.timeline.name_id[work.rows]
    formats = np.zeros(len(work.timeline.names), dtype=np.int64)
    for i in np.unique(name[matrix]).tolist():
        formats[i] = _FORMATS.index(_format(work.timeline.names[i]))
    own = _own(work)
    format_of_row = np.where(matrix & ~own, formats[name], 0)
    own &= matrix & np.isin(formats[name], (1, 2))
    return PrecisionUse(
        fp32=work.share(format_of_row == 1),
        tf32=work.share(format_of_row == 2),
        narrow=work.share(format_of_row == 3),
        half_able=work.share(work.of("pointwise", "normalization", "copy", "layout") & ~work.of_optimizer),
        costliest=short_name(work.costliest(format_of_row == 1)),
        costliest_tf32=short_name(work.costliest(format_of_row == 2)),
        unknown=work.share(format_of_row == 4),
        own=work.share(own),
        costliest_own=short_name(work.costliest(own)),
    )


def _own(work: DeviceWork) -> spans.Mask:
    """Rows that were started outside every operator, where those are recorded; a replayed graph hides its own."""
    host = spans.in_category(work.timeline, Category.CPU_OP, Category.USER_ANNOTATION, Category.PYTHON_FUNCTION)
    replayed = replay_of(work.timeline, work.rows) >= 0
    return (work.call >= 0) & (work.operator < 0) & ~replayed & host.any()


def _format(name: str) -> str:
    return "unknown" if reading(name).tensor_cores is None else reading(name).numbers


def short_name(kernel: str) -> str:
    """A kernel's name as a person can read it: without return type, template and arguments."""
    name = kernel.removeprefix("void ").replace("(anonymous namespace)::", "")
    return name.partition("<")[0].partition("(")[0] or kernel[:60]
