"""`%gpulab climb` in a real ipykernel: what is shown, what is put back, how it is stopped."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.kernel_session import Answer, KernelSession, kernel
from tests.support.paths import ROOT

SETUP = f"""
%load_ext gpulab
import sys, torch
sys.path.insert(0, {str(ROOT)!r})
from torch import nn
from torch.utils.data import DataLoader
from planted.datasets import Stored
torch.manual_seed(0)
torch.set_num_threads(1)
data = Stored(400, 0.01)
model = nn.Linear(16, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""
CELL = """
loader = DataLoader(data, batch_size=4, shuffle=True)
for x, y in loader:
    loss = nn.functional.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
CLIMB = "%gpulab climb --rungs 1 --pairs 8 --steps 6 --without cache,prefetch --no-save"


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KernelSession]:
    with kernel(tmp_path_factory.mktemp("climb")) as started:
        assert started.run(SETUP).status == "ok"
        yield started


@pytest.fixture
def profiled(session: KernelSession) -> Iterator[KernelSession]:
    """A cell that was profiled, and the weights that it left."""
    answer = session.run(f"%%gpuprofile --no-live --no-save --steps 12\n{CELL}")
    assert answer.status == "ok", answer.error
    session.run("before = model.weight.detach().clone()")
    yield session
    assert session.value("bool(torch.equal(before, model.weight))") is True
    assert not session.left_behind()


def shown(answer: Answer) -> str:
    return answer.stdout + "".join(
        str(d.get("text/plain", "")) + str(d.get("text/html", "")) for d in answer.displays()
    )


def test_nothing_was_profiled_yet(session: KernelSession) -> None:
    if session.value("'loader' in globals()"):
        pytest.skip("an earlier test has profiled a cell")
    answer = session.run("%gpulab climb")
    assert "no profiled cell yet" in answer.stderr + str(answer.error)


def test_the_ladder_and_the_edit_are_in_the_notebook(profiled: KernelSession) -> None:
    answer = profiled.run(CLIMB)
    assert answer.status == "ok", answer.error
    assert "The ladder" in shown(answer) and "num_workers=" in shown(answer) and "Keep it" in shown(answer)
    assert "widget" not in "".join(str(sorted(d)) for d in answer.displays()), "no widget stays in the saved notebook"
    profiled.run("import gpulab; last = gpulab.climbs[-1]")
    assert profiled.value("list(last.kept)") == ["workers"]
    assert profiled.value("loader.num_workers") == 0


def test_a_bad_line_is_one_sentence(profiled: KernelSession) -> None:
    answer = profiled.run("%gpulab climb --budget soon")
    assert "number of seconds" in answer.stderr + str(answer.error)
    assert "%gpulab climb" in profiled.run("%gpulab climb --help").stdout


def begun_trying(answer: Answer) -> bool:
    return any("try 1: block" in str(d.get("text/plain")) for d in answer.displays())


def test_the_stop_button(profiled: KernelSession) -> None:
    running = profiled.begin("%gpulab climb --without cache,prefetch --no-save")
    profiled.wait(running, begun_trying)
    assert profiled.control("gpulab_stop", {"run": profiled.run_key()})["status"] == "ok"
    answer = profiled.finish(running)
    assert answer.status == "ok", answer.error
    assert "The climb was stopped" in shown(answer) and "not kept: stopped" in shown(answer)


def test_the_stop_of_the_notebook(profiled: KernelSession) -> None:
    running = profiled.begin("%gpulab climb --without cache,prefetch --no-save")
    profiled.wait(running, begun_trying)
    profiled.interrupt()
    answer = profiled.finish(running)
    assert answer.error is not None and answer.error[2].startswith("Interrupted: above is what was measured")
    assert "\n" not in answer.error[2], "no frames"
    assert "The ladder" in shown(answer) and "stopped" in shown(answer)


def test_what_the_cell_raises_is_shown_as_from_the_cell(session: KernelSession) -> None:
    session.run(f"%%gpuprofile --no-live --no-save --steps 12\nif armed: 1 / 0\n{CELL}")
    session.run("armed = False")
    session.run(f"%%gpuprofile --no-live --no-save --steps 12\nif armed: 1 / 0\n{CELL}")
    session.run("armed = True")
    answer = session.run("%gpulab climb --no-save")
    assert answer.error is not None and answer.error[0] == "ZeroDivisionError"
    assert "trials" not in answer.error[2] and "if armed: 1 / 0" in answer.error[2]
    session.run("armed = False")
