"""The magics in an in-process shell: parsing, help, completion, configuration, and what a terminal sees."""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from IPython.core.error import UsageError as LineError
from IPython.core.interactiveshell import ExecutionResult, InteractiveShell

import gpulab
from gpulab import magics
from gpulab.arguments import HelpRequest, Parser
from gpulab.commands import PROFILE, at
from gpulab.errors import UsageError
from gpulab.knobs.catalogue import KNOBS
from gpulab.tuning import cell_code
from tests.support.commands import answered
from tests.support.fork_server import python_with_torch
from tests.support.leftovers import own_frames
from tests.support.shell import bare_shell


@pytest.fixture
def shell(monkeypatch: pytest.MonkeyPatch) -> Iterator[InteractiveShell]:
    """A shell of its own, with the extension; afterwards the extension is gone without a trace."""
    with bare_shell() as made:
        before = _registered(made)
        extensions = made.extension_manager
        assert extensions is not None
        extensions.load_extension("gpulab")
        assert _registered(made) != before
        yield made
        extensions.unload_extension("gpulab")
        assert _registered(made) == before


def _registered(shell: InteractiveShell) -> dict[str, Any]:
    """Everything in a shell that loading the extension may touch."""
    return {
        "magics": [
            (kind, name) for kind, found in shell.magics_manager.magics.items() for name in found if "gpu" in name
        ],
        "registry": "GPUProfile" in shell.magics_manager.registry,
        "configurables": sum(type(c).__name__ == "GPUProfile" for c in shell.configurables),
        "matchers": len(shell.Completer.custom_matchers),
        "completers": sorted(shell.strdispatchers["complete_command"].strs),
        "callbacks": {event: len(found) for event, found in shell.events.callbacks.items()},
        "names": sorted(name for name in shell.user_ns if "gpu" in name.lower() or name in ("profile", "magics")),
    }


def run(shell: InteractiveShell, code: str) -> ExecutionResult:
    done: ExecutionResult = shell.run_cell(code, store_history=True)
    return done


def value_of(done: ExecutionResult) -> Any:
    """What the cell's last expression gave; IPython declares it None."""
    return done.result


# -- the line ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "words", "statement"),
    [
        ("train()", {}, "train()"),
        ("  f(x)[0] ", {}, "f(x)[0] "),
        ("--steps 3 f(-1, --x)", {"steps": 3}, "f(-1, --x)"),
        ("--steps=3 --no-live -r f('a  b')", {"steps": 3, "no_live": True, "give": True}, "f('a  b')"),
        ("-r x = {'a': $b}", {"give": True}, "x = {'a': $b}"),
        ('--ab "workers=1, amp=bf16" train("a  b")', {"ab": ["workers=1, amp=bf16"]}, 'train("a  b")'),
        ("--ab='a=1, b=2' --set x=' 3 ' f()", {"ab": ["a=1, b=2"], "set": ["x= 3 "]}, "f()"),
        ("- 1", {}, "- 1"),
    ],
)
def test_a_statement_is_left_as_it_is(line: str, words: dict[str, object], statement: str) -> None:
    options, rest = magics.split_statement(line)
    assert {k: v for k, v in vars(options).items() if v not in (None, False, "", "%%gpuprofile")} == words
    assert rest == statement
    with pytest.raises(HelpRequest):
        magics.split_statement("--help")


@pytest.mark.parametrize(
    ("read", "given", "told"),
    [
        (magics.parse, ["--step"], "did you mean --steps?"),
        (magics.parse, ["--trace_steps", "3"], "did you mean --trace-steps?"),
        (magics.parse, ["--Device=cpu"], "did you mean --device?"),
        (magics.parse, ["name", "--hlep"], "did you mean --help?"),
        (magics.parse, ["-v"], "did you mean --all?"),
        (magics.parse, ["--max_steps", "9"], "did you mean --steps?"),
        (magics.parse, ["--workers", "2"], "settings are --set workers=2 or, to compare, --ab workers=2."),
        (magics.parse, ["--batch-size=64"], "settings are --set batch_size=64 or, to compare, --ab batch_size=64."),
        (magics.parse, ["--compile"], "settings are --set compile="),
        (magics.parse, ["--zzzzzz"], "%%gpuprofile has no option --zzzzzz; --help lists them."),
        (answered, "rnus", "Did you mean runs?"),
        (answered, "Doctor", "Did you mean doctor?"),
        (answered, "foo", "There are: report, runs, predict, "),
        (answered, "foo", "See `%gpulab --help`."),
        (answered, "watch", "At a terminal: gpulab watch."),
        (answered, "doctor strange", "Unexpected argument 'strange'. See `%gpulab doctor --help`."),
    ],
)
def test_an_unknown_word_names_the_nearest(read: Callable[[Any], object], given: Any, told: str) -> None:
    """By what it means, then by its letters; of a word that is near none nothing is guessed."""
    with pytest.raises(UsageError) as caught:
        read(given)
    assert told in str(caught.value) and "\n" not in str(caught.value)
    assert ("id you mean" in str(caught.value)) is ("ou mean" in told)


