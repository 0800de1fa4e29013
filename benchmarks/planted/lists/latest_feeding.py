"""Cells on feeding, written last, without a look at the rules, and kept aside."""

from __future__ import annotations

from benchmarks.planted.planted import Planted

LATEST_FEEDING: tuple[Planted, ...] = ()
