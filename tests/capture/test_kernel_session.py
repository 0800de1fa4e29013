"""`%%gpuprofile` in a real ipykernel: the user's cell is sacred, and bad input is answered in one line.

Two kernels run in lockstep, one bare, one with the magic; whatever "unchanged" claims is compared between them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from html import unescape
from pathlib import Path
from typing import Any

import nbformat
import pytest
from msgspec import Struct
from nbclient.exceptions import CellExecutionError
from nbconvert import HTMLExporter
from nbconvert.preprocessors import ExecutePreprocessor

from tests.support.kernel_session import WIDGET_VIEW, Answer, KernelSession, is_ours, kernel, plain
from tests.support.leftovers import own_frames

SETUP = """
import random, time
import numpy as np, torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

class Slow(Dataset):
    def __init__(self, n=64, wait_s=0.0): self.n, self.wait_s = n, wait_s
    def __len__(self): return self.n
    def __getitem__(self, i):
        if self.wait_s: time.sleep(self.wait_s)
        return torch.full((4,), float(i)), i % 2

class Faulty(Slow):
    def __getitem__(self, i):
        if i == 13: raise KeyError(f"sample {i}")
        return super().__getitem__(i)

def train(loader, epochs=1):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for epoch in range(epochs):
        for x, y in loader:
            loss = torch.nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return model

def told(loader):
    for n, batch in enumerate(loader):
        if n == 8: print('under way', flush=True)
        yield batch
"""


class Pair(Struct):
    """The same session twice: cells go to both, and both answers must be the same but for our own outputs."""

    bare: KernelSession
    profiled: KernelSession

    def compare(self, cell: str, line: str = "--no-live --no-save") -> tuple[Answer, Answer]:
        bare, profiled = both(lambda: self.bare.run(cell), lambda: self.profiled.run(f"%%gpuprofile {line}\n{cell}"))
        assert "--no-live" not in line or not any(WIDGET_VIEW in d for d in profiled.shown_first.values())
        assert profiled.stdout == bare.stdout
        assert said_beside_kineto(profiled) == said_beside_kineto(bare)
        assert ordered(profiled) == ordered(bare)
        assert profiled.reply["status"] == bare.reply["status"]
        assert profiled.reply.get("ename") == bare.reply.get("ename")
        assert plain(profiled.reply.get("evalue", "")) == plain(bare.reply.get("evalue", ""))
        return bare, profiled

    def in_both(self, code: str) -> None:
        """Without a prompt number."""
        both(lambda: self.bare._silent(code), lambda: self.profiled._silent(code))

    def alike(self, expression: str) -> Any:
        """The value that an expression has in both kernels."""
        bare, profiled = both(lambda: self.bare.value(expression), lambda: self.profiled.value(expression))
        assert bare == profiled
        return bare


def shown_value(answer: Answer) -> str | None:
    """The text of the cell's value."""
    return None if answer.result is None else str(answer.result["data"]["text/plain"])


def said_beside_kineto(answer: Answer) -> list[str]:
    """Kineto writes past Python: on a busy machine the kernel hands its lines to a later cell."""
    return [line for line in plain(answer.stderr).splitlines() if not line.startswith("USDT")]


def both(first: Any, second: Any) -> tuple[Any, Any]:
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(first)
        mine = second()
        return other.result(), mine


def ordered(answer: Answer) -> list[dict[str, Any]]:
    """The user's outputs in order; stderr, which no kernel keeps in order with the rest, is compared apart.

    A kernel that gets no core sends one line in two messages: what follows on the same stream is one output.
    """
    outputs: list[dict[str, Any]] = []
    for output in answer.theirs():
        kept = {k: v for k, v in output.items() if k != "display_id"}
        if kept.get("name") == "stderr":
            continue
        if outputs and kept.get("name") == outputs[-1].get("name") == "stdout":
            outputs[-1]["text"] += kept["text"]
        else:
            outputs.append(kept)
    return outputs


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("pair")
    (folder / "bare").mkdir()
    (folder / "profiled").mkdir()
    with kernel(folder / "bare") as bare, kernel(folder / "profiled") as profiled:
        both(lambda: bare.run(SETUP), lambda: profiled.run(SETUP))
        profiled._silent("%load_ext gpulab")
        yield Pair(bare, profiled)


