"""A training that is put back goes on bit for bit as the first time, and nothing of it becomes another object.

The oracle is dumb: cells are text, run by `exec` in a namespace as a notebook does; a photo of a namespace is the bytes
of all tensors that modules, optimizers and the like tell in their own `state_dict`, the names' plain values, and the
next numbers of all global generators.
"""

from __future__ import annotations

import contextlib
import gc
import random
import subprocess
import sys
import textwrap
import warnings
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpulab.errors import GpulabError
from gpulab.snapshot import tensors, walk
from gpulab.snapshot.containers import ObjectPath
from gpulab.snapshot.state import Restored, State
from gpulab.snapshot.tensors import TooLarge

IMPORTS = """
import collections, dataclasses, functools, itertools, random, types, weakref
import numpy as np, torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(3)
"""
START = """
x, y = torch.randn(32, 6), torch.randint(0, 4, (32,))
model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 4))
losses = []
"""

LOOP = """
model.train()
for _ in range(4):
    i = torch.randperm(32)[:8]
    loss = cross_entropy(model(x[i] + random.random() + np.random.rand()), y[i])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
"""


def notebook(*cells: str) -> dict[str, Any]:
    """The namespace after these cells, and one of imports before."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for cell in (IMPORTS, *cells):
        run(namespace, cell)
    return namespace


def run(namespace: dict[str, Any], cell: str) -> None:
    """As a cell runs."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exec(compile(textwrap.dedent(cell), "<cell>", "exec"), namespace)


def photo(namespace: dict[str, Any]) -> dict[str, Any]:
    """Everything that training is about, as plain values."""
    names = {k: plain(v) for k, v in namespace.items() if not k.startswith("_")}
    return {**names, "next random numbers": drawn()}


def plain(x: Any) -> Any:
    """Bytes and plain values in place of objects."""
    if isinstance(x, torch.Tensor):
        grad = plain(x.grad) if x.is_leaf else None
        return (str(x.dtype), tuple(x.shape), x.stride(), x.detach().numpy().tobytes(), x.requires_grad, grad)
    if isinstance(x, torch.nn.Module):
        own = {k: v for k, v in vars(x).items() if isinstance(v, bool | int | float | str | list | None)}
        return plain([{n: m.training for n, m in x.named_modules()}, own, *x.parameters(), *x.buffers()])
    if isinstance(x, torch.Generator):
        return plain(x.get_state())
    if isinstance(x, np.random.Generator):
        return str(x.bit_generator.state)
    if isinstance(x, random.Random):
        return x.getstate()
    if isinstance(x, torch.optim.Optimizer):
        return plain([x.state_dict(), list(x.state.values())])
    if isinstance(x, torch.optim.lr_scheduler.LRScheduler | torch.amp.GradScaler):
        return plain(x.state_dict())
    if isinstance(x, dict):
        return [(plain(k) if isinstance(k, str | int) else "key", plain(v)) for k, v in x.items()]
    if isinstance(x, list | tuple | set):
        return [plain(v) for v in x]
    return x if isinstance(x, bool | int | float | str) else type(x).__name__


def drawn() -> tuple[object, ...]:
    """What the global generators will give next; nothing is drawn."""
    legacy = np.random.get_state(legacy=True)
    assert isinstance(legacy, tuple)
    return random.getstate(), legacy[1].tobytes(), legacy[2], torch.get_rng_state().numpy().tobytes()


def identities(namespace: dict[str, Any]) -> list[tuple[int, int]]:
    """Which objects there are, and where the tensors' memory is."""
    found: list[tuple[int, int]] = []
    for value in (v for k, v in namespace.items() if not k.startswith("_")):
        if isinstance(value, torch.nn.Module):
            for tensor in (*value.parameters(), *value.buffers()):
                found.append((id(tensor), tensor.data_ptr()))
            found += [(id(module), 0) for module in value.modules()]
        elif isinstance(value, torch.optim.Optimizer):
            found += [(id(p), id(group)) for group in value.param_groups for p in group["params"]]
            found += [(id(s), 0) for s in value.state.values()]
        found.append((id(value), 0))
    return found


