"""The largest size that fits: by arithmetic, on made-up machines, and once where memory really runs out."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim.optimizer import register_optimizer_step_post_hook

from gpulab.api.memory import fit as fit_of
from gpulab.api.memory import memory
from gpulab.errors import UsageError
from gpulab.memory_record import Room
from gpulab.tuning import fit as module
from gpulab.tuning.code import Code
from gpulab.tuning.fit import (
    ATTEMPTS,
    LEAST_GROWTH_BYTES,
    MOST_CHEAP,
    Fit,
    MemoryLine,
    Probe,
    Shortage,
    candidates,
    line_through,
)
from gpulab.tuning.schedule import Size

MB = 1 << 20


@given(
    st.dictionaries(st.integers(1, 10_000), st.integers(0, 1 << 36), min_size=2, max_size=6), st.integers(1, 1 << 37)
)
def test_the_largest_size_is_the_last_below_the_line(peaks: dict[int, int], allowed: int) -> None:
    line = line_through(peaks)
    mean = sum(peaks.values()) / len(peaks)
    middle = sum(peaks) / len(peaks)
    assert line.at(middle) == pytest.approx(mean, rel=1e-6, abs=1), "least squares: through the mean"
    if len(peaks) == 2:
        assert all(line.at(size) == pytest.approx(peak, rel=1e-6, abs=1000) for size, peak in peaks.items())
    largest = line.largest(allowed)
    if largest is None:
        assert line.m1_bytes <= 0
        return
    size, low, high = largest
    assert 0 <= low <= size <= high
    slack = 1e-6 * allowed + 1000
    assert size == 0 or line.at(size) <= allowed + slack
    assert line.at(size + 1) >= allowed - slack
    assert line.sd_bytes >= module.NOISE_BYTES


def test_the_interval_is_wider_far_from_the_runs() -> None:
    line = MemoryLine(0.0, 1.0 * MB, (10, 20), 4.0 * MB)
    near, far = line.largest(20 * MB), line.largest(200 * MB)
    assert near is not None and far is not None
    assert near[0] == 20 and far[0] == 200 and far[2] - far[1] > 3 * (near[2] - near[1])


# -- made-up machines --------------------------------------------------------------------------------------------------


class Machine:
    """Stands for a `Prober`: a run's peak is a function of its size, and too large a peak runs out."""

    def __init__(
        self,
        peak_of: Callable[[int], float],
        room_bytes: int,
        *,
        limit: str = "RLIMIT_AS",
        kept_bytes: int = 0,
        rows: float = math.inf,
    ) -> None:
        self.rows = rows
        self.peak_of, self.room_bytes, self.limit, self.kept_bytes = peak_of, room_bytes, limit, kept_bytes
        self.code, self.halted = None, False
        self.probes: list[Probe] = []
        self.used_bytes, self.copy_bytes = 300 * MB, 0
        self._sizes: set[int] = set()

    def room(self) -> Room:
        return Room(self.room_bytes + 300 * MB - self.used_bytes, self.room_bytes, self.limit)

    def run(
        self,
        settings: Mapping[str, Any],
        size: int | None = None,
        steps: Size = module.STEPS,
        *,
        is_trial: bool = False,
    ) -> Probe:
        base, free, number = self.used_bytes, self.room().free_bytes, settings["batch_size"]
        kept = self.kept_bytes if number not in self._sizes else 0  # by libraries, of each size that has run
        wanted = self.peak_of(number) * (0.4 if "checkpointing" in settings else 1) + kept
        fits = wanted <= free
        self.used_bytes += min(kept, free)
        self._sizes.add(number)
        shortage: Shortage = "memory" if not fits else "data" if number * 3 > self.rows else ""
        peak = base + int(min(wanted, free))
        self.probes.append(Probe(settings, size, peak, shortage, None, base, self.used_bytes, shortage))
        return self.probes[-1]


