"""Which call a stack is in: the user's line and the function below it, as a user writes it."""

from __future__ import annotations

import json
from collections.abc import Iterable

import pytest
import torchmetrics  # noqa: F401  what is imported is named as it is written

from gpulab.capture.lines.batch_lines import BatchLines
from gpulab.capture.lines.calls import callee_of, calls_in, training_path
from gpulab.capture.lines.update_line import UpdateLine

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


FIT = (SITE + "lightning/trainer.py", 9, "Trainer.fit")
BATCH = (SITE + "lightning/loops.py", 9, "_Loop.advance")
HOOKS = (SITE + "lightning/call.py", 3, "_call_callback_hooks")
CALLBACK = ("/home/u/watch.py", 7, "Watch.on_train_batch_end")
LOG = (SITE + "lightning/loggers/csv.py", 7, "CSVLogger.log_metrics")
SCHEDULER = (SITE + "torch/optim/lr_scheduler.py", 7, "LRScheduler.step")
WRAPPER = (SITE + "torch/optim/lr_scheduler.py", 8, "LRScheduler.patch.<locals>.wrapper")
FORMAT = (SITE + "torch/_tensor.py", 3, "Tensor.__format__")
STATE_OF_ADAM = (SITE + "torch/optim/optimizer.py", 3, "Optimizer.state_dict")
ADAM = (SITE + "torch/optim/adam.py", 7, "Adam.step")


def named(
    *inwards: tuple[str, int, str], needed: bool = True, path: Iterable[tuple[str, int, str]] = ()
) -> list[tuple[int, str, str] | None]:
    batches, update = BatchLines(), UpdateLine()
    batches.needed = {LINE} if needed else {(LOOP[0], 1, LOOP[1])}
    update.step_lines = {LINE} if path else set()
    both = calls_in(inwards[::-1], {LOOP}, {(file, function) for file, _, function in path}, update, batches)
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
    for frame in (STATE, FORMAT):
        assert named(LINE, OWN, frame)[1] is not None, "only calls of modules compute"


def test_what_leaves_a_trainers_path_to_the_updates_is_a_call() -> None:
    path = (LINE, FIT, BATCH)
    assert named(*path, LOG, path=path) == [(9, "lightning.loggers.csv.CSVLogger.log_metrics", "library"), None]
    assert named(*path, HOOKS, CALLBACK, path=path) == [None, (9, "Watch.on_train_batch_end", "aside")]
    assert named(*path, HOOKS, CALLBACK, CALLED, path=path)[1] is not None, "whatever it computes"
    for inside in ((), (ADAM,), (WRAPPER, ADAM), (CALLED,), (OWN, CALLED)):
        assert named(*path, *inside, path=path) == [None, None]
    assert named(*path, LOG, path=[SCHEDULER]) == [None, None], "without a path it may be the training"


def test_the_path_to_the_updates() -> None:
    stacks = [(LINE, FIT, WRAPPER, ADAM), (LINE, FIT, BATCH, BACKWARD), (LINE, OWN, SCHEDULER), (LINE, LOG), (LINE,)]
    stacks += [(LINE, OWN, FORMAT), (LINE, OWN, STATE_OF_ADAM)]  # of what trains, but no update
    path = training_path(stack[::-1] for stack in stacks)
    assert path == {(file, function) for file, _, function in (LINE, FIT, WRAPPER, BATCH)}
    assert named(LINE, SCHEDULER)[0] == (9, "torch.optim.lr_scheduler.LRScheduler.step", "library")


@pytest.mark.parametrize(
    "frames",
    [(LINE, CALLED, OWN), (LINE, OWN, BACKWARD), (LINE, OWN, CALLED), (LINE, DATA, OWN, SCORE), (LINE, BACKWARD), ()],
)
def test_training_and_loading_are_no_call(frames: tuple[tuple[str, int, str], ...]) -> None:
    library, own = named(*frames)
    assert library is None and own is None
