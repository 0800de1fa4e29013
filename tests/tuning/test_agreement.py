"""Ranks that agree through a file: each hears what the first says, and whose failure came first."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from msgspec.structs import replace

from gpulab.errors import StoreError
from gpulab.tuning.agreement import Agreement, RanksAgreement, decode, encode, error_of_all, joined
from gpulab.tuning.compare.blocks import compare_blocks
from gpulab.tuning.record import Block, Experiment, Side

SIZE = 3


def together(folder: Path, say: Callable[[RanksAgreement], object]) -> list[object]:
    """What each of three ranks comes to, each on a thread of its own."""

    def one(rank: int) -> object:
        return say(RanksAgreement(folder / "agreed", {"RANK": str(rank), "WORLD_SIZE": str(SIZE)}))

    with ThreadPoolExecutor(SIZE) as threads:
        return list(threads.map(one, range(SIZE)))


def test_the_first_rank_decides(tmp_path: Path) -> None:
    assert (
        together(tmp_path, lambda ranks: [ranks.of_first([ranks.rank, i]) for i in range(20)])
        == [[[0, i] for i in range(20)]] * SIZE
    )


def test_all_hear_all_in_their_order(tmp_path: Path) -> None:
    assert together(tmp_path, lambda ranks: ranks.of_all(10 * ranks.rank)) == [[0, 10, 20]] * SIZE


def test_the_first_failure_is_everybodys(tmp_path: Path) -> None:
    assert together(tmp_path / "none", lambda ranks: error_of_all(ranks, None)) == [None] * SIZE

    def fail(ranks: RanksAgreement) -> object:
        return str(error_of_all(ranks, ValueError("broken") if ranks.rank == 2 else None))

    others = "rank 2 failed: ValueError: broken"
    assert together(tmp_path / "one", fail) == [others, others, "broken"]


def test_one_alone_agrees_with_itself() -> None:
    alone = Agreement()
    assert alone.of_first(3) == 3 and alone.of_all("x") == ["x"] and not alone.is_of_several
    assert error_of_all(alone, None) is None


@pytest.fixture(autouse=True)
def folders(tmp_path: Path) -> None:
    for name in ("none", "one"):
        (tmp_path / name).mkdir()


def experiment(label: str, seconds: float = 1.0) -> Experiment:
    def side(name: str, arm: int, ns: int) -> Side:
        blocks = tuple(
            Block(arm, turn, 2 * turn + arm, 10, 3, 320, ns + turn, (float("nan"), 0.5)) for turn in range(6)
        )
        return Side(name, {} if arm == 0 else {"workers": name}, None, blocks, losses=(1.0, float("nan")))

    a, b = side("baseline", 0, 1_000_000), side(label, 1, 700_000)
    comparison = compare_blocks(a, b, restored="", same_start=True, changes_training="", notes=())
    return Experiment((a, comparison.b), (comparison,), seconds, name="x", notes=(f"of {label}",))


def test_an_experiment_comes_back_from_its_bytes() -> None:
    given = experiment("2")
    back = decode(encode(given), lambda run: pytest.fail(f"no run {run} is kept"))
    assert repr(back) == repr(given), "NaN included, which equals nothing"


def test_what_is_no_experiment_is_refused() -> None:
    with pytest.raises(StoreError, match="cannot be read"):
        decode(b"\x00", lambda run: pytest.fail(run))


def test_tasks_of_an_array_are_one_experiment() -> None:
    one = joined([experiment("2", 3.0), replace(experiment("4", 5.0), stopped=True)])
    assert [side.label for side in one.sides] == ["baseline", "2", "4"]
    assert [c.b.label for c in one.comparisons] == ["2", "4"]
    assert one.seconds == 5.0 and one.stopped and one.notes == ("of 2", "of 4")