def searched(machine: Machine, before: int) -> Fit:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "present_size", lambda *arguments: before)
        patch.setattr(module, "candidates", lambda *arguments: [{"checkpointing": True}])
        return module.fit(machine, "batch_size")  # type: ignore[arg-type]


@given(
    st.floats(0, 50 * MB),
    st.floats(10_000, 8 * MB),
    st.just(0.0) | st.floats(0, 2_000),
    st.integers(1, 5000),
    st.integers(400 * MB, 20_000 * MB),
    st.just(0) | st.integers(0, 20 * MB),
)
def test_what_is_proven_ran_within_the_room(
    base: float, each: float, square: float, before: int, room: int, kept: int
) -> None:
    machine = Machine(lambda size: base + each * size + square * size**2, room, kept_bytes=kept)
    found = searched(machine, before)
    allowed = found.allowed_bytes
    assert allowed < 300 * MB + room
    assert len(found.probes) <= MOST_CHEAP + ATTEMPTS
    if found.proven is not None:
        peak = found.peak_of(found.proven)
        assert peak is not None and peak <= allowed
    largest = 0
    for bit in reversed(range(24)):
        if 300 * MB + machine.peak_of(largest + (1 << bit)) <= allowed:
            largest += 1 << bit
    if largest >= 40 and square == 0 and not kept:
        assert found.proven is not None and 0.9 * largest <= found.proven <= largest
    for cure in found.cures:
        assert machine.peak_of(before) > allowed - machine.used_bytes and cure.peak_bytes <= allowed


def test_too_large_a_size_has_a_cure_and_a_small_one_needs_none() -> None:
    machine = Machine(lambda size: 5 * MB * size, 1000 * MB)
    found = searched(machine, 300)
    (cure,) = found.cures
    assert cure.settings == {"checkpointing": True} and cure.peak_bytes == pytest.approx(900 * MB, rel=0.01)
    assert not searched(Machine(lambda size: 5 * MB * size, 1000 * MB), 30).cures
    assert not searched(Machine(lambda size: 50 * MB * size, 1000 * MB), 300).cures


