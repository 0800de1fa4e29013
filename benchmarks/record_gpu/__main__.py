"""`python -m benchmarks.record_gpu --out FOLDER [--only NAME…] [--simulate] [--budget SECONDS] [--pack FOLDER]`,
and `python -m benchmarks.record_gpu --collect FOLDER [--without-traces]` for what it has written."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.conductor import what_is_missing

NEEDED = ("torch", "numpy", "msgspec", "psutil", "pynvml")
PROBE = "import torch; print('GPU:', torch.cuda.get_device_name() if torch.cuda.is_available() else '')"


def main() -> int:
    """Exit status 0 when it ran to its end, also where cells failed; 1: nothing collected; 2: it cannot start."""
    parser = argparse.ArgumentParser(prog="benchmarks.record_gpu", description="Record the lessons' cells on a GPU.")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--out", type=Path, metavar="FOLDER", help="recordings are written there; call again to go on")
    what.add_argument("--collect", type=Path, metavar="FOLDER", help="copy the recordings of that folder into gpulab")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="these recordings and no others")
    parser.add_argument("--simulate", action="store_true", help="the CPU stands in for a GPU, with tiny sizes")
    parser.add_argument("--budget", type=float, default=None, metavar="SECONDS", help="for everything together")
    parser.add_argument("--pack", type=Path, metavar="FOLDER", help="tables and packed recordings go there, not to OUT")
    parser.add_argument("--without-traces", action="store_true", help="of --collect: leave the trace files out")
    options = parser.parse_args()
    if missing := what_is_missing(NEEDED):
        print(missing, file=sys.stderr)
        return 2
    return _collect(options) if options.collect is not None else _record(parser, options)


def _collect(options: argparse.Namespace) -> int:
    from benchmarks.record_gpu.collecting import CannotCollect, collect

    try:
        collected = collect(options.collect, traces=not options.without_traces)
    except CannotCollect as e:
        print(e, file=sys.stderr)
        return 1
    print(f"{len(collected.names)} recordings copied; gpulab ships {collected.total_bytes / 1e6:.1f} MB of them now.")
    for sentence in collected.omissions:
        print(f"Left out: {sentence}.")
    return 0


def _record(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    from benchmarks.record_gpu.catalogue import every, select
    from benchmarks.record_gpu.outlet import SIMULATED, Outlet, machine_of
    from benchmarks.record_gpu.packing import unpack
    from benchmarks.record_gpu.session import BUDGET_S, Session
    from benchmarks.record_gpu.table import table

    try:
        recordings = select(options.only, every())
    except ValueError as e:
        parser.error(str(e))
    machine = SIMULATED if options.simulate else machine_of(_gpu())
    if not options.simulate and not _gpu():
        print(
            "PyTorch sees no NVIDIA GPU here, so nothing can be recorded. Run this on a machine with one, or add "
            "--simulate to try the script with the CPU in its place.",
            file=sys.stderr,
        )
        return 2
    outlet = Outlet(options.out, options.pack or options.out)
    outlet.path.mkdir(parents=True, exist_ok=True)
    for torn in unpack(options.out, options.out):
        print(f"A packed file cannot be read, and its recordings are made again: {torn}", file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="record-gpu-") as scratch:
        # nothing that this user has measured before may have a say, and what one cell compiles serves the next
        os.environ["GPULAB_DIR"] = scratch
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(Path(scratch, "compiled")))
        session = Session(outlet, machine, budget_s=options.budget or BUDGET_S)
        results = session.conduct(recordings)
    print(f"\n{table(results, short=True)}")
    return 0


def _gpu() -> str:
    """The name of torch's first GPU, asked in another process: this one must not take part of the GPU."""
    done = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, check=False)
    return next((line[5:] for line in done.stdout.splitlines() if line.startswith("GPU: ")), "").strip()


if __name__ == "__main__":
    sys.exit(main())
