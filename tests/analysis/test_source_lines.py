"""The user's line: which one a stretch of time belongs to, from looks at the stack or from a trace's own stacks."""

from __future__ import annotations

import gc
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

import gpulab
from gpulab.analysis.source_lines import line_of, lines_of
from gpulab.capture.calls import users_lines
from gpulab.capture.places import Naming, users_spot
from gpulab.capture.stack_reader import Spot
from gpulab.capture.stack_sampler import ThreadSampler, own_layout
from gpulab.intervals import EMPTY, Intervals
from gpulab.run import Category, Place, Run, StackSamples, Timeline
from gpulab.timeline.labels import labels
from gpulab.tuning.code import Code
from tests.support import synthetic
from tests.support.kernel_session import kernel
from tests.support.paths import ROOT
from tests.support.real_traces import path as trace_path
from tests.support.scripted_looks import installed
from tests.support.timelines import MAIN, Span, timeline

torch = pytest.importorskip("torch")

MS = 1_000_000
PLACES = (Place("cell", 2, "", "a()"), Place("cell", 3, "", "b()"), Place("lib.py", 7, "f", "c()"))


def run_with(stack: StackSamples | None, recorded: Timeline | None = None) -> Run:
    return replace(synthetic.cpu_case().run, stack=stack, places=PLACES, timeline=recorded)


def looks(rows: list[tuple[int, int]]) -> StackSamples:
    t = np.array([t for t, _ in rows], np.int64) * MS
    return StackSamples(t, np.array([p for _, p in rows], np.int32), 0)


def times(*pairs: tuple[int, int]) -> Intervals:
    return np.array(pairs, np.int64).reshape(-1, 2) * MS


def test_the_line_with_most_of_the_looks() -> None:
    run = run_with(looks([(2, 0), (4, 1), (6, 1), (8, 1), (10, 0), (12, 2), (14, 2), (16, -1), (18, -1)]))
    assert line_of(run, times((3, 9))) == PLACES[1]
    assert line_of(run, times((11, 15))) == PLACES[2]
    assert line_of(run, EMPTY) is None
    assert line_of(run, times((0, 15))) is None, "3 of 7 is no answer"
    assert line_of(run, times((11, 19))) is None, "half of it is outside the user's code"


def test_one_look_is_no_evidence_but_a_long_call_is() -> None:
    usual = [(2 * i, 0) for i in range(1, 20)]
    run = run_with(looks([*usual, (80, 1), (82, 0), (84, 0)]))  # the call of line 1 held the lock from 38 to 80
    assert line_of(run, times((39, 79))) == PLACES[1], "the look came when the call had ended"
    assert line_of(run, times((81, 83))) is None, "a single look"
    assert line_of(run, times((39, 45))) is None, "most of the call is elsewhere"


@pytest.mark.parametrize("stack", [None, StackSamples(np.empty(0, np.int64), np.empty(0, np.int32))])
def test_without_looks_and_without_stacks_there_is_no_line(stack: StackSamples | None) -> None:
    assert line_of(run_with(stack), times((0, 100))) is None


@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(-1, 2)), min_size=1, max_size=40),
    st.lists(st.tuples(st.integers(0, 60), st.integers(1, 40)), max_size=6),
)
def test_against_counting_by_hand(gaps: list[tuple[int, int]], pieces: list[tuple[int, int]]) -> None:
    rows, at = [], 0
    for gap, place in gaps:
        at += gap
        rows.append((at, place))
    wanted: list[tuple[int, int]] = []
    end = 0
    for gap, length in pieces:
        wanted.append((end + gap + 1, end + gap + 1 + length))
        end = wanted[-1][1]
    inside = {t for a, b in wanted for t in range(a, b)}
    waits = sorted(g for g, _ in gaps)
    usual = float(np.median(waits))
    weight: dict[int, int] = {}
    before = 0
    for t, place in rows:
        mine = sum(u in inside for u in range(before, t))
        late = t - before > 2 * usual and 2 * mine > t - before
        if (t in inside or late) and mine:
            weight[place] = weight.get(place, 0) + mine
        before = t
    total = sum(weight.values())
    found = {x.place: x.share for x in lines_of(run_with(looks(rows)), times(*wanted))}
    assert found == pytest.approx({PLACES[p]: w / total for p, w in weight.items() if p >= 0})


