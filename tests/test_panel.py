"""The panel and the lab: what each knob shows, what each button starts, and that a run on its own thread is as ours."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import ipywidgets
import pytest

from gpulab.api.experiment import NO_CELL
from gpulab.errors import UsageError
from gpulab.knobs.catalogue import KNOBS
from gpulab.knobs.knob import Value
from gpulab.knobs.observe.observation import (
    Observation,
    ObservedLoader,
    ObservedModule,
    ObservedOptimizer,
)
from gpulab.panel.controls import KnobRow, lesson_path
from gpulab.panel.opening import lab
from gpulab.panel.panel import Panel, head, progress_words, share_done
from gpulab.panel.session import BUSY, NOTHING_TURNED, PanelSession
from gpulab.run import Device, Loader
from gpulab.tuning.function_code import FunctionCode
from gpulab.tuning.plan import Code, Listener, Plan, Progress
from gpulab.tuning.record import Experiment
from gpulab.tuning.threaded_code import Apart, MainThread, Thread, Written, torch_settings, written_apart
from gpulab.tuning.trial import Trial

PATIENCE_S = 120.0
LOADER = Loader("Digits", 480, 16, 0, None, False, False, 30, False)
SCENE = Observation(
    device=Device("cpu", "CPU (test)"),
    loaders=(ObservedLoader(LOADER, False, False, "fork"),),
    optimizers=(ObservedOptimizer("Adam", True, None, ("cpu",), ("float32",), False),),
    modules=(ObservedModule("Sequential", 100, ("float32",), True, "contiguous", False, True, None),),
)


class Pressed:
    """Notes what the panel's buttons ask for."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, dict[str, Value]]] = []

    def look(self) -> None:
        self.asked.append(("look", {}))

    def run(self, settings: Mapping[str, Value]) -> None:
        self.asked.append(("run", dict(settings)))

    def compare(self, settings: Mapping[str, Value]) -> None:
        self.asked.append(("compare", dict(settings)))

    def stop(self) -> None:
        self.asked.append(("stop", {}))

    def close(self) -> None:
        self.asked.append(("close", {}))


@pytest.fixture
def pressed() -> Pressed:
    return Pressed()


@pytest.fixture
def panel(pressed: Pressed) -> Iterator[Panel]:
    before = set(ipywidgets.widgets.widget._instances)
    made = Panel(tuple(KNOBS.values()), "# training\nfor x in loader:\n    step(x)", pressed)
    yield made
    made.close()
    assert set(ipywidgets.widgets.widget._instances) == before, "a closed panel leaves no widget"


def row(panel: Panel, name: str) -> KnobRow:
    return next(r for r in panel.rows if r.knob.name == name)


def words(of: KnobRow) -> str:
    return " ".join(cell.value for cell in of.cells if hasattr(cell, "value"))


# -- what each knob shows ----------------------------------------------------------------------------------------------


def test_before_the_cell_was_looked_at_nothing_is_known_and_nothing_can_be_turned(panel: Panel) -> None:
    assert [r.knob.name for r in panel.rows] == list(KNOBS)
    assert all(r.control.disabled for r in panel.rows)
    assert all("as found: ?" in words(r) for r in panel.rows)


def test_each_knob_shows_its_value_as_found_its_help_and_a_control_that_fits(panel: Panel) -> None:
    panel.show_observation(SCENE)
    assert all(r.knob.title in words(r) for r in panel.rows)
    assert "as found: 16" in words(row(panel, "batch_size")) and row(panel, "batch_size").control.value == 16
    assert isinstance(row(panel, "workers").control, ipywidgets.BoundedIntText)
    assert isinstance(row(panel, "pin_memory").control, ipywidgets.Checkbox)
    assert isinstance(row(panel, "amp").control, ipywidgets.Dropdown)
    assert row(panel, "amp").control.value == "off"
    assert panel.settings == {}


@pytest.mark.parametrize(("items", "batch", "disabled"), [(6, 4, False), (6, 1, False), (6, 16, False), (1, 1, True)])
def test_a_small_dataset_leaves_small_batches(panel: Panel, items: int, batch: int, disabled: bool) -> None:
    small = replace(LOADER, dataset_length=items, batch_size=batch)
    panel.show_observation(replace(SCENE, loaders=(replace(SCENE.loaders[0], record=small),)))
    assert row(panel, "batch_size").control.disabled is disabled


