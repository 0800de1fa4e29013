"""Who holds memory and how to let it go; which size fits; and whether a cure fits, with its price."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from msgspec.structs import replace

from gpulab.api.experiment import code_of, remember_experiment
from gpulab.errors import UsageError
from gpulab.formatting import settings_words
from gpulab.knobs.variables import Plain
from gpulab.memory.failure import out_of_memory
from gpulab.memory.owners import notebook_roots
from gpulab.memory.room import room_of
from gpulab.memory.survey import empty_caches, free_outputs, free_tracebacks, notebook, survey
from gpulab.memory_record import OutOfMemory, Survey
from gpulab.options import LEAST_FREE
from gpulab.run import Run
from gpulab.tuning import fit as fitting
from gpulab.tuning.code import Code
from gpulab.tuning.execute import FullRun
from gpulab.tuning.fit import Fit, Prober, Proof
from gpulab.tuning.runner import Runner
from gpulab.tuning.schedule import Arm, Listener, Plan
from gpulab.views.comparison import Compared
from gpulab.views.memory import Cured, Fitted, Owners
from gpulab.views.progress import Stoppable
from gpulab.views.view import Answer

PRICE_S = 60.0  # for the blocks that measure the price of a cure
HINT = "End the search at the next step; what was measured so far is shown"
NAME = "batch_size"


def memory(*, free: Sequence[str] = ()) -> Owners:
    """Who holds tensor memory in this process, by the names that a user can delete.

    `free`: "traceback", "out" (IPython's outputs), or names of the notebook, which are deleted first. Raises UsageError
    for an unknown name; then nothing is freed.
    """
    shell, namespace = notebook()
    unknown = [name for name in free if name not in ("traceback", "out") and name not in namespace]
    if unknown:
        raise UsageError(f"--free {unknown[0]}: no such name in the notebook. Use traceback, out, or a variable.")
    before = survey(shell, namespace) if free else None
    if "traceback" in free:
        free_tracebacks(shell)
    if "out" in free:
        free_outputs(shell, namespace)
    for name in free:
        if name not in ("traceback", "out"):
            _delete(shell, namespace, name)
    empty_caches()
    after = survey(shell, namespace)
    return Owners(after, None if before is None else _freed(before, after), tuple(free), room_of(None))


def _delete(shell: Any, namespace: dict[str, Any], name: str) -> None:
    """Delete a name as `del` does; and IPython's outputs of its value, unless another name of the user's has it."""
    value = namespace.pop(name, None)
    names = (root for root in notebook_roots(shell, namespace) if not root.group)
    if not isinstance(value, str | int | float | None) and not any(root.thing is value for root in names):
        free_outputs(shell, namespace, value)


def _freed(before: Survey, after: Survey) -> dict[str, int]:
    earlier, later = before.total_bytes, after.total_bytes
    return {device: count - later.get(device, 0) for device, count in earlier.items()}


def show_memory(options: argparse.Namespace) -> Answer:
    """Do `%gpulab memory`. Raises UsageError."""
    return Answer(memory(free=[word for word in options.free.split(",") if word]))


def fit(
    code: Code | str | None = None,
    name: str = NAME,
    *,
    least_free: float = LEAST_FREE,
    namespace: dict[str, Any] | None = None,
    show: bool = True,
    tell: Listener | None = None,
) -> Fitted:
    """The largest value of `name` (the batch size) with which the cell fits into memory, predicted and then run.

    `code`: a cell's text, or None for the cell profiled last. `least_free`: the share of the free memory that stays
    free. Raises UsageError if the cell has no such size; other exceptions of the cell pass.
    """
    cell = code_of(code, namespace)
    prober = Prober(cell, device=_device(cell))
    results: list[Fit] = []
    with Stoppable(prober.stop, HINT, show=show) as progress:
        prober.tell = tell or progress.tell
        prober.within(lambda: results.append(fitting.fit(prober, name, least_free=least_free, loader_size=_size(cell))))
        fitted = Fitted(replace(results[0], notes=(*results[0].notes, *prober.notes)))
        progress.put(fitted)
    return fitted


def _size(cell: Code) -> int | None:
    """The batch size of the cell's loader in its last run; None if unknown."""
    last = last_run(cell)
    return last.loader.batch_size if last is not None and last.loader is not None else None


def _device(cell: Code) -> str:
    """Where the cell's last run lacked memory; "auto" if it did not."""
    failure = failure_of(last_run(cell))
    return failure.device if failure is not None else "auto"


def is_size_known(cell: Code) -> bool:
    """Whether the cell has a batch size whose present value is known."""
    with suppress(UsageError):
        return fitting.present_size(Prober(cell), NAME, _size(cell)) > 0
    return False


def last_run(cell: Code) -> Run | None:
    """The last run of this code in this process."""
    from gpulab.api.runs import runs

    return next((run for run in reversed(runs.own) if run.code == cell.text), None)


def prove(
    settings: Mapping[str, Plain], fitted: Fitted, code: Code | str | None = None, *, tell: Listener | None = None
) -> Cured:
    """Prove that a cure makes the cell fit at its present size, and measure its price in speed.

    The price is measured in interleaved blocks against the same cell without the cure, at a size that fits. Raises
    UsageError for settings that were not predicted to fit, where the kernel would kill the process.
    """
    cell, result = code_of(code), fitted.result
    proposals = [dict(cure.settings) for cure in result.cures]
    if result.room.kills and result.is_short and dict(settings) not in proposals:
        raise UsageError(
            f"{settings_words(Arm(settings).texts)} is not predicted to fit. It was not run, because the kernel kills "
            f"this process at the limit of the {result.room.limit}."
        )
    prober = Prober(cell, tell or (lambda progress: None), _device(cell))
    proofs, full = list[Proof](), list[FullRun]()
    base: dict[str, Plain] = {result.name: result.base} if result.base else {}
    base |= {result.name: settings[result.name]} if result.name in settings else {}  # accumulation: the same batch

    def work() -> None:
        proofs.append(fitting.prove_cure(prober, settings))
        if base and proofs[0].probe.fits:
            full.append(prober.full_run(base))

    prober.within(work)
    compared = _price(cell, base, settings, full[0], tell) if full and full[0].error is None else None
    return Cured(result, replace(proofs[0], notes=prober.notes), compared)


def _price(
    cell: Code, base: dict[str, Plain], settings: Mapping[str, Plain], full: FullRun, tell: Listener | None
) -> Compared | None:
    plan = Plan((Arm({**base, **settings}),), base=Arm(base), budget_s=PRICE_S, trace=False, save=False)
    runner = Runner(cell, plan, tell or (lambda progress: None), done=[(Arm(), full)])
    result = runner.run()
    if runner.error is not None and not out_of_memory(runner.error):
        raise runner.error
    return None if runner.error is not None else remember_experiment(result)


def failure_of(run: Run | None) -> OutOfMemory | None:
    """How the run ran out of memory; None if it did not."""
    return run.memory_account.failure if run is not None and run.memory_account is not None else None