def test_every_option_is_read_and_every_default_is_configurable() -> None:
    of_one_line = {"name", "help", "all", "give", "whole", "set", "ab", "sweep", "pairs", "budget", "seeds"}
    of_one_line |= {"ranks", "only_ranks", "on", "nodes", "time", "sbatch"}
    actions = Parser(PROFILE, PROFILE.name)._actions
    read = {a.dest for a in actions} - of_one_line
    traits = set(magics.GPUProfile.class_own_traits(config=True))
    assert {name.removeprefix("no_") for name in read} == traits
    for action in actions:
        assert action.help and action.help != argparse.SUPPRESS
        assert all(option in magics.help_text() for option in action.option_strings)


# -- the shell ---------------------------------------------------------------------------------------------------------


def test_help_is_the_docstring_and_the_knobs(shell: InteractiveShell, capsys: pytest.CaptureFixture[str]) -> None:
    run(shell, "%gpuprofile --help")
    printed = capsys.readouterr().out
    assert printed == magics.help_text() + "\n"
    assert f"Settings: {', '.join(KNOBS)}, or any variable" in " ".join(printed.split())
    without_knobs = printed[: printed.index("Settings: ")]
    assert shell.find_line_magic("gpuprofile").__doc__.startswith(without_knobs)
    assert max(len(line) for line in printed.splitlines()) <= 120
    run(shell, "%gpuprofile")
    assert capsys.readouterr().out == printed


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("a b", "'b'"),
        ("--steps x", "--steps"),
        ("--steps", "--steps"),
        ("it's", "it's"),
        ("--no-trace --whole", "--whole"),
        ("--steps 3 --warmup 3", "--warmup 3"),
        ("--device cuda:7", '"cuda:7"'),
        ("--device tpu", 'use "auto"'),
        ("--no-save=1", "--no-save"),
        ("--steps 5 name more", "'more'"),
    ],
)
def test_bad_lines_stop_run_all(shell: InteractiveShell, line: str, named: str) -> None:
    text = refused(shell, f"%%gpuprofile {line}\nhas_run = 1")
    assert named in text and text.count("run.") == 1 and re.search(r"[.?] The cell did not run\.$", text), text


def refused(shell: InteractiveShell, cell: str) -> str:
    result = run(shell, cell)
    assert isinstance(result.error_in_exec, LineError) and "has_run" not in shell.user_ns
    text = str(result.error_in_exec)
    assert "\n" not in text
    return text


def test_a_refused_statement_or_empty_cell_says_so(shell: InteractiveShell) -> None:
    """The lines above the statement in its cell have run."""
    statement = refused(shell, "above = 1\n%gpuprofile --steps 0 has_run = 1")
    assert shell.user_ns["above"] == 1 and statement.endswith(". The statement did not run.")
    for cell in ("%%gpuprofile\n", "%%gpuprofile\n\n  \n", "%%gpuprofile name"):
        assert "%gpuprofile" in refused(shell, cell)


def test_braces_and_dollars_in_the_line_stay(shell: InteractiveShell) -> None:
    result = run(shell, "value = 5\nrun_ = %gpuprofile -r --no-save print('{value} $value')\nrun_")
    assert value_of(result).code == "print('{value} $value')"
    run(shell, "%%gpuprofile '{value} $value' --no-save\n1")
    assert gpulab.runs[-1].name == "{value} $value"
    assert run(shell, "%gpulab report {value} $value").success


