"""Each knob of ranks on two real ranks of gloo: it does what the same does by hand, and is taken back."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support.fork_server import EXECUTABLE, python_with_torch
from tests.support.paths import ROOT

SAME = 1e-6


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    """What both ranks saw."""
    module = f"{__package__}.two_ranks"
    words = [python_with_torch(), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", module]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), EXECUTABLE: python_with_torch()}
    said = subprocess.run(words, capture_output=True, text=True, env=environment, cwd=Path(ROOT))
    assert said.returncode == 0, said.stderr
    found: list[dict[str, Any]] = json.loads(said.stdout.strip().splitlines()[-1])
    return found


def test_options_of_ddp_are_as_if_written_there(ranks: list[dict[str, Any]]) -> None:
    for seen in ranks:
        cap, view, static = seen["as_written"]
        options = {
            "bucket_cap_mb": [2**19, view, static],
            "gradient_as_bucket_view": [cap, True, static],
            "static_graph": [cap, view, True],
        }
        for name, expected in options.items():
            made, difference, counts = seen[name]
            assert made == expected and counts == {"wrapped models": 1}, name
            assert difference < SAME, f"{name} changes no weight"


def test_a_hook_is_registered_where_there_is_room(ranks: list[dict[str, Any]]) -> None:
    for seen in ranks:
        assert seen["fp16"] == [1, True, {"models with the hook": 1}]
        hooks, refused = seen["own_hook"]
        assert hooks == 1 and "already has a communication hook" in refused[0]


def test_local_sgd_is_that_by_hand(ranks: list[dict[str, Any]]) -> None:
    for seen in ranks:
        difference, counts, synced_again = seen["local_sgd"]
        assert difference < SAME and synced_again
        assert counts == {"local steps": 8, "averages": 2}


def test_accumulation_is_no_sync_by_hand(ranks: list[dict[str, Any]]) -> None:
    for seen in ranks:
        difference, counts, synced_again = seen["accumulate"]
        assert difference < SAME and synced_again and seen["apart"] > 1e-4
        assert counts == {"optimizer steps": 2, "steps passed over": 6, "exchanges": 2}


def test_sharded_weights_are_the_same_kept_or_not(ranks: list[dict[str, Any]]) -> None:
    for seen in ranks:
        assert seen["fully_shard"]["difference"] < SAME
        assert seen["fully_shard"]["counts"] == {"sharded modules": 3}


def test_nothing_is_left_of_any_knob(ranks: list[dict[str, Any]]) -> None:
    assert [seen["put_back"] < SAME for seen in ranks] == [True, True]