def test_a_knob_that_cannot_apply_is_greyed_with_the_reason(panel: Panel) -> None:
    panel.show_observation(SCENE)
    tf32 = row(panel, "tf32")
    assert tf32.control.disabled and str(KNOBS["tf32"].refuses(SCENE, True)) in words(tf32).replace("&#x27;", "'")
    assert not row(panel, "workers").control.disabled
    iterable = replace(SCENE, loaders=(replace(SCENE.loaders[0], record=replace(LOADER, iterable=True)),))
    panel.show_observation(iterable)
    assert row(panel, "workers").control.disabled


def test_what_one_knob_can_be_depends_on_the_others(panel: Panel) -> None:
    panel.show_observation(SCENE)
    assert row(panel, "prefetch").control.disabled, "there are no workers that could prefetch"
    row(panel, "workers").control.value = 2
    assert not row(panel, "prefetch").control.disabled
    row(panel, "prefetch").control.value = 4
    assert panel.settings == {"workers": 2, "prefetch": 4}
    row(panel, "workers").control.value = 0
    prefetch = row(panel, "prefetch")
    assert prefetch.refusal and not prefetch.control.disabled, "it can be taken back"


def test_a_turned_knob_is_marked_and_reset_takes_all_back(panel: Panel) -> None:
    panel.show_observation(SCENE)
    row(panel, "workers").control.value = 2
    row(panel, "tf32").control.value = ""
    assert "●" in words(row(panel, "workers")) and "●" not in words(row(panel, "amp"))
    row(panel, "workers").control.value = 0  # as found: no setting
    assert panel.settings == {} and "●" not in words(row(panel, "workers"))
    row(panel, "amp").control.value = "bf16"
    panel.buttons["reset"].click()
    assert panel.settings == {} and row(panel, "amp").control.value == "off"


def test_buttons_hand_over_the_settings_and_a_refused_one_starts_nothing(panel: Panel, pressed: Pressed) -> None:
    panel.show_observation(SCENE)
    row(panel, "workers").control.value = 2
    panel.buttons["compare"].click()
    panel.buttons["run"].click()
    assert pressed.asked == [("compare", {"workers": 2}), ("run", {"workers": 2})]
    row(panel, "batch_size").control.value = 481
    panel.buttons["run"].click()
    assert len(pressed.asked) == 2
    assert "the largest is batch_size=480" in panel._message.value


def test_stop_can_be_pressed_only_while_something_runs(panel: Panel) -> None:
    assert panel.buttons["stop"].disabled
    panel.begin("comparing")
    assert not panel.buttons["stop"].disabled
    panel.tell(Progress("block 7 of 40: workers=2", 6, 40, 33.4))
    assert "block 7 of 40: workers=2 · about 33 s left" in panel._now.value
    panel.end("workers=2 is faster")
    assert panel.buttons["stop"].disabled and "workers=2 is faster" in panel._message.value


def test_the_bar_never_goes_back() -> None:
    course = [Progress("as written", 0, 2, None), Progress("block_size=2", 1, 2, None)]  # a variable of the cell
    course += [Progress(f"block {i + 1} of 9: x", i, 9, 1.0, in_blocks=True) for i in range(9)]
    shares = [share_done(p) for p in course]
    assert shares == sorted(shares) and shares[0] >= 0 and shares[-1] < 1
    assert progress_words(course[0]) == "as written"


def test_text_of_the_user_is_escaped() -> None:
    assert "<script>" not in head("x = '<script>alert(1)</script>'")
    assert "for x in loader" in head("\n# comment\nfor x in loader:\n    pass")


def test_a_lesson_is_linked_only_where_its_notebook_is(tmp_path: Any) -> None:
    assert lesson_path("03_starving_gpu", tmp_path) is None
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "notebooks" / "03_starving_gpu.ipynb").touch()
    assert lesson_path("03_starving_gpu", tmp_path) == "notebooks/03_starving_gpu.ipynb"
    assert lesson_path("", tmp_path) is None


def test_a_click_that_arrives_on_another_thread_is_acted_upon_on_the_main_one(pressed: Pressed) -> None:
    where: dict[str, threading.Thread] = {}
    pressed.run = lambda settings: where.update(run=threading.current_thread())  # type: ignore[method-assign]
    pressed.stop = lambda: where.update(stop=threading.current_thread())  # type: ignore[method-assign]

    async def session() -> None:
        main = MainThread()
        panel = Panel(tuple(KNOBS.values()), "x", pressed, on_main=main.call)
        panel.show_observation(SCENE)

        def clicks() -> None:
            row(panel, "workers").control.value = 2
            where.update(clicks=threading.current_thread())
            panel.buttons["run"].click()
            panel.buttons["stop"].click()

        await asyncio.to_thread(clicks)
        await asyncio.sleep(0)
        assert panel.settings == {"workers": 2}
        panel.close()

    asyncio.run(session())
    assert where["run"] is threading.main_thread()
    assert where["stop"] is where["clicks"] is not threading.main_thread(), "the main thread may be busy"