def twice(cell: str, *before: str, names: list[str] | None = None) -> tuple[dict[str, Any], Restored]:
    """Run the cell, put back, run it again, put back again: all as the first time. The last restore is given back."""
    namespace = notebook(*before)
    start, objects = photo(namespace), identities(namespace)
    state = State.of(namespace, names)
    run(namespace, cell)
    first = photo(namespace)
    assert first != start, "a cell that changes nothing proves nothing"
    for _ in range(2):
        restored = state.restore()
        assert photo(namespace) == start
        assert identities(namespace) == objects
        run(namespace, cell)
        assert photo(namespace) == first
    restored = state.restore()
    assert photo(namespace) == start
    return namespace, restored


OPTIMIZERS = {
    "SGD": "torch.optim.SGD(model.parameters(), 0.1)",
    "momentum": "torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, nesterov=True)",
    "Adam": "torch.optim.Adam(model.parameters(), 0.01)",
    "AdamW": "torch.optim.AdamW(model.parameters(), 0.01, weight_decay=0.1)",
    "amsgrad": "torch.optim.AdamW(model.parameters(), 0.01, amsgrad=True)",
    "tensor lr": "torch.optim.AdamW(model.parameters(), torch.tensor(0.01), fused=True)",
    "foreach": "torch.optim.Adam(model.parameters(), 0.01, foreach=True)",
    "groups": "torch.optim.RMSprop([{'params': model[0].parameters()}, {'params': model[4].parameters(), 'lr': 1e-3}])",
}