def test_a_terminal_gets_the_text_report_once(shell: InteractiveShell, capsys: pytest.CaptureFixture[str]) -> None:
    result = run(shell, "%%gpuprofile terminal --no-save\nprint('mine')\n40 + 2")
    out, err = capsys.readouterr()
    assert value_of(result) == 42 and err == ""
    assert out.startswith("mine\ngpulab · terminal")
    assert out.count("gpulab · terminal") == 1
    assert out.rstrip().endswith(f"Out[{shell.execution_count - 1}]: 42")
    run(shell, "%gpulab report")
    assert capsys.readouterr().out.startswith("gpulab · terminal")


INNER = "gpulab: %%gpuprofile inside a measured cell is ignored: the outer one already measures this code.\n"


@pytest.mark.parametrize(
    ("inner", "said", "steps"),
    [
        ("%%gpuprofile --no-live\ntrain()", INNER, 9),
        ("%gpuprofile train()", INNER, 9),
        (
            "%gpuprofile --set workers=2 train()",
            "cannot take --set: put one %%gpuprofile --set on the cell's first line",
            0,
        ),
    ],
)
def test_a_cell_is_measured_once(
    shell: InteractiveShell, capsys: pytest.CaptureFixture[str], inner: str, said: str, steps: int
) -> None:
    before = len(gpulab.runs)
    run(shell, "from gpulab import step\ndef train():\n    for _ in range(9):\n        step()")
    done = run(shell, f"%%gpuprofile --no-live --no-save --no-trace\n{inner}")
    printed = capsys.readouterr()
    assert said in printed.err + printed.out and done.success is bool(steps)
    assert len(gpulab.runs) == before + 1 and len(gpulab.runs[-1].steps) == steps


def test_the_other_commands(shell: InteractiveShell, capsys: pytest.CaptureFixture[str]) -> None:
    run(shell, "%gpulab doctor")
    assert "torch" in capsys.readouterr().out.lower()
    run(shell, "%gpuprofile --no-live 1")
    capsys.readouterr()
    run(shell, "%gpulab runs")
    assert gpulab.runs[-1].id in capsys.readouterr().out
    assert "no-such-run" in refused(shell, "%gpulab report no-such-run")


def test_a_failure_that_nobody_shows_changes_nothing_later(
    shell: InteractiveShell, capsys: pytest.CaptureFixture[str]
) -> None:
    """The hook that shows the next error as bare is gone with the cell, also where the cell caught its error."""
    custom = shell.CustomTB
    code = "try:\n    get_ipython().run_cell_magic('gpuprofile', '--no-save', '1 / 0')\nexcept ZeroDivisionError: pass"
    assert run(shell, code).success
    assert shell.custom_exceptions == () and shell.CustomTB is custom
    capsys.readouterr()
    run(shell, "1 / 0")
    assert "ZeroDivisionError" in capsys.readouterr().out


def test_a_users_own_exception_handler_is_called(shell: InteractiveShell) -> None:
    seen: list[BaseException] = []
    shell.set_custom_exc((ValueError,), lambda self, kind, value, trace, tb_offset=None: seen.append(value))
    run(shell, "%%gpuprofile --no-save\nraise ValueError('mine')")
    assert [str(e) for e in seen] == ["mine"]
    assert shell.custom_exceptions == (ValueError,)
    shell.set_custom_exc((), None)


