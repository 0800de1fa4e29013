"""The values that a model of several ranks is given: heard from its calls, laid to the steps they fall into."""

from __future__ import annotations

import json
import os
import subprocess
from collections import deque
from pathlib import Path

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from gpulab.capture.training_facts import ModelInputs
from gpulab.run import Steps
from tests.support.fork_server import python_with_torch


def steps_of(*bounds: tuple[int, int]) -> Steps:
    start, end = (np.array(column, np.int64) for column in zip(*bounds, strict=True))
    return replace(Steps.empty(), number=np.arange(len(start)), start_ns=start, end_ns=end)


def test_values_are_summed_in_the_step_of_their_call() -> None:
    inputs = ModelInputs()
    inputs._calls.extend([(105, 8), (112, 4), (113, 4), (131, -1), (132, 5)])
    steps = steps_of((0, 10), (10, 20), (20, 30), (30, 40))
    assert inputs.values_of(steps, 100).tolist() == [8, 8, -1, -1]
    assert len(ModelInputs().values_of(steps, 100)) == 0


@pytest.mark.parametrize(
    ("given", "rows"),
    [
        ((torch.zeros(5, 3),), 15),
        (([torch.zeros(3, 8, 8), torch.zeros(3, 9, 9)], [{}]), 3 * 64 + 3 * 81),
        (("words", {"ids": torch.zeros(7, 2)}), 14),
        ((torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]),), 5),
        ((), -1),
    ],
)
def test_values_of_what_a_model_may_be_given(given: tuple[object, ...], rows: int) -> None:
    inputs = ModelInputs()
    inputs.called((None, *given), {})
    assert [count for _, count in inputs._calls] == [rows]


def test_where_calls_were_forgotten_nothing_is_said() -> None:
    inputs = ModelInputs()
    inputs._calls = deque([(115, 4), (125, 4), (126, 4)], maxlen=3)
    assert inputs.values_of(steps_of((0, 10), (10, 20), (20, 30)), 100).tolist() == [-1, -1, 8]


TRAINING = """
import json, sys
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
import gpulab

dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=0, world_size=1)
plain = DistributedDataParallel.forward
model = DistributedDataParallel(nn.Linear(4, 1))
if len(sys.argv) > 2:
    model = torch.compile(model, backend="eager")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.utils.data.DataLoader(torch.randn(40, 4), batch_size=10)
with gpulab.profile(trace=False, save=False) as p:
    for step, x in enumerate(data):
        model(x[: step + 1]).sum().backward()
        with torch.no_grad():
            model(x)
        optimizer.step()
        optimizer.zero_grad()
steps = p.run.steps
assert DistributedDataParallel.forward is plain
print(json.dumps({"rows": steps.input_values.tolist(), "loaded": steps.sample_count.tolist()}))
dist.destroy_process_group()
"""


@pytest.mark.parametrize("compiled", [False, True])
def test_what_the_loop_leaves_out_is_not_counted(compiled: bool, tmp_path: Path) -> None:
    words = [python_with_torch(), "-c", TRAINING, str(tmp_path / "meeting"), *(["compile"] if compiled else [])]
    ended = subprocess.run(words, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    told = json.loads(ended.stdout.splitlines()[-1])
    assert told == {"rows": [] if compiled else [4, 8, 12, 16], "loaded": [10, 10, 10, 10]}


WITHOUT_WRAPPER = """
import json
import torch
from torch import nn
import gpulab

class Teacher(nn.Linear):
    pass

class Model(nn.Sequential):
    pass

plain = nn.Sequential.forward
teacher, model = Teacher(4, 4).requires_grad_(False), Model(nn.Sequential(nn.Linear(4, 4)), nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with gpulab.profile(trace=False, save=False) as p:
    for step in range(4):
        loss = model(teacher(torch.randn(step + 1, 4))).sum()
        with torch.no_grad():
            model(torch.randn(50, 4))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
assert "forward" not in vars(Model) and nn.Sequential.forward is plain
assert not nn.modules.module._global_forward_pre_hooks
print(json.dumps(p.run.steps.input_values.tolist()))
"""


@pytest.mark.parametrize(("ranks", "rows"), [(2, [-1, 8, 12, 16]), (1, [])])
def test_without_a_wrapper_the_first_that_learns_tells(ranks: int, rows: list[int], tmp_path: Path) -> None:
    words = [python_with_torch(), "-c", WITHOUT_WRAPPER]
    rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(ranks)}
    ended = subprocess.run(words, capture_output=True, text=True, check=False, cwd=tmp_path, env={**os.environ, **rank})
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout.splitlines()[-1]) == rows