@pytest.mark.parametrize("made", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("warm", [False, True], ids=["new", "after steps"])
def test_an_optimizer(made: str, warm: bool) -> None:
    before = [START, f"optimizer = {made}", *([LOOP] if warm else [])]
    _, restored = twice(LOOP, *before)
    assert restored == Restored()


SGD = "optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)\n"
CLOSURE = """
def closure():
    optimizer.zero_grad()
    loss = cross_entropy(model[0](x)[:, :4], y)
    loss.backward()
    return loss
for _ in range(3):
    losses.append(optimizer.step(closure).item())
"""
GROUPS = """
optimizer.param_groups[0]['note'] = 3
optimizer.param_groups[0]['weight_decay'] = 0.5
optimizer.add_param_group({'params': nn.Linear(2, 2).parameters()})
"""
SCALER = "scaler = torch.amp.GradScaler('cpu', init_scale=2.0**14, growth_interval=2)\n"
SCALED = """
for _ in range(5):
    optimizer.zero_grad()
    scaler.scale(cross_entropy(model(x), y)).backward()
    scaler.step(optimizer)
    scaler.update()
    losses.append(scaler.get_scale())
"""
AVERAGE = """
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
shadow = {name: p.detach().clone() for name, p in model.named_parameters()}
"""
AVERAGED = """
    average.update_parameters(model)
    [shadow[n].lerp_(p.detach(), .1) for n, p in model.named_parameters()]
"""
VIEWS = "view = model[0].weight.data[1:3]; flat = view[0]"
SEVEN = "with torch.no_grad(): model[0].weight[1] = 7.\nassert (view[0] == 7).all() and (flat == 7).all()"
BUFFER = "both = torch.arange(24.)\na, b = nn.Parameter(both[:12].view(3, 4)), nn.Parameter(both[12:].view(4, 3).t())"
LIGHTNING = """
import lightning.pytorch as pl
class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 4))
        self.losses = []
    def training_step(self, batch, _):
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.losses.append(loss.item())
        self.log("loss", loss, on_epoch=True)
        return loss
    def validation_step(self, batch, _):
        self.log("val", nn.functional.cross_entropy(self.net(batch[0]), batch[1]))
    def configure_optimizers(self):
        opt = torch.optim.AdamW(self.parameters(), 1e-2)
        return [opt], [torch.optim.lr_scheduler.StepLR(opt, 1)]
torch.manual_seed(0)
data = TensorDataset(torch.randn(32, 6), torch.randint(0, 4, (32,)))
train, val = DataLoader(data, batch_size=8, shuffle=True), DataLoader(data, batch_size=16)
net = Net()
trainer = pl.Trainer(max_epochs=2, accelerator="cpu", logger=False, enable_checkpointing=False,
    enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder)
"""

HUGGING_FACE = """
from tests.support.cells_libraries import Sentences
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
torch.manual_seed(0)
model = GPT2LMHeadModel(GPT2Config(vocab_size=13, n_positions=8, n_embd=8, n_layer=1, n_head=2,
    bos_token_id=0, eos_token_id=0))
trainer = Trainer(model=model, train_dataset=Sentences(16), args=TrainingArguments(output_dir=folder,
    num_train_epochs=2, per_device_train_batch_size=4, save_strategy="no", report_to="none", use_cpu=True,
    disable_tqdm=True, logging_strategy="no", dataloader_pin_memory=False))
"""

ACCELERATE = """
from accelerate import Accelerator
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
loader = DataLoader(TensorDataset(x, y), batch_size=4, shuffle=True)
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
"""
FIT = "trainer.fit(net, train, val); kept = [list(net.losses), trainer.global_step]\n"
TRAIN = "kept = [trainer.train().training_loss, trainer.state.global_step]"
ACCELERATED = """
for a, b in loader:
    with accelerator.accumulate(model):
        loss = cross_entropy(model(a), b)
        accelerator.backward(loss)
        optimizer.step(); scheduler.step(); optimizer.zero_grad()
        losses.append(loss.item())
kept = accelerator.step
"""


TRAININGS = {
    "closure": ("optimizer = torch.optim.LBFGS(model.parameters(), 0.1, max_iter=3)\n" + CLOSURE, CLOSURE, ""),
    "groups": (
        SGD,
        LOOP + GROUPS,
        "assert len(optimizer.param_groups) == 1 and 'note' not in optimizer.param_groups[0]",
    ),
    "scheduler of the cell": (
        SGD,
        f"s = torch.optim.lr_scheduler.StepLR(optimizer, 1)\n{LOOP}    s.step()\n",
        "assert 'step' not in vars(optimizer) and 's' not in globals()",
    ),
    "scaler": (SGD + SCALER, SCALED, ""),
    "used scaler": (SGD + SCALER + SCALED, SCALED, ""),
    "averages": (SGD + AVERAGE, LOOP.rstrip() + AVERAGED, ""),
    "views": (SGD + VIEWS, LOOP + "model[0].weight.data = model[0].weight.data.double().float() * 2\n", SEVEN),
    "one buffer": (BUFFER, "with torch.no_grad(): a.mul_(3); b.add_(1); b.t()[0] = 9", ""),
    "Lightning": (LIGHTNING + FIT + "trainer.fit_loop.max_epochs = 4", FIT, "assert trainer.global_step == 8"),
    "Hugging Face": (HUGGING_FACE, TRAIN, "assert trainer.optimizer is None and trainer.state.global_step == 0"),
    "Accelerate": (ACCELERATE, ACCELERATED, ""),
}


@pytest.mark.parametrize(("before", "cell", "then"), TRAININGS.values(), ids=TRAININGS)
def test_a_training(before: str, cell: str, then: str, tmp_path: Path) -> None:
    namespace, restored = twice(cell, START, f"folder = {str(tmp_path)!r}", before)
    assert restored == Restored()
    run(namespace, then)


SCHEDULERS = {
    "OneCycleLR": "sched.OneCycleLR(optimizer, 0.1, total_steps=30)",
    "SequentialLR": "sched.SequentialLR(optimizer, [sched.LinearLR(optimizer, total_iters=2),"
    " sched.CosineAnnealingLR(optimizer, 9)], milestones=[2])",
    "ReduceLROnPlateau": "sched.ReduceLROnPlateau(optimizer, patience=0)",
    "LambdaLR": "sched.LambdaLR(optimizer, lambda step: 0.9 ** step)",
    "SWALR": "torch.optim.swa_utils.SWALR(optimizer, swa_lr=0.05)",
}


@pytest.mark.parametrize("made", SCHEDULERS.values(), ids=SCHEDULERS)
@pytest.mark.parametrize("lr", ["0.1", "torch.tensor(0.1)"], ids=["float lr", "tensor lr"])
def test_a_scheduler(made: str, lr: str) -> None:
    step = f"    scheduler.step({'loss.item()' if 'Plateau' in made else ''})\n"
    opt = f"optimizer = torch.optim.AdamW(model.parameters(), {lr}); import torch.optim.lr_scheduler as sched"
    namespace, _ = twice(LOOP + step, START, opt, f"scheduler = {made}", LOOP + step)
    if lr != "0.1" and not ("Plateau" in made and torch.__version__ < "2.7"):  # 2.6 puts a float in its place
        assert isinstance(namespace["optimizer"].param_groups[0]["lr"], torch.Tensor)


def test_tied_weights_stay_tied_and_are_copied_once() -> None:
    namespace = notebook("a, b = nn.Linear(50, 50), nn.Linear(50, 50)")
    untied = State.of(namespace, None).bytes
    split_at_mark = notebook(BUFFER)
    assert State.of(split_at_mark, None).bytes == 24 * 4, "parameters in one buffer"
    column = notebook("data = torch.zeros(1000, 1000); w = torch.zeros(1000, requires_grad=True)")
    run(column, "column = data[:, 3]; row = data[3]; model = torch.nn.Linear(1000, 1)")
    assert State.of(column, None).bytes == 4 * (1000 + 1000 + 1001), "a column does not cost the whole"
    run(namespace, "b.weight = a.weight")
    state, weight, before = State.of(namespace, None), namespace["a"].weight, namespace["a"].weight.detach().clone()
    assert state.bytes == untied - 50 * 50 * 4 == (50 * 50 + 100) * 4
    run(namespace, "with torch.no_grad(): a.weight.add_(1)\nb.weight = nn.Parameter(torch.zeros(50, 50))")
    run(namespace, "a.weight.data.untyped_storage().resize_(0)")
    state.restore()
    assert namespace["b"].weight is namespace["a"].weight is weight
    assert weight.untyped_storage().nbytes() == 50 * 50 * 4 and torch.equal(weight, before)


@pytest.mark.parametrize(
    "change",
    [
        "model.to(memory_format=torch.channels_last)",
        "model.double()",
        "model[0].eval(); model.half()",
        "model.add_module('late', nn.Linear(2, 2)); del model[1]",
        "model[0] = nn.Linear(3, 3)",
        "model[1].register_buffer('seen', torch.zeros(3)); model[1].running_mean = torch.ones(4)",
        "model.register_forward_hook(lambda *a: None); model.note = 3; model.extra = {'a': 1}",
        "model(image).sum().backward(); model.zero_grad(set_to_none=False)",
        "model[1].num_batches_tracked.add_(5); del model[1].momentum",
        "model[1].running_var = (model[0].weight.sum() * 2).reshape(1)",
        "model[1].running_mean.add_(model[0].weight.sum())",
        "loss = model(image).sum(); loss.backward(); model[0].weight.grad.data = torch.zeros(4, 3, 3, 3).float()",
        "model[0]._parameters.clear()",
        "nn.utils.parametrizations.weight_norm(model[0])",
    ],
)
def test_what_a_cell_can_do_to_a_module(change: str) -> None:
    made = """
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 1))
    image = torch.randn(2, 3, 8, 8)
    """
    namespace = notebook(made)
    start, objects, hooks = photo(namespace), identities(namespace), len(namespace["model"]._forward_hooks)
    attributes = [dict(vars(m)) for m in namespace["model"].modules()]
    state = State.of(namespace, None)
    for _ in range(2):
        run(namespace, change)
        restored = state.restore()
        assert photo(namespace) == start and identities(namespace) == objects and restored.could_not == ()
        assert [dict(vars(m)) for m in namespace["model"].modules()] == attributes
        assert len(namespace["model"]._forward_hooks) == hooks


def test_a_raw_loop_without_modules() -> None:
    made = """
    w, b = torch.randn(1000, 300, requires_grad=True), torch.zeros(300, requires_grad=True)
    layers = [(w, b)]
    total = torch.zeros(())
    history = torch.zeros(2**19)
    """
    cell = """
    for step in range(3):
        h = torch.rand(4, 1000) @ w + b
        h.square().mean().backward()
        with torch.no_grad():
            for t in layers[0]:
                t -= 0.1 * t.grad
                t.grad = None
        total += h.detach().sum()
        steps = step
    """
    _, restored = twice(cell, made)
    assert restored == Restored()


def test_training_state_is_put_back_however_large() -> None:
    made = """
    model = nn.Linear(600, 600)
    model.register_buffer("table", torch.zeros(2**19))
    table = model.table
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model(torch.randn(2, 600)).sum().backward()
    optimizer.state[model.weight]["history"] = torch.zeros(2**19)
    average = {"weight": model.weight.detach().clone()}
    frozen = nn.Linear(600, 700).requires_grad_(False)
    """
    cell = """
    model(torch.randn(2, 600)).sum().backward()
    optimizer.step()
    optimizer.state[model.weight]["history"] += 1
    table += 1
    average["weight"].lerp_(model.weight.detach(), 0.5)
    frozen.weight += 1
    """
    _, restored = twice(cell, made)
    assert restored == Restored()


def test_containers_of_the_user_are_put_back() -> None:
    made = """
    seen, best, done = [1, [2]], {"loss": 1.0}, {3}
    recent = collections.deque([1, 2], maxlen=2)
    counts, order = collections.Counter("aab"), collections.OrderedDict(a=1, b=2)
    class Meter:
        def __init__(self): self.values, self.steps = [], 0
    meter = Meter()
    box = types.SimpleNamespace(a=1, inner=[meter])
    same, alike = [1000, 2.5], {"a": 1000}
    """
    cell = """
    seen[1].append(4); seen.pop(0); best["epoch"] = 2; best["loss"] = 0.5; done.add(4); recent.append(3)
    counts.update("ab"); order.move_to_end("a")
    meter.values.append(1); meter.steps += 1; meter.late = 3
    box.a = 2; del box.inner
    same[0] = int("1000"); alike["a"] = int("1000")
    """
    namespace, restored = twice(cell, made)
    assert restored == Restored()
    assert (namespace["seen"], namespace["done"], namespace["best"]) == ([1, [2]], {3}, {"loss": 1.0})
    assert vars(namespace["meter"]) == {"values": [], "steps": 0} and namespace["counts"]["a"] == 2
    assert namespace["recent"].maxlen == 2 and list(namespace["order"]) == ["a", "b"]


TAKEN = {  # what the cell takes from, how if not by next(it), and what is named
    "iter of a list": ("iter([1, 2, 3])",),
    "range": ("iter(range(5))",),
    "dict": ("iter({'a': 1, 'b': 2})",),
    "zip": ("zip([1, 2, 3], 'abc')",),
    "enumerate": ("enumerate([1, 2, 3])",),
    "map": ("map(str, [1, 2, 3])",),
    "filter": ("filter(None, [1, 2, 3])",),
    "cycle": ("itertools.cycle([1, 2, 3])",),
    "count": ("itertools.count()",),
    "islice": ("itertools.islice(itertools.count(), 9)",),
    "chain": ("itertools.chain([1, 2], [3])",),
    "generator expression": ("(i for i in range(5))",),
    "generator": ("numbers()",),
    "delegating generator": ("outer()",),
    "reversed": ("reversed([1, 2, 3])",),
    "loader": ("iter(torch.utils.data.DataLoader(torch.arange(9)))",),
    "file": ("open(file)", "it.readline()"),
    "in a dict": ("{'it': iter([1, 2, 3])}['it']",),
    "a list too large to remember": ("list(range(20_000))", "it.append(1)"),
    "a large tensor that is no state": ("torch.zeros(2**19)", "it.add_(1)"),
    "a large tensor in a list": ("[{'a': torch.zeros(2**19)}]", "it[0]['a'].add_(1)", "it[0]['a']"),
}
GENERATORS = """
class Batch: pass
held = []
def numbers():
    while True:
        batch = Batch()
        held[:] = [weakref.ref(batch)]
        yield 1000
def outer():
    yield from numbers()
"""


@pytest.mark.parametrize("taken", TAKEN.values(), ids=TAKEN)
@pytest.mark.parametrize("begun", [False, True], ids=["new", "begun"])
def test_what_a_cell_takes_from_for_good_is_named(taken: tuple[str, ...], begun: bool, tmp_path: Path) -> None:
    made, take, name = (*taken, *("next(it)", "it")[len(taken) - 1 :])
    (tmp_path / "lines.txt").write_text("1\n2\n3\n4\n")
    namespace = notebook(f"file = {str(tmp_path / 'lines.txt')!r}", GENERATORS, f"it = {made}")
    if begun:
        run(namespace, take)
    state = State.of(namespace, ["it"])
    assert state.bytes == 0 and state.restore() == Restored()
    run(namespace, take)
    restored = state.restore()
    assert restored.iterators + restored.changed == (name,)
    assert state.restore() == Restored()
    if made == "numbers()":
        first = namespace["held"][0]
        run(namespace, take)
        assert first() is None, "looking at a generator keeps nothing alive"
    if "open" in made:
        namespace["it"].close()


def test_generators_that_the_code_can_reach() -> None:
    made = START + textwrap.dedent("""
    g = torch.Generator(); g.manual_seed(1)
    loader = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True, generator=g)
    rng, old, mt = np.random.default_rng(1), np.random.RandomState(2), np.random.Generator(np.random.MT19937(3))
    py = random.Random(4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    del g
    """)
    cell = """
    for a, b in loader:
        noise = rng.standard_normal() + old.rand() + mt.random() + py.random()
        loss = cross_entropy(model(a + noise), b)
        optimizer.zero_grad(); loss.backward(); optimizer.step()
        losses.append(loss.item())
    """
    twice(cell, made)


def test_a_generator_is_found_through_functions() -> None:
    made = """
    rng = random.Random(1)
    def make():
        hidden, count = random.Random(2), 0
        w = torch.zeros(3, requires_grad=True)
        def draw(scale, r=random.Random(3)):
            nonlocal count
            global total
            count += 1
            total = total + 1 if count > 1 else 1
            with torch.no_grad(): w.add_(count)
            return scale * (hidden.random() + r.random() + rng.random()) + count + total + w.sum().item()
        return draw
    class Source:
        def __init__(self): self.draw_one = functools.partial(make(), 2)
        def draw(self): return self.draw_one() + rng.random()
    source = Source()
    bound = source.draw
    """
    twice("drawn = [bound() for _ in range(3)]", made, names=["bound", "drawn"])


def test_methods_lead_to_the_globals_they_use() -> None:
    made = """
    class Learner:
        def __init__(self): self.name = "a"
        def fit(self): self.step()
        @classmethod
        def build(cls): pass
        @property
        def loss(self): return weight.sum()
        def step(self):
            global calls
            calls += 1
            with torch.no_grad(): weight.add_(1)
    calls, weight = 0, torch.zeros(2, requires_grad=True)
    learner = Learner()
    """
    twice("learner.fit()", made, names=["learner"])
    twice("Learner().fit()", made, names=["Learner"])


def test_functions_of_libraries_do_not_lead_to_their_modules() -> None:
    reached = walk.Reachable()
    functions = (torch.nn.functional.cross_entropy, textwrap.dedent, torch)
    reached.follow([(function, ObjectPath("f")) for function in functions])
    assert reached.undos == [] and not reached.tensors


def test_a_cycle_and_a_great_depth() -> None:
    namespace = notebook("a = [1]; a.append(a)\nfor _ in range(5000): a = [a]", "b = {}; b['b'] = b")
    state = State.of(namespace, None)
    run(namespace, "b['c'] = 1")
    assert state.restore() == Restored() and list(namespace["b"]) == ["b"]


def test_bindings_of_names() -> None:
    namespace = notebook("a, b, c, unread = [1], 2, 3, 4")
    kept = namespace["a"]
    state = State.of(namespace, ["a", "b", "c", "late"])
    run(namespace, "a, b, late, other, unread = [5], 6, 7, 8, 9\ndel c")
    state.restore()
    assert namespace["a"] is kept and (namespace["b"], namespace["c"]) == (2, 3) and "late" not in namespace
    assert (namespace["other"], namespace["unread"]) == (8, 9), "names the cell does not use are not ours"


def test_all_names_leave_the_shell_alone() -> None:
    namespace = notebook("a = 1; In, Out, _i1 = [''], {}, ''")
    state = State.of(namespace, None)
    run(namespace, "b = 2; a = 3; In.append('x'); _i2 = 'x'; Out[1] = 4; _ = 4")
    state.restore()
    assert namespace["a"] == 1 and "b" not in namespace
    assert (namespace["In"], namespace["Out"], namespace["_i2"]) == (["", "x"], {1: 4}, "x")


def test_nameless_roots_are_followed_and_end_with_the_state() -> None:
    model = torch.nn.Linear(2, 2)
    state, before = State.of({}, [], [model]), model.weight.detach().clone()
    with torch.no_grad():
        model.weight.add_(1)
    state.restore()
    assert torch.equal(model.weight, before)
    gone = weakref.ref(model)
    del state, model
    gc.collect()
    assert gone() is None


def test_what_cannot_be_put_back_is_named() -> None:
    made = """
    lazy, meta = nn.LazyLinear(3), nn.Linear(2, 2, device="meta")
    sparse = nn.Parameter(torch.eye(3).to_sparse())
    class Wrapped(torch.Tensor):
        @classmethod
        def __torch_dispatch__(cls, f, types, args=(), kwargs=None): return f(*args, **(kwargs or {}))
    wrapped = nn.Module()
    wrapped.register_buffer("b", torch.zeros(2).as_subclass(Wrapped))
    """
    namespace = notebook(made)
    state = State.of(namespace, None)
    run(namespace, "lazy(torch.zeros(1, 2))")
    could_not = state.restore().could_not
    assert type(namespace["lazy"]) is torch.nn.LazyLinear
    run(namespace, "lazy(torch.zeros(1, 2))")
    assert state.restore().could_not == could_not
    named = {reason.partition(":")[0] for reason in could_not}
    left = {"lazy.weight", "lazy.bias", "meta.weight", "meta.bias", "sparse", "wrapped.b"}
    assert named == {f"`{name}`" for name in left}


@pytest.mark.parametrize("free", [0, 10_000])
def test_a_state_larger_than_free_memory_is_refused(free: int, monkeypatch: pytest.MonkeyPatch) -> None:
    namespace = notebook("model = nn.Linear(100, 100, bias=False); a = 1")
    monkeypatch.setattr(tensors, "free_host_bytes", lambda: free)
    with pytest.raises(TooLarge) as refused:
        State.of(namespace, None)
    assert isinstance(refused.value, GpulabError) and "between runs" in str(refused.value)
    assert (refused.value.bytes, refused.value.free_bytes) == (40_000, free)
    state = State.of_random(namespace, None)
    before = drawn()
    run(namespace, "torch.rand(1); a = 2")
    state.restore()
    assert drawn() == before and namespace["a"] == 1 and state.bytes == 0


def children() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True)}