def test_a_fault_of_ours_does_not_hide_the_users(
    shell: InteractiveShell, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from gpulab.capture.recorder import Capture

    finish = Capture.finish

    def broken(self: Capture, *args: Any) -> Any:
        finish(self, *args)
        raise RuntimeError("broken on purpose")

    monkeypatch.setattr(Capture, "finish", broken)
    result = run(shell, "%%gpuprofile --no-save\n{}['k']")
    assert type(result.error_in_exec) is KeyError and result.error_in_exec.__context__ is None
    assert "broken on purpose" in capsys.readouterr().err
    result = run(shell, "%%gpuprofile --no-save\n5")
    assert value_of(result) == 5
    assert "broken on purpose" in capsys.readouterr().err


def test_an_interrupt_while_starting_leaves_nothing(shell: InteractiveShell, monkeypatch: pytest.MonkeyPatch) -> None:
    from gpulab.capture import recorder

    def interrupted(*args: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(recorder.Capture, "_hook_torch", interrupted)
    result = run(shell, "%%gpuprofile --no-save\nhas_run = 1")
    assert isinstance(result.error_in_exec, KeyboardInterrupt) and "has_run" not in shell.user_ns


# -- the cell ----------------------------------------------------------------------------------------------------------


def test_await_is_found_before_anything_runs(shell: InteractiveShell) -> None:
    for text in ("await f()", "async for x in y: pass", "[x async for x in y]"):
        with pytest.raises(UsageError, match="async with gpulab"):
            cell_code.parsed(shell, text)
    within = "f = lambda: 1\ndef g():\n    async def h():\n        await i()"
    for text in ("async def f():\n    await g()", within, "'await f()'  # await f()"):
        cell_code.parsed(shell, text)


def test_without_autoawait_await_is_a_syntax_error(shell: InteractiveShell) -> None:
    shell.autoawait = False
    result = run(shell, "%%gpuprofile --no-save\nbefore = 1\nawait f()")
    assert isinstance(result.error_in_exec, SyntaxError)
    assert shell.user_ns["before"] == 1, "as in a bare cell, what stands before has run"


def test_a_transformer_sees_the_cell_once(shell: InteractiveShell) -> None:
    seen: list[str] = []

    def note(lines: list[str]) -> list[str]:
        seen.append("".join(lines))
        return lines

    shell.input_transformers_post.append(note)
    run(shell, "%%gpuprofile --no-save\nonly_once = 1")
    assert sum(text == "only_once = 1\n" for text in seen) == 1


# -- outside a notebook ------------------------------------------------------------------------------------------------


def test_ipython_in_a_terminal(tmp_path: Path) -> None:
    script = "%load_ext gpulab\n%gpuprofile from_terminal = 6 * 7\nprint(from_terminal)\n%gpuprofile 1 / 0\n"
    (tmp_path / "session.ipy").write_text(script)
    environment = {**os.environ, "IPYTHONDIR": str(tmp_path / "ipython"), "GPULAB_DIR": str(tmp_path / "store")}
    command = [python_with_torch(), "-m", "IPython", "--no-banner", "--colors=NoColor", "session.ipy"]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.stdout.count("gpulab ·") == 1, done.stdout + done.stderr
    nothing = "before its first training step (ZeroDivisionError: division by zero), so there is no report."
    assert "\n42\n" in done.stdout and nothing in done.stdout
    assert not own_frames(done.stdout.split(nothing, 1)[1])
    assert len(list((tmp_path / "store" / "runs").iterdir())) == 2


TRAINING = """%%gpuprofile --no-save --no-trace
import torch
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(torch.randn(64, 4)), batch_size=8)
for (x,) in loader:
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
"""


def test_the_bench_opens_with_what_the_cell_has(shell: InteractiveShell) -> None:
    """Without a second run: the profiled one has shown it."""
    import torch

    before = [torch.autograd.backward, torch.utils.data.DataLoader.__iter__]
    assert run(shell, TRAINING).success
    assert [torch.autograd.backward, torch.utils.data.DataLoader.__iter__] == before
    session = gpulab.lab()
    try:
        observation = session._observation
        assert observation is not None and observation.loader is not None
        loader = observation.loader.record
        assert (loader.batch_size, loader.num_workers) == (8, 0)
    finally:
        session.close()


def test_the_bench_of_a_cell_that_failed_shows_no_values(shell: InteractiveShell) -> None:
    run(shell, TRAINING.replace("for (x,) in loader:", "raise ValueError('mine')\nfor (x,) in loader:"))
    session = gpulab.lab()
    try:
        assert session._observation is None and not session.rows
    finally:
        session.close()


@pytest.mark.parametrize("command", [command.name for command in at("notebook")])
def test_every_command_answers_help(shell: InteractiveShell, capsys: pytest.CaptureFixture[str], command: str) -> None:
    shell.run_line_magic("gpulab", f"{command} --help")
    assert capsys.readouterr().out.startswith(f"usage: %gpulab {command}")
    shell.run_line_magic("gpulab", "--help")
    assert f"%gpulab {command} " in capsys.readouterr().out


def test_the_extension_loads_without_what_only_comparisons_need() -> None:
    code = """
import sys
from IPython.core.interactiveshell import InteractiveShell
InteractiveShell.instance().run_line_magic("load_ext", "gpulab")
print(sorted(name for name in sys.modules if name.startswith(("gpulab.knobs", "torch"))))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
