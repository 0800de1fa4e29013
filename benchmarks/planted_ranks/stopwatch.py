"""Time per step of a planted script, as written and without its cause, by its optimizer's steps; no gpulab.

`python -m benchmarks.planted_ranks.stopwatch [NAME…]` prints what the header of a cell then says. As a script, by
`torch.distributed.run`, it times one rank: `PROGRAM WARMUP STEPS FOLDER`.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.own_process import ROOT
from benchmarks.planted.timing import Clock, Enough, by_optimizer, execute, hushed
from benchmarks.planted_ranks.planted import PlantedRanks, all_cells

ROUNDS = 3
LIMIT_S = 180.0


def measured(planted: PlantedRanks, rounds: int = ROUNDS) -> dict[str, float]:
    """Milliseconds per step, `written_ms` and `without_ms`: medians of runs by turns, and the least ratio's range."""
    texts = {"written_ms": planted.text(), "without_ms": planted.text(without=True)}
    times: dict[str, list[float]] = {arm: [] for arm in texts}
    for _ in range(rounds):
        for arm, text in texts.items():
            times[arm].append(_once(planted, text))
    shares = [1 - without / written for written, without in zip(*times.values(), strict=True)]
    medians = {arm: 1e3 * statistics.median(values) for arm, values in times.items()}
    return medians | {"least_share": min(shares), "largest_share": max(shares)}


def launcher_words(ranks: int) -> list[str]:
    """torchrun, for so many ranks of this machine."""
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]


def _once(planted: PlantedRanks, text: str) -> float:
    """Seconds per step, the mean of the ranks."""
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder, f"{planted.name}.py")
        program.write_text(text, encoding="utf-8")
        count = (str(planted.warmup), str(planted.steps))
        words = [*launcher_words(planted.ranks), "-m", __spec__.name, "--rank", str(program), *count]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        subprocess.run(words, cwd=folder, env=environment, check=True, timeout=LIMIT_S)
        seconds = [float(file.read_text()) for file in Path(folder).glob("*.seconds")]
    if len(seconds) != planted.ranks:
        raise RuntimeError(f"{planted.name} ended before its step {planted.warmup + planted.steps}")
    return statistics.mean(seconds)


def _time_this_rank(program: Path, warmup: int, steps: int) -> None:
    """Leaves the seconds per step beside the program."""
    import torch.distributed as dist

    clock = Clock(warmup, steps)
    with by_optimizer(clock), hushed():
        try:
            execute(program.read_text(encoding="utf-8"), {"__name__": "__main__"}, str(program))
        except Enough:
            dist.barrier()
            dist.destroy_process_group()
    if clock.seconds is not None:
        program.with_name(f"{os.environ['RANK']}.seconds").write_text(repr(clock.seconds / steps))


def main() -> None:
    """Without a name all cells."""
    names = sys.argv[1:]
    for planted in all_cells():
        if not names or planted.name in names:
            found = measured(planted)
            share = 1 - found["without_ms"] / found["written_ms"]
            print(
                f"{planted.cause:22} {planted.name:26} written_ms = {found['written_ms']:.1f}  "
                f"without_ms = {found['without_ms']:.1f}  share {share:.0%} "
                f"[{found['least_share']:.0%}, {found['largest_share']:.0%}]",
                flush=True,
            )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        _time_this_rank(Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
    else:
        main()
