"""`gpulab.profile` as code uses it: once per block, with figures that add up."""

from __future__ import annotations

import multiprocessing
import time
import traceback
from pathlib import Path

import pytest
import torch
from torch import nn

import gpulab
import gpulab.demo
from gpulab.analysis.facts import facts
from gpulab.errors import UsageError
from gpulab.store.folders import Store, trace_path
from gpulab.trace.profiler_result import Recording
from gpulab.views.report.sections import opening


def train(steps: int) -> None:
    model, x = nn.Linear(4, 2), torch.ones(3, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()


def test_a_profile_runs_once() -> None:
    p = gpulab.profile("once", show=False, save=False, trace=False)
    with p:
        gpulab.step()
    first = p.run
    with pytest.raises(UsageError, match="make a new one"), p:
        pass
    assert p.run is first


def test_time_outside_steps_is_a_share_of_the_codes_own_time() -> None:
    with gpulab.profile("outside", show=False, save=False, trace=False) as p:
        for _ in range(4):
            time.sleep(0.02)
            gpulab.step()
        time.sleep(0.08)
    known = facts(p.run)
    assert p.run.code_wall_ns < p.run.wall_ns
    inside = int(p.run.steps.wall_ns.sum()) / p.run.code_wall_ns
    assert known.outside_steps_fraction == pytest.approx(1 - inside)
    assert known.outside_steps_fraction is not None
    assert known.outside_steps_fraction * p.run.code_wall_ns >= 0.079e9, "at least the last sleep"


def test_the_first_step_does_not_begin_before_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    from gpulab.capture.sampler import Sampler

    def slow(self: Sampler) -> None:
        time.sleep(0.2)
        started(self)

    started = Sampler.start
    monkeypatch.setattr(Sampler, "start", slow)
    with gpulab.profile("first", show=False, save=False, trace=False) as p:
        gpulab.step()
    assert p.run.steps.start_ns[0] >= 0.2e9
    assert p.run.steps.wall_ns[0] <= p.run.code_wall_ns


@pytest.mark.parametrize("fails", [False, True])
def test_code_that_fails_to_clean_up_after_its_end_has_ended(fails: bool) -> None:
    with gpulab.profile("tidy", steps=8, show=False, save=False, trace=False) as p:
        try:
            train(40)
        finally:
            if fails:
                raise RuntimeError("the loader is only half there")
    assert (len(p.run.steps), p.run.outcome) == (8, "stopped")
    line = " ".join(opening(facts(p.run)).split())
    assert ("cleaning up, the code raised RuntimeError: the loader" in line) is fails


@pytest.mark.parametrize("folder", ["gpulab_cells", "gpulab/demo"])
def test_a_frame_stays_whose_folder_only_begins_as_ours(folder: str) -> None:
    file = str(Path(gpulab.__file__).parents[1] / folder / "train.py")
    code = compile("def train():\n    raise ValueError('mine')\ntrain()", file, "exec")
    with pytest.raises(ValueError, match="mine") as caught, gpulab.profile("beside", show=False, save=False):
        exec(code, {})
    assert [frame.name for frame in traceback.extract_tb(caught.value.__traceback__) if frame.filename == file] == [
        "<module>",
        "train",
    ]


def test_a_loop_shorter_than_asked_still_has_a_breakdown() -> None:
    with gpulab.profile("short", steps=200, show=False, save=False) as p:
        train(40)
    assert len(p.run.steps) == 40
    assert facts(p.run).breakdown is not None
    assert all(m.key != "breakdown" for m in p.run.missing)


def test_the_report_does_not_wait_for_the_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    write = Recording.write

    def writing(self: Recording, path: Path) -> None:
        done.append("trace")
        write(self, path)

    monkeypatch.setattr(Recording, "write", writing)
    monkeypatch.setattr(gpulab.profile, "_present", lambda self: done.append("report"))
    with gpulab.profile("order", steps=8) as p:
        for _ in range(8):
            gpulab.step()
    assert done == ["report", "trace"]
    (folder,) = Store().root.iterdir()
    assert trace_path(folder) is not None and p.run.missing == Store().load(folder).missing


def test_a_trace_that_fails_is_said_afterwards(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(self: Recording, path: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Recording, "write", full)
    with gpulab.profile("no room", show=False, steps=8) as p:
        for _ in range(8):
            gpulab.step()
    assert "no space left on device" in p.run.missing[-1].reason
    assert gpulab.runs[-1].missing == p.run.missing
    assert "no space left on device" in p.report.text(full=True)


def test_forked_ranks_are_said_not_to_be_measured() -> None:
    code = "from accelerate import notebook_launcher\nnotebook_launcher(train, (3, 'x'), num_processes=2)"

    def start_ranks() -> None:
        started = [multiprocessing.get_context("fork").Process(target=str) for _ in range(2)]
        for process in started:
            process.start()
        for process in started:
            process.join()

    with gpulab.profile(show=False, live=False, trace=False, source="cell", code=code) as p:
        start_ranks()
    (said,) = (m for m in p.run.missing if m.key == "ranks")
    assert said.reason == (
        "the 2 processes that notebook_launcher starts cannot be followed: use train(3, 'x') instead, under "
        "%%gpuprofile --ranks 2"
    )
    assert "gpulab did not measure" in p.report.headline.sentence and "train(3, 'x')" in p.report.text()
    with gpulab.profile(show=False, live=False, trace=False, source="cell", code=code) as q:
        start_ranks()
        for _ in range(3):
            gpulab.step()
    assert not any(m.key == "ranks" for m in q.run.missing), "it has steps of its own"
    with gpulab.profile(show=False, live=False, trace=False, source="cell", code=code) as r:
        list(torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.zeros(2)), num_workers=2))
    assert not any(m.key == "ranks" for m in r.run.missing), "a DataLoader's workers are no ranks"
