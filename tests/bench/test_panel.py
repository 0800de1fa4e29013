"""The panel and its session: what each knob shows, what each button starts, and where the cell's prints go."""

from __future__ import annotations

import asyncio
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

import ipywidgets
import pytest
import torch
from gpulab.panel.controls import KnobRow
from gpulab.panel.opening import lab
from gpulab.panel.output import KeptPrints, MainThread, interruptible, prints_kept
from gpulab.panel.panel import Panel, head
from gpulab.panel.session import INTERRUPTED, NOTHING_TURNED, PanelSession
from msgspec.structs import replace

from gpulab.api.experiment import NO_CELL
from gpulab.errors import UsageError
from gpulab.knobs.catalogue import KNOBS
from gpulab.knobs.knob import Value
from gpulab.tuning.function_code import FunctionCode, TextCode
from gpulab.tuning.plan import Code, Listener, Plan, Progress
from gpulab.tuning.record import Experiment
from gpulab.tuning.trial import Trial
from gpulab.views.running.progress import share_done
from gpulab.views.wording import lesson_path
from tests.knobs.scenes import loading
from tests.tuning.cells import CELL, SETUP, same, weights

PATIENCE_S = 120.0
SCENE = loading(dataset_length=480, batch_size=16)
LOADER = SCENE.loaders[0].record