@pytest.fixture
def session(pair: Pair) -> Iterator[KernelSession]:
    """The kernel with the magic; afterwards nothing of ours is left in it."""
    before = pair.profiled.names()
    yield pair.profiled
    assert pair.profiled.left_behind() == {}
    ours = {n for n in pair.profiled.names() - before if "gpu" in n.lower()}
    assert not ours


@pytest.fixture(autouse=True)
def in_step(request: pytest.FixtureRequest) -> Iterator[None]:
    """Both kernels count their cells alike, whatever a test ran in one of them only."""
    yield
    if "pair" in request.fixturenames:
        pair: Pair = request.getfixturevalue("pair")
        counts = [k.value("get_ipython().execution_count") for k in (pair.bare, pair.profiled)]
        pair.in_both(f"get_ipython().execution_count = {max(counts)}")


# -- the cell is sacred ------------------------------------------------------------------------------------------------

AS_BARE = {
    "value, silenced": "1 + 1;",
    "no value": "y_ = 3",
    "None": "None",
    "leading blank lines": "\n\nvalue_ = 4\nvalue_",
    "streams": "import sys\nprint('out')\nprint('err', file=sys.stderr)\nimport warnings\nwarnings.warn('careful')",
    "display order": "print('a')\ndisplay(1)\nprint('b')\ndisplay({'text/html': '<b>x'}, raw=True)\nprint('c')\n'd'",
    "update display": "h = display('one', display_id=True)\nh.update('two')",
    "rich value": "class Rich:\n    def _repr_html_(self): return '<i>rich</i>'\nRich()",
    "clear output": "from IPython.display import clear_output\nprint('gone')\nclear_output()\nprint('kept')",
    "underscore": "_",
    "braces and dollars": "x = 3\nprint('{x} $x {undefined} $HOME', f'{x}')\n'{x}'",
    "shell": '!echo "it\'s (unbalanced"\nnames = !echo a b\nnames',
    "line magics": "%env GPULAB_TEST_VARIABLE=1\n%precision 3\n3.14159",
    "unknown magic": "print('before')\n%no_such_magic",
    "cell magic within": "%%capture captured\nprint('hidden')\n1",
    "name": "print(__name__, sorted(k for k in locals() if k.startswith('gpu')))",
    "annotations": "def f(x: int): return x\nf.__annotations__",
    "future": "from __future__ import annotations\ndef f(x: undefined): return x\nf.__annotations__",
    "future later": "def f(x: undefined_as_well): return x\nf.__annotations__",
    "function source": "import inspect\ndef shown(a):\n    # a comment\n    return a\nprint(inspect.getsource(shown))",
    "class source": "class Shown:\n    def method(self):\n        return 1\nprint(inspect.getsource(Shown.method))",
    "lambda in a loop": "fs = [lambda i=i: i * 2 for i in range(3)]\n[f() for f in fs]",
    "plot": (
        "%matplotlib inline\nimport matplotlib.pyplot as plt\nplt.rcParams['lines.linewidth'] = 5\nplt.plot([1, 2]);"
    ),
    "plot settings": "(plt.rcParams['lines.linewidth'], plt.get_fignums(), plt.get_backend())",
    "user's display hook": "import sys\ntype(sys.displayhook).__name__",
}

