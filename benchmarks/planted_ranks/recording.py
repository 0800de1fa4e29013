"""One planted script under `gpulab record --ranks`, as a user calls it, and what its report says."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.own_process import ROOT
from benchmarks.planted.planted import HEALTHY
from benchmarks.planted_ranks.planted import PlantedRanks

LIMIT_S = 240.0


def recorded(planted: PlantedRanks, store: Path | None = None) -> dict[str, Any]:
    """Headline and findings. `store`: where the runs are kept, in a folder by its name.

    Raises RuntimeError where the command fails or ends without one report of all ranks.
    """
    with tempfile.TemporaryDirectory() as folder:
        script, figures = Path(folder, f"{planted.name}.py"), Path(folder, "figures.json")
        script.write_text(planted.text(), encoding="utf-8")
        kept = Path(folder, "kept") if store is None else store / planted.name
        words = [sys.executable, "-m", "gpulab", "record", "--ranks", str(planted.ranks)]
        printed = _output([*words, "--json", str(figures), str(script)], folder, kept)
        if not figures.exists():
            raise RuntimeError(f"no report: {' | '.join(printed.splitlines()[-5:])}")
        if store is not None:
            (kept / "printed.txt").write_text(printed, encoding="utf-8")
        return said(json.loads(figures.read_text(encoding="utf-8")), planted)


def said(document: dict[str, Any], planted: PlantedRanks) -> dict[str, Any]:
    """What the JSON of a job's report says. Raises RuntimeError where it is not of all its ranks."""
    present = document.get("ranks") or {}
    if document.get("source") != "ranks" or len(present.get("present") or ()) != planted.ranks:
        raise RuntimeError(f"the report is of {document.get('source')}, ranks {present.get('present')}")
    keys = [finding["key"] for finding in document["findings"]]
    return {
        "headline": keys[0],
        "findings": keys,
        "summary": document["findings"][0].get("summary", ""),
        "straggler": document.get("straggler"),
        "right": keys[0] == planted.cause,
        "false_alarms": [key for key in keys if key != HEALTHY] if planted.cause == HEALTHY else [],
    }


def _output(words: list[str], folder: str, kept: Path) -> str:
    """What the command prints. It and all its ranks are ended where they take too long."""
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "GPULAB_DIR": str(kept),
        "CUDA_VISIBLE_DEVICES": "",
        "COLUMNS": "120",
    }
    environment.pop("OMP_NUM_THREADS", None)  # as at home: the launcher gives each rank its threads
    with subprocess.Popen(
        words, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    ) as process:  # fmt: skip
        try:
            printed, _ = process.communicate(timeout=LIMIT_S)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    if process.returncode:
        raise RuntimeError(f"status {process.returncode}: {' | '.join(printed.splitlines()[-5:])}")
    return printed
