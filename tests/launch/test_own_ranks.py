"""Which call of the user's code starts ranks, and what to write instead."""

from __future__ import annotations

import pytest

from gpulab.launch.own_ranks import own_ranks

WORK = 'work(int(os.environ["RANK"]))'


@pytest.mark.parametrize(
    ("code", "starter", "instead", "ranks"),
    [
        ("notebook_launcher(train, num_processes=2)", "notebook_launcher", "train()", "2"),
        ("accelerate.notebook_launcher(train, (cfg, 3), 4)", "notebook_launcher", "train(cfg, 3)", "4"),
        ("notebook_launcher(function=train, args=given)", "notebook_launcher", "train(*given)", "N"),
        ("import os\nmp.spawn(work, nprocs=8)", "mp.spawn", WORK, "8"),
        ("spawn(work, (5,), nprocs=count)", "spawn", f"{WORK[:-1]}, 5)", "N"),
        ("torch.multiprocessing.start_processes(work)", "torch.multiprocessing.start_processes", WORK, "N"),
        ('Trainer(devices=2, strategy="ddp_notebook")', 'strategy="ddp_notebook"', 'strategy="ddp"', "2"),
        ("!pip list\n%matplotlib\nmp.spawn(work, nprocs=2)", "mp.spawn", WORK, "2"),
        ("os.environ['MASTER_PORT'] = '1'; mp.spawn(work, nprocs=2)", "mp.spawn", f"{WORK}, without MASTER_PORT,", "2"),
    ],
)
def test_calls_that_start_ranks(code: str, starter: str, instead: str, ranks: str) -> None:
    own = own_ranks(code)
    assert own is not None and (own.starter, own.instead, own.ranks) == (starter, instead, ranks)


def test_calls_that_start_none() -> None:
    for code in ("train()", "pool.spawn(work)", "Trainer(strategy='ddp')", "def (", "# mp.spawn(work)"):
        assert own_ranks(code) is None, code


@pytest.mark.parametrize(
    ("code", "runs"),
    [
        ("notebook_launcher(train)", True),
        ("if __name__ == '__main__':\n    notebook_launcher(train)", True),
        ("if 'RANK' not in os.environ:\n    notebook_launcher(train)", False),
        ("def main():\n    notebook_launcher(train)", False),
    ],
)
def test_a_call_that_may_not_run_is_not_sure(code: str, runs: bool) -> None:
    assert own_ranks(code) is not None
    assert (own_ranks(code, sure=True) is not None) is runs