FAILING = {
    "in a function": "def inner(x):\n    y = 1\n    return y / x\ndef outer(x):\n    return inner(x)\nouter(0)",
    "function of another cell": "outer(0)",
    "middle of the cell": "a = 1\nb = 2\n\nraise ValueError('multi\\nline')\nc = 3",
    "from": "try:\n    {}['k']\nexcept KeyError as e:\n    raise ValueError('no k') from e",
    "group": "raise ExceptionGroup('several', [ValueError('a'), KeyError('b')])",
    "no dictionary": "class Slotted(Exception):\n    __slots__ = ()\nraise Slotted('tight')",
    "renders itself": (
        "class Own(Exception):\n    def _render_traceback_(self):\n        return ['my own words']\nraise Own()"
    ),
    "syntax": "a = 1\nb = = 2",
    "return": "print('this runs')\nreturn 3",
    "null byte": "a = 1\x002",
    "syntax at run time": "def compiles(text):\n    exec(text)\ncompiles('x = = 1')",
    "exit": "import sys\nprint('bye')\nsys.exit(3)",
    "own KeyboardInterrupt": "raise KeyboardInterrupt('by hand')",
    "name": "undefined_name",
    "dataset, chained": (
        "try:\n    train(DataLoader(Faulty(), batch_size=4))\n"
        "except KeyError as e:\n    raise RuntimeError('chained') from e"
    ),
    "worker": "train(DataLoader(Faulty(), batch_size=4, num_workers=1))",
    "backward": "torch.zeros(2).sum().backward()",
    "repr": "class Unshowable:\n    def __repr__(self): raise ValueError('no repr')\nUnshowable()",
}


@pytest.mark.parametrize("name", AS_BARE)
def test_a_cell_does_what_it_does_bare(pair: Pair, session: KernelSession, name: str) -> None:
    _, profiled = pair.compare(AS_BARE[name])
    if name == "unknown magic":  # it raises before any step, which gets a sentence
        assert any(is_ours(d) for d in profiled.displays())
    elif name != "clear output":
        profiled.report()


@pytest.mark.parametrize("name", FAILING)
def test_an_error_reads_as_it_does_bare(pair: Pair, session: KernelSession, name: str) -> None:
    bare, profiled = pair.compare(FAILING[name])
    compiles = name not in ("syntax", "null byte")
    assert any(is_ours(d) for d in profiled.displays()) == compiles, "a partial report, if the cell ran at all"
    if bare.error is not None:
        assert not own_frames(bare.error[2])
    after = session.run("print('next')")
    assert after.stdout == "next\n" and after.status == "ok"


def test_a_frame_of_ours_would_be_seen(session: KernelSession) -> None:
    """What the other tests of tracebacks rest on: this kernel's gpulab lies where they look for it."""
    answer = session.run("__import__('gpulab').load('absent.json')")
    assert answer.error is not None and own_frames(answer.error[2])
    assert own_frames("\n".join(answer.reply["traceback"]))


def test_an_error_in_the_first_forward_pass(pair: Pair, session: KernelSession) -> None:
    """While gpulab listens for module calls, torch takes its path for modules with hooks: one frame more."""
    cell = "train([(torch.zeros(2, 5), torch.zeros(2).long())])"
    bare, ours = both(lambda: pair.bare.run(cell), lambda: session.run(f"%%gpuprofile --no-live --no-save\n{cell}"))
    assert bare.error is not None and ours.error is not None and ours.error[:2] == bare.error[:2]
    frames = [re.split(r"\n(?=File |Cell )", answer.error[2]) for answer in (bare, ours) if answer.error]
    without_hooks = [[f for f in found if "torch/nn/modules/module.py" not in f] for found in frames]
    assert without_hooks[0] == without_hooks[1] and len(without_hooks[0]) >= 4
    assert not own_frames(ours.error[2])


@pytest.mark.parametrize("interactivity", ["all", "last", "last_expr_or_assign", "none"])
def test_interactivity_is_kept(pair: Pair, session: KernelSession, interactivity: str) -> None:
    setting = "get_ipython().ast_node_interactivity"
    pair.in_both(f"{setting} = {interactivity!r}")
    try:
        for cell in ("1\n2\n3", "1\n2;", "a = 5", "a = b = 6", "a: int = 7", "1\nfor i in range(2):\n    i * 10"):
            pair.compare(cell, "--no-live --no-save --no-trace")
    finally:
        pair.in_both(f"{setting} = 'last_expr'")


