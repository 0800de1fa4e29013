"""`gpulab.experiment` compares settings of the same code; `gpulab.headspace` measures the gain of a perfect loader."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import product
from typing import Any, Literal

from gpulab.api.runs import Runs
from gpulab.errors import UsageError
from gpulab.knobs.variables import Plain
from gpulab.options import check_seconds, check_whole_number
from gpulab.run import Run
from gpulab.tuning import cell_code as cells
from gpulab.tuning.cell_code import Interrupted
from gpulab.tuning.code import Code
from gpulab.tuning.execute import FullRun
from gpulab.tuning.headspace import Differential
from gpulab.tuning.record import Comparison, Experiment, Speed
from gpulab.tuning.resolve import check, observation_of
from gpulab.tuning.runner import Runner
from gpulab.tuning.schedule import Arm, Listener, Plan, step_s
from gpulab.views.comparison import Compared, Comparing
from gpulab.views.headspace import HeadspaceReport
from gpulab.views.progress import Progressing, Stoppable
from gpulab.views.view import View

HINT = "End the comparison at the next step; what was measured so far is shown"
HEADSPACE_HINT = "End the test at the next step; what was measured so far is shown"
NO_CELL = (
    "No cell was profiled in this kernel yet: put %%gpuprofile above a training cell and run it once. "
    "Earlier runs are kept: %gpulab runs."
)

experiments: list[Compared] = []
headspaces: list[HeadspaceReport] = []
_text_since: dict[str, str] = {}  # the cell's text after an applied edit, by the id of its last run


def experiment(
    code: Callable[[], object] | str,
    knobs: Mapping[str, object | Sequence[object]],
    *,
    namespace: dict[str, Any] | None = None,
    name: str = "",
    steps: int | None = None,
    pairs: int | None = None,
    budget_s: float | None = None,
    seeds: int = 0,
    save: bool = True,
    show: bool = True,
) -> Compared:
    """Compare the same code under changed settings with the baseline, the code as it is.

    `code`: a function without arguments, or the text of a cell with the names of `namespace`; without a namespace, of
    the notebook, or no names at all without a notebook. `knobs`: for each knob or variable a value, or a list of values
    for a sweep; several lists make a grid. `steps`: counted steps of a block; `pairs`: pairs of blocks of a comparison;
    `budget_s`: seconds in all (None: 60, and 30 more for each further setting), after which the result so far counts.
    Raises UsageError before anything runs; exceptions of the baseline propagate.
    """
    plan = Plan(
        arms=arms_of(knobs), block_steps=steps, pairs=pairs, budget_s=budget_s, seeds=seeds, name=name, save=save
    )
    return conduct(code_of(code, namespace), plan, show=show)


def code_of(code: Callable[[], object] | str | Code | None, namespace: dict[str, Any] | None = None) -> Code:
    """The code that the argument denotes; None: the cell profiled last. Raises UsageError if there is none.

    A text uses `namespace`, else the names of the notebook; without a notebook, no names.
    """
    if code is None:
        run, text = _last_profiled()
        return _text_code(text, main_names(), "statement" if run.source == "statement" else "cell")
    if isinstance(code, str):
        return _text_code(code, namespace, "cell")
    return code if isinstance(code, Code) else Code.of_function(code)


def main_names() -> dict[str, Any] | None:
    """The names of the main module if there is no notebook; else None."""
    return None if cells.shell() is not None else vars(sys.modules["__main__"])


def edited(code: Code, text: str) -> Code:
    """The code of a cell after its text has changed to `text`."""
    with suppress(UsageError):
        run, before = _last_profiled()
        if before == code.text:
            _text_since[run.id] = text
    return code_of(text, None if cells.shell() is not None else code.namespace)


def _last_profiled() -> tuple[Run, str]:
    """The last profiled run of this process, with the present text of its cell."""
    from gpulab.api.runs import runs

    run = next((run for run in reversed(runs.own) if run.source in ("cell", "statement") and run.code.strip()), None)
    if run is None:
        raise UsageError(NO_CELL)
    return run, _text_since.get(run.id, run.code)


def _text_code(text: str, namespace: dict[str, Any] | None, source: Literal["cell", "statement"]) -> Code:
    shell = cells.shell()
    if namespace is not None or shell is None:
        return Code.of_text(text, {} if namespace is None else namespace)
    try:
        return Code.of_cell(shell, text, cells.parsed(shell, text), source)
    except SyntaxError as e:
        raise UsageError(f"The code does not parse: {e}.") from None


def arms_of(knobs: Mapping[str, object | Sequence[object]]) -> tuple[Arm, ...]:
    """All combinations of the values. Raises UsageError for an unknown value or an empty list."""
    from gpulab.knobs.catalogue import parsed_value

    lists: list[list[tuple[str, Plain]]] = []
    for knob, value in knobs.items():
        values = list(value) if isinstance(value, (list, tuple)) else [value]
        if not values:
            raise UsageError(f"{knob} has no value to try: name at least one.")
        lists.append([(knob, parsed_value(knob, one)) for one in values])
    return tuple(map(Arm, map(dict, product(*lists)))) if lists else ()


def conduct(code: Code, plan: Plan, *, show: bool = True, tell: Listener | None = None, full: bool = False) -> Compared:
    """Run the plan, store and show the result. An error that ended it early is raised after that."""
    check(code, plan)
    runner = Runner(code, plan, done=run_before(code, plan), step_s=last_step_s(code))
    arms = plan.arms if plan.interleaved else ()
    with Comparing(runner.stop, HINT, arms, lambda: runner.blocks, also=tell, show=show) as progressing:
        runner.tell, runner.tick = progressing.tell, progressing.tick
        result = runner.run()
    compared = remember_experiment(result)
    remember_full_runs(runner.full_runs)
    finish(progressing, compared, runner.error, measured=bool(result.comparisons), show=show, full=full)
    return compared


def finish(
    progress: Progressing,
    view: View,
    error: BaseException | None,
    *,
    measured: bool,
    show: bool,
    full: bool = False,
) -> None:
    """Show the result, if anything was measured; then raise the error that ended it early, if any."""
    if error is not None and not measured:  # the error says it all
        progress.clear()
    else:
        try:
            progress.put(view, full=full)
        except Exception as e:
            sys.stderr.write(f"gpulab: the result could not be shown ({type(e).__name__}: {e})\n")
    if error is not None:
        raise ending(error, has_result=show and measured)


def ending(error: BaseException, *, has_result: bool) -> BaseException:
    """The exception to raise after the result: an interrupt becomes a single line."""
    if not isinstance(error, KeyboardInterrupt):
        return error
    if has_result:
        return Interrupted("Interrupted: what was measured so far is above. The training state was restored.")
    return Interrupted("Interrupted. The training state was restored.")


def run_before(code: Code, plan: Plan) -> list[tuple[Arm, FullRun]]:
    """The baseline's last run in this process, if it has a trace and read the same objects; else empty."""
    from gpulab.api.runs import runs

    observation = observation_of(code)
    latest = next((run for run in reversed(runs.own) if run.code == code.text and not run.settings.knobs), None)
    if observation is None or latest is None or not plan.interleaved or plan.seeds or not plan.trace:
        return []
    usable = latest.outcome in ("completed", "stopped") and not latest.settings.whole
    if not usable or latest.timeline is None or latest.settings.device != plan.device:
        return []
    return [(Arm(), FullRun(latest, observation, ()))]


