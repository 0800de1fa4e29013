"""Which kernels use matrix units, told by their names, because no trace says it."""

from __future__ import annotations

import numpy as np

from gpulab.run import Category, Timeline
from gpulab.timeline.kernel_names import reading


def uses_tensor_cores(name: str) -> bool | None:
    """Whether a kernel of an NVIDIA GPU of that name computes on tensor cores; None: the name does not tell."""
    return reading(name).tensor_cores


def names_tell(timeline: Timeline) -> bool:
    """Whether kernel names tell it here: only where CUDA's own calls show that the GPU is NVIDIA's.

    AMD's libraries name only some of their matrix kernels.
    """
    calls = np.isin(timeline.category, [int(Category.CUDA_RUNTIME), int(Category.CUDA_DRIVER)])
    return any(timeline.names[i].startswith("cu") for i in np.unique(timeline.name_id[calls]).tolist())