@pytest.mark.skipif(sys.platform != "linux", reason="workers are forked")
def test_persistent_workers_of_the_cell_are_shut_down() -> None:
    numbers: Any = range(24)
    loader = torch.utils.data.DataLoader(numbers, 4, shuffle=True, num_workers=1, persistent_workers=True)
    namespace: dict[str, Any] = {"loader": loader}
    before, cell = children(), "order = [b.tolist() for b in loader]"
    state = State.of(namespace, None)
    run(namespace, cell)
    first = namespace["order"]
    started = loader._iterator  # somebody else holds it: it does not end by itself
    assert len(children() - before) == 1 and started is not None
    assert state.restore().could_not == ()
    left = loader._iterator
    assert left is None and children() <= before
    run(namespace, cell)
    assert namespace["order"] == first
    lasting = State.of(namespace, None)
    run(namespace, cell)
    assert lasting.restore().could_not == (
        "the random numbers in the persistent workers of `loader`, which were running before",
    )
    assert loader._iterator is not None and len(children() - before) == 1
    state.restore()


def test_only_what_lives_in_python_is_put_back(tmp_path: Path) -> None:
    made = """
    import threading, io, logging
    class Worker(threading.Thread):
        def run(self): self.done = True
    class Opened:
        def __init__(self): self.handle, self.lines = None, []
    worker, opened, text, log = Worker(), Opened(), io.StringIO(), logging.getLogger("x")
    """
    namespace = notebook(made)
    state = State.of(namespace, None)
    run(namespace, "worker.start(); worker.join(); opened.handle = io.StringIO(); text.write('a'); log.note = 1")
    restored = state.restore()
    assert namespace["worker"].done and not namespace["worker"].is_alive() and namespace["log"].note == 1
    assert namespace["opened"].handle is None
    assert restored == Restored(("text",))


