"""Sizes of matrix products, from the shapes that a trace with record_shapes=True holds of its operators."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from gpulab.run import Float64, Int64
from gpulab.trace.events import Args, Span

COLUMNS = ("product_m", "product_n", "product_k")
# Which of an operator's inputs are the two factors.
FACTORS = {
    "aten::mm": (0, 1),
    "aten::bmm": (0, 1),
    "aten::addmm": (1, 2),
    "aten::baddbmm": (1, 2),
    "aten::_addmm_activation": (1, 2),
    "aten::_scaled_mm": (0, 1),
}


_dims: msgspec.json.Decoder[list[object]] = msgspec.json.Decoder(list)


def product_sizes(
    spans: Sequence[Span], args: Sequence[Args | None], products: npt.NDArray[np.intp]
) -> tuple[Int64, dict[str, Float64]]:
    """Which of the spans are products of two matrices of known shapes, and their m, n and k: [m, k] by [k, n].

    `products` are the rows whose names are among FACTORS.
    """
    rows, sizes = [], []
    for i in products.tolist():
        given = args[i]
        if given is None:
            continue
        product = _sizes(bytes(given.input_dims), FACTORS[spans[i].name])
        if product is not None:
            rows.append(i)
            sizes.append(product)
    table = np.array(sizes, dtype=np.float64).reshape(-1, 3)
    return np.array(rows, dtype=np.int64), {name: table[:, i] for i, name in enumerate(COLUMNS)} if rows else {}


def _sizes(written: bytes, factors: tuple[int, int]) -> tuple[int, int, int] | None:
    """None where the shapes are not those of a product: another version's spelling, or an odd file."""
    try:
        dims = _dims.decode(written)
    except (msgspec.MsgspecError, RecursionError):
        return None
    if len(dims) <= factors[1]:
        return None
    a, b = _shape(dims[factors[0]]), _shape(dims[factors[1]])
    if a is None or b is None or a[-1] != b[-2]:
        return None
    return a[-2], b[-1], a[-1]


def _shape(given: object) -> list[int] | None:
    """Of a matrix, or of a batch of them."""
    if not isinstance(given, list) or len(given) < 2:
        return None
    return given if all(type(n) is int and 0 < n < 1 << 53 for n in given) else None
