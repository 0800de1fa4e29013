"""Which call a stack is in: the user's line and the function below it, as a user writes it."""

from __future__ import annotations

import json

import pytest
import torchmetrics  # noqa: F401  what is imported is named as it is written

from gpulab.capture.pauses.batch_lines import BatchLines
from gpulab.capture.pauses.call_looks import callee_of, calls_in
from gpulab.capture.pauses.update_line import UpdateLine

SITE = "/venv/lib/python3.11/site-packages/"
LOOP = ("/home/u/train.py", "<module>")
LINE = (LOOP[0], 9, LOOP[1])
OWN = ("/home/u/buffer.py", 4, "Buffer.sample")
SCORE = (SITE + "sklearn/metrics/_ranking.py", 5, "roc_auc_score")
NO_GRAD = (SITE + "torch/utils/_contextlib.py", 3, "context_decorator.<locals>.decorate_context")
CALLED = (SITE + "torch/nn/modules/module.py", 1, "Module._call_impl")
STATE = (SITE + "torch/nn/modules/module.py", 2, "Module.state_dict")
BACKWARD = (SITE + "torch/autograd/graph.py", 2, "_engine_run_backward")
DATA = (SITE + "torch/utils/data/dataloader.py", 2, "_BaseDataLoaderIter.__next__")


def named(*inwards: tuple[str, int, str], needed: bool = True) -> list[tuple[int, str, str] | None]:
    batches = BatchLines()
    batches.needed = {LINE} if needed else {(LOOP[0], 1, LOOP[1])}
    both = calls_in(inwards[::-1], {LOOP}, UpdateLine(), batches)
    return [None if call is None else (call.line[1], call.callee, call.kind) for call in both]


@pytest.mark.parametrize(
    ("frames", "name"),
    [
        (
            [(SITE + "a/d.py", 7, "check.<locals>.wrapper"), (SITE + "a/b/_c.py", 5, "f")],
            "a.b.f",
        ),  # without the decorator that calls it
        ([(SITE + "pandas/core/generic.py", 1, "NDFrame.to_csv")], "pandas.core.generic.NDFrame.to_csv"),
        ([(json.__file__, 1, "dumps")], "json.dumps"),
        ([(SITE + "torch/functional.py", 1, "einsum")], ""),  # PyTorch computes
        ([CALLED, (SITE + "torchmetrics/metric.py", 1, "Metric.forward")], "torchmetrics.Metric.forward"),
        ([("<generated>", 1, "argmap"), (SITE + "a/b.py", 1, "f")], "a.b.f"),
        ([], ""),
    ],
)
def test_a_callee_is_named_as_a_user_writes_it(frames: list[tuple[str, int, str]], name: str) -> None:
    assert callee_of(frames) == name


def test_the_library_below_the_line_and_the_users_function() -> None:
    library, own = named(LINE, OWN, SCORE)
    assert library is not None and library[0] == OWN[1] and library[2] == "library"
    assert own == (9, "Buffer.sample", "own")
    assert named(LINE, NO_GRAD, OWN, needed=False)[1] == (9, "Buffer.sample", "aside"), "no decorator hides it"
    assert named(LINE, OWN, STATE)[1] is not None, "only calls of modules compute"


@pytest.mark.parametrize(
    "frames",
    [(LINE, CALLED, OWN), (LINE, OWN, BACKWARD), (LINE, OWN, CALLED), (LINE, DATA, OWN, SCORE), (LINE, BACKWARD), ()],
)
def test_training_and_loading_are_no_call(frames: tuple[tuple[str, int, str], ...]) -> None:
    library, own = named(*frames)
    assert library is None and own is None
