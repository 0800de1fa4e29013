"""The call that takes most of the counted steps, from looks during the whole run."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec.structs import replace

from gpulab.analysis.host.calls import costliest_call
from gpulab.run import CALL_KINDS, CallLooks, Pause, Phase, Place, Run
from tests.support import synthetic


def looked(kind: str, met: int, count: int = 100) -> Run:
    """Looks spread over the counted steps of a run, so many of them at one call."""
    run = synthetic.cpu_case().run
    rows = np.flatnonzero((run.steps.phase == Phase.MEASURED) & (run.steps.flags == 0))
    inside = run.steps.start_ns[rows][:, None] + run.steps.wall_ns[rows][:, None] * np.linspace(0.1, 0.9, count)
    t_ns = np.sort(inside.ravel())[:: len(rows)][:count].astype(np.int64)
    place = np.where(np.arange(count) < met, 0, -1).astype(np.int32)
    number = np.full(count, CALL_KINDS.index(kind), np.uint8)
    looks = CallLooks(t_ns, place, place.copy(), place.copy(), number)
    return replace(run, call_looks=looks, callees=("json.dumps",), places=(Place("cell", 7, "", "json.dumps(x)"),))


def test_its_share_of_the_looks_in_counted_steps() -> None:
    call = costliest_call(looked("library", 40), None, CALL_KINDS)
    assert call is not None and (call.line.line, call.callee, call.word) == (7, "json.dumps", "serialization")
    assert call.share == 0.4 and call.interval[0] < 0.4 < call.interval[1] and len(call.times)


def test_few_looks_other_kinds_and_known_pauses_say_nothing() -> None:
    run = looked("library", 40)
    assert costliest_call(looked("library", 20, 30), None, CALL_KINDS) is None
    assert costliest_call(run, None, ["batch"]) is None
    paused = replace(run, pauses=(Pause("logging", 0, int(run.steps.end_ns[-1]) + 1),))
    assert costliest_call(paused, None, CALL_KINDS) is None
    assert costliest_call(looked("own", 40), None, CALL_KINDS) is None, "it may be the training: no trace tells"
    assert costliest_call(looked("aside", 40), None, CALL_KINDS) is not None


def test_what_lies_between_steps_counts() -> None:
    """As saving at an epoch's end: no step holds it."""
    run = looked("library", 40)
    assert run.call_looks is not None
    steps = replace(run.steps, start_ns=run.steps.start_ns * 2, end_ns=run.steps.end_ns * 2 - run.steps.wall_ns)
    looks = replace(run.call_looks, t_ns=run.call_looks.t_ns * 2)
    call = costliest_call(replace(run, steps=steps, call_looks=looks), None, CALL_KINDS)
    assert call is not None and call.whole > 90 and call.share == pytest.approx(0.4, abs=0.03)
    counted = (steps.phase == Phase.MEASURED) & (steps.flags == 0)
    assert call.cost_us == pytest.approx(0.4 * 2 * np.mean(run.steps.wall_ns[counted]) / 1e3, rel=0.2)


@pytest.mark.parametrize(
    ("callee", "word"),
    [
        ("torch.save", "saving"),
        ("save_state", "saving"),
        ("lightning.pytorch.callbacks.ModelCheckpoint.on_train_batch_end", "saving"),
        ("load_checkpoint", ""),
        ("Net.forward_checkpointed", ""),
        ("claim.pay", ""),
        ("mylib.evaluate.foo", ""),
        ("rich.print", "logging"),
        ("Trainer.log", "logging"),
    ],
)
def test_what_a_function_is_there_for(callee: str, word: str) -> None:
    run = replace(looked("library", 40), callees=(callee,))
    call = costliest_call(run, None, CALL_KINDS, saving=word == "saving")
    assert call is not None and call.word == word