TRAINING = """
random.seed(1); np.random.seed(2); torch.manual_seed(3)
dataset = TensorDataset(torch.randn(96, 4), torch.randint(0, 2, (96,)))
loader = DataLoader(dataset, batch_size=4, shuffle=True, num_workers={workers})
net = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Dropout(0.3), torch.nn.Linear(16, 2))
optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
for x, y in loader:
    noise = random.random() + np.random.rand()
    loss = torch.nn.functional.cross_entropy(net(x + noise * torch.randn_like(x)), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(loss.item())
loss.item()
"""


@pytest.mark.parametrize("workers", [0, 2])
def test_training_is_bit_identical(pair: Pair, session: KernelSession, workers: int) -> None:
    pair.compare(TRAINING.replace("{workers}", str(workers)), "")
    assert len(pair.profiled.value("[int(n) for n in __import__('gpulab').runs[-1].steps.number]")) == 24
    for expression in (
        "[p.detach().numpy().tobytes().hex() for p in net.parameters()]",
        "[s['exp_avg'].numpy().tobytes().hex() for s in optimizer.state.values()]",
        "torch.get_rng_state().numpy().tobytes().hex()",
        "[int(n) for n in np.random.get_state()[1]]",
        "repr(random.getstate())",
        "[torch.get_num_threads(), torch.is_grad_enabled(), str(torch.get_default_dtype())]",
        "sorted(k for k in get_ipython().user_ns if not k.startswith('_'))",
    ):
        assert pair.alike(expression)


def test_history_and_namespace_are_ipythons_own(pair: Pair, session: KernelSession) -> None:
    before = session.names()
    _, profiled = pair.compare("fresh_name = 40\nfresh_name + 2")
    number = profiled.reply["execution_count"]
    assert profiled.result == {"data": {"text/plain": "42"}, "execution_count": number}
    assert session.names() - before == {"fresh_name"}
    assert pair.alike(f"[Out[{number}], _, _{number}]") == [42, 42, 42]
    assert session.value(f"In[{number}].startswith(\"get_ipython().run_cell_magic('gpuprofile'\")")


def test_post_mortem_begins_in_the_users_code(pair: Pair, session: KernelSession) -> None:
    pair.compare("def inner(x):\n    return 1 / x\ninner(0)")
    frames = "[f.f_code.co_name for f, _ in __import__('traceback').walk_tb(__import__('sys').last_traceback)]"
    assert pair.alike(frames)[1:] == ["<module>", "inner"]
    pair.compare("%tb")


def test_a_finished_run_reports_below_what_the_cell_prints(pair: Pair, session: KernelSession) -> None:
    number = session.value("get_ipython().execution_count")
    answer = session.run("%%gpuprofile shown\nprint('mine')\nm = train(DataLoader(Slow(48), batch_size=4))\n'value'")
    assert answer.status == "ok" and answer.stderr == ""
    kinds = [o["output_type"] for o in answer.outputs]
    assert kinds == ["display_data", "display_data", "stream", "display_data", "execute_result"]
    assert any("Try other settings</button>" in b.get("text/html", "") for b in answer.buttons)
    picture, tables = answer.report()
    note, live = answer.shown_first.values()
    assert WIDGET_VIEW in live and "%gpulab report" in note["text/html"], "the live view came first"
    empty = {"text/plain": "", "text/html": ""}
    assert answer.displays() == [empty, empty, picture], "and left nothing"
    assert "12 steps" in picture["text/plain"] and "shown" in picture["text/plain"]
    assert "<script" not in tables and "<svg" in tables
    assert answer.result == {"data": {"text/plain": "'value'"}, "execution_count": number}
    assert session.value("[(len(r.steps), r.name) for r in __import__('gpulab').runs[-1:]]") == [[12, "shown"]]


# -- options -----------------------------------------------------------------------------------------------------------


