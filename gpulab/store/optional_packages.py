"""Whether a package that gpulab can do without is installed."""

from __future__ import annotations

from importlib.util import find_spec


def installed(name: str) -> bool:
    """Whether a package can be imported, without importing it. A folder that merely has its name does not count."""
    try:
        spec = find_spec(name)
    except (ImportError, ValueError):
        return False
    return spec is not None and spec.origin is not None
