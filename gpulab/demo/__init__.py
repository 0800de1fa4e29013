"""A small real training on real image files: what `make demo` and the quick-start notebook profile.

Images are scikit-learn's handwritten digits (its bundled copy of the UCI set, nothing is downloaded), written as PNG
files once and opened, decoded and augmented for every sample, so that loading is real work.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpulab.user_code import counts_as_users

if TYPE_CHECKING:
    from gpulab.demo.digits import DigitsFolder, write_digits

counts_as_users(__file__)

__all__ = ["DigitsFolder", "write_digits"]


def __getattr__(name: str) -> object:
    """Imports PyTorch on first use, after `python -m gpulab.demo` has announced it."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from gpulab.demo import digits

    return getattr(digits, name)
