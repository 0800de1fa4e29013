"""Records facts of a training: what autograd's graph computes, the loss of each step, the size of the model's inputs.

The graph is read at a few early backward passes. That takes at most 20 ms, or 1 % of the step if a step takes more
than 2 s. Only names, numbers and weak references to parameters are stored. If reading fails, the facts are missing.

A loss is the scalar from which a backward pass starts. It is read at the end of the run, because reading it waits for
the device. Input sizes are counted at the model, because a loop may have no DataLoader or use only a part of a batch.
"""

from __future__ import annotations

import functools
import math
import re
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from threading import get_ident
from time import perf_counter_ns
from typing import Any
from zlib import crc32

import numpy as np
from msgspec import Struct, field

from gpulab.capture.loader_facts import arrays_in
from gpulab.capture.stack_sampler import ThreadSamples
from gpulab.devices.gpus import in_graph_capture
from gpulab.patching.attributes import Args, KeywordArgs, before_calls, replaced
from gpulab.patching.hook_points import module_calls
from gpulab.run import BackwardPass, DenseGradient, Int64, Steps, TrainingFacts

EARLY, LATE = range(4, 9), range(16, 20)  # backward passes, ours: one or two steps, and 12 passes later
LONGEST_NS, LONGEST_FRACTION = 20_000_000, 0.01
FEWEST_SAMPLES = 40  # ours: with fewer samples a share is chance
_VALUES = 16
_SAMPLED = 8  # parameters whose values are compared, ours: code that changes weights by hand changes at least one
_ROWS, _LARGE = 512, 10_000  # ours: rows to check of an embedding table that has at least _LARGE rows
_ROUNDS = 4  # ours: batches of each worker that are compared
_CHECKED = 4_096  # bytes of a batch

CALLS: Mapping[str, re.Pattern[str]] = {  # file and function that torch calls because of a switch or default
    "anomaly_detection": re.compile(r"[/\\]torch[/\\]fx[/\\]traceback\.py:.*format_stack$"),
    "argument_validation": re.compile(
        r"[/\\]torch[/\\]distributions[/\\](constraints\.py:|distribution\.py:Distribution\.(__init__|_validate_sample)$)"
    ),
    "recomputation": re.compile(
        r"[/\\]torch[/\\]utils[/\\]checkpoint\.py:(.*recompute_fn|CheckpointFunction\.backward)$"
    ),
}
_ENGINE = re.compile(r"[/\\]torch[/\\]autograd[/\\]")
_SEQUENCES = 1 << 60  # limit of sequence numbers; those of leaves are above
_PADDED_INDICES = 1_000_000  # ours: a larger tensor is not compared


class _Graph(Struct):
    """The graph of a backward pass.

    `nodes`: sequence number, name, and positions of the nodes that receive its gradients. `leaves`: parameter ids by
    position. `versions` and `values` cover parameters that no known optimizer holds, `values` only some of them.
    `dropped`: leaves whose gradient was deleted before their optimizer stepped.
    """

    nodes: list[tuple[int, str, list[int]]]
    leaves: dict[int, int]
    biases: set[int]
    versions: dict[int, int]
    values: dict[int, Any]
    dropped: set[int] = field(default_factory=set)


