"""`--set`, `--ab`, `climb` and `headspace` in a real ipykernel: what is shown, put back, answered to bad input."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator

import pytest

from tests.support.kernel_session import Answer, KernelSession, kernel
from tests.support.paths import ROOT
from tests.tuning.cells import shown

SETUP = f"""
%load_ext gpulab
import sys, time, torch
sys.path.insert(0, {str(ROOT)!r})
from torch import nn
from torch.utils.data import DataLoader
from planted.datasets import Stored
torch.manual_seed(0)
torch.set_num_threads(1)
pause = 0.0
data = Stored(400, 0.005)
model = nn.Linear(16, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""
CELL = """
loader = DataLoader(data, batch_size=4, shuffle=True)
for x, y in loader:
    time.sleep(pause)
    loss = nn.functional.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
FUNCTION = f"def train():\n{textwrap.indent(CELL, '    ')}"
PROFILE = "%%gpuprofile --no-live --no-save --steps 12\n"
CLIMB = "%gpulab climb --rungs 1 --pairs 6 --steps 5 --without cache,prefetch --no-save"


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KernelSession]:
    with kernel(tmp_path_factory.mktemp("experiments")) as started:
        assert started.run(SETUP + FUNCTION).status == "ok"
        yield started


@pytest.fixture
def restored(session: KernelSession) -> Iterator[KernelSession]:
    """The model is in the end as it was."""
    session.run("before = model.weight.detach().clone()")
    yield session
    assert session.value("bool(torch.equal(before, model.weight))") is True
    assert not session.left_behind()


@pytest.fixture(scope="module")
def profiled(session: KernelSession) -> None:
    """A cell that was profiled."""
    answer = session.run(PROFILE + CELL)
    assert answer.status == "ok", answer.error


def test_nothing_was_profiled_yet_and_bad_lines(session: KernelSession) -> None:
    if session.value("'loader' in globals()"):
        pytest.skip("an earlier test has profiled a cell")
    for line, words in (
        ("climb", "No cell was profiled in this kernel yet"),
        ("climb --budget soon", "number of seconds"),
        ("headspace", "No cell was profiled"),
        ("headspace --stps 3", "--steps"),
    ):
        answer = session.run(f"%gpulab {line}")
        assert words in answer.stderr + str(answer.error)
    for command in ("climb", "headspace"):
        assert f"%gpulab {command}" in session.run(f"%gpulab {command} --help").stdout


# -- experiments -------------------------------------------------------------------------------------------------------


def test_a_comparison_beside_the_cell(restored: KernelSession) -> None:
    answer = restored.run(f"%%gpuprofile --ab pause=0.02 --pairs 1 --steps 4 --no-save\n{CELL}")
    assert answer.status == "ok", answer.error
    assert "pause=0.02" in shown(answer) and "variable" in shown(answer)
    assert restored.value("pause") == 0.0
    restored.run("import gpulab; last = gpulab.experiments[-1]")
    assert restored.value("last.result.sides[1].settings") == {"pause": "0.02"}
    assert restored.value("len(last.result.sides[1].blocks)") == 1


def test_one_run_with_a_knob_set(session: KernelSession) -> None:
    session.run("before = model.weight.detach().clone()")
    answer = session.run(f"%%gpuprofile with-worker --set workers=1 --steps 12\n{CELL}")
    assert answer.status == "ok", answer.error
    assert "hanged for this run" in shown(answer) and "took effect" in shown(answer)
    assert "DataLoader option" in shown(answer), "the rule that decided is shown"
    session.run("import gpulab; run = gpulab.runs['with-worker']")
    assert session.value("run.settings.knobs") == {"workers": "1"}
    assert session.value("run.loader.num_workers") == 1
    assert session.value("loader.num_workers") == 0
    assert session.value("bool(torch.equal(before, model.weight))") is False, "it is an ordinary run: it trains"
    assert not session.left_behind()


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--ab wrkers=2", "workers"),
        ("--pairs 5", "needs a comparison"),
        ("--ab workers=1 --whole", "cannot be combined"),
        ("--ab workers=1 --warmup 0", "cannot be combined"),
        ("--ab workers=1 --budget soon", "number of seconds"),
        ("--ab workers=1 --pairs 0", "≥ 1"),
        ("--set model=3", "model"),
        ("--ab workers=1 --device cuda:77", "cuda:77"),
        ("--sweep workers=1,two", "workers"),
    ],
)
def test_what_cannot_work_is_one_line_and_nothing_runs(session: KernelSession, line: str, words: str) -> None:
    answer = session.run(f"%%gpuprofile {line}\nran = True\n{CELL}")
    assert answer.error is not None or "UsageError" in answer.stderr, answer
    said = answer.stderr or str(answer.error)
    assert words in said and "did not run" in said
    assert "ran" not in session.names()


def test_several_knobs_in_quotes_and_the_result_handed_over(session: KernelSession) -> None:
    answer = session.run('found = %gpuprofile -r --ab "workers=1, pause=0.01" --pairs 1 --steps 4 --no-save train()')
    assert answer.status == "ok", answer.error
    assert session.value("found.only.b.settings") == {"workers": "1", "pause": "0.01"}
    assert session.value("found.only.b.checks[0].state") == "took effect"
    assert session.value("found.verdict in ('faster', 'slower', 'no measurable difference', 'undecided')") is True


def test_the_text_of_a_cell_finds_the_names_of_the_notebook(session: KernelSession) -> None:
    """And shows its steps and the limit while the first run goes on."""

    def stepping(answer: Answer) -> bool:
        return any("baseline: step " in str(d.get("text/plain")) for d in answer.displays())

    slow = CELL.replace("pause", "0.1")
    running = session.begin(f"import gpulab\ngpulab.experiment({slow!r}, {{'batch_size': 2}}, save=False, show=False);")
    session.wait(running, stepping)
    line = str(next(d["text/plain"] for d in running.answer.displays() if "step " in str(d.get("text/plain"))))
    assert "at most 60 s" in line and line.count("step ") == 1
    assert session.control("gpulab_stop", {"run": session.run_key()})["status"] == "ok"
    answer = session.finish(running)
    assert answer.status == "ok" and shown(answer) == "", "without a result nothing stays"


def test_the_cell_as_written_may_fail(session: KernelSession) -> None:
    answer = session.run("%%gpuprofile --ab workers=1 --no-save\n1 / 0")
    assert answer.error is not None and answer.error[0] == "ZeroDivisionError"
    answer = session.run(f"%%gpuprofile --no-live --no-save --steps 5\n{CELL}")
    assert "Try other settings" in str(answer.buttons), "under the report without a live view too"
    session.run("1")  # puts text in its place
    assert not session.left_behind()


# -- climb, headspace --------------------------------------------------------------------------------------------------


@pytest.fixture
def loading(session: KernelSession) -> Iterator[None]:
    """A profiled cell that sleeps so long for each batch that workers win on a busy machine, too."""
    session.run("data = Stored(400, 0.015)")
    assert session.run(PROFILE + CELL).status == "ok"
    yield
    session.run("data = Stored(400, 0.005)")


@pytest.mark.slow("a real climb with a loader that sleeps")
def test_a_cell_whose_loader_sleeps_ends_with_workers(loading: None, restored: KernelSession) -> None:
    restored.run("random = torch.get_rng_state()")
    answer = restored.run(CLIMB)
    assert answer.status == "ok", answer.error
    assert all(words in shown(answer) for words in ("The ladder", "num_workers=", "Keep it", "speedup"))
    assert "widget" not in "".join(str(sorted(d)) for d in answer.displays()), "no widget stays in the saved notebook"
    restored.run("import gpulab; last = gpulab.climbs[-1]")
    assert restored.value("list(last.kept)") == ["workers"]
    assert restored.value("last.ratio is not None and last.ratio < 0.9") is True
    assert restored.value("loader.num_workers") == 0
    assert restored.value("bool(torch.equal(random, torch.get_rng_state()))") is True
    assert restored.value("[r.settings.knobs for r in gpulab.runs.own[-2:]] == [{}, last.kept]") is True
    edit = "'+loader = DataLoader(data, batch_size=4, shuffle=True, num_workers=' + last.kept['workers']"
    assert restored.value(f"{edit} in last.edit") is True


def test_the_headspace_of_the_cell_that_was_profiled_last(profiled: None, restored: KernelSession) -> None:
    names = restored.names()
    answer = restored.run("%gpulab headspace --steps 4 --pairs 2")
    assert answer.status == "ok", answer.error
    assert "perfect DataLoader" in shown(answer) and restored.names() == names
    assert "widget" not in "".join(str(sorted(d)) for d in answer.displays()), "no widget stays in the saved notebook"


@pytest.mark.parametrize("by", ["button", "interrupt"])
@pytest.mark.parametrize(
    ("code", "begun", "words"),
    [
        (
            f"%%gpuprofile --ab pause=0.001 --pairs 30 --no-save\n{CELL}",
            r"block \d\d of 90",
            ["Stopped after", "pairs"],
        ),
        ("%gpulab climb --without cache,prefetch --no-save", "try 1: block", ["The ladder", "stopped"]),
        ("%gpulab headspace --budget 100 --pairs 30", r"block \d+ of", ["stopped early"]),
    ],
    ids=["comparison", "climb", "headspace"],
)
def test_a_stop_shows_what_there_is(
    profiled: None, restored: KernelSession, code: str, begun: str, words: list[str], by: str
) -> None:
    running = restored.begin(code)
    restored.wait(running, lambda a: any(re.search(begun, str(d.get("text/plain"))) for d in a.displays()))
    if by == "interrupt":
        restored.interrupt()
    else:
        assert restored.control("gpulab_stop", {"run": restored.run_key()})["status"] == "ok"
    answer = restored.finish(running)
    if by == "button" or "headspace" not in code:  # where a pair of blocks had run by then
        assert all(word in " ".join(shown(answer).split()) for word in words)
    assert "widget" not in "".join(str(sorted(d)) for d in answer.displays()), "no widget stays in the saved notebook"
    if by == "button":
        assert answer.status == "ok", answer.error
        assert "climb" not in code or "not kept: stopped" in shown(answer)
    else:
        assert answer.error is not None and answer.error[2].startswith("Interrupted")
        assert "\n" not in answer.error[2], "no frames"


def test_what_the_cell_raises_is_shown_as_from_the_cell(session: KernelSession) -> None:
    session.run("armed = False")
    session.run(f"{PROFILE}if armed: 1 / 0\n{CELL}")
    session.run("armed = True")
    answer = session.run("%gpulab climb --no-save")
    assert answer.error is not None and answer.error[0] == "ZeroDivisionError"
    assert "full_runs" not in answer.error[2] and "if armed: 1 / 0" in answer.error[2]
