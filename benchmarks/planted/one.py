"""One planted cell in this process: profiled, diagnosed, its cure measured. Called by `own_process`."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from benchmarks.planted import judging, named
from benchmarks.planted.curing import measured
from benchmarks.planted.planted import Planted
from benchmarks.planted.profiling import profiled


def row(name: str, diagnose: bool = True, cures: bool = True, store: str = "") -> dict[str, Any]:
    """The columns of the cell's row that need it to run. Files that the cell writes are gone afterwards.

    `store`: a folder in which the diagnosed run is kept, under the cell's name; empty for none.
    """
    planted = named(name)
    if not planted.gpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ["HF_HUB_OFFLINE"] = "1"
    home = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        os.environ["GPULAB_DIR"] = folder  # runs and earlier predictions of this machine have no say
        try:
            return _diagnosed(planted, cures, store) if diagnose else _measured(planted, None)
        finally:
            os.chdir(home)


def _diagnosed(planted: Planted, cures: bool, store: str) -> dict[str, Any]:
    import gpulab
    from gpulab.store.folders import Store

    run = profiled(planted)
    if store:
        Store(Path(store)).save(replace(run, settings=replace(run.settings, name=planted.name)))
    told = judging.said(gpulab.diagnose(run))
    finding = judging.true_finding(planted, told)
    truth = _measured(planted, finding) if cures else {"measured": None, "untrue": ""}
    return {
        **told,
        **judging.judged(planted, told),
        **truth,
        **judging.prediction_of(finding, truth["measured"]),
    }


def _measured(planted: Planted, finding: dict[str, Any] | None) -> dict[str, Any]:
    gains = measured(planted, finding["settings"] if finding else {})
    return {"measured": gains, "untrue": judging.truth_of(planted, gains)}
