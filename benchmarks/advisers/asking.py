"""Asks each adviser, each in a process that can be given up on."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.advisers.advice import plain
from benchmarks.advisers.recording import exported, recorded
from benchmarks.planted import named

LIMIT_S = 120.0
PEERS = "PEERS"  # names a Python in which HTA 0.5.0 is installed


def of_cell(name: str, trace: str) -> dict[str, Any]:
    """The plugin's and the pattern matcher's words about a cell; its trace is left at `trace`."""
    planted = named(name)
    os.environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "") if planted.gpu else ""
    os.environ["HF_HUB_OFFLINE"] = "1"
    home = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            profiler, _kept = recorded(planted)
        finally:
            os.chdir(home)
    exported(profiler, Path(trace))
    return {"plugin": plugin(trace), "matcher": matched(profiler)}


def of_trace(trace: str) -> dict[str, Any]:
    """Of a trace from elsewhere: the matcher cannot read one."""
    return {"plugin": plugin(trace), "matcher": {"cannot": "reads a live profile only, no trace file"}}


def matched(profiler: Any) -> dict[str, Any]:
    """What `report_all_anti_patterns` prints, each sentence once."""
    from torch.profiler._pattern_matcher import report_all_anti_patterns

    out = io.StringIO()
    try:
        with contextlib.redirect_stdout(out):
            report_all_anti_patterns(profiler, should_benchmark=False, print_enable=True)
    except Exception as e:
        return {"cannot": f"fails: {type(e).__name__}: {e}"}
    lines = [line.strip() for line in out.getvalue().splitlines()]
    skipped = ("-", "[", "Matched Events", "Summary")
    said = [line for line in lines if line and not line.startswith(skipped)]
    return {"advice": [plain(line) for line in dict.fromkeys(said) if ": " not in line or "events matched" not in line]}


def plugin(trace: str) -> dict[str, Any]:
    """The recommendations of torch-tb-profiler's overview, and its figures."""
    logging.disable(logging.CRITICAL)
    try:
        from torch_tb_profiler.profiler.data import RunProfileData

        _, content = RunProfileData._preprocess_file(trace, None)
        data = RunProfileData("worker", "0", content)
        data.process()
        data.analyze()
    except ImportError as e:
        return {"cannot": f"is not installed ({e})"}
    except Exception as e:
        return {"cannot": f"fails on this trace: {type(e).__name__}: {e}"}
    return {"advice": [plain(a) for a in data.recommendations]}


def hta(trace: Path) -> dict[str, Any]:
    """HTA's percentages, from the Python that `PEERS` names."""
    python = os.environ.get(PEERS)
    if not python:
        return {"cannot": f"is not installed: {PEERS} names no Python that has it"}
    done = subprocess.run(
        [python, str(Path(__file__).with_name("hta_figures.py")), str(trace)],
        capture_output=True, text=True, timeout=LIMIT_S, check=False,
    )  # fmt: skip
    if done.returncode:
        return {"cannot": f"fails on this trace: {done.stderr.strip().splitlines()[-1:]}"}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return {"figures": found}


def asked(function: str, **arguments: object) -> dict[str, Any]:
    """A function of this module, in a process of its own, given up after a while: stacks with workers may hang."""
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder, "answer.json")
        command = [sys.executable, "-m", "benchmarks.own_process", __name__, function, json.dumps(arguments)]
        try:
            subprocess.run(
                [*command, str(answer)], cwd=Path(__file__).parents[2], check=True, timeout=LIMIT_S,
                env=os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}, stderr=subprocess.DEVNULL,
            )  # fmt: skip
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as e:
            said = f"hangs for {LIMIT_S:.0f} s" if isinstance(e, subprocess.TimeoutExpired) else "fails"
            return {"plugin": {"cannot": f"recording {said}"}, "matcher": {"cannot": f"recording {said}"}}
        found: dict[str, Any] = json.loads(answer.read_text(encoding="utf-8"))
    return found