# -- the thread that looks ------------------------------------------------------------------------------------------


def sampled(work: Callable[[], object]) -> list[tuple[int, Spot | None]]:
    """When that work was looked at, and at which line."""
    sampler = ThreadSampler()
    sampler.start()
    try:
        work()
    finally:
        sampler.stop()
    looks = sampler.samples
    spots = [next(iter(users_lines(stack)), None) for stack in looks.stacks]
    return [(t_ns, spots[i]) for t_ns, i in zip(looks.t_ns, looks.stack, strict=True)]


def test_the_sleeping_line_is_seen_and_nothing_stays() -> None:
    def work() -> None:
        threading.Event().wait(0.3)  # within Python's own library

    spots = [s for _, s in sampled(work) if s is not None]
    assert {s[0] for s in spots} == {__file__}
    assert (work.__code__.co_firstlineno + 1) in [s[1] for s in spots if s[2].endswith("work")]
    assert {s[2].split(".")[-1] for s in spots} <= {"work", "sampled"}
    assert not [t for t in threading.enumerate() if t.name == "gpulab-lines"]


def test_a_call_that_holds_the_lock_is_seen_at_its_own_line() -> None:
    ended: list[int] = []

    def work() -> None:
        sorted(range(3_000_000), key=None)  # one long call in C
        ended.append(time.perf_counter_ns())

    began = time.perf_counter_ns()
    looks = sampled(work)
    line = work.__code__.co_firstlineno + 1
    since, longest = began, (0, 0)
    for t, spot in looks:
        if began < t <= ended[0] and spot is not None and spot[2].endswith("work"):
            longest = max(longest, (t - since, spot[1]))
        since = max(t, began)
    assert longest[1] == line, "the look after the longest wait stands at the call that it waited for"


def test_a_frame_is_not_kept() -> None:
    class Thing:
        pass

    things: list[weakref.ref[Thing]] = []

    def work() -> None:
        thing = Thing()
        things.append(weakref.ref(thing))
        time.sleep(0.05)

    assert sampled(work) and things[0]() is None


def test_places_of_a_file_have_their_text_and_equal_ones_are_one() -> None:
    naming = Naming("", 0)
    spot = users_spot(sys._getframe())
    assert spot is not None and spot[2] == "test_places_of_a_file_have_their_text_and_equal_ones_are_one"
    assert naming.number(spot) == naming.number(spot) == 0 and naming.number(None) == -1
    (place,) = naming.places
    assert place.text == "spot = users_spot(sys._getframe())" and place.file == __file__


def test_a_block_names_the_lines_of_a_script(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch.setattr)
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gpulab.profile(show=False, save=False, trace_steps=8) as p:
        for _ in range(40):
            model(torch.randn(8, 4)).sum().backward()
            optimizer.step()
            time.sleep(0.05)  # what takes the time
    assert p.run.timeline is not None
    place = line_of(p.run, np.array([p.run.timeline.window_ns]))
    assert place is not None and place.text == "time.sleep(0.05)  # what takes the time" and place.file == __file__


# -- real cells -----------------------------------------------------------------------------------------------------

SETUP = f"""
import sys, time, torch
sys.path[:0] = [".", {str(ROOT)!r}]
import numpy as np
import gpulab
from gpulab.analysis.source_lines import line_of
from torch import nn
from torch.utils.data import DataLoader
from slow_items import Slow
%load_ext gpulab
from tests.support.scripted_looks import installed
installed()
model = nn.Linear(8, 2); opt = torch.optim.SGD(model.parameters(), lr=0.1)
def found(run, wait):
    from gpulab.intervals import subtract
    from gpulab.timeline.labels import labels
    waiting = labels(run.timeline).loading
    place = line_of(run, waiting if wait else subtract(np.array([run.timeline.window_ns]), waiting))
    return None if place is None else [place.file.split("/")[-1], place.line, place.text, place.function]
"""

ITEMS = """import time
import torch


class Slow(torch.utils.data.Dataset):
    pause = 0.004

    def __len__(self):
        return 240

    def transform(self, x):
        time.sleep(self.pause)
        return x

    def __getitem__(self, i):
        return self.transform(torch.zeros(8)), i % 2
"""

