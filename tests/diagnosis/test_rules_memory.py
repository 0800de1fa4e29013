"""Rules of memory on hand-made accounts: what ran out leads, and advice is given only where figures carry it."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from gpulab.diagnosis import memory
from gpulab.diagnosis.diagnose import diagnose
from gpulab.diagnosis.finding import RuleContext
from gpulab.memory_record import Growth, Holding, MemoryAccount, OutOfMemory, Pool, Room
from gpulab.run import Memory
from tests.support.rule_cases import case_of, run_of
from tests.support.rule_tables import Answer, assert_golden

GB, MB = 10**9, 10**6
HOLDINGS = (
    Holding("parameters", "model", 3 * GB),
    Holding("saved activations", "traceback: h in step()", 2 * GB, "", ("loss", "Out[3]", "_")),
    Holding("variables", "history", GB),
    Holding("variables", "cache", MB),
)
FULL = Pool(7 * GB, 7 * GB + 200 * MB, 100 * MB, 2)
TORN = Pool(5 * GB, 7 * GB, 300 * MB, 2)
GPU_FULL = Room(300 * MB, 8 * GB, "GPU")


def out(pool: Pool | None = FULL, request: int | None = GB, **changes: Any) -> MemoryAccount:
    failure = OutOfMemory("cuda:0", request, "line 4 of the cell: h = block(x)", 7, HOLDINGS, GPU_FULL, pool)
    return MemoryAccount(failure=replace(failure, **changes), room=GPU_FULL, pool=pool)


def grows(each: float, room: Room | None = None, line: str = "line 5: history.append(loss)") -> MemoryAccount:
    return MemoryAccount(growth=(Growth("history", each, 40, line),), room=room)


def reruns(owner: str) -> MemoryAccount:
    return MemoryAccount(rerun=Growth(owner, 50.0 * MB, 2))


ACCOUNTS: dict[str, MemoryAccount] = {
    "out of memory": out(),
    "out of memory in the first step, with nothing known": MemoryAccount(failure=OutOfMemory("cpu", None, "", 0)),
    "out of memory in a torn pool": out(TORN),
    "out of memory in a torn pool, of an unknown request": out(TORN, None),
    "grows, and runs out soon": grows(10 * MB, Room(5 * GB, 8 * GB, "RLIMIT_AS")),
    "grows, far away": grows(10 * MB, Room(500 * GB, 800 * GB, "machine")),
    "grows, with no room known": grows(10 * MB, line=""),
    "keeps more with each run": reruns("trainer.cache['a']"),
    "keeps outputs": reruns("Out[3]"),
    "keeps what a module holds": reruns("module helpers.cache['a']"),
    "keeps what a function holds": reruns("train_step's variable seen"),
    "retries in a torn pool": MemoryAccount(pool=TORN),
}
UNTOLD: dict[str, MemoryAccount | None] = {
    "no account": None,
    "nothing": MemoryAccount(),
    "a full pool with retries": MemoryAccount(pool=replace(FULL, reserved_bytes=6 * GB)),
    "a torn pool without retries": MemoryAccount(pool=replace(TORN, retries=0)),
    "an empty pool": MemoryAccount(pool=Pool(0, 0, 0, 3)),
}


def case(account: MemoryAccount | None) -> RuleContext:
    """A run whose tensors took 5 GB at their peak; its allocator held what the pool says."""
    failed = account is not None and account.failure is not None
    pool = account.pool if account is not None else None
    memory = Memory(peak_allocated_bytes=5 * GB, peak_reserved_bytes=pool.reserved_bytes if pool is not None else None)
    outcome = "failed" if failed else "completed"
    return case_of(run_of(gpu=True, memory_account=account, memory=memory, outcome=outcome))


def answer(name: str) -> Answer:
    return next(found for kind in memory.FINDINGS if kind.rule and (found := kind.rule(case(ACCOUNTS[name]))))


@pytest.mark.parametrize("name", UNTOLD)
def test_what_no_figure_carries_is_not_said(name: str) -> None:
    assert not any(kind.rule(case(UNTOLD[name])) for kind in memory.FINDINGS if kind.rule)


def test_memory_that_ran_out_leads() -> None:
    for account in (out(), replace(out(), growth=grows(GB).growth, pool=TORN)):
        context = case(account)
        said = diagnose(context.facts, predict_cures=False)
        assert said.first.key == "out_of_memory"
        assert said.first.summary.startswith("Out of memory in step 8, asking for 954 MiB at line 4 of the cell")


@pytest.mark.parametrize(
    ("pool", "request_bytes", "torn"),
    [(FULL, GB, False), (TORN, GB, True), (TORN, 200 * MB, False), (TORN, None, False)],
)
def test_advice_on_the_allocator_where_its_figures_carry_it(pool: Pool, request_bytes: int | None, torn: bool) -> None:
    found = memory.out_of_memory(case(out(pool, request_bytes)))
    assert found is not None and ("expandable_segments" in found.cure) is torn
    assert any("fragmentation" in part.words for part in found.evidence) is torn


def test_growth_far_away_is_only_a_hint() -> None:
    steps = len(case(None).run.steps)
    for room_bytes, confidence in ((int(19.0 * steps * MB), "measured"), (int(21.0 * steps * MB), "possible")):
        found = memory.memory_growth(case(grows(MB, Room(room_bytes, 800 * GB, "machine"))))
        assert found is not None and found.confidence == confidence
    context = case(grows(MB, Room(800 * GB, 800 * GB, "machine")))
    said = diagnose(context.facts, predict_cures=False)
    assert "Memory grows" not in said.alarm and said.first.key != "memory_growth"
    soon = diagnose(case(grows(MB, Room(100 * MB, 8 * GB, "GPU"))).facts, predict_cures=False)
    assert "Memory grows" in soon.alarm + soon.first.summary


def test_what_is_said_is_the_golden_text() -> None:
    assert_golden("findings_memory", {name: answer(name) for name in ACCOUNTS})