def last_step_s(code: Code) -> float | None:
    """The step of this code in its last run in this process, in s; None without such a run."""
    from gpulab.api.runs import runs

    latest = next((run for run in reversed(runs.own) if run.code == code.text and len(run.steps)), None)
    return step_s(latest) if latest is not None else None


def remember_experiment(result: Comparison | Experiment) -> Compared:
    """Append the result to `gpulab.experiments`; the reports of its runs will quote it."""
    compared = Compared(result)
    experiments.append(compared)
    for comparison in compared.comparisons:
        if comparison.b.facts is not None:
            remember_speed(comparison.b.facts.run.id, comparison.speed)
    return compared


def remember_speed(run_id: str, speed: Speed | None) -> None:
    """Let the report of this run quote the speed of its settings, if blocks were interleaved."""
    from gpulab.api.reading import speeds

    if run_id and speed is not None and speed.pairs:
        speeds[run_id] = speed


def remember_full_runs(full_runs: Sequence[FullRun]) -> None:
    """Add these runs to `gpulab.runs`."""
    from gpulab.api.runs import runs

    store: Runs = runs
    for full_run in full_runs:
        store.add(full_run.run, full_run.path)


def headspace(
    code: Callable[[], object] | str | Code | None = None,
    *,
    namespace: dict[str, Any] | None = None,
    budget_s: float | None = None,
    steps: int | None = None,
    pairs: int | None = None,
    show: bool = True,
) -> HeadspaceReport:
    """The speedup that a perfect DataLoader would give a cell, and the cost of its data per step.

    `code`: a function without arguments, the text of a cell with the names of `namespace`, or None for the cell
    profiled last. `steps`: counted steps of a block; `pairs`: pairs of blocks to compare; `budget_s`: seconds in all.
    Raises UsageError if the cell takes no data from a DataLoader; exceptions of the baseline propagate.
    """
    if budget_s is not None:
        check_seconds("--budget", budget_s)
    check_whole_number("--steps", steps, 1)
    check_whole_number("--pairs", pairs, 1)
    cell = code_of(code, namespace)
    test = Differential(cell, budget_s=budget_s, steps=steps, pairs=pairs, step_s=last_step_s(cell))
    with Stoppable(test.stop, HEADSPACE_HINT, show=show) as progress:
        test.tell, test.tick = progress.tell, progress.tick
        result = test.headspace()
    report = HeadspaceReport(result)
    headspaces.append(report)
    finish(progress, report, test.error, measured=result.ceiling is not None, show=show)
    return report


def headspace_last(options: argparse.Namespace) -> None:
    """Do `%gpulab headspace`. Raises UsageError in one line, and exceptions of the cell."""
    headspace(budget_s=options.budget, steps=options.steps, pairs=options.pairs)
