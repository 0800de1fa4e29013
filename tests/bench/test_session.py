"""The bench as a session: what each click starts, how rows grow, what outlives the kernel, where prints go."""

from __future__ import annotations

import asyncio
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

import ipywidgets
import pytest
import torch
from msgspec.structs import replace

from gpulab.api.experiment import NO_CELL
from gpulab.api.reading import report
from gpulab.api.runs import runs
from gpulab.bench import file
from gpulab.bench.opening import NOTHING_TO_APPLY, apply_edit, lab
from gpulab.bench.output import (
    INTERRUPTED,
    MISSING,
    BenchWidget,
    MainThread,
    Prints,
    collecting,
    first_line,
    interruptible,
)
from gpulab.bench.session import (
    BUSY,
    MEASURED_AGAIN,
    BenchSession,
)
from gpulab.bench.toggles import TWO_SETTINGS
from gpulab.errors import UsageError
from gpulab.tuning import resolve
from gpulab.tuning.code import Code
from gpulab.tuning.execute import FullRun
from gpulab.tuning.runner import Runner
from gpulab.tuning.schedule import Arm, Listener, Plan
from gpulab.views import bench as view
from gpulab.views.wording import lesson_path
from tests.support.scripted_runs import ScriptedRuns
from tests.tuning.cells import CELL, SETUP, same, weights

PATIENCE_S = 120.0
STEPS_S = {"baseline": 0.04, "workers=2": 0.02, "batch_size=16": 0.04, "workers=2, batch_size=16": 0.02}
CODE = Code.of_text("for x in loader:\n    step(x)", {"loader": [], "step": print})


