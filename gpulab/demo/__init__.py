"""A small real training on real image files: what `make demo` and the quick-start notebook profile.

Images are scikit-learn's handwritten digits (its bundled copy of the UCI set, nothing is downloaded), written as PNG
files once and opened, decoded and augmented for every sample, so that loading is real work.
"""

from __future__ import annotations

from gpulab.demo.digits import DigitsFolder, write_digits
from gpulab.user_code import counts_as_users

counts_as_users(__file__)

__all__ = ["DigitsFolder", "write_digits"]