class TrainingFactsReader:
    """Reads facts of a training loop. `wants_passes`, `wants_batches`: whether it still needs to see these."""

    def __init__(self) -> None:
        self.wants_passes = self.wants_batches = True
        self.differentiates_twice = False
        self.optimizers: dict[int, tuple[int, int]] = {}  # by id: number of groups, elements of all parameters
        self._count = self._newest_ns = 0  # backward passes
        self._graphs: list[_Graph] = []
        self._is_whole = True  # all graphs were read in time; one of two similar passes of a step would mislead
        self._leaves: dict[int, Callable[[], Any]] = {}  # weak references to leaves of the newest graph
        self._changed: list[Any] = []
        self._evaluated: set[int] = set()  # sequence numbers of the nodes in those graphs
        self._again: list[tuple[int, int]] = []  # by graph: number of nodes also in earlier graphs, of all nodes
        self._is_on: list[tuple[bool, bool]] = []  # by graph: anomaly detection is on, a profiler is on
        self._padding: list[Any] = []  # by embedding: for each column of indices, whether it is the same in all rows
        self._batch_nodes: list[int] = []
        self._holders: dict[int, int] = {}  # by id of the parameter, that of its optimizer
        self._stepped: set[int] = set()  # optimizers that have stepped since the newest graph
        self._tables: list[Callable[[], Any]] = []
        self._dense: dict[int, list[tuple[int, Any, float]]] = {}
        self._float64: list[float] = []
        self._emulated: list[float] = []
        self._iterator: Callable[[], Any] = object
        self._workers = 0
        self._sums: list[list[int]] = []

    def backward(self, root: Any) -> None:
        """A backward pass begins, from `root` (a tensor or several)."""
        self._count += 1
        began_ns, before_ns = perf_counter_ns(), self._newest_ns
        self._newest_ns = began_ns
        if self._count == LATE[-1]:
            self.wants_passes, self.wants_batches = False, self._workers > 1
        if self._count not in EARLY and self._count not in LATE:
            return
        with suppress(Exception):  # a user-defined tensor type may raise at any call
            if not in_graph_capture():
                self._read_graph(root, began_ns + max(LONGEST_NS, int(LONGEST_FRACTION * (began_ns - before_ns))))

    def step(self, optimizer: Any) -> None:
        """An optimizer's step begins."""
        number = id(optimizer)
        with suppress(Exception):
            if self.optimizers.get(number, (0, 0))[0] != len(optimizer.param_groups):
                parameters = [p for group in optimizer.param_groups for p in group["params"]]
                self.optimizers[number] = len(optimizer.param_groups), sum(p.numel() for p in parameters)
                self._holders.update((id(p), number) for p in parameters)
            self._stepped.add(number)
            for table in (t() for t in self._tables):
                gradient = table.grad
                if self._holders.get(id(table)) == number and gradient is not None and not gradient.is_sparse:
                    used = (gradient[:: len(table) // _ROWS | 1] != 0).any(1).float().mean()
                    of = table.numel() / self.optimizers[number][1]
                    self._dense.setdefault(id(table), []).append((len(table), used, of))

    def batch(self, iterator: Any, batch: Any) -> None:
        """A loader's iterator has returned this batch."""
        if len(self._batch_nodes) < _ROUNDS:
            with suppress(Exception):
                computed = [part for part in arrays_in(batch) if getattr(part, "grad_fn", None) is not None]
                nodes, _, is_whole, _ = _walked(computed, perf_counter_ns() + LONGEST_NS)
                self._batch_nodes.append(len(nodes) if is_whole else 0)
        if self._iterator() is not iterator:
            self._iterator, workers = weakref.ref(iterator), getattr(iterator, "_num_workers", 0)
            self._workers = workers if getattr(iterator, "_dataset_kind", 0) == 1 else 0  # an IterableDataset
            self._sums += [[]] if self._workers > 1 else []
        if self._workers > 1:
            with suppress(Exception):
                self._sums[-1].append(_sum_of(batch))
            self.wants_batches = len(self._sums[-1]) < _ROUNDS * self._workers

    def _read_graph(self, root: Any, until_ns: int) -> None:
        import torch

        self._check_gradients()
        self._tables = []
        if self._count == EARLY[-1]:
            return
        late = self._count in LATE
        self._is_on.append((torch.is_anomaly_enabled(), torch._C._autograd._profiler_enabled()))
        nodes, leaves, is_whole, lookups = _walked(root, until_ns)
        if not late:
            sequences = {number for number, _, _ in nodes if number < _SEQUENCES}
            self._again.append((len(sequences & self._evaluated), len(sequences)))
            self._evaluated |= sequences
            self._padding += [_is_the_same(node._saved_indices) for node in lookups]
        self._is_whole &= is_whole or late
        if not is_whole or (torch.distributed.is_available() and torch.distributed.is_initialized()):
            return  # in a distributed run an optimizer may hold other tensors than the model uses
        loose = [p for p in leaves.values() if id(p) not in self._holders and isinstance(p, torch.nn.Parameter)]
        graph = _Graph(
            nodes,
            leaves={i: id(p) for i, p in leaves.items()},
            biases={i for i, p in leaves.items() if p.dim() < 2},
            versions={id(p): p._version for p in loose},
            values={id(p): some_values(p) for p in loose[:: max(1, len(loose) // _SAMPLED)]},
        )
        for early in self._graphs if late else ():
            self._changed += [early.versions[i] != v for i, v in graph.versions.items() if i in early.versions]
            self._changed += [(early.values[i] != v).any() for i, v in graph.values.items() if i in early.values]
        if not late:
            self._graphs.append(graph)
            self._stepped.clear()
            self._leaves = {i: weakref.ref(p) for i, p in leaves.items()}
            wide = sum(p.numel() for p in leaves.values() if p.dtype is torch.float64)
            self._float64.append(wide / sum(p.numel() for p in leaves.values()))
            emulated = sum(p.numel() for p in leaves.values() if _is_emulated(p))
            self._emulated.append(emulated / sum(p.numel() for p in leaves.values()))
            tables = {i for _, name, to in nodes if name.startswith("Embedding") for i in to if i in leaves}
            self._tables = [weakref.ref(leaves[i]) for i in tables if len(leaves[i]) >= _LARGE]

    def _check_gradients(self) -> None:
        """Find leaves of the newest graph whose gradients are gone, although only other optimizers have stepped."""
        leaves, self._leaves = self._leaves, {}
        for i, leaf in leaves.items() if self._stepped else ():
            holder = self._holders.get(self._graphs[-1].leaves[i])
            if holder and holder not in self._stepped and leaf().grad is None:
                self._graphs[-1].dropped.add(i)

    def finish(self, samples: ThreadSamples | None, steps: Steps, origin_ns: int) -> TrainingFacts | None:
        """All facts, with the calls that `samples` show from the first step to the last; None if reading failed."""
        try:
            passes, unheld = self._passes()
            return TrainingFacts(
                anomaly_detection=bool(self._is_on) and all(anomaly for anomaly, _ in self._is_on),
                profiled=len(self._is_on) > len(EARLY) and all(profiler for _, profiler in self._is_on),
                calls=call_shares(samples, steps, origin_ns),
                repeated_fraction=_ratio(self._again[1:]),
                padding_fraction=_padding(self._padding),
                batch_nodes_fraction=_ratio(
                    [(min(self._batch_nodes, default=0), n) for _, n in self._again[:1] if self._is_whole]
                ),
                passes=passes,
                unheld=unheld,
                differentiates_twice=self.differentiates_twice,
                float64_fraction=min(self._float64, default=0.0),
                emulated_fraction=min(self._emulated, default=0.0),
                dense_gradients=tuple(
                    DenseGradient(rows[0][0], max(float(used) for _, used, _ in rows), rows[0][2])
                    for rows in self._dense.values()
                ),
                batch_copies=max((_copies(sums, self._workers) for sums in self._sums), default=1),
            )
        except Exception:  # for example a broken GPU
            return None

    def _passes(self) -> tuple[tuple[BackwardPass, ...], bool]:
        """Passes that compute unused gradients, by kind, with mean shares; and whether some leaf is in no optimizer."""
        unchanged = bool(self._changed) and not any(self._changed) and bool(self._holders)
        unused: dict[tuple[str, ...], list[list[float]]] = {}  # two passes of a step may have the same nodes
        unheld = False
        for graph in self._graphs if self._is_whole else ():
            loose = {i for i, p in graph.leaves.items() if unchanged and p in graph.versions and p not in self._holders}
            unheld |= bool(loose)
            names, shares = _unused(graph, graph.dropped | loose)
            unused.setdefault(names, []).append(shares)
        means = {names: np.mean(rows, axis=0).tolist() for names, rows in unused.items()}
        return tuple(BackwardPass(names, tuple(s)) for names, s in means.items() if any(s)), unheld


def call_shares(samples: ThreadSamples | None, steps: Steps, origin_ns: int) -> dict[str, float]:
    """The share of each of `CALLS` among the samples from the first step to the last; empty with too few samples."""
    if samples is None or not len(steps):
        return {}
    at_ns = np.array(samples.t_ns, np.int64) - origin_ns
    numbers = np.array(samples.stack, np.int64)[(at_ns >= steps.start_ns[0]) & (at_ns <= steps.end_ns[-1])]
    if len(numbers) < FEWEST_SAMPLES:
        return {}
    names = []
    for stack in samples.stacks:  # within a backward pass only the frames below it
        engine = next((i for i, spot in enumerate(stack) if _ENGINE.search(spot[0])), len(stack))
        names.append([f"{file}:{function}" for file, _, function in stack[:engine]])
    below = {call: np.array([any(map(pattern.search, stack)) for stack in names]) for call, pattern in CALLS.items()}
    return {call: float(rows[numbers].mean()) for call, rows in below.items() if rows[numbers].any()}


def graph_of(root: Any) -> Iterator[tuple[Any, list[int]]]:
    """The nodes of autograd's graph, from `root` (one tensor or several), breadth first, each node once.

    Each node comes with the positions, in this order, of the nodes that receive its gradients.
    """
    order = [r.grad_fn for r in ([root] if hasattr(root, "grad_fn") else root) if r.grad_fn is not None]
    position = {node: i for i, node in enumerate(order)}
    for node in order:
        to: list[int] = []
        for other, _ in node.next_functions:
            if other is not None:
                to.append(position.setdefault(other, len(order)))
                if to[-1] == len(order):
                    order.append(other)
        yield node, to


def _walked(root: Any, until_ns: int) -> tuple[list[tuple[int, str, list[int]]], dict[int, Any], bool, list[Any]]:
    """The nodes as in `_Graph`, the leaves, whether the graph was read in time, and the nodes of embeddings."""
    nodes: list[tuple[int, str, list[int]]] = []
    leaves: dict[int, Any] = {}
    lookups: list[Any] = []
    for i, (node, to) in enumerate(graph_of(root)):
        if not i % 32 and perf_counter_ns() > until_ns:
            return nodes, leaves, False, lookups
        name = type(node).__name__
        if name == "AccumulateGrad":
            leaves[i] = node.variable
        elif name == "EmbeddingBackward0":
            lookups.append(node)
        nodes.append((node._sequence_nr(), name, to))
    return nodes, leaves, True, lookups


def _unused(graph: _Graph, dead: set[int]) -> tuple[tuple[str, ...], list[float]]:
    """The names of nodes in the order of evaluation, and the share of each node's work that only `dead` leaves need.

    A bias costs next to nothing and does not count next to a weight.
    """
    order = sorted((i for i in range(len(graph.nodes)) if i not in graph.leaves), key=lambda i: -graph.nodes[i][0])
    share = dict.fromkeys(dead, 1.0)
    for i in reversed(order):  # the nodes that receive its gradients come first
        to = [j for j in graph.nodes[i][2] if j not in graph.biases] or graph.nodes[i][2]
        share[i] = sum(share.get(j, 0.0) == 1.0 for j in to) / max(1, len(to))
    return tuple(graph.nodes[i][1] for i in order), [share[i] for i in order]


def _copies(sums: list[int], workers: int) -> int:
    """How many workers make each batch: all, if in each round they make the same one and then another; else 1."""
    rounds = [sums[i : i + workers] for i in range(0, len(sums) - workers + 1, workers)] if workers > 1 else []
    alike = len(rounds) > 1 and all(len(set(r)) == 1 for r in rounds) and len({r[0] for r in rounds}) == len(rounds)
    return workers if alike else 1


def _is_emulated(parameter: Any) -> bool:
    """Whether this CPU has no instructions for the parameter's dtype."""
    import torch

    able = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}
    name = "" if parameter.is_cuda else able.get(parameter.dtype, "")
    return bool(name) and not getattr(torch.ops.mkldnn, name)()


def _is_the_same(indices: Any) -> Any:
    """For each column, whether all its values equal the first or the last value of row 0; None if unknown."""
    if indices.dim() != 2 or not 2 <= len(indices) <= indices.numel() <= _PADDED_INDICES:
        return None
    same = [(indices == value).all(0) for value in (indices[0, 0], indices[0, -1])]
    return same[0] | same[1]


def _padding(columns: Sequence[Any]) -> float:
    """The smallest share of columns that are the same in all rows. A share of 1 is ignored: it is no padding."""
    shares = [float(c.float().mean()) for c in columns if c is not None]
    return min((share for share in shares if share < 1), default=0.0)


def _ratio(counts: Sequence[tuple[int, int]]) -> float:
    return sum(part for part, _ in counts) / max(1, sum(whole for _, whole in counts))


def _sum_of(batch: Any) -> int:
    """A checksum of the first bytes of the batch's first tensor; 0 if the tensor is on a GPU."""
    first = next(arrays_in(batch))
    return 0 if first.is_cuda else crc32(first.reshape(-1)[:_CHECKED].numpy().tobytes()[:_CHECKED])


def some_values(leaf: Any) -> Any:
    """A few values from all over the tensor, because some rows of an embedding may not change."""
    flat = leaf.detach().reshape(-1)
    return flat[:: max(1, len(flat) // _VALUES)].clone()


# -- losses and inputs -------------------------------------------------------------------------------------------------

MOST_LOSSES = 10_000  # on a GPU each occupies a block of 512 bytes


class Losses:
    """The scalars from which backward passes started; they are read at the end."""

    def __init__(self) -> None:
        self._scalars: list[tuple[int, Any]] = []
        self._scaled: tuple[Any, Any] | None = None  # the newest result of GradScaler.scale, and its argument

    @contextmanager
    def recording(self) -> Iterator[Losses]:
        """Record the losses of this thread in the block. Enter it last, so that knobs scale a loss only afterwards."""
        from torch import autograd
        from torch.amp import GradScaler

        thread = get_ident()

        def wrap_scale(original: Any) -> Any:
            @functools.wraps(original)
            def scale(scaler: Any, outputs: Any) -> Any:
                result = original(scaler, outputs)
                if get_ident() == thread:
                    self._scaled = result, outputs
                return result

            return scale

        try:
            with before_calls(autograd, "backward", self._add), replaced(GradScaler, "scale", wrap_scale):
                yield self
        finally:
            self._scaled = None

    def _add(self, args: Args, kwargs: KeywordArgs) -> None:
        """Record the loss of this call. An error in gpulab must not break the user's backward pass."""
        root: Any = args[0] if args else kwargs.get("tensors")
        if self._scaled is not None and root is self._scaled[0]:
            root = self._scaled[1]
        if getattr(root, "numel", None) is None or len(self._scalars) >= MOST_LOSSES:
            return
        with suppress(Exception):  # a user-defined tensor type, or a broken GPU
            if root.numel() == 1 and not in_graph_capture():  # in capture a loss has no value before the replay
                self._scalars.append((perf_counter_ns(), _copy_of(root)))

    def per_step(self, steps: Steps, origin_ns: int) -> tuple[float, ...]:
        """The mean loss of each step, NaN without one; `origin_ns`: origin of the steps' clock. Clears the losses."""
        scalars, self._scalars = self._scalars, []
        sums, counts = np.zeros(len(steps)), np.zeros(len(steps))
        times = np.array([t - origin_ns for t, _ in scalars], dtype=np.int64)
        rows = np.searchsorted(steps.start_ns, times, side="right") - 1
        for row, t_ns, (_, loss) in zip(rows, times, scalars, strict=True):
            if row >= 0 and t_ns <= steps.end_ns[row]:
                sums[row] += _value(loss)
                counts[row] += 1
        with np.errstate(invalid="ignore"):
            return tuple((sums / np.where(counts == 0, np.nan, counts)).tolist())


def _copy_of(loss: Any) -> Any:
    """The loss without its graph; cloned, at the cost of a kernel launch, only if its memory may be overwritten."""
    copy = loss.detach()
    return copy.clone() if loss.is_cuda and not _owns_memory(loss) else copy


def _owns_memory(loss: Any) -> bool:
    """Whether one of torch's own operators made the loss. A compiled module's CUDA graph overwrites its results.

    Views of such results, and results of in-place operators (`loss /= 4`), count as overwritten, too.
    """
    from torch.autograd.function import BackwardCFunction

    return loss._base is None and loss._version == 0 and not isinstance(loss.grad_fn, BackwardCFunction)


def _value(loss: Any) -> float:
    """The loss as a number; NaN if it cannot be read because its memory was freed or the GPU fails."""
    try:
        return float(loss)
    except RuntimeError:
        return math.nan


MOST_CALLS = 65_536  # the newest calls are kept, as two numbers each


class ModelInputs:
    """Counts the values in the inputs of DistributedDataParallel, else of the first module with trainable parameters.

    Only calls with gradients enabled count.
    """

    def __init__(self) -> None:
        self._calls: deque[tuple[int, int]] = deque(maxlen=MOST_CALLS)
        self._first = ExitStack()  # the hooks of that module
        self._wrapped = False  # the model is in DistributedDataParallel

    def count_first_model(self) -> None:
        """Find the first trainable module that this thread calls, and count the inputs of its calls."""
        from torch import is_grad_enabled

        def find(module: Any) -> None:
            if is_grad_enabled() and any(p.requires_grad for p in module.parameters()):
                first = weakref.ref(module)
                self._first.close()
                self._first.enter_context(
                    before_calls(type(module), "forward", lambda a, k: self._add_call(first(), a, k))
                )

        self._first.enter_context(module_calls(find, get_ident()))

    def close(self) -> None:
        """Remove these hooks when the run is over, something is compiled, or DistributedDataParallel is used."""
        self._first.close()

    def called(self, args: Args, kwargs: KeywordArgs) -> None:
        """DistributedDataParallel is called with these arguments."""
        if not self._wrapped:
            self._wrapped = True
            self._first.close()
            self._calls.clear()
        self._count(args, kwargs)

    def _add_call(self, first: Any, args: Args, kwargs: KeywordArgs) -> None:
        if first is not None and args[:1] and args[0] is first:
            self._count(args, kwargs)

    def _count(self, args: Args, kwargs: KeywordArgs) -> None:
        from torch import is_grad_enabled

        if not is_grad_enabled():
            return
        try:
            parts = arrays_in([args[1:], kwargs])  # all values: the number of rows hides how long sequences are
            count = sum(int(part.numel()) for part in parts if hasattr(part, "numel"))
        except Exception:  # a user-defined tensor type may raise; the user's step goes on
            count = 0
        self._calls.append((perf_counter_ns(), count or -1))

    def values_of(self, steps: Steps, origin_ns: int) -> Int64:
        """The number of input values in each step, -1 if unknown; empty without calls. `origin_ns` as in `per_step`."""
        if not self._calls:
            return Steps.empty().input_values
        calls = np.array(self._calls, dtype=np.int64)
        at_ns, counts = calls[:, 0] - origin_ns, calls[:, 1]
        first, after = np.searchsorted(at_ns, steps.start_ns), np.searchsorted(at_ns, steps.end_ns)
        sums, misses = (np.concatenate(([0], np.cumsum(of))) for of in (counts, counts < 0))
        whole = (after > first) & (misses[after] == misses[first])
        if len(calls) == self._calls.maxlen:  # earlier ones are gone
            whole &= steps.start_ns >= at_ns[0]
        return np.where(whole, sums[after] - sums[first], -1).astype(np.int64)