# -- the lab -----------------------------------------------------------------------------------------------------------


class Scripted:
    """An engine that runs until it is stopped or let go."""

    def __init__(self, code: Code, plan: Plan, tell: Listener) -> None:
        self.code, self.plan, self.tell = code, plan, tell
        self.trials: list[Trial] = []
        self.error: BaseException | None = None
        self.thread: threading.Thread | None = None
        self.began, self.ended = threading.Event(), threading.Event()
        self.stops = 0

    def run(self) -> Experiment:
        self.thread = threading.current_thread()
        self.tell(Progress("as written", 0, 1, None))
        self.began.set()
        assert self.ended.wait(PATIENCE_S)
        return Experiment((), (), 0.0)

    def stop(self) -> None:
        self.stops += 1
        self.ended.set()


class Made:
    """Makes scripted engines and keeps them."""

    def __init__(self) -> None:
        self.engines: list[Scripted] = []

    def __call__(self, code: Code, plan: Plan, tell: Listener) -> Scripted:
        self.engines.append(Scripted(code, plan, tell))
        return self.engines[-1]


@pytest.fixture
def made() -> Made:
    return Made()


@pytest.fixture
def scripted(made: Made) -> Iterator[PanelSession]:
    before = set(ipywidgets.widgets.widget._instances)
    opened = PanelSession(FunctionCode(lambda: None), thread=True, engine=made, save=False)
    yield opened
    opened.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("gpulab")], "no thread stays"
    assert set(ipywidgets.widgets.widget._instances) == before, "no widget stays"


def test_a_run_goes_on_beside_the_main_thread_and_a_second_click_only_says_so(
    scripted: PanelSession, made: Made
) -> None:
    panel = scripted.panel
    panel.buttons["look"].click()
    assert made.engines[0].began.wait(PATIENCE_S) and scripted.running
    assert made.engines[0].thread is not threading.main_thread()
    panel.buttons["run"].click()
    assert len(made.engines) == 1 and BUSY in panel._message.value
    with pytest.raises(UsageError, match="goes on already"):
        scripted.run()
    panel.buttons["stop"].click()
    assert scripted.wait() is None
    assert made.engines[0].stops == 1 and not scripted.running
    panel.buttons["look"].click()
    assert len(made.engines) == 2, "it can begin again"


def test_a_closed_panel_stops_its_run(scripted: PanelSession, made: Made) -> None:
    scripted.panel.buttons["look"].click()
    assert made.engines[0].began.wait(PATIENCE_S)
    scripted.panel.buttons["close"].click()
    assert made.engines[0].stops == 1 and not scripted.running


