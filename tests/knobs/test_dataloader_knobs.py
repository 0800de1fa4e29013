"""The DataLoader's knobs: what they change, that the data and random numbers stay, that nothing is left."""

from __future__ import annotations

import gc
import inspect
import itertools
import multiprocessing
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    WeightedRandomSampler,
)
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from gpulab.knobs import loader_options
from gpulab.knobs.description import observed_loader
from gpulab.knobs.knob import Knob, KnobEffects, Value
from gpulab.knobs.loader_options import BATCH_SIZE, PERSISTENT_WORKERS, PIN_MEMORY, PREFETCH, WORKERS
from gpulab.knobs.observation import Observation
from gpulab.run import Device, Run
from tests.support import cells_libraries
from tests.support.knob_cells import captured, same

LENGTH = 26


class Squares(Dataset[tuple[torch.Tensor, int]]):
    """Items of a function of their index, and the process that made them."""

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        info = torch.utils.data.get_worker_info()
        return torch.tensor([float(i), float(i) ** 2]), -1 if info is None else info.id


class Noise(Squares):
    """Items of random numbers of the process that makes them."""

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        return torch.rand(2), i


class Bucketed:
    """A batch_sampler that draws as soon as it is asked, from torch and from Python."""

    def __len__(self) -> int:
        return 5

    def __iter__(self) -> Iterator[list[int]]:
        batches = torch.randperm(20).reshape(5, 4).tolist()
        random.shuffle(batches)
        return iter(batches)


class Counting(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return (torch.tensor(float(i)) for i in range(LENGTH))


@contextmanager
def applied(settings: Mapping[Knob, Value]) -> Iterator[dict[str, KnobEffects]]:
    with ExitStack() as stack:
        yield {knob.name: stack.enter_context(knob.applied(value)) for knob, value in settings.items()}


def workers() -> int:
    gc.collect()
    return len(multiprocessing.active_children())


def measured(code: Callable[[], object], settings: Mapping[Knob, Value]) -> tuple[Run, dict[str, KnobEffects]]:
    run, logs, _ = captured(code, *settings.items(), trace=False)
    return run, logs


def observation(*loaders: DataLoader[Any]) -> Observation:
    return Observation(Device("cpu", "CPU"), tuple(map(observed_loader, loaders)))


def train(loader: DataLoader[Any], epochs: int = 1) -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 1e-4)
    for _ in range(epochs):
        for x, _worker in loader:
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()


# -- the same data, the same random numbers ---


def plain(**options: Any) -> DataLoader[Any]:
    return DataLoader(Squares(), batch_size=4, **options)


LOADERS: dict[str, Callable[[], DataLoader[Any]]] = {
    "in order": plain,
    "shuffled": lambda: plain(shuffle=True),
    "own generator": lambda: plain(shuffle=True, generator=torch.Generator().manual_seed(5)),
    "drop_last": lambda: plain(shuffle=True, drop_last=True),
    "weighted": lambda: plain(sampler=WeightedRandomSampler([i + 1.0 for i in range(LENGTH)], 30)),
    "with replacement": lambda: plain(
        sampler=RandomSampler(Squares(), replacement=True, num_samples=70, generator=torch.Generator().manual_seed(2))
    ),
    "own batch_sampler": lambda: DataLoader(Squares(), batch_sampler=BatchSampler(RandomSampler(Squares()), 5, False)),
    "bucketed": lambda: DataLoader(Squares(), batch_sampler=Bucketed()),
    "bucketed, workers": lambda: DataLoader(Squares(), batch_sampler=Bucketed(), num_workers=1),
    "bucketed, persistent": lambda: DataLoader(
        Squares(), batch_sampler=Bucketed(), num_workers=1, persistent_workers=True
    ),
    "no batches": lambda: DataLoader(Squares(), batch_size=None, shuffle=True),
    "noise": lambda: DataLoader(Noise(), batch_size=4, num_workers=2, shuffle=True),
    "workers": lambda: plain(shuffle=True, num_workers=1),
    "persistent": lambda: plain(shuffle=True, num_workers=1, persistent_workers=True),
    "persistent, own generator": lambda: plain(
        shuffle=True, num_workers=1, persistent_workers=True, generator=torch.Generator().manual_seed(3)
    ),
}
PERSISTENT: Mapping[Knob, Value] = {PERSISTENT_WORKERS: True, WORKERS: 2}
NO_WORKERS: Mapping[Knob, Value] = {WORKERS: 0}
NOT_PERSISTENT: Mapping[Knob, Value] = {PREFETCH: 3, PERSISTENT_WORKERS: False, WORKERS: 1}
CASES: list[tuple[str, Mapping[Knob, Value]]] = [
    *((kind, PERSISTENT) for kind in LOADERS if kind != "noise"),
    *((kind, NOT_PERSISTENT) for kind in LOADERS if kind.startswith(("shuffled", "own", "persistent", "bucketed, p"))),
    *((kind, NO_WORKERS) for kind in LOADERS if "workers" in kind or "persistent" in kind),
    ("noise", {PREFETCH: 5}),  # the workers draw as before
]


