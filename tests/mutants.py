"""Whether a fault in gpulab would be noticed: `make mutants` makes each of mutants.toml, and runs the tests for it.

The checkout stays as it is: the faults are made in a copy. All the tests run once without a fault before, for a test
that fails anyhow catches nothing. The exit status is 1 where a fault survives or cannot be made.

    python -m tests.mutants                     all of them
    python -m tests.mutants rounding            those with that word in their name
    python -m tests.mutants --before FOLDER     the same faults in an older checkout, and its tests
"""

from __future__ import annotations

import argparse
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import msgspec

from tests.support.paths import ROOT, TESTS

LIST = TESTS / "mutants.toml"
LIMIT_S = 600.0  # a fault that makes its test stand still is caught
NOT_COPIED = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "node_modules")
PASSED, FAILED = 0, 1  # pytest's exit status; any other one means that it ran no test
WORDS = {PASSED: "SURVIVED", FAILED: "caught"}


class Mutant(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One fault: in `file`, `old` becomes `new`. `before` and `file_before` are of the older checkout, where other."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    before: tuple[str, ...] = ()
    file_before: str = ""

    def in_older(self) -> Mutant:
        """The same fault as the older checkout has it."""
        return msgspec.structs.replace(
            self, file=self.file_before or self.file, tests=self.before or self.tests, before=(), file_before=""
        )


def listed(part_of_name: str = "") -> list[Mutant]:
    """The faults of the list whose name has that part."""
    every = msgspec.convert(tomllib.loads(LIST.read_text(encoding="utf-8")), dict[str, list[Mutant]])["mutant"]
    return [mutant for mutant in every if part_of_name in mutant.name]


@contextmanager
def made(mutant: Mutant, tree: Path) -> Iterator[bool]:
    """Inside, the fault is in that tree; False where its text does not stand there once."""
    path = tree / mutant.file
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    if text.count(mutant.old) != 1:
        yield False
        return
    state = path.stat()
    path.write_text(text.replace(mutant.old, mutant.new), encoding="utf-8")
    # Python knows its compiled code by size and whole second of the source: each fault has a second of its own
    second = 1_000_000_000 + hash(mutant.name) % 500_000_000
    os.utime(path, (second, second))
    try:
        yield True
    finally:
        path.write_text(text, encoding="utf-8")
        os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))


def run_tests(tree: Path, tests: Sequence[str], *options: str) -> tuple[int, str]:
    """pytest's exit status in that tree, and what it wrote."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options, *tests]
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    try:
        done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        return FAILED, f"stood still for {LIMIT_S:.0f} s"
    return done.returncode, done.stdout + done.stderr


def tried(mutant: Mutant, tree: Path) -> str:
    """What came of it, in words: "caught" is the only good one."""
    with made(mutant, tree) as applies:
        if not applies:
            return "did not apply"
        status, written = run_tests(tree, mutant.tests, "-x")
    return WORDS.get(status) or f"its tests did not run: {' '.join(written.splitlines()[-1:])}"


def main(arguments: Sequence[str] | None = None) -> int:
    """The faults one after the other, a line for each, and how many were caught."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("name", nargs="?", default="", help="a part of the names of those to try")
    parser.add_argument("--before", type=Path, metavar="FOLDER", help="an older checkout, to be tried in its place")
    parser.add_argument("--jobs", type=int, default=1, help="how many at a time, each in a copy of its own")
    asked = parser.parse_args(arguments)
    mutants = [mutant.in_older() if asked.before else mutant for mutant in listed(asked.name)]
    if not mutants:
        parser.error(f"no name has {asked.name!r} in it")
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(asked.jobs) as pool:
        copies: queue.SimpleQueue[Path] = queue.SimpleQueue()
        for number in range(asked.jobs):
            copies.put(shutil.copytree(asked.before or ROOT, Path(folder) / str(number), ignore=NOT_COPIED))

        def try_in_a_copy(mutant: Mutant) -> str:
            tree = copies.get()
            try:
                return tried(mutant, tree)
            finally:
                copies.put(tree)

        status, written = run_tests(Path(folder) / "0", sorted({test for m in mutants for test in m.tests}))
        if status != PASSED:
            print(written, "Without a fault the tests must pass.", sep="\n")
            return 1
        caught = 0
        for mutant, said in zip(mutants, pool.map(try_in_a_copy, mutants), strict=True):
            caught += said == WORDS[FAILED]
            print(f"{said:10}{mutant.name} ({mutant.file})", flush=True)
    print(f"{caught} of {len(mutants)} caught")
    return int(caught < len(mutants))


if __name__ == "__main__":
    sys.exit(main())