def test_slots_and_dataclasses() -> None:
    made = """
    class Slotted:
        __slots__ = ("a", "__b", "late")
        def __init__(self): self.a, self.__b = 1, [2]
        def change(self): self.a, self.__b, self.late = 3, None, 4
        def values(self): return self.a, self.__b, hasattr(self, "late")
    @dataclasses.dataclass(slots=True)
    class Progress:
        step: int = 0
        losses: list = dataclasses.field(default_factory=list)
    slotted, progress = Slotted(), Progress()
    """
    namespace = notebook(made)
    before = namespace["slotted"].values()
    state = State.of(namespace, None)
    run(namespace, "slotted.change(); progress.step += 1; progress.losses.append(1)")
    assert state.restore() == Restored()
    assert namespace["slotted"].values() == before and namespace["progress"] == namespace["Progress"]()


def test_more_objects_than_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(walk, "MOST", 500)
    namespace = notebook("data = [[[i], [i]] for i in range(2000)]", "model = nn.Sequential(nn.Linear(2, 2))")
    state = State.of(namespace, None)
    run(namespace, "model[0].weight.data.zero_()")
    restored = state.restore()
    assert any("beyond the first" in reason for reason in restored.could_not)
    assert namespace["model"][0].weight.abs().sum() > 0, "a long list does not crowd out the model"