def test_a_bad_option_is_answered_in_one_line_and_nothing_runs(session: KernelSession) -> None:
    answer = session.run("%%gpuprofile --xyzzyqqq\nhas_run = True")
    assert answer.status == "error" and answer.reply["ename"] == "UsageError", "Run All stops"
    text = answer.reply["evalue"]
    assert "\n" not in text and "--xyzzyqqq" in text and "--help" in text
    assert answer.outputs == [{"output_type": "stream", "name": "stderr", "text": f"UsageError: {text}\n"}]
    assert "has_run" not in session.names()


def test_await_names_the_way_that_works(session: KernelSession) -> None:
    answer = session.run("%%gpuprofile\nasync with x as y:\n    pass")
    assert answer.reply["ename"] == "UsageError" and "async with gpulab.profile(" in answer.reply["evalue"]
    assert answer.displays() == []


def test_async_with_works_in_a_cell_that_awaits(session: KernelSession) -> None:
    answer = session.run(
        "import asyncio, gpulab\n"
        "async with gpulab.profile('awaited', save=False) as p:\n"
        "    for x, y in DataLoader(Slow(20), batch_size=2):\n"
        "        await asyncio.sleep(0.001)\n"
        "print(p.run.outcome, len(p.run.steps), p.run.name)"
    )
    assert answer.error is None and answer.stdout == "completed 10 awaited\n" and answer.stderr == ""
    answer.report()
    session._silent("del asyncio, gpulab, p")


def test_an_error_leaves_async_with_as_it_leaves_a_bare_block(pair: Pair, session: KernelSession) -> None:
    lines = "{}\n    await asyncio.sleep(0)\n    for x, y in DataLoader(Faulty(), batch_size=4):\n        pass"
    both(lambda: pair.bare.run("import asyncio, contextlib"), lambda: session.run("import asyncio, gpulab"))
    bare, ours = both(
        lambda: pair.bare.run(lines.format("async with contextlib.AsyncExitStack():")),
        lambda: session.run(lines.format("async with gpulab.profile(save=False)  :     ")),
    )
    assert bare.error is not None and ours.error is not None
    frames = [[line for line in a.error[2].splitlines() if re.match(r"(Cell|File)", line)] for a in (bare, ours)]
    assert frames[0] == [f for f in frames[1] if "contextlib" not in f]
    ours.report()
    session._silent("del asyncio, gpulab")


def test_help_and_completion(session: KernelSession) -> None:
    answer = session.run("%%gpuprofile --help\nhas_run = True")
    assert answer.status == "ok" and answer.displays() == [] and answer.result is None
    assert "--trace-steps N" in answer.stdout and "has_run" not in session.names()
    pager = session.run("%gpuprofile?").reply["payload"][0]["data"]["text/plain"]
    assert "--trace-steps N" in pager and "examples:" in pager
    assert "%gpulab runs" in session.run("%gpulab?").reply["payload"][0]["data"]["text/plain"]
    assert session.complete("%%gpuprofile --st") == ["--steps"]
    assert "DataLoader" in session.complete("%gpuprofile -r train(DataLo")
    assert "--steps" not in session.complete("%%gpuprofile\nx -- ")


def test_return_gives_the_run(session: KernelSession) -> None:
    answer = session.run("run_ = %gpuprofile -r --no-live train(DataLoader(Slow(20), batch_size=2))")
    assert answer.status == "ok" and answer.result is None
    assert session.value("[type(run_).__name__, len(run_.steps), run_.source]") == ["Run", 10, "statement"]
    answer = session.run("%gpuprofile --no-live --no-save 1 + 1")
    assert shown_value(answer) == "2"
    assert session.run("%gpuprofile --no-live --no-save 1 + 1;").result is None
    answer = session.run("def inside(n):\n    %gpuprofile --no-live --no-save print(n + 1)\ninside(4)")
    assert answer.stdout == "5\n", "a line magic sees the names of the function it is in"
    answer = session.run("%%gpuprofile -r --no-live --no-save\n1 + 1")
    assert "Run" in (shown_value(answer) or "")
    assert session.run("%%gpuprofile -r --no-live --no-save\n1 + 1;").result is None


