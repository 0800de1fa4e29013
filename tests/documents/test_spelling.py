"""What readers see has no misspelled word that codespell's dictionary knows."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
READ = (
    "README.md",
    "CHANGELOG.md",
    "docs",
    "notebooks/README.md",
    "notebooks/lessons",
    "benchmarks/README.md",
    "planted/README.md",
    "gpulab",
)
MEANT = "childs,ackward"  # names and a beginning of a word, within code


def _misspelled(*paths: str | Path) -> list[str]:
    command = [sys.executable, "-m", "codespell_lib", "--skip", "*.js,*.pyc,data", "-L", MEANT, *map(str, paths)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)
    assert not done.stderr, done.stderr
    return done.stdout.splitlines()


def test_no_word_for_readers_is_misspelled() -> None:
    assert _misspelled(*READ) == []


def test_a_misspelled_word_is_seen(tmp_path: Path) -> None:
    text = tmp_path / "text.md"
    text.write_text("We recieve it.\n", encoding="utf-8")
    assert len(_misspelled(text)) == 1