def story(loader: DataLoader[Any], epochs: int = 3) -> list[Any]:
    """All that a cell can see of the data and of random numbers, over some epochs, the second cut short."""
    torch.manual_seed(7)
    random.seed(7)
    np.random.seed(7)
    seen: list[Any] = []
    for epoch in range(epochs):
        stop = 2 if epoch == 1 else None
        seen += [x.tolist() for x, _ in itertools.islice(loader, stop)]
        seen.append(torch.rand(2).tolist())
    seen += [
        torch.get_rng_state().tolist(),
        random.getstate(),
        np.random.get_state(legacy=False)["state"]["key"].tolist(),
    ]
    if loader.generator is not None:
        seen.append(loader.generator.get_state().tolist())
    return seen


@pytest.mark.parametrize(("kind", "settings"), CASES)
def test_data_and_random_numbers_are_as_without(kind: str, settings: Mapping[Knob, Value]) -> None:
    expected = story(LOADERS[kind]())
    loader = LOADERS[kind]()
    with applied(settings) as logs:
        seen = story(loader)
    assert seen == expected
    assert all(log.counts.get("loaders", 0) + log.counts.get("loaders unchanged", 0) for log in logs.values())
    assert loader._iterator is None
    assert workers() == 0


@pytest.mark.parametrize("settings", [PERSISTENT, NOT_PERSISTENT, {WORKERS: 0}])
def test_a_loader_whose_workers_already_live_draws_no_seed_anew(settings: Mapping[Knob, Value]) -> None:
    def after_one_epoch() -> DataLoader[Any]:
        loader = LOADERS["persistent, own generator"]()
        torch.manual_seed(1)
        list(loader)
        return loader

    expected = story(after_one_epoch())
    loader = after_one_epoch()
    own = loader._iterator
    with applied(settings):
        assert story(loader) == expected
    assert loader._iterator is own
    assert isinstance(own, _MultiProcessingDataLoaderIter) and all(w.is_alive() for w in own._workers)
    assert len(list(loader)) == 7


# -- what is changed, and what is not ---


def test_workers_make_the_batches_of_a_loader_built_before() -> None:
    loader = plain()
    before = dict(vars(loader))
    with WORKERS.applied(2) as log:
        made_by = {int(w) for _, ids in loader for w in ids}
    assert made_by == {0, 1}
    assert log.counts == {"loaders": 1, "epochs": 1, "worker starts": 1, "worker processes": 2}
    assert vars(loader) == before
    assert {int(w) for _, ids in loader for w in ids} == {-1}


def test_everything_else_of_the_loader_is_kept() -> None:
    def collate(items: list[Any]) -> list[float]:
        return [float(x[0]) for x, _ in items]

    def init(worker: int) -> None:
        torch.set_num_threads(1)

    loader = DataLoader(
        Squares(), 4, num_workers=1, collate_fn=collate, worker_init_fn=init, timeout=30, multiprocessing_context="fork"
    )
    with applied({WORKERS: 2, PREFETCH: 3}):
        iterator = iter(loader)
        assert isinstance(iterator, _MultiProcessingDataLoaderIter)
        assert iterator._collate_fn is collate and iterator._worker_init_fn is init and iterator._timeout == 30
        assert iterator._num_workers == 2 and iterator._prefetch_factor == 3
        assert iterator._index_sampler is loader.batch_sampler  # by which the capture knows the loader
        assert next(iterator) == [0.0, 1.0, 2.0, 3.0]
    with WORKERS.applied(0):
        assert next(iter(loader)) == [0.0, 1.0, 2.0, 3.0]