def test_the_extension_unloads_and_reloads(session: KernelSession) -> None:
    assert session.run("%unload_ext gpulab").status == "ok"
    assert "gpuprofile" in session.run("%%gpuprofile\n1").reply["evalue"]
    assert "--steps" not in session.complete("%%gpuprofile --st")
    assert "GPUProfile" not in session.run("%config").stdout
    assert session.run("%load_ext gpulab\n%reload_ext gpulab").status == "ok"
    assert session.run("%config").stdout.count("GPUProfile") == 1
    session.run("%%gpuprofile --no-live --no-save\n1 + 1").report()


def test_time_around_and_inside(session: KernelSession) -> None:
    saved = "sorted(p.name for p in __import__('gpulab').runs.store.root.glob('*'))"
    before = session.value(saved)
    for first in ("%%time\n%%gpuprofile --no-save", "%%gpuprofile --no-save\n%%time"):
        answer = session.run(f"{first}\nm = train(DataLoader(Slow(20), batch_size=2))\n6 * 7")
        assert "Wall time" in answer.stdout and shown_value(answer) == "42"
        assert "Saving was switched off." in answer.report()[1] and session.value(saved) == before
    answer = session.run("%%time\n%%gpuprofile --no-save\ndef f():\n    1 / 0\nf()")
    assert answer.error is not None and not own_frames(answer.error[2])
    assert "Cell In" in answer.error[2] and "in f()" in answer.error[2]


def test_a_captured_cell_keeps_its_report(session: KernelSession) -> None:
    answer = session.run("%%capture caught\n%%gpuprofile --no-save\nprint('inside')\n1 / 0")
    assert answer.error is not None and "ZeroDivisionError" in answer.error[0] and answer.displays() == []
    answer = session.run("%%capture caught\n%%gpuprofile --no-save\nprint('inside')\n6 * 7")
    assert answer.status == "ok" and answer.outputs == []
    answer = session.run("caught.show()")
    assert answer.stdout == "inside\n" and answer.status == "ok"
    answer.report()
    assert not any(WIDGET_VIEW in d for d in answer.displays())


# -- interrupts, Stop and things that die ------------------------------------------------------------------------------

BATCHES = "len(list(DataLoader(Slow(16), batch_size=4, num_workers=2)))"


def begin_long(session: KernelSession, code: str) -> Any:
    """Begin a cell that prints `under way` once it trains."""
    running = session.begin(code)
    session.wait(running, lambda a: "under way" in a.stdout)
    return running


# What ends the workers of an interrupted loop now: torch tells the cells after it of one that dies late.
FORGET = """
import gc, sys
get_ipython().InteractiveTB.tb = None
for _name in ("last_exc", "last_type", "last_value", "last_traceback"):
    if hasattr(sys, _name): delattr(sys, _name)
gc.collect()
del gc, sys, _name
"""


@pytest.mark.parametrize("workers", [0, 2])
def test_an_interrupt_shows_a_partial_report_and_stops_run_all(session: KernelSession, workers: int) -> None:
    loader = f"DataLoader(Slow(100000, 0.002), batch_size=4, num_workers={workers})"
    running = begin_long(session, f"%%gpuprofile cut\nm = train(told({loader}))")
    session.interrupt()
    answer = session.finish(running)
    assert answer.reply["ename"] == "KeyboardInterrupt" and answer.error is not None
    assert not own_frames(answer.error[2]) and "Cell In" in answer.error[2]
    picture, _ = answer.report()
    assert "interrupted" in picture["text/plain"].lower() and "Try other settings" in str(answer.buttons)
    assert session.value("__import__('gpulab').runs[-1].outcome") == "interrupted"
    assert session.value("len(__import__('gpulab').runs[-1].steps)") >= 8
    again = session.run(f"%%gpuprofile --no-live --no-save\n{BATCHES}")
    assert shown_value(again) == "4", "a new loader works"
    assert session.run(BATCHES).result is not None
    session._silent(FORGET)


