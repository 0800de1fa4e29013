"""The parity bench: which settings a search goes through, what it counts as reached, and what it says without files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import parity
from benchmarks.parity import inputs, report, search, settings
from benchmarks.parity.catalogue import SCRIPTS, TRAININGS, named
from benchmarks.parity.limits import Limits
from benchmarks.parity.staging import CHECKOUTS, missing
from gpulab.tuning.compare.blocks import compare_blocks
from tests.support.comparisons import alike, as_written, blocks, faster
from tests.support.scripted_climb import SCENE


def test_every_knob_that_can_act_is_tried_at_all_values() -> None:
    single = settings.alone(SCENE, cores=2)
    assert {"workers": 2} in single and {"cache": True} in single
    names = {name for chosen in single for name in chosen}
    assert not names & {"batch_size", "accumulate"}, "these change the training"
    assert "prefetch" not in names, "it needs workers"
    assert not any(int(chosen["workers"]) > 4 for chosen in single if "workers" in chosen)


def test_on_top_of_workers_comes_what_needs_them() -> None:
    more = settings.alone(SCENE, cores=2, base={"workers": 2})
    assert {"prefetch": 4} in more and not any("workers" in chosen for chosen in more)


def test_a_grid_that_is_too_large_is_pairs() -> None:
    helpful: dict[str, list[Any]] = {"workers": [2, 1], "cache": [True]}
    assert settings.together(helpful, SCENE) == [{"workers": 2, "cache": True}, {"workers": 1, "cache": True}]
    many: dict[str, list[Any]] = {**helpful, "fused_optimizer": [True], "amp": ["bf16", "fp16"]}
    assert all(len(chosen) == 2 for chosen in settings.together(many, SCENE))
    assert len(settings.together(many, SCENE)) <= 6


def test_another_loss_is_not_the_same_training() -> None:
    measured = search.measured(compare_blocks(as_written(), faster()), {"workers": 2})
    assert measured["same_loss"] and measured["ratio"] == pytest.approx(13.1 / 38, rel=0.02)
    moved = search.measured(compare_blocks(as_written(), faster(losses=(1.0,) * 40)), {"amp": "bf16"})
    assert not moved["same_loss"]
    unknown = compare_blocks(as_written(losses=()), alike(losses=(), blocks=blocks(1, 20.0)))
    assert search.same_loss(unknown, {"workers": 2}) and not search.same_loss(unknown, {"amp": "bf16"})


def kept(share: float, *, same_loss: bool = True, seconds: float = 200.0) -> dict[str, Any]:
    arm = {"ratio": 0.5, "interval": [0.45, 0.55], "failure": "", "same_loss": same_loss}
    return {
        "search": {"step_ms": 9.0, "best": {"workers": 2, "cache": True}, "seconds": 100.0, "thin": ["amp=bf16"]},
        "climb": {"kept": {"cache": "on"}, "ended": "budget", "headline": {"sentence": "Faster."}, "seconds": seconds},
        "judgement": {
            "share": {"ratio": share, "interval": [share - 0.01, share + 0.01]},
            "arms": [arm | {"settings": {"workers": 2, "cache": True}}, arm | {"settings": {"cache": True}}],
        },
    }


@pytest.mark.parametrize(
    ("result", "reached"),
    [(kept(0.96), True), (kept(0.94), False), (kept(0.96, same_loss=False), False), (kept(0.96, seconds=400), False)],
)
def test_reached_is_the_share_at_the_same_loss_in_time(result: dict[str, Any], reached: bool) -> None:
    row = parity.judged_row(result)
    assert row["reached"] is reached and row["kept_now"] is not None and row["best_now"] is not None


def test_a_search_without_time_shows_no_parity() -> None:
    """As written is the best only where all knobs were measured."""
    result = kept(1.0)
    result["search"]["best"] = result["climb"]["kept"] = {}
    assert not parity.judged_row(result)["reached"]
    result["search"]["thin"] = []
    assert parity.judged_row(result)["reached"]


def test_the_table_has_a_row_for_each_and_names_what_is_missing() -> None:
    done = {"key": "a", "title": "one", **parity.judged_row(kept(0.96))}
    lines = report.section(parity.summary([done, {"key": "b", "title": "other", "skipped": "no checkout"}]))
    assert "Reached: **1 of 1**." in lines and "- other: no checkout" in lines
    row = next(line for line in lines if line.startswith("| one"))
    assert "| cache=on, workers=2 | 0.50 [0.45, 0.55] | cache=on | 0.50 [0.45, 0.55] | 96% [95%, 97%] |" in row


def test_a_missing_checkout_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CHECKOUTS, raising=False)
    assert CHECKOUTS in missing(named("nanogpt"))
    monkeypatch.setenv(CHECKOUTS, str(tmp_path))
    assert "nanoGPT/./train.py" in missing(named("nanogpt"))
    assert parity.row_of(named("nanogpt"), folder=tmp_path)["skipped"]
    (tmp_path / "nanoGPT").mkdir()
    (tmp_path / "nanoGPT" / "train.py").write_text("")
    assert not missing(named("nanogpt"))


def test_what_is_measured_needs_no_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CHECKOUTS, raising=False)
    file = tmp_path / f"nanogpt{parity._suffix()}.json"
    file.write_text(json.dumps({"compiling": {}, **kept(0.96)}))
    row = parity.row_of(named("nanogpt"), folder=tmp_path)
    assert row["reached"] is True and row["share"]["ratio"] == 0.96
    assert parity.row_of(named("nanogpt"), folder=tmp_path, again=True)["skipped"], "it would have to climb anew"


class Measuring(search.Search):
    """Every second setting has too few pairs to tell anything at first; no time passes."""

    def _measure(self, stage: str, many: Any, budget_s: float, base: Any = None) -> None:
        for number, chosen in enumerate(many):
            pairs = 2 if len(many) > 1 and number % 2 else 9
            values = {"ratio": 0.97, "interval": None, "pairs": pairs, "verdict": "undecided", "failure": ""}
            self.rows.append({"stage": stage, "settings": chosen, "base": {}, "same_loss": True, **values})


def test_what_was_measured_too_briefly_is_measured_again() -> None:
    looking = Measuring(None, Limits(), lambda words: None)  # type: ignore[arg-type]
    looking._measure("alone", [{"cache": True}, {"workers": 2}, {"compute_threads": 1}], 1.0)
    looking._look_again()
    stages = {row["stage"]: list(row["settings"]) for row in looking.rows if row["settings"] == {"workers": 2}}
    assert stages == {"glance": ["workers"], "alone": ["workers"]}
    assert sum(row["settings"] == {"workers": 2} for row in looking._ranked("alone")) == 1


def test_ten_trainings_each_with_what_it_needs() -> None:
    assert len(TRAININGS) == len({training.key for training in TRAININGS}) == 10
    for training in TRAININGS:
        assert bool(training.repository) == (len(training.commit) == 40)
        assert training.repository or (SCRIPTS / training.entry).is_file()


def test_the_data_are_as_the_scripts_read_them(tmp_path: Path) -> None:
    inputs.citations(tmp_path)
    rows = (tmp_path / "data" / "cora" / "cora.content").read_text().splitlines()
    assert len(rows) == inputs.NODES and all(len(row.split()) == inputs.FEATURES + 2 for row in rows)
    inputs.words(tmp_path)
    assert {file.stem for file in (tmp_path / "words").iterdir()} == {"train", "valid", "test"}
    inputs.shakespeare_char(tmp_path)
    assert (tmp_path / "data" / "shakespeare_char" / "train.bin").stat().st_size > 100_000