@pytest.mark.parametrize("order", [*itertools.permutations((WORKERS, PREFETCH, PERSISTENT_WORKERS, BATCH_SIZE))][::9])
def test_options_combine_in_any_order(order: tuple[Knob, ...]) -> None:
    values: Mapping[Knob, Value] = {WORKERS: 1, PREFETCH: 3, PERSISTENT_WORKERS: True, BATCH_SIZE: 13}
    loader = plain()
    with applied({knob: values[knob] for knob in order}) as logs:
        iterator = iter(loader)
        assert isinstance(iterator, _MultiProcessingDataLoaderIter)
        assert (iterator._num_workers, iterator._prefetch_factor, iterator._persistent_workers) == (1, 3, True)
        assert [len(x) for x, _ in iterator] == [13, 13]
        assert len(loader) == 2
    assert all(log.counts["loaders"] == 1 and not log.refusals for log in logs.values())
    assert len(loader) == 7


def test_of_two_values_the_inner_counts() -> None:
    with BATCH_SIZE.applied(2), BATCH_SIZE.applied(13):
        assert len(next(iter(plain()))[0]) == 13


def test_batch_size_changes_length_keeps_drop_last_and_sampler() -> None:
    loader = plain(drop_last=True, shuffle=True)
    with BATCH_SIZE.applied(10):
        assert len(loader) == 2
        batches = [x[:, 0] for x, _ in loader]
        assert [len(b) for b in batches] == [10, 10]
    assert len(loader) == 6 and loader.batch_size == 4


def test_subclasses_with_super_or_own_iterators() -> None:
    class Doubled(DataLoader[Any]):
        def __iter__(self) -> Any:
            for x, _ in super().__iter__():
                yield 2 * x

    class Tagged(DataLoader[Any]):
        tag = "mine"

        def _get_iterator(self) -> Any:
            return ((self.tag, x) for x, _ in super()._get_iterator())

    with BATCH_SIZE.applied(13):
        assert [len(x) for x in Doubled(Squares(), 4)] == [13, 13]
        assert [(tag, len(x)) for tag, x in Tagged(Squares(), 4)] == [("mine", 13)] * 2
    with WORKERS.applied(1):
        hidden = iter(Tagged(Squares(), 4))
        next(hidden)
        assert workers() == 1
    assert workers() == 0


def test_other_threads_and_worker_processes_are_left_alone() -> None:
    class Inner(Squares):
        def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
            return torch.tensor(float(len(next(iter(plain()))[0]))), i

    seen: list[int] = []
    loader = plain()
    with applied({WORKERS: 1, BATCH_SIZE: 13}):
        other = threading.Thread(target=lambda: seen.append(len(next(iter(loader))[0])))
        other.start()
        other.join()
        x, _ = next(iter(DataLoader(Inner(), 4)))
    assert seen == [4]
    assert x.tolist() == [4.0] * 13


# -- nothing is left ---


def test_workers_of_an_interrupted_epoch_end_with_the_context() -> None:
    kept: list[Any] = []

    def cell() -> None:
        with WORKERS.applied(2):
            kept.append(iter(plain()))
            next(kept[0])
            assert workers() == 2
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cell()
    assert workers() == 0


def test_the_copy_of_a_loader_ends_with_it() -> None:
    with applied({WORKERS: 1, PERSISTENT_WORKERS: True}):
        for _ in range(3):
            list(plain())
        assert workers() == 0


# -- loaders that are left as they are ---


def test_an_iterable_dataset_is_left_and_another_changed() -> None:
    knobs = (WORKERS, PREFETCH, PERSISTENT_WORKERS, BATCH_SIZE)
    with applied(dict.fromkeys(knobs, 2)) as logs:
        assert [len(x) for x in DataLoader(Counting(), 4)] == [4] * 6 + [2]
        assert len(next(iter(plain()))[0]) == 2
    for log in logs.values():
        assert "IterableDataset" in log.refusals[0] and len(log.refusals) == log.counts["loaders"] == 1


def test_what_cannot_be_is_left_as_it_is_with_the_reason() -> None:
    class Own(BatchSampler):
        pass

    own = DataLoader(Squares(), batch_sampler=Own(SequentialSampler(Squares()), 3, False))
    for loader, knob, value, words in (
        (own, BATCH_SIZE, 2, "batch_sampler"),
        (DataLoader(Squares(), batch_size=None), BATCH_SIZE, 2, "batch_size=None"),
        (plain(), BATCH_SIZE, LENGTH + 1, "26 items"),
        (plain(), PREFETCH, 4, "workers=2"),
        (plain(), PERSISTENT_WORKERS, True, "workers=2"),
    ):
        count = len(loader)
        with knob.applied(value) as log:
            assert len(list(loader)) == count
        assert words in log.refusals[0]


