"""gpulab: see why a GPU idles, turn a knob, prove the cure.

`%load_ext gpulab` adds `%%gpuprofile`; `gpulab.profile` does the same for a block of code, `gpulab.step` marks steps
by hand, `gpulab.runs` holds the measured runs, `gpulab.load` reads traces from other tools, and `gpulab.compare`
compares runs. Everything is imported at first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpulab.api.climb import climb, climbs
    from gpulab.api.experiment import experiment, experiments, headspace, headspaces
    from gpulab.api.fleet import fleet
    from gpulab.api.predict import predict, scoreboard
    from gpulab.api.profile import profile
    from gpulab.api.reading import compare, diagnose, load, report, runs
    from gpulab.bench.opening import lab
    from gpulab.capture.pilot import mark_step as step
    from gpulab.run import Ranks, Run

__version__ = "0.1.0"
__all__ = [
    "Ranks",
    "Run",
    "climb",
    "climbs",
    "compare",
    "diagnose",
    "experiment",
    "experiments",
    "fleet",
    "headspace",
    "headspaces",
    "lab",
    "load",
    "load_ipython_extension",
    "predict",
    "profile",
    "report",
    "runs",
    "scoreboard",
    "step",
    "unload_ipython_extension",
]

_MODULES = {
    "gpulab.api.climb": ("climb", "climbs"),
    "gpulab.api.experiment": ("experiment", "experiments", "headspace", "headspaces"),
    "gpulab.api.fleet": ("fleet",),
    "gpulab.api.predict": ("predict", "scoreboard"),
    "gpulab.api.profile": ("profile",),
    "gpulab.api.reading": ("compare", "diagnose", "load", "report", "runs"),
    "gpulab.bench.opening": ("lab",),
    "gpulab.capture.pilot": ("step",),
    "gpulab.run": ("Ranks", "Run"),
}
_DOORS = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _DOORS:
        raise AttributeError(f"module 'gpulab' has no attribute {name!r}")
    return getattr(_imported(_DOORS[name]), "mark_step" if name == "step" else name)


def _imported(module: str) -> Any:
    """A module of gpulab. If a dependency is missing, the error is one sentence: a system Python may lack msgspec."""
    try:
        return import_module(module)
    except ModuleNotFoundError as e:
        if e.name != "msgspec":
            raise
        raise ImportError("gpulab needs the package msgspec, which is not installed: pip install msgspec") from None


def __dir__() -> list[str]:
    return sorted({*globals(), *_DOORS})


def load_ipython_extension(shell: Any) -> None:
    """`%load_ext gpulab`: register the magics."""
    from gpulab.magics import register

    register(shell)


def unload_ipython_extension(shell: Any) -> None:
    """`%unload_ext gpulab`: unregister the magics."""
    from gpulab.magics import unregister

    unregister(shell)