def test_an_interrupt_while_waiting_ends_the_run(
    scripted: PanelSession, made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripted.look()
    join = Thread.join
    raised: list[None] = []

    def interrupted(self: Thread, timeout_s: float | None = None) -> None:
        if not raised:
            raised.append(None)
            raise KeyboardInterrupt
        join(self, timeout_s)

    monkeypatch.setattr(Thread, "join", interrupted)
    with pytest.raises(KeyboardInterrupt):
        scripted.wait()
    assert made.engines[0].stops == 1 and not scripted.running


def test_what_the_cell_raises_is_raised_by_wait_and_said_in_the_panel(scripted: PanelSession, made: Made) -> None:
    scripted.panel.buttons["look"].click()
    made.engines[0].error = ZeroDivisionError("division by zero")
    made.engines[0].ended.set()
    with pytest.raises(ZeroDivisionError):
        scripted.wait()
    assert "ZeroDivisionError: division by zero" in scripted.panel._message.value


def test_plans_are_made_of_the_settings(scripted: PanelSession, made: Made) -> None:
    scripted.panel.steps.value = 7
    scripted.compare(workers=2, amp="bf16")
    scripted.stop()
    plan = made.engines[0].plan
    assert plan.interleaved and plan.block_steps == 7
    assert [dict(arm.settings) for arm in plan.arms] == [{"workers": 2, "amp": "bf16"}]
    scripted.wait()
    scripted.run(workers=2)
    scripted.stop()
    assert not made.engines[1].plan.interleaved and made.engines[1].plan.block_steps == 7


@pytest.mark.parametrize(("settings", "words"), [({}, NOTHING_TURNED), ({"workers": -1}, "workers")])
def test_what_cannot_be_compared_is_refused(
    scripted: PanelSession, made: Made, settings: dict[str, object], words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        scripted.compare(**settings)
    assert not scripted.running and not made.engines


def test_without_a_profiled_cell_it_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    from gpulab.api.profile import runs

    monkeypatch.setattr(runs, "_own", {})
    with pytest.raises(UsageError, match=NO_CELL.split(":")[0]):
        lab()


def test_in_a_terminal_it_is_text(scripted: PanelSession, capsys: pytest.CaptureFixture[str]) -> None:
    scripted.show()
    assert "lab.compare(workers=2)" in capsys.readouterr().out
    assert "workers" in scripted.panel.text()


# -- code on a thread of its own ---------------------------------------------------------------------------------------


def on_thread(task: Callable[[], None]) -> None:
    thread = Thread(task, "gpulab-test")
    thread.begin()
    thread.join(PATIENCE_S)
    assert not thread.alive


def test_what_the_code_prints_is_collected_and_others_print_on(capsys: pytest.CaptureFixture[str]) -> None:
    before = sys.stdout, sys.stderr
    inside, go_on = threading.Event(), threading.Event()

    def code() -> None:
        print("of the cell")
        print("trouble", file=sys.stderr)
        inside.set()
        assert go_on.wait(PATIENCE_S)

    apart = Apart(FunctionCode(code))
    thread = Thread(lambda: apart.run(quiet=False) and None, "gpulab-test")
    thread.begin()
    assert inside.wait(PATIENCE_S)
    print("of another thread")
    go_on.set()
    thread.join(PATIENCE_S)
    assert apart.written.text == "of the cell\ntrouble\n"
    assert capsys.readouterr().out == "of another thread\n"
    assert (sys.stdout, sys.stderr) == before
    inside.clear()
    apart.run(quiet=True)
    assert apart.written.text == "of the cell\ntrouble\n" and capsys.readouterr() == ("", "")


def test_only_the_end_of_much_output_is_kept() -> None:
    written = Written()
    with written_apart(written):
        print("begin")
        print("x" * 30_000)
        print("end")
    assert (
        written.cut and written.text.endswith("end\n") and "begin" not in written.text and len(written.text) <= 20_000
    )


def test_another_ones_redirection_of_stdout_survives_ours() -> None:
    written, before = Written(), sys.stdout
    with written_apart(written):
        ours = sys.stdout
        sys.stdout = theirs = type(ours)(before, Written())  # put over ours by somebody else, meanwhile
    assert sys.stdout is theirs
    sys.stdout = ours  # and put back by them
    print("to nobody")
    assert written.text == "", "what is over takes nothing any more"
    sys.stdout = before


def test_torch_is_set_there_as_here() -> None:
    import torch

    seen: list[object] = []

    def look() -> None:
        seen.extend((torch.is_grad_enabled(), torch.get_num_threads(), torch.get_default_device().type))

    torch.set_grad_enabled(False)
    torch.set_default_device("meta")
    threads = torch.get_num_threads()
    try:
        on_thread(look)
    finally:
        torch.set_grad_enabled(True)
        torch.set_default_device("cpu")
    assert seen == [False, threads, "meta"]
    torch_settings()()
    assert torch.is_grad_enabled()


def test_a_real_run_on_its_own_thread_leaves_the_training_where_it_was() -> None:
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(torch.randn(64, 4), torch.zeros(64, dtype=torch.long)), batch_size=4)
    where: list[threading.Thread] = []

    def train() -> None:
        where.append(threading.current_thread())
        print("trained")
        for x, y in loader:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()

    before, random = model.weight.clone(), torch.get_rng_state()
    opened = PanelSession(FunctionCode(train), thread=True, save=False)
    try:
        assert opened.look().wait() is None
        report = opened.run(batch_size=8).wait()
    finally:
        opened.close()
    assert torch.equal(model.weight, before) and torch.equal(torch.get_rng_state(), random)
    assert threading.main_thread() not in where
    assert (
        opened.observation is not None
        and opened.observation.loader is not None
        and opened.observation.loader.record.batch_size == 4
    )
    assert report is not None and "batch_size=8" in report.text()
    assert "CHANGED FOR THIS RUN" in report.text() and "took effect: batches of 8 samples" in report.text()