# -- took it effect? ---


@pytest.mark.filterwarnings("error")
def test_verified_from_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """One run with all of them and one with none: what only that value can bring about tells them apart."""

    monkeypatch.setattr(loader_options, "pins_nothing_here", lambda: True)
    loader = plain(shuffle=True)
    seen = observation(loader)
    values: dict[Knob, Value] = {WORKERS: 1, PREFETCH: 3, PERSISTENT_WORKERS: True, BATCH_SIZE: 13, PIN_MEMORY: True}

    def code() -> None:
        train(loader, 3)
        assert workers() == 1

    run, logs = measured(code, values)
    assert workers() == 0
    untouched, as_written = measured(lambda: train(loader, 3), {WORKERS: 0})
    words = {
        WORKERS: "1 worker process was alive",
        PREFETCH: "up to 3 batches",
        PERSISTENT_WORKERS: "started once for 3 epochs",
        BATCH_SIZE: "batches of 13 samples",
    }
    for knob, said in words.items():
        result = knob.verify(seen, values[knob], logs[knob.name], run)
        assert result.state == "took effect" and said in result.evidence
        assert knob.verify(seen, values[knob], KnobEffects(Counter({"loaders": 1})), untouched).state == "no effect"
    pinned = PIN_MEMORY.verify(seen, True, logs["pin_memory"], run)
    assert pinned.state == "no effect" and "no GPU" in pinned.evidence
    crowded = replace(run, environment=replace(run.environment, usable_cores=0.5))
    assert "more than the 0.5 usable cores" in WORKERS.verify(seen, 1, logs["workers"], crowded).evidence
    nobody = WORKERS.verify(seen, 1, KnobEffects(Counter({"loaders": 1})), run)
    assert (nobody.state, nobody.evidence) == ("no effect", "0 of 1 worker process were alive")
    once = KnobEffects(Counter({"loaders": 1, "epochs": 1, "worker starts": 1}))
    result = PERSISTENT_WORKERS.verify(seen, True, once, run)
    assert result.state == "cannot tell" and "one epoch" in result.evidence
    result = WORKERS.verify(seen, 0, as_written["workers"], untouched)
    assert (result.state, result.evidence) == ("no effect", "the DataLoader already has workers=0")
    assert WORKERS.verify(observation(), 2, KnobEffects(), untouched).state == "no effect"
    assert run.loader is not None and run.loader.dataset == "Squares"
    assert (run.loader.num_workers, run.loader.batch_size, run.loader.length) == (1, 13, 2)
    assert len(run.steps) == 6 and set(run.steps.sample_count.tolist()) == {13}, "one loader for all epochs"


# -- libraries ---


LIBRARIES = [cells_libraries.accelerated, cells_libraries.lightning_trainer, cells_libraries.hugging_face_trainer]


@pytest.mark.parametrize("cell", LIBRARIES, ids=lambda cell: cell.__name__)
def test_a_library_trains_with_it_as_without(
    cell: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The evaluation's loader is changed, too."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    pytest.importorskip("lightning.pytorch")  # its import draws random numbers: not within the cell
    folder = [tmp_path] * ("folder" in inspect.signature(cell).parameters)

    def trained(settings: Mapping[Knob, Value]) -> tuple[list[torch.Tensor], Run, dict[str, KnobEffects]]:
        keep: list[torch.nn.Module] = []
        torch.manual_seed(1)
        run, logs = measured(lambda: cell(keep, *folder), settings)
        return [p.detach() for p in keep[0].parameters()], run, logs

    as_written, plain_run, _ = trained({})
    weights, run, logs = trained({WORKERS: 1})
    assert same(weights, as_written, exactly=True) and plain_run.loader is not None
    assert WORKERS.verify(observation(plain()), 1, logs["workers"], run).state == "took effect"
    _, run, logs = trained({BATCH_SIZE: 7})
    assert BATCH_SIZE.verify(observation(plain()), 7, logs["batch_size"], run).state == "took effect"
    assert run.loader is not None and plain_run.loader.batch_size != run.loader.batch_size == 7
    evaluates = cell is not cells_libraries.accelerated
    assert (logs["batch_size"].counts["loaders"] > 1) is evaluates
