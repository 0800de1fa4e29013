"""Files that grow while they are read: lines as a terminal would leave them, whole ones only."""

from __future__ import annotations

import os
import sys
import tempfile
from itertools import pairwise
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from gpulab.launch.launcher import GrowingFile, Line, RankProcesses, launcher_words

PRINTS = """
import os, sys, time
rank, ended = os.environ["RANK"], __file__ + ".ended"
print("trained", rank)
for done in range(3):
    print(f"\\r{done} of 2", end="", file=sys.stderr)
print("\\rend", end="", flush=True)
if rank == "0":
    open(ended, "w").close()
while not os.path.exists(ended):  # a rank that fails has the others ended
    time.sleep(0.05)
sys.exit(int(rank))
"""


@given(st.text("a\r\n", max_size=30), st.lists(st.integers(0, 30), max_size=4))
def test_pieces_are_read_as_the_whole_file_would_be(written: str, cuts: list[int]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "out"
        file = GrowingFile(path)
        assert list(file.lines()) == []
        bounds = [0, *sorted(min(cut, len(written)) for cut in cuts), len(written)]
        lines: list[str] = []
        for begin, end in pairwise(bounds):
            with path.open("ab") as out:
                out.write(written[begin:end].encode())
            lines += file.lines()
        lines += file.rest()
    whole = written.split("\n")
    assert lines == [line.rstrip("\r").split("\r")[-1] for line in (whole if whole[-1] else whole[:-1])]


def test_a_letter_that_is_written_in_two_goes(tmp_path: Path) -> None:
    path = tmp_path / "out"
    file = GrowingFile(path)
    path.write_bytes("µ".encode()[:1])
    assert list(file.lines()) == []
    path.write_bytes("µ\n".encode())
    assert list(file.lines()) == ["µ"]


def test_what_ranks_print_arrives_to_the_last_line(tmp_path: Path) -> None:
    script = tmp_path / "prints.py"
    script.write_text(PRINTS)
    logs = tmp_path / "logs of mine"
    logs.mkdir()
    words = [*launcher_words(2, "prints", logs), str(script)]
    processes = RankProcesses(words, dict(os.environ) | {"OMP_NUM_THREADS": "1"}, logs)
    lines = [line for line in processes.lines() if line is not None]
    assert processes.end() == 1, "rank 1 has failed"
    assert sys.executable in words
    for rank in range(2):
        own = [line for line in lines if line.rank == rank]
        assert [line.text for line in own if not line.is_error] == [f"trained {rank}", "end"]
        assert Line(rank, "2 of 2", True) in own
    assert any(line.rank is None and line.is_error and "prints.py" in line.text for line in lines), "PyTorch's words"
