"""`--set`, `--ab` and `--sweep` in a real ipykernel: what is shown, what is put back, how bad input is answered."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator

import pytest

from tests.support.kernel_session import Answer, KernelSession, kernel
from tests.tuning.cells import shown

SETUP = """
%load_ext gpulab
import time, torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
torch.set_num_threads(1)
pause = 0.0
model = nn.Linear(8, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(torch.randn(256, 8), torch.randint(0, 2, (256,))), batch_size=4, shuffle=True)
before = model.weight.detach().clone()
"""
CELL = """
for x, y in loader:
    time.sleep(pause)
    loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print("trained")
"""
FUNCTION = f"def train():\n{textwrap.indent(CELL, '    ')}"


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KernelSession]:
    with kernel(tmp_path_factory.mktemp("experiments")) as started:
        assert started.run(SETUP + FUNCTION).status == "ok"
        yield started


def stepping(answer: Answer) -> bool:
    return any("as written: step " in str(d.get("text/plain")) for d in answer.displays())


def test_a_comparison_beside_the_cell(session: KernelSession) -> None:
    answer = session.run(f"%%gpuprofile --ab pause=0.02 --pairs 1 --steps 4 --no-save\n{CELL}")
    assert answer.status == "ok", answer.error
    assert "pause=0.02" in shown(answer) and "variable of the cell" in shown(answer)
    assert session.value("bool(torch.equal(before, model.weight))") is True
    assert session.value("pause") == 0.0
    session.run("import gpulab; last = gpulab.experiments[-1]")
    assert session.value("last.result.sides[1].settings") == {"pause": "0.02"}
    assert session.value("len(last.result.sides[1].blocks)") == 1
    assert not session.left_behind()


def test_one_run_with_a_knob_set(session: KernelSession) -> None:
    answer = session.run(f"%%gpuprofile with-worker --set workers=1 --steps 12\n{CELL}")
    assert answer.status == "ok", answer.error
    assert "hanged for this run" in shown(answer) and "took effect" in shown(answer)
    assert "DataLoader option" in shown(answer), "the rule that decided is shown"
    session.run("import gpulab; run = gpulab.runs['with-worker']")
    assert session.value("run.settings.knobs") == {"workers": "1"}
    assert session.value("run.loader.num_workers") == 1
    assert session.value("loader.num_workers") == 0
    assert session.value("bool(torch.equal(before, model.weight))") is False, "it is an ordinary run: it trains"
    session.run("model.weight.data.copy_(before);")
    assert not session.left_behind()


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--ab wrkers=2", "workers"),
        ("--ab workers=1 --ab workers=2", "set twice"),
        ("--pairs 5", "belongs to a comparison"),
        ("--ab workers=1 --whole", "contradict"),
        ("--ab workers=1 --warmup 0", "contradict"),
        ("--ab workers=1 --budget soon", "number of seconds"),
        ("--ab workers=1 --pairs 0", "at least 1"),
        ("--set model=3", "model"),
        ("--ab pause=abc", "pause is 0.0 in the code, so it takes a number."),
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
    assert "Turn a knob on this cell" in str(answer.buttons), "under the report without a live view too"
    session.run("1")  # puts text in its place
    assert not session.left_behind()


# -- how it ends -------------------------------------------------------------------------------------------------------

LONG = f"%%gpuprofile --ab pause=0.001 --pairs 30 --no-save\n{CELL}"


def comparing(answer: Answer) -> bool:
    """Blocks of the second turn run."""
    told = (re.search(r"block (\d+) of 90", str(d.get("text/plain"))) for d in answer.displays())
    return any(block is not None and int(block[1]) >= 5 for block in told)


@pytest.mark.parametrize("by", ["button", "interrupt"])
def test_a_stop_gives_the_result_so_far(session: KernelSession, by: str) -> None:
    session.run("before = model.weight.detach().clone()")
    running = session.begin(LONG)
    session.wait(running, comparing)
    if by == "interrupt":
        session.interrupt()
    else:
        assert session.control("gpulab_stop", {"run": session.run_key()})["status"] == "ok"
    answer = session.finish(running)
    assert "Stopped after " in shown(answer) and "of blocks" in shown(answer)
    assert "widget" not in "".join(str(sorted(d)) for d in answer.displays()), "no widget stays in the saved notebook"
    assert (answer.error is not None) is (by == "interrupt")
    if answer.error is not None:
        assert answer.error[2].startswith("Interrupted: above is what was measured until then")
        assert "\n" not in answer.error[2], "no frames"
    assert session.value("bool(torch.equal(before, model.weight))") is True
    assert not session.left_behind()
