"""Run by Python in every child of a recorded script, before the child's own code: a child that is a rank is recorded.

Lightning's `ddp`, and torchrun called by a script, start their ranks as `python script.py` or `python -m module` with
variables in the environment. Such a process restarts as `gpulab record script.py`. Other processes are unchanged, and a
`sitecustomize` of the user's own still runs.
"""

import os
import sys


def _follow() -> None:
    record_options = os.environ.pop("GPULAB_FOLLOW", "")
    here = os.path.dirname(os.path.abspath(__file__))
    rest = [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p and os.path.abspath(p) != here]
    if rest:
        os.environ["PYTHONPATH"] = os.pathsep.join(rest)
    else:
        os.environ.pop("PYTHONPATH", None)
    sys.path[:] = [p for p in sys.path if os.path.abspath(p or ".") != here]
    words = list(getattr(sys, "orig_argv", ()))[1:]  # another environment's Python may be older
    options = []
    while words and words[0] in ("-u", "-B", "-O", "-s"):
        options.append(words.pop(0))
    rank = os.environ.get("LOCAL_RANK", "")
    is_rank = rank.isdecimal() and (rank != "0" or "TORCHELASTIC_RUN_ID" in os.environ)
    is_script = bool(words) and words[0].endswith(".py") and os.path.isfile(words[0])
    is_module = len(words) > 1 and words[0] == "-m" and words[1] != "gpulab"
    if record_options and is_rank and (is_script or is_module) and _has_gpulab():
        command = [sys.executable, *options, "-m", "gpulab", "record", *record_options.split("\n"), *words]
        os.execv(sys.executable, command)
    if record_options:  # this process is no rank, but its children may be
        os.environ["GPULAB_FOLLOW"] = record_options
        os.environ["PYTHONPATH"] = os.pathsep.join([here, *rest])


def _has_gpulab() -> bool:
    """Whether gpulab is installed: this may be the Python of another environment."""
    import importlib.util

    return importlib.util.find_spec("gpulab") is not None


def _users_own() -> None:
    """Run the `sitecustomize` that Python would have run without this file."""
    import importlib.machinery
    import importlib.util

    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", sys.path)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


_follow()
_users_own()
