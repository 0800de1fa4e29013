"""Which call a stack is in: the user's line and the function below it, as a user writes it."""

from __future__ import annotations

import json
from collections.abc import Iterable

import numpy as np
import pytest
import torchmetrics  # noqa: F401  what is imported is named as it is written

from gpulab.capture.calls import (
    _Call,
    _choose,
    callee_of,
    calls_of_stack,
    own_batches,
    training_line,
    training_of,
)
from gpulab.capture.loop_lines import LoopLines
from gpulab.run import CALL_KINDS, CallLooks, Phase
from tests.support import synthetic

SITE = "/venv/lib/python3.11/site-packages/"
LOOP = ("/home/u/train.py", "<module>")
LINE = (LOOP[0], 9, LOOP[1])
OWN = ("/home/u/buffer.py", 4, "Buffer.sample")
SCORE = (SITE + "sklearn/metrics/_ranking.py", 5, "roc_auc_score")
NO_GRAD = (SITE + "torch/utils/_contextlib.py", 3, "context_decorator.<locals>.decorate_context")
CALLED = (SITE + "torch/nn/modules/module.py", 1, "Module._call_impl")
STATE = (SITE + "torch/nn/modules/module.py", 2, "Module.state_dict")
REDUCE = (SITE + "torch/distributed/c10d_logger.py", 2, "wrapper")
GRAD = (SITE + "torch/autograd/__init__.py", 2, "grad")
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


FORWARD = ("/home/u/net.py", 3, "Net.forward")
RECV = (SITE + "multiprocessing/connection.py", 3, "_ConnectionBase.recv")


def named(
    *inwards: tuple[str, int, str], needed: bool = True, path: Iterable[tuple[str, int, str]] = (), off: bool = False
) -> list[tuple[int, str, str] | None]:
    """`path`: an update is seen from there, and its user's lines are those of steps."""
    lines = LoopLines()
    lines.needed = {LINE} if needed else {(LOOP[0], 1, LOOP[1])}
    lines.step_lines = {LINE} if path else {(LOOP[0], 2, LOOP[1])}
    seen = [(inwards[::-1], off), ((*path, ADAM)[::-1], False)]
    both = calls_of_stack(inwards[::-1], training_of(seen, [9, 1], lines), lines, grad_off=off)
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
        ([RECV], "multiprocessing.connection._ConnectionBase.recv"),  # where nothing is public
        ([], ""),
    ],
)
def test_a_callee_is_named_as_a_user_writes_it(frames: list[tuple[str, int, str]], name: str) -> None:
    assert callee_of(frames) == name


def test_the_library_below_the_line_and_the_users_function() -> None:
    assert named(LINE, OWN, REDUCE, needed=False) == [None, None], "communication is told by itself"
    sharded = (SITE + "torch/distributed/fsdp/fully_sharded_data_parallel.py", 2, "FullyShardedDataParallel.forward")
    assert named(LINE, CALLED, sharded, CALLED, FORWARD, OWN) == named(LINE, CALLED, FORWARD, OWN) != [None, None]
    library, own = named(LINE, OWN, SCORE)
    assert library is not None and library[0] == OWN[1] and library[2] == "library"
    assert own == (9, "Buffer.sample", "own")
    assert named(LINE, NO_GRAD, OWN, needed=False)[1] == (9, "Buffer.sample", "aside"), "no decorator hides it"
    for frame in (STATE, FORMAT):
        assert named(LINE, OWN, frame)[1] is not None, "only calls of modules compute"


def test_what_leaves_a_trainers_path_to_the_updates_is_a_call() -> None:
    path = (LINE, FIT, BATCH)
    assert named(*path, LOG, path=path) == [(9, "lightning.loggers.csv.CSVLogger.log_metrics", "library"), None]
    for computes in (False, True):
        called = named(*path, HOOKS, CALLBACK, *([CALLED] if computes else []), path=path)
        assert called[1] == (9, "Watch.on_train_batch_end", "aside"), "whatever it computes"
    for inside in ((), (ADAM,), (WRAPPER, ADAM), (CALLED,), (OWN, CALLED)):
        assert named(*path, *inside, path=path) == [None, None]
    assert named(*path, CALLED, path=path, off=True)[0] is None, "PyTorch's own functions are no callee"
    collect = (SITE + "lightning/agents.py", 5, "Agent.collect")
    assert named(*path, collect, CALLED, path=path) == [None, None]
    assert named(*path, collect, CALLED, path=path, off=True)[0] == (9, "lightning.agents.Agent.collect", "library")