def test_a_swallowed_interrupt_stays_swallowed(session: KernelSession) -> None:
    code = (
        "try:\n    train(told(DataLoader(Slow(100000, 0.002), batch_size=4)))\n"
        "except KeyboardInterrupt:\n    print('swallowed')\n'went on'"
    )
    running = begin_long(session, f"%%gpuprofile\n{code}")
    session.interrupt()
    answer = session.finish(running)
    assert answer.status == "ok" and answer.stdout.endswith("swallowed\n") and answer.result is not None
    answer.report()


@pytest.mark.parametrize("before", ["", "train(DataLoader(Slow(40, 0), batch_size=4))\n"], ids=["no step", "steps"])
def test_stop_ends_code_that_comes_to_no_step(session: KernelSession, before: str) -> None:
    cell = f"import time\n{before}print('under way', flush=True)\nwhile True: time.sleep(0.01)"
    running = begin_long(session, f"%%gpuprofile\n{cell}")
    assert session.control("gpulab_stop", {"run": session.run_key()}) == {"status": "ok"}
    answer = session.finish(running)
    assert answer.status == "ok" and answer.error is None
    assert session.value("__import__('gpulab').runs[-1].outcome") == "stopped"


def test_stop_on_the_control_channel_ends_the_cell_at_a_step(session: KernelSession) -> None:
    cell = "m = train(told(DataLoader(Slow(100000, 0.002), batch_size=4)))\nprint('no')"
    running = begin_long(session, f"%%gpuprofile\n{cell}")
    assert session.control("gpulab_stop", {"run": "another"})["status"] == "error"
    assert session.control("gpulab_stop", {"run": session.run_key()}) == {"status": "ok"}
    answer = session.finish(running)
    assert answer.status == "ok" and answer.error is None and "no" not in answer.stdout.split()
    picture, _ = answer.report()
    assert "stopped" in picture["text/plain"].lower() and "Try other settings" in str(answer.buttons)
    assert session.value("__import__('gpulab').runs[-1].outcome") == "stopped"
    printed = next(i for i, o in enumerate(answer.outputs) if "under way" in o.get("text", ""))
    shown = next(i for i, o in enumerate(answer.outputs) if o.get("data") is picture)
    assert shown > printed, "what the cell prints stands above its report"
    kinds = [o["output_type"] for o in answer.outputs]
    assert kinds[0] == "display_data" and not any(WIDGET_VIEW in d for d in answer.displays())


# -- a fresh kernel, Run All, saved notebooks --------------------------------------------------------------------------


def test_before_torch_is_imported(tmp_path: Path) -> None:
    with kernel(tmp_path, bare=True) as fresh:
        assert fresh.run("%load_ext gpulab").outputs == []
        assert fresh.value("'torch' in __import__('sys').modules") is False
        names = fresh.names()
        answer = fresh.run("%%gpuprofile\nprint('no torch here')\n6 * 7")
        assert answer.status == "ok" and answer.stdout == "no torch here\n" and answer.stderr == ""
        answer.report()
        assert answer.result == {"data": {"text/plain": "42"}, "execution_count": 2}
        assert fresh.names() == names
        answer = fresh.run(f"%%gpuprofile --no-save\n{SETUP}\nm = train(DataLoader(Slow(), batch_size=4))")
        assert answer.status == "ok" and answer.stderr == ""
        assert fresh.value("len(__import__('gpulab').runs[-1].steps)") == 16
        assert fresh.left_behind() == {}


def notebook(*cells: str) -> nbformat.NotebookNode:
    made: nbformat.NotebookNode = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])  # type: ignore[no-untyped-call]
    made.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
    return made


