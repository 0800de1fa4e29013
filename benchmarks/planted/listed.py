"""All planted cells."""

from __future__ import annotations

from benchmarks.planted.lists.computing import COMPUTING
from benchmarks.planted.lists.feeding import FEEDING
from benchmarks.planted.lists.fresh_computing import FRESH_COMPUTING
from benchmarks.planted.lists.fresh_feeding import FRESH_FEEDING
from benchmarks.planted.lists.healthy import HEALTHY
from benchmarks.planted.lists.hosting import HOSTING
from benchmarks.planted.lists.layered import LAYERED
from benchmarks.planted.lists.on_gpu import ON_GPU
from benchmarks.planted.planted import Planted

FRESH = (*FRESH_FEEDING, *FRESH_COMPUTING)
CELLS: tuple[Planted, ...] = (*FEEDING, *HOSTING, *COMPUTING, *LAYERED, *HEALTHY, *FRESH, *ON_GPU)
