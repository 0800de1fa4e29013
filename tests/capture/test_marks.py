"""The parts that turn what torch does into marks: loader numbers, weights watched, samples counted, phases planned."""

from __future__ import annotations

import threading
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import pytest
import torch
import torch._dynamo
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.modules import module as torch_module
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, TensorDataset

from gpulab.capture import arguments, torch_hooks
from gpulab.capture.arguments import UpdateDetector
from gpulab.capture.loader_facts import samples_in
from gpulab.capture.windows import EARLY_TRACED, plan
from gpulab.patching.attributes import Hook
from gpulab.patching.hook_points import module_calls
from gpulab.run import Settings

POINTS = TensorDataset(torch.zeros(12, 3), torch.zeros(12))


# -- loader numbers ------------------------------------------------------------------------------------------------


def test_a_loader_and_its_iterators_share_one_number() -> None:
    keys = arguments.Keys()
    listed = DataLoader(POINTS, batch_sampler=[[0, 1], [2, 3]])  # a list takes no weak reference
    custom = DataLoader(POINTS, batch_sampler=BatchSampler(SequentialSampler(POINTS), 2, False))
    loaders = [DataLoader(POINTS, batch_size=2), DataLoader(POINTS, batch_size=2), listed, custom]
    for loader in loaders:
        assert keys.of(loader) == keys.of(iter(loader)) == keys.of(iter(loader))
    assert len({keys.of(loader) for loader in loaders}) == 4


def test_a_new_loader_at_an_old_address_gets_a_new_number() -> None:
    keys, seen, addresses = arguments.Keys(), set(), set()
    for _ in range(50):
        loader = DataLoader(POINTS, batch_size=2)
        addresses.add(id(loader._index_sampler))
        seen.add(keys.of(loader))
        del loader
    assert len(addresses) < 50, "the test shows nothing: no address came back"
    assert len(seen) == 50


# -- module calls --------------------------------------------------------------------------------------------------


class Ears:
    """A listener that counts module calls."""

    def __init__(self) -> None:
        self.heard = 0
        thread = threading.get_ident()
        self.hook = Hook(lambda: module_calls(self.called, thread))

    def called(self, module: nn.Module) -> None:
        """One more."""
        self.heard += 1


def test_a_module_hook_works_only_between_on_and_close() -> None:
    ears, net = Ears(), nn.Identity()
    hook = ears.hook
    for switch, heard in ((hook.on, 1), (hook.on, 2), (hook.off, 2), (hook.on, 3), (hook.close, 3), (hook.on, 3)):
        switch()
        net(torch.ones(1))
        assert ears.heard == heard
    assert not torch_module._global_forward_pre_hooks


def test_another_threads_calls_are_not_the_trainings() -> None:
    ears = Ears()
    with closing(ears.hook), ThreadPoolExecutor(1) as other:
        ears.hook.on()
        other.submit(nn.Identity(), torch.ones(1)).result()
    assert ears.heard == 0


def test_a_module_hook_lets_itself_be_compiled() -> None:
    """Only where torch.compile was not seen coming; `fullgraph` fails if a line of the hook cannot be compiled."""
    net, hook = nn.Linear(2, 2), Ears().hook
    with closing(hook):
        hook.on()
        torch.compile(lambda x: net(x), fullgraph=True, backend="eager")(torch.ones(1, 2))
    torch._dynamo.reset()


def test_what_was_compiled_before_closes_the_module_hook() -> None:
    torch._dynamo.reset()
    assert not torch_hooks._something_is_compiled()
    torch.compile(nn.Identity(), backend="eager")
    assert torch_hooks._something_is_compiled()
    torch._dynamo.reset()


# -- weights -------------------------------------------------------------------------------------------------------


def test_weights_that_get_new_data_are_noticed() -> None:
    """Other ways, and no update at all: tests/capture/test_steps_by_hand.py."""
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    loss = (net(torch.randn(5, 3)) ** 2).sum()
    updates = UpdateDetector()
    updates.begin(loss)
    loss.backward()
    assert updates.first is not None and not updates.since_first()
    for p in net.parameters():
        assert p.grad is not None
        p.data = p.data - 0.1 * p.grad
    assert updates.since_first()


def test_watching_draws_no_random_number_and_keeps_nothing_alive() -> None:
    w = torch.randn(4, requires_grad=True)
    before = torch.get_rng_state()
    updates = UpdateDetector()
    updates.begin([(w**2).sum()])
    assert updates.first is not None
    assert torch.equal(before, torch.get_rng_state())
    del w
    assert not updates.since_first()


@pytest.mark.parametrize("root", [None, 3, torch.ones(2), torch.ones(2, requires_grad=True)])
def test_what_cannot_be_watched_is_not(root: Any) -> None:
    updates = UpdateDetector()
    updates.begin(root)
    assert updates.first is None


# -- samples -------------------------------------------------------------------------------------------------------


Pair = namedtuple("Pair", "x y")


@pytest.mark.parametrize(
    ("sample", "collate"),
    [
        ((torch.zeros(3, 2), 1), None),
        ({"pixels": torch.zeros(3, 2), "label": 1}, None),
        (((torch.zeros(3), torch.zeros(2)), (1, 2)), None),
        (Pair(torch.zeros(3), 1), None),
        (torch.zeros(3), None),
        ((torch.zeros(3, 8, 8), {"boxes": torch.zeros(2, 4)}), lambda batch: tuple(zip(*batch, strict=True))),
        ((torch.zeros(3, 8, 8), {"boxes": torch.zeros(2, 4)}), lambda batch: batch),
    ],
    ids=["pair", "dict", "nested", "named", "tensor", "transposed", "uncollated"],
)
def test_samples_are_counted_however_they_are_collated(sample: Any, collate: Any) -> None:
    batch = next(iter(DataLoader([sample] * 5, batch_size=5, collate_fn=collate)))  # type: ignore[arg-type]
    assert samples_in(batch) == 5


@pytest.mark.parametrize("batch", ["text", 3, None, [], {}, torch.tensor(1.0), object()])
def test_samples_that_cannot_be_known_are_none(batch: Any) -> None:
    assert samples_in(batch) is None


# -- phases of a loop that may be left before its epoch ends -------------------------------------------------------


@given(st.none() | st.integers(0, 10**6), st.none() | st.integers(1, 8))
def test_six_steps_of_a_longer_epoch_are_profiled(epoch: int | None, asked: int | None) -> None:
    early, late = plan(Settings(trace_steps=asked), epoch, certain=False).windows
    assert early.after + min(early.length, EARLY_TRACED) <= 5, "a sixth step need not be whole"
    assert early.length <= (asked or EARLY_TRACED)
    assert late.after >= early.after + early.length + 2, "steps are measured between the windows"


@given(st.integers(0, 200))
def test_each_window_begins_once_also_when_steps_come_in_lumps(lump: int) -> None:
    schedule = plan(Settings(), None)
    begun, done = [], 0
    for _ in range(100):
        before, done = done, done + lump
        begun.append(schedule.window_at(before, done))
    found = [w for w in begun if w is not None]
    assert len(found) == len(set(found)) and (lump == 0 or schedule.windows[-1] in found)
