"""Tab in a magic's line: what is offered, and what is left to Python."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from IPython.core.completer import provisionalcompleter
from IPython.core.interactiveshell import InteractiveShell
from msgspec.structs import replace

from gpulab.api import runs as own_runs
from gpulab.api.runs import Runs
from gpulab.arguments import Parser
from gpulab.commands import PROFILE, at
from gpulab.completion import fitting
from gpulab.knobs.catalogue import KNOBS
from gpulab.store.folders import Store
from tests.support.shell import shell_with_gpulab
from tests.support.synthetic import cpu_case


def texts(line: str, token: str = "") -> list[str]:
    return [text for text, _ in fitting(line, token)]


@pytest.fixture
def named_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = Runs(Store(tmp_path))
    for name in ("baseline", "it's a name", ""):
        run = cpu_case().run
        runs.add(replace(run, id=f"20260101-000000-{len(runs):06x}", settings=replace(run.settings, name=name)))
    monkeypatch.setattr(own_runs, "runs", runs)


@pytest.mark.parametrize(
    ("line", "token", "expected"),
    [
        ("%gpulab re", "re", ["report"]),
        ("%gpulab s", "s", ["scoreboard"]),
        ("%%gpuprofile --ab wor", "wor", ["workers="]),
        ("%%gpuprofile --ab=wor", "wor", ["workers="]),
        ("%%gpuprofile --ab workers=2,am", "am", ["amp="]),
        ("%%gpuprofile --set amp=b", "b", ["bf16"]),
        ("%gpulab predict am", "am", ["amp="]),
        ("%gpulab climb --without ba", "ba", ["batch_size"]),
        ("%gpulab climb --bu", "--bu", ["--budget"]),
        ("%gpulab runs del", "del", ["delete"]),
        ("%gpulab runs --outcome int", "int", ["interrupted"]),
        ("%gpulab runs delete --y", "--y", ["--yes"]),
        ("run = %gpuprofile --ste", "--ste", ["--steps"]),
        ("%%gpuprofile name --steps 5 --ste", "--ste", []),
    ],
)
def test_what_is_begun_is_completed(line: str, token: str, expected: list[str]) -> None:
    assert texts(line, token) == expected


def test_all_commands_and_knobs_are_offered() -> None:
    assert texts("%gpulab ") == [command.name for command in at("notebook")]
    assert texts("%%gpuprofile --ab ") == [f"{name}=" for name in KNOBS]
    assert set(texts("%%gpuprofile ")) == set(Parser(PROFILE, PROFILE.name)._option_string_actions)


def test_a_sweep_offers_values_not_there_yet() -> None:
    assert "8" in texts("%%gpuprofile --sweep batch_size=")
    assert "8" not in texts("%%gpuprofile --sweep batch_size=8,")
    assert "16" in texts("%%gpuprofile --sweep batch_size=8,")


@pytest.mark.parametrize("line", ["x = 1 + ", "print(%gpulab", "%gpuprofile ", "%gpuprofile train", "%timeit "])
def test_other_lines_are_left_to_python(line: str) -> None:
    assert texts(line, line.split()[-1] if line[-1:].strip() else "") == []


def test_runs_are_offered_by_name(named_runs: None) -> None:
    assert texts("%gpulab report ") == ["latest", "20260101-000000-000002", "'it'\\''s a name'", "baseline"]
    assert texts("%gpulab report ba", "ba") == ["baseline"]
    assert texts("%gpulab report 'it", "it") == ["it'\\''s a name'"]
    assert texts("%gpulab runs delete ba", "ba") == ["baseline"]


@pytest.fixture
def shell() -> Iterator[InteractiveShell]:
    with shell_with_gpulab() as made_shell:
        yield made_shell


@pytest.mark.parametrize(
    ("cell", "line", "expected"),
    [
        ("%gpulab cl", "%gpulab cl", "%gpulab climb"),
        ("%%gpuprofile --ab workers=4,pre\nfor x in y: pass", "%%gpuprofile --ab workers=4,pre", "prefetch="),
        ("a = 1\n%gpulab predict channels", "a = 1\n%gpulab predict channels", "channels_last="),
    ],
)
def test_ipython_offers_only_ours(shell: InteractiveShell, cell: str, line: str, expected: str) -> None:
    """As JupyterLab asks for completions."""
    assert shell.Completer is not None
    with provisionalcompleter():
        offered = list(shell.Completer.completions(cell, len(line)))
    placed = [line[: one.start] + one.text for one in offered]
    assert len(placed) == 1 and placed[0].endswith(expected), placed