def test_what_stacks_show_of_the_training() -> None:
    stacks = [(LINE, FIT, WRAPPER, ADAM), (LINE, FIT, BATCH, BACKWARD), (LINE, OWN, SCHEDULER), (LINE, LOG), (LINE,)]
    stacks += [(LINE, OWN, FORMAT), (LINE, OWN, STATE_OF_ADAM)]  # of what trains, but no update
    training = training_of([(stack[::-1], False) for stack in stacks], [1] * len(stacks), LoopLines())
    assert training.path == {(file, function) for file, _, function in (LINE, FIT, WRAPPER, BATCH)}
    assert named(LINE, SCHEDULER)[0] == (9, "torch.optim.lr_scheduler.LRScheduler.step", "library")
    hook = ("/home/u/probe.py", 4, "Probe.hook")
    for off in (False, True):
        stacks = [(LINE, CALLED, FORWARD, hook), (LINE, OWN, CALLED), (LINE, hook)]
        training = training_of([(stack[::-1], off) for stack in stacks], [1, 1, 8], LoopLines())
        assert ((FORWARD[0], FORWARD[2]) in training.computing) is not off
        assert ((OWN[0], OWN[2]) in training.computing) is not off
        assert (hook[0], hook[2]) not in training.computing, "it only ran below a module"


def test_what_is_called_within_the_models_work_is_named() -> None:
    mask = ("/home/u/net.py", 30, "Net.mask")
    assert named(LINE, CALLED, FORWARD, mask)[1] == (3, "Net.mask", "own")
    assert named(LINE, BACKWARD, OWN)[1] == (9, "Buffer.sample", "own"), "a hook of a gradient"


@pytest.mark.parametrize(
    ("frames", "kind"),
    [
        ((), "operator"),
        ((CALLED,), "layer"),
        ((GRAD, BACKWARD), "operator"),
        ((BACKWARD,), ""),
        ((DATA,), ""),
        ((REDUCE,), ""),
    ],
)
def test_a_line_of_the_training_but_its_updates(frames: tuple[tuple[str, int, str], ...], kind: str) -> None:
    line = training_line((LINE, CALLED, FORWARD, *frames)[::-1])
    assert (("" if line is None else line.kind) == kind) and (line is None or line.line == FORWARD)


@pytest.mark.parametrize("looks", [1, 18])
def test_a_line_is_its_librarys_where_nearly_all_looks_meet_it(looks: int) -> None:
    """One look that was read while the stack changed names nothing."""
    own, library = _Call(LINE, "Buffer.add", "own"), _Call(OWN, "numpy.sum", "library")
    pairs, inner = [(None, own), (library, own)], [OWN, OWN]
    assert _choose(pairs, inner, [0] * (20 - looks) + [1] * looks) == ([own, own] if looks == 1 else [library, library])


def test_a_line_that_calls_nothing_is_named_itself() -> None:
    assert named(LINE) == [None, (9, "", "own")]
    assert named(LINE, (LOOP[0], 9, "<listcomp>")) == [None, (9, "", "own")]
    assert named(LINE, NO_GRAD, CALLED, off=True)[1] == (9, "", "own")
    assert named(LINE, path=(LINE,)) == [None, None], "it asks for an update"


@pytest.mark.parametrize(
    "frames",
    [(LINE, CALLED, FORWARD), (LINE, OWN, CALLED), (LINE, DATA, OWN, SCORE), (LINE, BACKWARD), ()],
)
def test_training_and_loading_are_no_call(frames: tuple[tuple[str, int, str], ...]) -> None:
    library, own = named(*frames)
    assert library is None and own is None


def test_looks_at_making_batches_stand_for_the_time_before_them() -> None:
    steps = synthetic.cpu_case().run.steps
    rows = np.flatnonzero(steps.phase == Phase.MEASURED)[:1]
    t_ns = int(steps.start_ns[rows[0]]) + np.array([0, 10, 40, 50])
    kind = np.full(4, CALL_KINDS.index("batch"), np.uint8)
    looks = CallLooks(t_ns, np.array([0, -1, 0, -1], np.int32), np.zeros(4, np.int32), np.zeros(4, np.int32), kind)
    own = own_batches(looks, steps)
    assert own is not None
    assert (own.looks, own.looked_ns, own.preparing_looks, own.preparing_ns) == (4, 50, 2, 30)
    assert own_batches(None, steps) is None
