"""All planted cells."""

from __future__ import annotations

from benchmarks.planted.lists.computing import COMPUTING
from benchmarks.planted.lists.feeding import FEEDING
from benchmarks.planted.lists.fresh_computing import FRESH_COMPUTING
from benchmarks.planted.lists.fresh_feeding import FRESH_FEEDING
from benchmarks.planted.lists.fresh_hosting import FRESH_HOSTING
from benchmarks.planted.lists.fresh_layout import FRESH_LAYOUT
from benchmarks.planted.lists.healthy import HEALTHY
from benchmarks.planted.lists.hosting import HOSTING
from benchmarks.planted.lists.later_feeding import LATER_FEEDING
from benchmarks.planted.lists.later_hosting import LATER_HOSTING
from benchmarks.planted.lists.latest_feeding import LATEST_FEEDING
from benchmarks.planted.lists.latest_hosting import LATEST_HOSTING
from benchmarks.planted.lists.layered import LAYERED
from benchmarks.planted.lists.more_computing import MORE_COMPUTING
from benchmarks.planted.lists.more_feeding import MORE_FEEDING
from benchmarks.planted.lists.on_gpu import ON_GPU
from benchmarks.planted.planted import Planted

FRESH = (*FRESH_FEEDING, *FRESH_HOSTING, *FRESH_COMPUTING, *FRESH_LAYOUT)
LATER = (*LATER_FEEDING, *LATER_HOSTING)
LATEST = (*LATEST_FEEDING, *LATEST_HOSTING)
MORE = (*MORE_FEEDING, *MORE_COMPUTING)
CELLS: tuple[Planted, ...] = (
    *FEEDING,
    *HOSTING,
    *COMPUTING,
    *LAYERED,
    *HEALTHY,
    *MORE,
    *FRESH,
    *LATER,
    *LATEST,
    *ON_GPU,
)
