"""What a perfect DataLoader would bring: real cells with a planted wait, put back as they were."""

from __future__ import annotations

import builtins
import io
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch.utils.data import DataLoader

import gpulab
from gpulab.errors import UsageError
from gpulab.tuning import headspace_data
from gpulab.tuning.code import Code
from gpulab.tuning.headspace import Differential, Headspace
from gpulab.tuning.headspace_data import BATCHES, reusing_batches
from gpulab.tuning.record import Experiment
from gpulab.verdict import Verdict
from gpulab.views.headspace import HeadspaceReport
from tests.support import comparisons as made
from tests.support.loading_datasets import Planted, Stream

CELL = """\
losses = []
for epoch in range(2):
    for batch in loader:
        loss = model(batch).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
"""


def names(loader: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=1e-6), "loader": loader}


class Files(Planted):
    """Each item in a file of its own."""

    def __init__(self, folder: Path, n: int = 40) -> None:
        super().__init__(n)
        self.folder = folder
        for i in range(n):
            (folder / f"{i}.bin").write_bytes(bytes([i]) * 8192)

    def __getitem__(self, i: int) -> torch.Tensor:
        with open(self.folder / f"{i}.bin", "rb") as file:
            return torch.full((4,), float(file.read(1)[0]))


# -- the whole test --------------------------------------------------------------------------------------------------


def test_a_planted_wait_is_what_a_perfect_loader_would_take_away() -> None:
    given = names(DataLoader(Planted(64, wait_s=0.01), batch_size=4, shuffle=True))
    before = given["model"].weight.clone()
    state = torch.get_rng_state()
    report = gpulab.headspace(CELL, namespace=given, steps=4, pairs=3, show=False)
    found = report.result
    assert gpulab.headspaces[-1] is report
    assert found.ideal_us is not None and found.step_us is not None and report.ceiling is not None
    assert found.ideal_us < found.step_us / 2 and report.ceiling > 2
    assert found.preparation_share is not None and found.preparation_share > 0.5
    assert found.cold_us is None and found.reasons["cold"] == headspace_data.NO_FILE
    assert torch.equal(given["model"].weight, before) and torch.equal(torch.get_rng_state(), state)
    for shown in (report.text(full=True), report.html(), report.fragment()):
        assert "perfect DataLoader" in shown and "read from the disk" in shown
    figures = json.loads(json.dumps(report.json()))
    assert figures["cold_step_us"] is None and figures["ceiling"] == report.ceiling


def test_files_that_the_steps_read_are_dropped_from_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = Files(tmp_path)
    dropped: list[int] = []
    drop = headspace_data.drop

    def noted(paths: Sequence[str]) -> None:
        dropped.append(len(paths))
        drop(paths)

    monkeypatch.setattr(headspace_data, "drop", noted)
    test = Differential(Code.of_text(CELL, names(DataLoader(dataset, batch_size=4))), budget_s=600, steps=3, pairs=2)
    found = test.headspace()
    assert {str(tmp_path / f"{i}.bin") for i in range(12)} <= set(test._files)
    if headspace_data.why_not(test._files):
        assert found.reasons["cold"] in (headspace_data.IN_MEMORY, headspace_data.NO_ADVICE)
    else:
        assert found.cold_us is not None and "cold" not in found.reasons
        assert len(dropped) == 2 + 2, "asked twice whether it can be done, and before each block"


def test_a_cell_without_a_loader_is_refused_and_put_back() -> None:
    code = "for i in range(40):\n    optimizer.zero_grad(); model(x).sum().backward(); optimizer.step()"
    given = names(None) | {"x": torch.ones(2, 4)}
    before = given["model"].weight.clone()
    with pytest.raises(UsageError, match="uses no DataLoader"):
        gpulab.headspace(code, namespace=given, show=False)
    assert torch.equal(given["model"].weight, before)
    with pytest.raises(ZeroDivisionError):
        gpulab.headspace("for batch in loader:\n    1 / 0", namespace=names(DataLoader(Planted(8))), show=False)