CELL = """%%time
%%gpuprofile both --no-live --trace-steps 6
def helper():
    time.sleep(0.03)

for x, y in DataLoader(Slow(), batch_size=8):
    nn.functional.cross_entropy(model(x), y).backward()
    opt.step()
    helper()
"""


def test_known_lines_of_a_real_cell(tmp_path: Path) -> None:
    (tmp_path / "slow_items.py").write_text(ITEMS)
    with kernel(tmp_path) as session:
        for cell in (SETUP, CELL):
            assert session.run(cell).error is None
        transform, helper = (session.value(f"found(gpulab.runs['both'], {wait})") for wait in (True, False))
        places = session.value("[str(p) for p in gpulab.runs['both'].places]")
        assert session.left_behind() == {}
    assert helper == ["cell", 4, "time.sleep(0.03)", "helper"]
    assert transform == ["slow_items.py", 12, "time.sleep(self.pause)", "Slow.transform"]
    lines = ("line 4 of the cell: time", "line 6 of the cell: for", "line 7 of", "line 8 of", "line 9 of")
    assert all(place.startswith(lines) for place in places if "of the cell" in place)


def test_code_of_a_thread_is_seen_as_well() -> None:
    """The panel and the labs run a cell in a thread, compiled without IPython."""
    text = (
        "import time, torch\n"
        "model = torch.nn.Linear(4, 2); optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "for _ in range(40):\n"
        "    model(torch.randn(8, 4)).sum().backward(); optimizer.step()\n"
        "    time.sleep(0.05)\n"
    )
    runs: list[Run] = []

    def work() -> None:
        with gpulab.profile(show=False, save=False, trace_steps=8, source="cell", code=text) as p:
            Code.of_text(text, {}).run()
        runs.append(p.run)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    (run,) = runs
    assert run.timeline is not None and run.stack is not None
    assert str(line_of(run, np.array([run.timeline.window_ns]))) == "line 5 of the cell: time.sleep(0.05)"
    assert run.stack.exact or own_layout() is None, "another process looks, where it can read the stack"


# -- stacks in a trace ----------------------------------------------------------------------------------------------


def test_the_innermost_user_function_in_a_trace_with_stacks() -> None:
    rows = [
        ("train.py(3): main", 0, 100),
        ("train.py(9): load", 10, 30),
        ("torch/nn/modules/module.py(1): _call_impl", 12, 8),
        ("torch/nn/modules/module.py(1): _call_impl", 50, 20),
        ("json/x.py(1): f", 80, 5),
    ]
    spans = [Span(name, Category.PYTHON_FUNCTION, MAIN, start * MS, length * MS) for name, start, length in rows]
    run = run_with(None, timeline(spans))
    assert line_of(run, times((11, 39))) == Place("train.py", 9, "load")
    assert line_of(run, times((50, 90))) == Place("train.py", 3, "main")
    shares = {x.place.function: x.share for x in lines_of(run, times((0, 100)))}
    assert shares == pytest.approx({"main": 0.7, "load": 0.3})


def test_a_real_trace_with_stacks_names_the_users_function() -> None:
    run = gpulab.load(trace_path("h100_owlv2_starved"))
    assert isinstance(run, Run) and run.timeline is not None
    place = line_of(run, labels(run.timeline).loading)
    assert place is not None and place.function == "run_on_input" and place.file.endswith("pipeline/model.py")


@pytest.mark.parametrize("enabled", [True, False])
def test_no_collection_begins_while_the_stack_is_looked_at(enabled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """CPython holds a lock in `_current_frames` that a thread which starts meanwhile waits for."""
    current_frames, seen = sys._current_frames, []

    def looked() -> dict[int, Any]:
        seen.append(gc.isenabled())
        return current_frames()

    def until_three() -> None:
        while len(seen) < 3:
            time.sleep(0.001)

    monkeypatch.setattr(sys, "_current_frames", looked)
    (gc.enable if enabled else gc.disable)()
    try:
        sampled(until_three)
        assert not any(seen) and gc.isenabled() is enabled
    finally:
        gc.enable()


def test_the_first_of_several_lines_says_that_it_goes_on() -> None:
    assert str(Place("cell", 3, text="image = file.rotate(")) == "line 3 of the cell: image = file.rotate( …"
    assert str(Place("data.py", 3, text="for x in loader:")) == "data.py, line 3: for x in loader:"
    assert str(Place("data.py", 3)) == "data.py, line 3"