def test_nothing_is_imported_where_the_code_has_no_torch() -> None:
    code = """
    import sys
    from gpulab.snapshot.state import State, Restored
    names = {"a": 1, "b": [1], "f": lambda: b}
    state = State.of(names, None)
    names["b"].append(2)
    names["c"] = 3
    assert state.restore() == Restored() and names["b"] == [1] and "c" not in names
    assert State.of({}, None).restore() == Restored()
    assert "torch" not in sys.modules and "psutil" not in sys.modules and "IPython" not in sys.modules
    import torch
    assert state.restore().could_not == ("torch's random numbers: the code itself imported torch",)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# -- properties --------------------------------------------------------------------------------------------------------

CHANGES = (
    "model[{i}].weight.data.add_(1)",
    "model[{i}].weight = nn.Parameter(torch.full((4, 4), 2.0))",
    "model[{i}].weight.data = torch.rand(4, 4).t()",
    "model(torch.rand(2, 4)).sum().backward()",
    "optimizer.step()",
    "optimizer.zero_grad(set_to_none={i} == 0)",
    "optimizer.param_groups[0]['lr'] *= 0.5",
    "optimizer.param_groups.reverse()",
    "optimizer.state.clear()",
    "scheduler.step()",
    "model[{i}].bias.requires_grad_(False)",
    "model[{i}].train(not model[{i}].training)",
    "model[0].weight, model[1].weight = model[1].weight, model[0].weight",
    "names['model'] = model[{i}]; names.pop('x', None)",
    "rng.random(); random.random(); np.random.rand()",
    "model = nn.Linear(1, 1)",
    "model.half().float()",
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.sampled_from(CHANGES), st.integers(0, 1)), min_size=1, max_size=12))
def test_any_sequence_of_changes_is_undone(changes: list[tuple[str, int]]) -> None:
    made = """
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    optimizer = torch.optim.AdamW([{'params': model[0].parameters()}, {'params': [model[1].bias]}], 0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    rng, names = np.random.default_rng(0), {'x': 1, 'model': None}
    """
    namespace = notebook(made)
    start, objects = photo(namespace), identities(namespace)
    state = State.of(namespace, None)
    for change, i in changes:
        with contextlib.suppress(Exception):  # some do not fit after others
            run(namespace, change.format(i=i))
    restored = state.restore()
    assert photo(namespace) == start and identities(namespace) == objects and restored.could_not == ()


@given(
    size=st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4)),
    order=st.permutations(range(3)),
    step=st.integers(1, 3),
    start=st.integers(0, 3),
)
def test_memory_of_any_form_is_covered(size: tuple[int, ...], order: list[int], step: int, start: int) -> None:
    big = torch.arange(300.0)
    view = big[start::step][: size[0] * size[1] * size[2]].reshape(size).permute(order)
    shared = big[start : start + 200 : 2].view(10, 10).t()[::3]
    module = torch.nn.Module()
    module.register_buffer("a", view)
    module.register_buffer("b", shared)
    module.register_buffer("c", shared[0].expand(4, 10))
    before, here = [t.clone() for t in module.buffers()], [t.data_ptr() for t in module.buffers()]
    state = State.of({"module": module}, None)
    big.mul_(-1).sub_(1)
    view.zero_()
    state.restore()
    assert all(map(torch.equal, module.buffers(), before)) and [t.data_ptr() for t in module.buffers()] == here


@pytest.fixture(autouse=True)
def main_module_is_not_touched() -> Iterator[None]:
    """Classes of the cells say they are of `__main__`: that module must not have them."""
    main: ModuleType = sys.modules["__main__"]
    before = set(vars(main))
    yield
    assert set(vars(main)) == before