class Pressed:
    """Notes what the panel's buttons ask for."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, dict[str, Value]]] = []

    def begin(self, kind: str, settings: Mapping[str, Value]) -> None:
        self.asked.append((kind, dict(settings)))

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


def test_each_knob_shows_its_value_help_and_control(panel: Panel) -> None:
    assert [r.knob.name for r in panel.rows] == list(KNOBS)
    assert all(r.control.disabled and "as found: ?" in words(r) for r in panel.rows), "before a look at the cell"
    panel.show_observation(SCENE)
    assert all(r.knob.title in words(r) for r in panel.rows) and panel.settings == {}
    assert "as found: 16" in words(row(panel, "batch_size")) and row(panel, "batch_size").control.value == 16
    kinds = {"workers": ipywidgets.BoundedIntText, "pin_memory": ipywidgets.Checkbox, "amp": ipywidgets.Dropdown}
    assert all(isinstance(row(panel, name).control, kind) for name, kind in kinds.items())
    assert row(panel, "amp").control.value == "off"
    tf32 = row(panel, "tf32")
    assert tf32.control.disabled and str(KNOBS["tf32"].refuses(SCENE, True)) in words(tf32).replace("&#x27;", "'")
    assert not row(panel, "workers").control.disabled
    records: list[tuple[dict[str, Any], str, bool]] = [
        ({"iterable": True}, "workers", True),
        ({"dataset_length": 6, "batch_size": 16}, "batch_size", False),
        ({"dataset_length": 1, "batch_size": 1}, "batch_size", True),
    ]
    for changes, name, disabled in records:
        record = replace(LOADER, **changes)
        panel.show_observation(replace(SCENE, loaders=(replace(SCENE.loaders[0], record=record),)))
        assert row(panel, name).control.disabled is disabled, changes


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


def test_buttons_give_settings_and_a_refused_one_starts_nothing(panel: Panel, pressed: Pressed) -> None:
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
    assert "block 7 of 40: workers=2 (6 of 40 done, about 33 s left)" in panel._now.value
    panel.end("workers=2 is faster")
    assert panel.buttons["stop"].disabled and "workers=2 is faster" in panel._message.value


def test_the_bar_never_goes_back_and_text_of_the_user_is_escaped() -> None:
    course = [Progress("as written", 0, 2, None), Progress("block_size=2", 1, 2, None)]  # a variable of the cell
    course += [Progress(f"block {i + 1} of 9: x", i, 9, 1.0, in_blocks=True) for i in range(9)]
    shares = [share_done(p) for p in course]
    assert shares == sorted(shares) and shares[0] >= 0 and shares[-1] < 1
    assert "<script>" not in head("x = '<script>alert(1)</script>'")
    assert "for x in loader" in head("\n# comment\nfor x in loader:\n    pass")


def test_a_lesson_is_linked_only_where_its_notebook_is(tmp_path: Path) -> None:
    (tmp_path / "notebooks").mkdir()
    assert lesson_path("03_starving_gpu", tmp_path) is None
    (tmp_path / "notebooks" / "03_starving_gpu.ipynb").touch()
    assert lesson_path("03_starving_gpu", tmp_path) == "notebooks/03_starving_gpu.ipynb"
    assert lesson_path("", tmp_path) is None


def test_a_click_on_another_thread_acts_on_the_main_one(pressed: Pressed) -> None:
    where: dict[str, threading.Thread] = {}
    pressed.begin = lambda kind, settings: where.update(begin=threading.current_thread())  # type: ignore[method-assign]
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
    assert where["begin"] is threading.main_thread()
    assert where["stop"] is where["clicks"] is not threading.main_thread(), "the main thread may be busy"


# -- the lab -----------------------------------------------------------------------------------------------------------


class Scripted:
    """An engine that does, while it runs, what `Made.during` says."""

    def __init__(self, code: Code, plan: Plan, tell: Listener, during: Callable[[Scripted], None]) -> None:
        self.code, self.plan, self.tell = code, plan, tell
        self.trials: list[Trial] = []
        self.error: BaseException | None = None
        self.stops = 0
        self._during = during

    def run(self) -> Experiment:
        self.tell(Progress("as written", 0, 1, None))
        self._during(self)
        return Experiment((), (), 0.0)

    def stop(self) -> None:
        self.stops += 1


class Made:
    """Makes scripted engines and keeps them."""

    def __init__(self) -> None:
        self.engines: list[Scripted] = []
        self.during: Callable[[Scripted], None] = lambda engine: None

    def __call__(self, code: Code, plan: Plan, tell: Listener) -> Scripted:
        self.engines.append(Scripted(code, plan, tell, self.during))
        return self.engines[-1]


@pytest.fixture
def made() -> Made:
    return Made()


@pytest.fixture
def scripted(made: Made) -> Iterator[PanelSession]:
    before = set(ipywidgets.widgets.widget._instances)
    opened = PanelSession(FunctionCode(lambda: None), engine=made, save=False)  # type: ignore[arg-type]
    yield opened
    opened.close()
    assert set(ipywidgets.widgets.widget._instances) == before, "no widget stays"


def test_a_run_is_on_the_main_thread_while_the_panel_moves(scripted: PanelSession, made: Made) -> None:
    seen: list[object] = []

    def during(engine: Scripted) -> None:
        panel = scripted.panel
        seen.extend((threading.current_thread(), scripted.running, panel.buttons["stop"].disabled))
        engine.tell(Progress("block 3 of 4: workers=2", 2, 4, 1.0, in_blocks=True))
        seen.extend((panel._now.value, panel._bar.value))
        assert all(panel.buttons[name].disabled for name in ("look", "run", "compare"))
        panel.buttons["run"].click()
        with pytest.raises(UsageError, match="goes on already"):
            scripted.run()

    made.during = during
    scripted.panel.buttons["look"].click()
    assert seen[:3] == [threading.main_thread(), True, False]
    assert "block 3 of 4" in str(seen[3]) and seen[4] == share_done(Progress("", 2, 4, None, in_blocks=True))
    assert not scripted.running and scripted.panel.buttons["stop"].disabled and len(made.engines) == 1
    scripted.panel.buttons["look"].click()
    assert len(made.engines) == 2, "it can begin again"


def test_clicks_that_waited_for_the_end_of_a_run_start_nothing(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpulab.panel.session.SETTLING_S", 0.0)

    async def session() -> None:
        opened = PanelSession(FunctionCode(lambda: None), engine=made, save=False)  # type: ignore[arg-type]
        buttons, loop = opened.panel.buttons, asyncio.get_running_loop()

        def during(engine: Scripted) -> None:
            if len(made.engines) <= 1:
                loop.call_soon(buttons["run"].click)

        made.during = during
        buttons["look"].click()
        await asyncio.sleep(0)
        assert len(made.engines) == 1 and buttons["run"].disabled
        while opened._settling:
            await asyncio.sleep(0)
        assert not buttons["run"].disabled
        buttons["run"].click()
        assert len(made.engines) == 2, "a click of later is heard"
        opened.close()

    asyncio.run(session())


@pytest.mark.parametrize("button", ["stop", "close"])
def test_stop_reaches_the_engine(scripted: PanelSession, made: Made, button: str) -> None:
    made.during = lambda engine: scripted.panel.buttons[button].click()
    scripted.panel.buttons["look"].click()
    assert made.engines[0].stops == 1 and scripted.result is None and not scripted.running


def test_an_interrupt_is_heard_where_the_kernel_ignores_it() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt), interruptible():
            signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(
    ("error", "shown"),
    [(ZeroDivisionError("division by zero"), "ZeroDivisionError: division by zero"), (None, INTERRUPTED)],
)
def test_an_error_is_shown_in_the_panel_and_raised_in_code(
    scripted: PanelSession, made: Made, error: Exception | None, shown: str
) -> None:
    def during(engine: Scripted) -> None:
        if error is None:
            raise KeyboardInterrupt
        engine.error = error

    made.during = during
    scripted.panel.buttons["look"].click()
    assert not scripted.running and shown in scripted.panel._message.value
    with pytest.raises(type(error or KeyboardInterrupt())):
        scripted.look()
    assert not scripted.running


def test_what_a_click_prints_is_kept(scripted: PanelSession, made: Made, capsys: pytest.CaptureFixture[str]) -> None:
    kept: list[str] = []

    def during(engine: Scripted) -> None:
        print("of the cell")
        assert scripted._job is not None
        kept.append(scripted._job.prints.text)

    made.during = during
    scripted.panel.buttons["look"].click()
    assert kept == ["of the cell\n"] and capsys.readouterr().out == ""
    scripted.look()
    assert kept[1] == "" and capsys.readouterr().out == "of the cell\n", "in a terminal, code prints as it does"


def test_plans_are_made_of_the_settings(scripted: PanelSession, made: Made, capsys: pytest.CaptureFixture[str]) -> None:
    refused: list[tuple[dict[str, Any], str]] = [({}, NOTHING_TURNED), ({"workers": -1}, "workers")]
    for settings, said in refused:
        with pytest.raises(UsageError, match=said):
            scripted.compare(**settings)
    assert not scripted.running and not made.engines
    scripted.panel.steps.value = 7
    scripted.compare(workers=2, amp="bf16")
    plan = made.engines[0].plan
    assert plan.interleaved and plan.block_steps == 7
    assert [dict(arm.settings) for arm in plan.arms] == [{"workers": 2, "amp": "bf16"}]
    scripted.run(workers=2)
    assert not made.engines[1].plan.interleaved and made.engines[1].plan.block_steps == 7
    scripted.show()
    assert "gpulab.lab().compare(workers=2)" in capsys.readouterr().out, "in a terminal it is text"
    assert "workers" in scripted.panel.text()


def test_without_a_profiled_cell_it_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    from gpulab.api.reading import runs

    monkeypatch.setattr(runs, "_own", {})
    with pytest.raises(UsageError, match=NO_CELL.split(":")[0]):
        lab()


# -- what the code prints ----------------------------------------------------------------------------------------------


def test_what_the_code_prints_is_collected_and_others_print_on(capsys: pytest.CaptureFixture[str]) -> None:
    before, written = (sys.stdout, sys.stderr), KeptPrints()
    with prints_kept(written):
        print("of the cell")
        print("trouble", file=sys.stderr)
        other = threading.Thread(target=print, args=("of another thread",))
        other.start()
        other.join(PATIENCE_S)
    assert written.text == "of the cell\ntrouble\n"
    assert capsys.readouterr().out == "of another thread\n"
    assert (sys.stdout, sys.stderr) == before


def test_only_the_end_of_much_output_is_kept() -> None:
    written = KeptPrints()
    with prints_kept(written):
        print("begin", "x" * 30_000, "end", sep="\n")
    assert written.cut and written.text.endswith("end\n") and "begin" not in written.text
    assert len(written.text) <= 20_000


def test_another_ones_redirection_of_stdout_survives_ours() -> None:
    written, before = KeptPrints(), sys.stdout
    with prints_kept(written):
        ours = sys.stdout
        kind: Callable[..., TextIO] = type(ours)
        sys.stdout = theirs = kind(before, KeptPrints())  # put over ours by somebody else, meanwhile
    assert sys.stdout is theirs
    sys.stdout = ours  # and put back by them
    print("to nobody")
    assert written.text == "", "what is over takes nothing any more"
    sys.stdout = before


def test_a_real_run_leaves_the_training_where_it_was() -> None:
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(SETUP, names)
    before, random = weights(names), torch.get_rng_state()
    opened = PanelSession(TextCode.parsed(CELL, names), save=False)
    try:
        assert opened.look().result is None
        report = opened.run(batch_size=8).result
    finally:
        opened.close()
    assert same(before, names) and torch.equal(torch.get_rng_state(), random)
    assert opened.observation is not None and opened.observation.loader is not None
    assert opened.observation.loader.record.batch_size == 4 and report is not None
    text = report.text(full=True)
    assert "CHANGED FOR THIS RUN" in text and "took effect: batches of 8 samples" in text and "batch_size=8" in text