def test_run_all_stops_at_the_failure_and_keeps_the_reports(tmp_path: Path) -> None:
    book = notebook(
        SETUP,
        "%load_ext gpulab",
        "%%gpuprofile whole\nm = train(DataLoader(Slow(), batch_size=2))",
        "%%gpuprofile part\ntrain(DataLoader(Faulty(), batch_size=2))",
        "print('never')",
    )
    runner = ExecutePreprocessor(timeout=300)  # type: ignore[no-untyped-call]  # what nbconvert --execute runs
    with pytest.raises(CellExecutionError, match="KeyError"):
        runner.preprocess(book, {"metadata": {"path": str(tmp_path)}})
    assert book.cells[4].outputs == [] and book.cells[4].execution_count is None
    [*above, error] = book.cells[3].outputs
    shown = next(o for o in above if o.data["text/plain"].startswith("gpulab · "))
    said = " ".join(shown.data["text/plain"].split())
    assert "ended by an exception (KeyError" in said
    assert "<table" in shown.data["text/html"]
    assert error.ename == "KeyError" and not own_frames("\n".join(error.traceback))
    assert WIDGET_VIEW not in json.dumps(book.cells) and "_esm" not in json.dumps(book.metadata)

    page, _ = HTMLExporter().from_notebook_node(book)  # type: ignore[no-untyped-call]
    shown = next(o for o in book.cells[2].outputs if o.data["text/plain"].startswith("gpulab · "))
    button = [o for o in book.cells[2].outputs if o is not shown]
    assert all(set(b.data) <= {"text/plain", "text/html"} for b in button), "it became text when the next cell was run"
    assert unescape(shown.data["text/html"])[:200] in unescape(page)
    assert "Error displaying widget" not in re.sub(r"<script.*?</script>", "", page, flags=re.S)


# -- the user's own profiler: last, for torch's first profiler decides what Kineto logs in this process ----------------

OWN_PROFILER = """
import torch.profiler
with torch.profiler.profile() as prof:
    m = train(DataLoader(Slow(16), batch_size=4))
print(sum(e.key == "Optimizer.step#SGD.step" for e in prof.key_averages()))
"""


def test_a_cell_that_profiles_itself_does_what_it_does_bare(pair: Pair, session: KernelSession) -> None:
    _, profiled = pair.compare(OWN_PROFILER)
    assert profiled.stdout == "1\n"
    assert "profiler itself, and only one can be active" in profiled.report()[1]


def test_another_profiler_costs_the_trace_only(session: KernelSession) -> None:
    session.run("import torch.profiler\nother = torch.profiler.profile()\nother.start()")
    try:
        answer = session.run("%%gpuprofile --no-save\nm = train(DataLoader(Slow(), batch_size=4))")
        assert answer.status == "ok" and said_beside_kineto(answer) == []
        picture, tables = answer.report()
        assert "another torch.profiler is active in this process" in tables
        assert "another torch.profiler" in " ".join(picture["text/plain"].split())
    finally:
        session.run("other.stop()")
    assert session.value("len(other.events()) > 0"), "the other one is unharmed"
    session._silent("del other")


LATE_PROFILER = """
import contextlib
def quietly():
    # what a library may do: bring its own profiler where the cell's text does not show it
    from importlib import import_module
    return getattr(import_module("torch" + ".profiler"), "profile")()
count = 0
for n, (x, y) in enumerate(DataLoader(Slow(80), batch_size=4)):
    with quietly() if n % 2 else contextlib.nullcontext():
        count += 1
count
"""


def test_a_profiler_that_the_cell_starts_within_our_window_works(pair: Pair, session: KernelSession) -> None:
    bare, answer = both(
        lambda: pair.bare.run(LATE_PROFILER),
        lambda: session.run(f"%%gpuprofile --no-live --no-save\n{LATE_PROFILER}"),
    )
    assert said_beside_kineto(bare) == said_beside_kineto(answer), "Kineto's session has changed hands; nothing else"
    assert shown_value(answer) == "20"
    assert "step breakdown" in answer.report()[1]


def test_no_stray_text_after_the_user_has_profiled(session: KernelSession) -> None:
    heard = session.run("import torch.profiler\nwith torch.profiler.profile(): torch.ones(2)").stderr
    for _ in range(100):
        if "profiler_stop" in heard:
            break
        heard += session.run("time.sleep(0.1)").stderr  # the kernel hands it over when it has the time
    answer = session.run("%%gpuprofile --no-save --no-live\nm = train(DataLoader(Slow(), batch_size=4))")
    assert answer.stderr == "" and session.value("__import__('gpulab').runs[-1].timeline is not None")