@pytest.mark.parametrize("margin", [-3, 3])
def test_a_cure_too_close_to_the_limit_is_run(margin: int) -> None:
    machine = Machine(lambda size: 5 * MB * size, (600 + margin) * MB * 10 // 9)
    found = searched(machine, 300)
    assert machine.probes[-1].settings == {"checkpointing": True, "batch_size": 300}
    assert [(dict(cure.settings), cure.is_measured) for cure in found.cures] == [({"checkpointing": True}, True)] * (
        margin > 0
    )


def test_a_size_that_failed_against_its_prediction_has_a_cure() -> None:
    machine = Machine(lambda size: (5 * size + (300 if size >= 160 else 0)) * MB, 1000 * MB)
    found = searched(machine, 170)
    assert found.line is not None and found.line.at(170) <= found.allowed_bytes and (found.proven or 0) < 160
    assert found.cures


@pytest.mark.parametrize("before", [64, 1200])
def test_data_that_end_bound_the_size(before: int) -> None:
    found = searched(Machine(lambda size: 10 * MB + 0.1 * MB * size, 20_000 * MB, rows=1797), before)
    assert found.best is not None and 300 <= found.best <= 599
    assert any("the data end too soon" in note for note in found.notes) and not found.is_short


@pytest.mark.parametrize("limit", ["machine", "control group"])
@pytest.mark.parametrize(("square", "before"), [(2_000.0, 60_000), (3_300.0, 60_000), (100.0, 500_000)])
def test_a_search_stays_below_a_limit_that_kills(limit: str, square: float, before: int) -> None:
    machine = Machine(lambda size: 10 * MB + square * size**2, 8_000 * MB, limit=limit)
    found = searched(machine, before)
    assert all(probe.shortage != "memory" for probe in machine.probes) and found.best


def test_a_run_with_accumulation_contains_an_update(request: pytest.FixtureRequest) -> None:
    updates: list[int] = []
    code = """
weights = torch.nn.Linear(4, 1)
optimizer = torch.optim.Adam(weights.parameters())
for (rows,) in torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(4000, 4)), batch_size=16):
    optimizer.zero_grad()
    weights(rows).sum().backward()
    optimizer.step()
"""
    prober, long = module.Prober(Code.of_text(code, {"torch": torch})), list[Probe]()
    request.addfinalizer(register_optimizer_step_post_hook(lambda *_: updates.append(1)).remove)
    prober.within(lambda: long.append(prober.run({"accumulate": 16})))
    assert long[0].fits and updates
    prober.within(lambda: long.append(prober.run({"accumulate": 16, "batch_size": 400})))
    assert long[1].shortage == "data"


def test_where_memory_hardly_grows_two_cheap_runs_do() -> None:
    first, second, third, *_ = searched(Machine(lambda size: 450 * MB + 100 * size, 1000 * MB), 100_000).probes
    assert (second.size or 0) < (first.size or 0) < (third.size or 0), "the third run is of the predicted size"


@pytest.mark.parametrize("kept", [0, 15 * MB])
def test_what_libraries_keep_of_each_size_is_no_slope(kept: int) -> None:
    found = searched(Machine(lambda size: 40 * MB + 2 * MB * size, 1000 * MB, kept_bytes=kept), 64)
    assert found.line is not None and found.line.m1_bytes == pytest.approx(2 * MB, rel=1e-3)
    used = found.allowed_bytes - (1 - found.free_fraction) * found.room.free_bytes
    assert found.line.m0_bytes == pytest.approx(used + kept + 40 * MB, abs=1000)


def test_memory_that_does_not_grow_or_never_fits() -> None:
    flat = searched(Machine(lambda size: 10 * MB, 1000 * MB), 64)
    assert flat.predicted is None or flat.line is not None
    assert flat.proven is None or flat.proven >= 64
    never = searched(Machine(lambda size: 2000 * MB, 1000 * MB), 64)
    assert (never.line, never.predicted, never.proven, never.best) == (None, None, None, None)
    assert LEAST_GROWTH_BYTES > 0


@pytest.mark.parametrize(("limit", "free", "words"), [("machine", 0.2, "kernel kills"), ("GPU", 0.05, "")])
def test_how_much_stays_free(limit: str, free: float, words: str) -> None:
    found = searched(Machine(lambda size: 5 * MB * size, 8000 * MB, limit=limit), 64)
    assert found.free_fraction >= free and any(words in note for note in found.notes) is bool(words)


# -- real cells --------------------------------------------------------------------------------------------------------


def names_of(code: str) -> tuple[Any, dict[str, Any]]:
    from gpulab.tuning.code import Code

    names: dict[str, Any] = {"__name__": "__main__"}
    exec("import torch\nmodel = torch.nn.Linear(8, 1)\noptimizer = torch.optim.SGD(model.parameters(), 0.1)", names)
    return Code.of_text(code, names), names


LOOP = """
for _ in range(8):
    loss = model(torch.randn({size}, 8)).mean()
    loss.backward()
    optimizer.step()
"""


@pytest.mark.parametrize(
    ("code", "name", "words"),
    [
        (LOOP.format(size=4), "batch_size", "batch_size"),
        (LOOP.format(size="width"), "width", "width"),
        ("batch_size = True\n" + LOOP.format(size="batch_size"), "batch_size", "batch_size"),
    ],
)
def test_a_cell_without_such_a_size_is_refused(code: str, name: str, words: str) -> None:
    cell, _ = names_of(code)
    with pytest.raises(UsageError, match=words):
        fit_of(cell, name, show=False)


def test_a_name_that_is_not_there_frees_nothing() -> None:
    with pytest.raises(UsageError, match="--free nothing_of_the_kind: no such name in the notebook"):
        memory(free=("traceback", "nothing_of_the_kind"))


def test_an_error_of_the_cell_passes_and_the_state_is_restored() -> None:
    cell, names = names_of("batch_size = 64\n" + LOOP.format(size="batch_size") + "    1 / (batch_size - 4)\n")
    before = names["model"].weight.detach().clone()
    with pytest.raises(ZeroDivisionError):
        fit_of(cell, show=False)
    assert names["model"].weight.equal(before)


@pytest.mark.parametrize(
    ("before", "fits", "parts"), [(64, 20, 4), (64, None, None), (64, 1, None), (60, 16, None), (64, 40, 2)]
)
def test_accumulation_keeps_the_effective_batch(before: int, fits: int | None, parts: int | None) -> None:
    cell, _ = names_of("batch_size = 64\n" + LOOP.format(size="batch_size"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "resolve", lambda *arguments: SimpleNamespace(refusal=""))
        found = [one for one in candidates(cell, "batch_size", before, fits) if "accumulate" in one]
    expected = [] if parts is None else [{"batch_size": before // parts, "accumulate": parts}]
    assert found == expected


IN_A_CHILD = """
import json, resource
import torch
from torch import nn
import gpulab
from gpulab.api.memory import fit
from gpulab.memory.room import status_bytes
from gpulab.tuning.code import Code
from gpulab.tuning.fit import Prober, prove_cure

torch.manual_seed(0)
names = {"__name__": "__main__", "torch": torch}
names["model"] = nn.Sequential(*[nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(16)])
names["optimizer"] = torch.optim.Adam(names["model"].parameters())
names["kept"] = torch.ones(4)
CELL = '''
batch_size = 7_000
for _ in range(8):
    x = torch.ones(batch_size, 256)
    loss = model(x).pow(2).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    kept += 1
'''
cell = Code.of_text(CELL, names)
with gpulab.profile(show=False, save=False, trace=False):  # as in a notebook: our threads have run
    names["model"](torch.ones(2, 256))
Prober(cell).within(lambda: None)
room = 256 << 20
resource.setrlimit(resource.RLIMIT_AS, (status_bytes("VmSize") + room, resource.RLIM_INFINITY))
before = [t.clone() for t in (*names["model"].parameters(), names["kept"])]
fitted = fit(cell, show=False)
found = fitted.result
prober, proofs = Prober(cell), []
prober.within(lambda: proofs.extend([prove_cure(prober, {"checkpointing": True}), prove_cure(prober, {})]))
after = [*names["model"].parameters(), names["kept"]]
print(json.dumps({
    "proven": found.proven, "predicted": found.predicted, "allowed": found.allowed_bytes,
    "peak": found.peak_of(found.proven or 0), "limit": found.room.limit, "text": fitted.text(full=True),
    "same": all(map(torch.equal, before, after)), "state": len(names["optimizer"].state),
    "cures": [dict(cure.settings) for cure in found.cures],
    "fits": [proof.probe.fits for proof in proofs], "failures": [proof.probe.failure for proof in proofs],
}))
"""


@pytest.mark.slow("a training runs out of memory in a process of its own, a dozen times")
def test_where_memory_really_runs_out() -> None:
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", IN_A_CHILD], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["limit"] == "RLIMIT_AS" and told["same"] and told["state"] == 0
    assert 0.9 * told["allowed"] <= told["peak"] <= told["allowed"]
    assert told["predicted"][1] <= told["proven"] * 1.03 and told["proven"] <= told["predicted"][2]
    assert {"checkpointing": True} in told["cures"]
    assert told["fits"] == [True, False] and [failure[:13] for failure in told["failures"]] == ["", "out of memory"]
    assert f"batch_size={told['proven']:,} fits" in told["text"]


def test_without_memory_for_the_state_it_says_what_to_free(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(code: Code) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(module, "Start", fail)
    with pytest.raises(UsageError, match=r"Too little memory is free to save the state .* --free traceback,NAME"):
        module.Prober(Code.of_text("x = 1", {})).within(lambda: None)
