"""Cells on feeding, written without a look at the rules and kept aside."""

from __future__ import annotations

from benchmarks.planted.planted import Planted

FRESH_FEEDING: tuple[Planted, ...] = ()
