"""How many samples a step has where no DataLoader tells: from what the model is given, else that it is not known."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from gpulab.knobs.observe.observation import StepInputs
from gpulab.run import Int64, Run, StepFlag
from gpulab.tuning.record import Block, Side


def counted(a: Side, b: Side) -> tuple[Side, Side, str]:
    """Both with samples counted from the inputs of their models, where a changed variable changed those; and a note.

    The rows of the inputs are samples for certain only where nothing but their number differs between the two.
    """
    if not changed_variables(a, b) or not (_uncounted(a) and _uncounted(b)):
        return a, b, ""
    rows_a, rows_b = _rows(a.step_inputs), _rows(b.step_inputs)
    if not rows_a or not rows_b or rows_a == rows_b or _tails(a.step_inputs) != _tails(b.step_inputs):
        return a, b, ""
    note = f"The samples of a step are the rows of what the model is given in it: {rows_a:,} and {rows_b:,}."
    return _with_rows(a, rows_a), _with_rows(b, rows_b), note


def unknown_work(a: Side, b: Side) -> str:
    """Why a step of one side may hold another number of samples; empty where nothing says so."""
    names = changed_variables(a, b)
    if not names or (a.step_inputs is not None and a.step_inputs == b.step_inputs):
        return ""
    named = ", ".join(f"`{name}`" for name in names)
    return f"Changing {named} may have changed how many samples a step has, and that is not known."


def changed_variables(a: Side, b: Side) -> tuple[str, ...]:
    """Names of the cell's variables whose values differ between the two on purpose."""
    of_a, of_b = _variables(a), _variables(b)
    return tuple(name for name in {**of_a, **of_b} if of_a.get(name) != of_b.get(name))


def _variables(side: Side) -> dict[str, str]:
    return {c.name: c.value for c in side.checks if c.kind == "variable of the cell" and c.state != "no effect"}


def _uncounted(side: Side) -> bool:
    in_blocks = any(block.sample_count for block in side.blocks)
    return not in_blocks and (side.facts is None or not (side.facts.run.steps.sample_count >= 0).any())


def _rows(inputs: StepInputs | None) -> int | None:
    """Of all backward passes of a step; None where the inputs of one pass have not all the same number of rows."""
    if inputs is None:
        return None
    counts = [{shape[0] if len(shape) > 1 else None for shape in shapes} for shapes in inputs]
    rows = [next(iter(found)) for found in counts if len(found) == 1]
    return sum(r for r in rows if r) if len(rows) == len(inputs) and all(rows) else None


def _tails(inputs: StepInputs | None) -> set[tuple[tuple[int, ...], ...]]:
    """The inputs of each backward pass without their number of rows."""
    return {tuple(shape[1:] for shape in shapes) for shapes in inputs or ()}


def _with_rows(side: Side, rows: int) -> Side:
    known = side.facts
    return replace(
        side,
        blocks=tuple(_block_with_rows(block, rows) for block in side.blocks),
        facts=None if known is None else replace(known, run=_run_with_rows(known.run, rows)),
    )


def _block_with_rows(block: Block, rows: int) -> Block:
    return replace(block, sample_count=rows * block.step_count)


def _run_with_rows(run: Run, rows: int) -> Run:
    whole = (run.steps.flags & StepFlag.PARTIAL) == 0
    samples: Int64 = np.where(whole, rows, -1).astype(np.int64)
    return replace(run, steps=replace(run.steps, sample_count=samples))