class Bench:
    """A bench on a machine whose clock the test holds. `plans` ran; `before` is called as each begins."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.plans: list[Plan] = []
        self.done: list[list[str]] = []
        self.before: Callable[[Runner], None] = lambda runner: None
        self.runs = ScriptedRuns(lambda label: STEPS_S[label]).install(monkeypatch)
        self.session = self.opened()

    def opened(self, save: bool = True) -> BenchSession:
        return BenchSession(CODE, engine=self.engine, save=save)

    def engine(self, code: Code, plan: Plan, tell: Listener, done: Sequence[tuple[Arm, FullRun]]) -> Runner:
        self.plans.append(plan)
        self.done.append([arm.label for arm, _ in done])
        made = Runner(code, plan, tell, done, clock=self.runs.clock)
        real = made.run

        def run() -> Any:
            self.before(made)
            return real()

        made.run = run  # type: ignore[method-assign]
        return made

    @property
    def labels(self) -> list[str]:
        return [row.label for row in self.session.rows]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch, own_store: Path) -> Iterator[Bench]:
    before = set(ipywidgets.widgets.widget._instances)
    made = Bench(monkeypatch)
    yield made
    made.session.close()
    assert set(ipywidgets.widgets.widget._instances) == before, "no widget stays"


# -- rows --------------------------------------------------------------------------------------------------------------


def test_each_run_is_one_more_row_and_the_first_is_not_run_again(bench: Bench) -> None:
    session = bench.session.run(workers=2)
    assert bench.labels == ["baseline", "workers=2"] and bench.done == [[]]
    speed = session.rows[1].speed
    assert speed is not None and speed.verdict == "faster" and speed.ratio == pytest.approx(0.5)
    assert [settings.knobs for settings in bench.runs.full_runs] == [{}, {"workers": "2"}]
    said = report(runs[session.rows[1].run_id]).headline.sentence
    assert said.startswith(f"Faster: speedup 2.000× (2.000–2.000) per step over the baseline, in {speed.pairs} pairs")
    assert bench.runs.blocks[:2] in (["baseline", "workers=2"], ["workers=2", "baseline"]), "figures come first"
    session.run(batch_size=16)
    assert bench.labels == ["baseline", "workers=2", "batch_size=16"] and bench.done[1] == ["baseline"]
    assert [settings.knobs for settings in bench.runs.full_runs][2:] == [{"batch_size": "16"}]
    assert session.result is not None and session.result.only.b.label == "batch_size=16"
    assert session.bench.step_us(session.rows[1]) == pytest.approx(session.rows[0].step_us * 0.5, rel=1e-3)  # type: ignore[operator]
    session.run()
    assert bench.labels[0] == "baseline" and len(session.rows) == 3, "baseline again is the same row"


def test_settings_by_themselves_and_together(bench: Bench) -> None:
    with pytest.raises(UsageError, match=TWO_SETTINGS.split(":")[0]):
        bench.session.each(workers=2)
    bench.session.each(workers=2, batch_size=16)
    assert bench.labels == ["baseline", "workers=2", "batch_size=16", "workers=2, batch_size=16"]
    ratios = [row.speed.ratio for row in bench.session.rows[1:] if row.speed is not None]
    assert ratios == pytest.approx([0.5, 1.0, 0.5], rel=1e-6)


def test_more_pairs_of_a_row_run_no_full_run_again(bench: Bench) -> None:
    session = bench.session.run(batch_size=16)
    full_runs, pairs = len(bench.runs.full_runs), session.rows[1].speed.pairs  # type: ignore[union-attr]
    session.decide(session.rows[1])
    assert len(bench.runs.full_runs) == full_runs and bench.plans[-1].pairs is not None
    assert session.rows[1].speed.pairs == pairs + bench.plans[-1].pairs  # type: ignore[union-attr]


def test_what_was_stopped_loses_no_row(bench: Bench) -> None:
    session = bench.session.run(workers=2)
    before = session.rows[1].speed
    bench.runs.on_block = lambda runs: session.stop()
    session.run(workers=2)
    assert session.rows[1].speed is not None and session.rows[1].speed.ratio == before.ratio  # type: ignore[union-attr]
    session.run(batch_size=16)
    assert not session.running and bench.labels[:2] == ["baseline", "workers=2"]


def test_a_bench_that_is_closed_ends_its_run(bench: Bench) -> None:
    bench.runs.on_block = lambda runs: bench.session.close()
    bench.session.run(workers=2)
    assert len(bench.runs.blocks) == 1 and not bench.session.running


def test_rows_outlive_the_process(bench: Bench) -> None:
    rows = bench.session.run(workers=2).rows
    assert bench.opened().rows == rows
    again = bench.opened()
    again.run(batch_size=16)
    assert [row.label for row in bench.opened().rows] == ["baseline", "workers=2", "batch_size=16"]
    assert not bench.opened(save=False).rows
    path = file.path_of(CODE.text)
    path.write_bytes(path.read_bytes()[:-20])
    broken, problem = file.load(CODE.text)
    assert not broken.rows and "could not be read" in problem


def test_an_applied_edit_keeps_the_rows_beside_a_new_baseline(alive: Bench) -> None:
    session = alive.session
    session.run(workers=2)
    session.run(batch_size=16)
    first, two, sixteen = session.rows
    changed, other = f"{CODE.text}\nx = 1", f"{CODE.text}\nx = 2"
    for row, cell in ((two, changed), (sixteen, other)):
        session.bench = session.bench.put(replace(row, edit="a diff", cell=cell))
    root = click(alive, "rename", row=two.id, name="two workers")
    assert (root.edit["row"], root.edit["texts"]) == (two.id, [CODE.text, changed]), "the best is offered"
    assert root.edit["title"] == "Keep workers=2"
    click(alive, "open", rows=[two.id])
    root = click(alive, "applied", row=two.id)
    assert "The cell now has two workers" in root.status["message"] and root.code == changed
    assert root.edit == {"text": ""}, "the cell has it"
    assert session.bench.baseline is None and session._observation is None, "another text: nothing is known of it"
    assert view.IN_CELL in root.table and "Measured on the cell without two workers" in root.table

    click(alive, "run", settings={"workers": 2})
    assert alive.done[-1] == [] and [row.label for row in session.bench.own] == ["baseline", "workers=2"]
    assert session.bench.row(two.id).speed == two.speed, "what was measured before stays"  # type: ignore[union-attr]
    root = click(alive, "open", rows=[two.id, session.bench.own[1].id])
    assert "measured against the baseline of another text" in root.detail
    click(alive, "remove", row=first.id)
    click(alive, "remove", row=session.bench.own[0].id)
    assert [row.id for row in session.rows if not row.settings] != [], "others are measured against them"
    click(alive, "decide", row=sixteen.id)
    assert session.bench.of({"batch_size": "16"}) is not None, "measured on the text that the cell has now"

    root = click(alive, "open", rows=[sixteen.id])
    assert root.edit["title"] == "Keep batch_size=16 instead of two workers"
    assert root.edit["texts"] == [changed, CODE.text, other], "looked for: what the cell has, else what it had"
    click(alive, "applied", row=sixteen.id)
    for text in (CODE.text, changed, other):
        kept = BenchSession(Code.of_text(f"{text}\n", {"loader": [], "step": print})).bench
        assert {row.title for row in kept.rows} >= {"two workers", "batch_size=16"} and len(kept.rows) == 6
    undone = BenchSession(CODE).bench
    assert undone.baseline is not None and undone.baseline.id == first.id and len(undone.own) == 3


def test_after_a_restart_the_last_bench_opens_again(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(file.NOTEBOOK, "this.ipynb")
    kept = bench.session.run(workers=2).bench
    monkeypatch.setenv(file.NOTEBOOK, "other.ipynb")
    file.save(replace(kept, code="of_another()"))
    monkeypatch.setattr(runs, "_own", {})
    monkeypatch.setattr(resolve, "_observations", {})
    assert lab().code.text == "of_another()"
    monkeypatch.setenv(file.NOTEBOOK, "this.ipynb")
    assert lab().code.text == CODE.text and lab().rows == kept.rows
    assert lab()._news == f"{MISSING.format('loader, step')} {MEASURED_AGAIN}"

    again = BenchSession(CODE, engine=bench.engine)
    assert again._news == MEASURED_AGAIN and again._observation == kept.observation, "the toggles show what it had"
    again.run(batch_size=16)
    assert bench.done[-1] == [] and again._news == "" and len(again.rows) == 3
    alone = BenchSession(Code.of_text(CODE.text, {}), engine=bench.engine)
    bench.before = lambda runner: eval("loader", runner._code.namespace)
    said = list[str]()
    monkeypatch.setattr(alone, "_show", lambda status=None, **_: said.extend([status.message] if status else []))
    alone.begin("run", {"workers": 2})
    assert said[-1] == MISSING.format("loader, step") and alone.rows == again.rows


@pytest.mark.parametrize(
    ("error", "shown"),
    [(ZeroDivisionError("division by zero"), "ZeroDivisionError: division by zero"), (None, INTERRUPTED)],
)
def test_an_error_is_shown_in_the_bench_and_raised_in_code(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, error: Exception | None, shown: str
) -> None:
    def before(runner: Runner) -> None:
        raise error if error is not None else KeyboardInterrupt

    bench.before = before
    session, said = bench.session, list[str]()
    monkeypatch.setattr(session, "_show", lambda status=None, **_: said.extend([status.message] if status else []))
    session.begin("run", {"workers": 2})
    assert not session.running and shown in said[-1]
    with pytest.raises(type(error or KeyboardInterrupt())):
        session.run(workers=2)
    assert not session.running


def test_one_run_at_a_time_and_on_the_main_thread(bench: Bench) -> None:
    seen: list[object] = []

    def before(runner: Runner) -> None:
        seen.extend((threading.current_thread(), bench.session.running))
        with pytest.raises(UsageError, match=BUSY.split(":")[0]):
            bench.session.run(workers=2)
        print("of the cell")

    bench.before = before
    bench.session.begin("run", {"workers": 2})
    assert seen == [threading.main_thread(), True] and "of the cell" in bench.session._prints


def test_settings_that_are_none_are_refused(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UsageError, match="workers"):
        bench.session.run(workers=-1)
    assert not bench.plans and not bench.session.running
    bench.session.show()
    assert "gpulab.lab().run(workers=2)" in capsys.readouterr().out, "in a terminal it is text"


# -- what a click does -------------------------------------------------------------------------------------------------


@pytest.fixture
def alive(bench: Bench) -> Bench:
    """With a widget, as in a notebook."""
    session = bench.session
    session._widget = BenchWidget("k", "r", "for x in loader:", CODE.text, session._receive)
    return bench


def click(bench: Bench, what: str, **content: object) -> Any:
    assert bench.session._widget is not None
    root = bench.session._widget.root
    root._handle_custom_msg({"do": what, **content}, [])
    return root


def test_clicks_do_what_code_does(alive: Bench) -> None:
    click(alive, "run", settings={"workers": 2, "no such": 3})
    session = alive.session
    root = click(alive, "choose", settings={"workers": 2, "batch_size": "many"})
    assert {t["name"] for t in root.toggles if t["value"] is not None} == {"workers"}
    row = session.rows[1]
    assert alive.labels == ["baseline", "workers=2"] and "workers=2 is faster" in root.status["message"]
    assert not root.status["running"] and row.label in root.table
    root = click(alive, "rename", row=row.id, name="<b>mine</b>")
    assert session.rows[1].title == "<b>mine</b>" and "<b>mine" not in root.table
    click(alive, "pin", row=row.id)
    assert session.rows[1].pinned
    root = click(alive, "open", rows=[row.id, session.rows[0].id])
    assert root.marks == [row.id, session.rows[0].id] and "Time per step" in root.detail
    assert root.charts and len(root.charts) == root.detail.count('class="gp-chart"'), "each is drawn in its place"
    root = click(alive, "open", rows=[row.id])
    assert "Step breakdown" in root.detail and not root.charts, "the report of one row"
    click(alive, "choose", settings={})
    root = click(alive, "use", row=row.id)
    assert [t["value"] for t in root.toggles if t["name"] == "workers"] == [2]
    click(alive, "remove", row=row.id)
    assert alive.labels == ["baseline"]
    click(alive, "again", row="no such row")
    click(alive, "close")
    assert session._widget is None


def test_the_table_grows_while_a_row_is_measured(alive: Bench) -> None:
    session, tables = alive.session, list[str]()
    session._widget.root.observe(lambda change: tables.append(change["new"]), "table")  # type: ignore[union-attr]
    session.begin("run", {"workers": 2})
    pairs = [int(n) for table in tables for n in __import__("re").findall(r"(\d+) pairs?<", table)]
    assert pairs == sorted(pairs) and pairs[0] == 1 and pairs[-1] >= 4, "from the first pair on"


def test_a_click_on_stop_is_answered_while_the_run_ends(alive: Bench) -> None:
    session, said = alive.session, list[Any]()
    session._widget.root.observe(lambda change: said.append(change["new"]), "status")  # type: ignore[union-attr]
    alive.runs.on_block = lambda runs: click(alive, "stop")
    session.begin("run", {"workers": 2})
    assert any(status["running"] and status["stopping"] for status in said) and not said[-1]["running"]


def test_a_click_on_another_thread_acts_on_the_main_one(alive: Bench) -> None:
    where: list[threading.Thread] = []
    alive.before = lambda runner: where.append(threading.current_thread())

    async def session() -> None:
        alive.session._main = MainThread()
        await asyncio.to_thread(click, alive, "run", settings={"workers": 2})
        await asyncio.sleep(0)

    asyncio.run(session())
    assert where == [threading.main_thread()]


def test_a_saved_page_holds_the_rows_without_a_kernel(bench: Bench) -> None:
    bench.session.run(workers=2)
    page = bench.session._page()
    assert "workers=2" in page and "gp-static" in page and "<button" not in page and "<script" not in page
    assert view.text(bench.session.bench).splitlines()[0].startswith("baseline; ")


def test_a_lesson_is_linked_only_where_its_notebook_is(tmp_path: Path) -> None:
    (tmp_path / "notebooks").mkdir()
    assert lesson_path("03_starving_gpu", tmp_path) is None
    (tmp_path / "notebooks" / "03_starving_gpu.ipynb").touch()
    assert lesson_path("03_starving_gpu", tmp_path) == "notebooks/03_starving_gpu.ipynb"
    assert lesson_path("", tmp_path) is None


def test_a_cell_is_known_by_its_first_line() -> None:
    assert first_line("\n# comment\nfor x in loader:\n    pass") == "for x in loader:"


def test_an_interrupt_is_heard_where_the_kernel_ignores_it() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt), interruptible():
            signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_without_a_profiled_cell_and_a_bench_it_says_what_to_do(
    own_store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "_own", {})
    with pytest.raises(UsageError, match=NO_CELL.split(":")[0]):
        lab()
    with pytest.raises(UsageError, match=NOTHING_TO_APPLY.split(":")[0]):
        apply_edit()


# -- what the code prints ----------------------------------------------------------------------------------------------


def test_what_the_code_prints_is_collected_and_others_print_on(capsys: pytest.CaptureFixture[str]) -> None:
    before, written = (sys.stdout, sys.stderr), Prints()
    with collecting(written):
        print("of the cell")
        print("trouble", file=sys.stderr)
        other = threading.Thread(target=print, args=("of another thread",))
        other.start()
        other.join(PATIENCE_S)
    assert written.text == "of the cell\ntrouble\n"
    assert capsys.readouterr().out == "of another thread\n"
    assert (sys.stdout, sys.stderr) == before


def test_only_the_end_of_much_output_is_kept() -> None:
    written = Prints()
    with collecting(written):
        print("begin", "x" * 30_000, "end", sep="\n")
    assert written.cut and written.text.endswith("end\n") and "begin" not in written.text
    assert len(written.text) <= 20_000


def test_another_ones_redirection_of_stdout_survives_ours() -> None:
    written, before = Prints(), sys.stdout
    with collecting(written):
        ours = sys.stdout
        kind: Callable[..., TextIO] = type(ours)
        sys.stdout = theirs = kind(before, Prints())  # put over ours by somebody else, meanwhile
    assert sys.stdout is theirs
    sys.stdout = ours  # and put back by them
    print("to nobody")
    assert written.text == "", "what is over takes nothing any more"
    sys.stdout = before


def test_a_real_run_leaves_the_training_where_it_was() -> None:
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(SETUP, names)
    before, random = weights(names), torch.get_rng_state()
    opened = BenchSession(Code.of_text(CELL, names), save=False, steps=3)
    try:
        opened.run(batch_size=8)
    finally:
        opened.close()
    assert same(before, names) and torch.equal(torch.get_rng_state(), random)
    first, second = opened.rows
    assert (first.samples_per_step, second.samples_per_step) == (4, 8)
    assert [check.state for check in second.checks] == ["took effect"] and second.speed is not None
    assert second.speed.unit == "sample" and second.losses and second.edit