def test_a_cell_that_cannot_run_on_reusing_batches_says_so() -> None:
    look = "        assert batch[0, 0].item() not in seen, 'twice'; seen.add(batch[0, 0].item())\n"
    once = "seen = set()\n" + CELL.replace("range(2)", "range(1)").replace(
        "        loss = ", f"{look}        loss = ", 1
    )
    given = names(DataLoader(Planted(64), batch_size=4))
    report = gpulab.headspace(once, namespace=given, steps=4, pairs=2, show=False)
    assert report.ceiling is None and "twice" in report.result.reasons["ideal"]
    assert report.headline.level == "unknown" and "AssertionError" in report.text(full=True)


# -- kept batches ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fits", [("cpu",), ()])
def test_batches_too_large_for_the_device_stay_in_host_memory(
    fits: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpulab.tuning.headspace._torch_name", lambda device: "elsewhere")
    test = Differential(
        Code.of_text(CELL, names(DataLoader(Planted(64), batch_size=4))), budget_s=200, steps=3, pairs=2
    )
    probe = test._probe

    def probed(code: Any, size: Any, what: str) -> Exception | None:
        if what == "batches kept" and test._batch_device not in fits:
            return RuntimeError("out of memory there")
        return probe(code, size, what)

    monkeypatch.setattr(test, "_probe", probed)
    found = test.headspace()
    assert (found.ideal_us is not None) is bool(fits), found.reasons
    assert ("out of memory there" in str(found.reasons.get("ideal"))) is not bool(fits)


@pytest.mark.parametrize("workers", [0, 1])
def test_reusing_batches_are_real_ones_in_the_same_number(workers: int) -> None:
    loader = DataLoader(Planted(30), batch_size=4, num_workers=workers)
    real = [batch.clone() for batch in loader]
    asked: list[int] = []
    loader.dataset.__class__ = type("Counted", (Planted,), {"__getitem__": _counting(asked)})
    with reusing_batches("cpu"):
        for epoch in range(2):
            had = []
            for batch in loader:
                had.append(batch.clone())
                batch.mul_(-1)  # in place: the next one given out is not touched
            assert len(had) == len(real)
            assert all(any(torch.equal(batch, one) for one in real) for batch in had)
            assert len(had[-1]) == 2, "the last of an epoch is as long as it was"
            if epoch == 0:
                assert torch.equal(had[0], real[0]) and torch.equal(had[1], real[1])
    assert len(asked) == 4 * BATCHES + 2, "loaded once"
    assert torch.equal(next(iter(DataLoader(Planted(30), batch_size=4))), real[0])


def _counting(asked: list[int]) -> Any:
    def __getitem__(self: Planted, i: int) -> torch.Tensor:
        asked.append(i)
        return Planted.__getitem__(self, i)

    return __getitem__


def test_reusing_batches_of_a_stream_go_on() -> None:
    with reusing_batches("cpu"):
        for i, batch in enumerate(DataLoader(Stream(40), batch_size=4)):
            assert batch.shape == (4, 4)
            if i == 30:
                break
        else:
            raise AssertionError("the stream ended")


def test_containers_are_made_anew_and_keep_their_kind() -> None:
    from collections import OrderedDict, UserDict, namedtuple

    from gpulab.tuning.headspace_data import _copied

    Pair = namedtuple("Pair", "x y")
    batch: dict[str, Any] = {
        "a": torch.ones(2),
        "b": [Pair(torch.zeros(1), "text"), (1, None)],
        "c": OrderedDict(d=torch.ones(1)),
        "e": UserDict(f=[torch.ones(1)]),
    }
    copied = _copied(_copied(batch, "cpu"))
    copied["a"].add_(1)
    copied["b"][0].x.add_(1)
    copied["c"]["d"].add_(1)
    copied["e"]["f"][0].add_(1)
    assert batch["a"].sum() == 2 and batch["b"][0].x.sum() == 0 and batch["c"]["d"].sum() == 1
    assert type(copied["b"][0]) is Pair and copied["b"][0].y == "text" and type(copied["c"]) is OrderedDict
    assert copied["b"][1] == (1, None)
    assert type(copied["e"]) is UserDict and batch["e"]["f"][0] == 1


# -- files -----------------------------------------------------------------------------------------------------------


def test_files_opened_in_each_way_are_seen_unless_written(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("a", "b", "c", "d", "empty", "e.py")]
    for path in paths:
        path.write_bytes(b"" if path.name == "empty" else b"x" * 100)
    before = builtins.open, io.open, os.open
    with headspace_data.logging_files() as opened:
        open(paths[0]).close()
        paths[1].read_bytes()
        os.close(os.open(paths[2], os.O_RDONLY))
        open(paths[3], "ab").close()
        open(paths[4]).close()
        open(paths[5]).close()
    assert (builtins.open, io.open, os.open) == before
    assert {p for p in opened.data if p.startswith(str(tmp_path))} == {str(p) for p in paths[:3]}


def test_a_dropped_file_is_not_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "data"
    path.write_bytes(os.urandom(1 << 20))
    assert headspace_data.resident_fraction(str(path)) in (1.0, None)
    why = headspace_data.why_not([str(path)])
    if not why:
        assert headspace_data.resident_fraction(str(path)) in (0.0, None)
    assert (
        why in ("", headspace_data.IN_MEMORY, headspace_data.NO_ADVICE)
        and headspace_data.why_not([]) == headspace_data.NO_FILE
    )
    monkeypatch.setattr(headspace_data, "drop", lambda paths: None)
    path.read_bytes()
    assert headspace_data.why_not([str(path)]) in (
        headspace_data.IN_MEMORY,
        "" if headspace_data._mincore() is None else "-",
    )
    monkeypatch.delattr(os, "posix_fadvise")
    assert headspace_data.why_not([str(path)]) == headspace_data.NO_ADVICE


# -- words -----------------------------------------------------------------------------------------------------------


def measured(
    said: Verdict, ceiling: float | None, interval: tuple[float, float] | None, notes: tuple[str, ...] = ()
) -> HeadspaceReport:
    """A test of which the first arm said that much of a perfect loader; the files could not be dropped."""
    found = replace(made.a_comparison(), pairs=12)
    experiment = Experiment((found.a, found.b), (found,), 20.0)
    ideal_us = None if ceiling is None else 297e3 / ceiling
    return HeadspaceReport(
        Headspace(
            made.run_of(found.a), experiment, 297e3, ideal_us, None, ceiling, interval,
            None if ideal_us is None else 297e3 - ideal_us, None,
            {"ideal": said}, {"cold": headspace_data.NO_FILE}, notes,
        )
    )  # fmt: skip


NO_GAIN = "The DataLoader is no bottleneck: no change to it would gain 3 % or more."
OPEN = "Undecided: a perfect DataLoader gave a 2.1× speedup, but the 95 % interval is 1.0–4.9."
GAIN = "A perfect DataLoader would give a 10× speedup; no DataLoader can give more."
PAIRS = "(95 % interval 5–16), by 12 pairs of short interleaved runs."


@pytest.mark.parametrize(
    ("said", "ceiling", "interval", "sentence", "words", "never"),
    [
        ("undecided", 2.14, (1.0, 4.94), OPEN, "297 ms undecided", "No work on the"),  # which was once said of it
        ("no measurable difference", 1.01, (1.0, 1.02), NO_GAIN, "nothing measurable", "139 ms"),
        ("undecided", 1.01, (1.0, 1.025), NO_GAIN, "", "139 ms"),
        ("faster", 10.0, (5.0, 16.0), GAIN, PAIRS, "undecided"),
    ],
)
def test_what_is_said_of_a_ceiling(
    said: Verdict,
    ceiling: float,
    interval: tuple[float, float],
    sentence: str,
    words: str,
    never: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shown = measured(said, ceiling, interval, ("<b>note</b>",))
    assert shown.headline.sentence == sentence and (shown.headline.level == "unknown") is (sentence == OPEN)
    first = shown.text()
    text = " ".join((first + shown.text(full=True)).split())
    assert words in text and never not in text
    assert first.endswith("The rest: import gpulab; print(gpulab.headspaces[-1].text(full=True))\n")
    monkeypatch.setattr(sys.modules["__main__"], "gpulab", gpulab, raising=False)
    assert shown.text().endswith("The rest: print(gpulab.headspaces[-1].text(full=True))\n")
    assert ("Use more workers, or make items cheaper to load." in first) is (said == "faster")
    assert shown.json()["verdicts"] == {"ideal": said}
    assert "<b>note</b>" not in shown.html() and "&lt;b&gt;note" in shown.html()
