"""`%gpulab climb` and `headspace` in a real ipykernel: what is shown, what is put back, how they are stopped."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from tests.support.kernel_session import WIDGET_VIEW, KernelSession, kernel
from tests.support.paths import ROOT
from tests.tuning.cells import shown

SETUP = f"""
%load_ext gpulab
import sys, torch
sys.path.insert(0, {str(ROOT)!r})
from torch import nn
from torch.utils.data import DataLoader
from planted.datasets import Stored
torch.manual_seed(0)
torch.set_num_threads(1)
data = Stored(400, 0.005)
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
CLIMB = "%gpulab climb --rungs 1 --pairs 6 --steps 5 --without cache,prefetch --no-save"


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KernelSession]:
    with kernel(tmp_path_factory.mktemp("climb")) as started:
        assert started.run(SETUP).status == "ok"
        yield started


@pytest.fixture
def profiled(session: KernelSession) -> Iterator[KernelSession]:
    """A cell that was profiled, and the weights that it left."""
    if not session.value("'before' in globals()"):
        answer = session.run(f"%%gpuprofile --no-live --no-save --steps 12\n{CELL}")
        assert answer.status == "ok", answer.error
    session.run("before = model.weight.detach().clone()")
    yield session
    assert session.value("bool(torch.equal(before, model.weight))") is True
    assert not session.left_behind()


def test_nothing_was_profiled_yet_and_bad_lines(session: KernelSession) -> None:
    if session.value("'loader' in globals()"):
        pytest.skip("an earlier test has profiled a cell")
    for line, words in (
        ("climb", "no profiled cell yet"),
        ("climb --budget soon", "number of seconds"),
        ("headspace", "no profiled cell"),
        ("headspace --stps 3", "--steps"),
    ):
        answer = session.run(f"%gpulab {line}")
        assert words in answer.stderr + str(answer.error)
    for command in ("climb", "headspace"):
        assert f"%gpulab {command}" in session.run(f"%gpulab {command} --help").stdout


@pytest.mark.slow("a real climb with a loader that sleeps")
def test_a_cell_whose_loader_sleeps_ends_with_workers(profiled: KernelSession) -> None:
    profiled.run("random = torch.get_rng_state()")
    answer = profiled.run(CLIMB)
    assert answer.status == "ok", answer.error
    assert all(words in shown(answer) for words in ("The ladder", "num_workers=", "Keep it", "times as fast"))
    assert "widget" not in "".join(str(sorted(d)) for d in answer.displays()), "no widget stays in the saved notebook"
    profiled.run("import gpulab; last = gpulab.climbs[-1]")
    assert profiled.value("list(last.kept)") == ["workers"]
    assert profiled.value("last.ratio is not None and last.ratio < 0.9") is True
    assert profiled.value("loader.num_workers") == 0
    assert profiled.value("bool(torch.equal(random, torch.get_rng_state()))") is True
    assert profiled.value("[r.settings.knobs for r in gpulab.runs.own[-2:]] == [{}, last.kept]") is True
    edit = "'+loader = DataLoader(data, batch_size=4, shuffle=True, num_workers=' + last.kept['workers']"
    assert profiled.value(f"{edit} in last.edit") is True


def test_the_headspace_of_the_cell_that_was_profiled_last(profiled: KernelSession) -> None:
    names = profiled.names()
    answer = profiled.run("%gpulab headspace --steps 4 --pairs 2")
    assert answer.status == "ok", answer.error
    assert "perfect DataLoader" in shown(answer) and profiled.names() == names
    assert not any(WIDGET_VIEW in d for d in answer.displays()), "a widget in a saved notebook is an error message"


@pytest.mark.parametrize("by", ["button", "interrupt"])
@pytest.mark.parametrize(
    ("line", "begun", "words"),
    [
        ("climb --without cache,prefetch --no-save", "try 1: block", ["The ladder", "stopped"]),
        ("headspace --budget 100 --pairs 30", r"block \d+ of", ["stopped early"]),
    ],
)
def test_a_stop_shows_what_there_is(profiled: KernelSession, line: str, begun: str, words: list[str], by: str) -> None:
    running = profiled.begin(f"%gpulab {line}")
    profiled.wait(running, lambda a: any(re.search(begun, str(d.get("text/plain"))) for d in a.displays()))
    if by == "interrupt":
        profiled.interrupt()
    else:
        assert profiled.control("gpulab_stop", {"run": profiled.run_key()})["status"] == "ok"
    answer = profiled.finish(running)
    if by == "button" or "climb" in line:  # where a pair of blocks had run by then
        assert all(word in " ".join(shown(answer).split()) for word in words)
    if by == "button":
        assert answer.status == "ok", answer.error
        assert "headspace" in line or "not kept: stopped" in shown(answer)
    else:
        assert answer.error is not None and answer.error[2].startswith("Interrupted")
        assert "\n" not in answer.error[2], "no frames"


def test_what_the_cell_raises_is_shown_as_from_the_cell(session: KernelSession) -> None:
    session.run(f"%%gpuprofile --no-live --no-save --steps 12\nif armed: 1 / 0\n{CELL}")
    session.run("armed = False")
    session.run(f"%%gpuprofile --no-live --no-save --steps 12\nif armed: 1 / 0\n{CELL}")
    session.run("armed = True")
    answer = session.run("%gpulab climb --no-save")
    assert answer.error is not None and answer.error[0] == "ZeroDivisionError"
    assert "trials" not in answer.error[2] and "if armed: 1 / 0" in answer.error[2]
    session.run("armed = False")
