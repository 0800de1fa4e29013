"""What is read of torch at a few early backward passes: what is switched on, what is computed and for whom.

A look takes at most 20 milliseconds, or a hundredth of a step that is longer than two seconds. It keeps names
and numbers, and parameters only weakly. What fails in it tells nothing.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from time import perf_counter_ns
from typing import Any
from zlib import crc32

import numpy as np
from msgspec import Struct, field

from gpulab.capture.loader_facts import arrays_in
from gpulab.capture.stack_sampler import ThreadSamples
from gpulab.devices.gpus import in_graph_capture
from gpulab.run import BackwardPass, DenseGradient, Steps, TrainingFacts

EARLY, LATE = range(4, 9), range(16, 20)  # backward passes; ours: those of a step or two, and of one 12 passes later
LEAST_NS, LEAST_FRACTION = 20_000_000, 0.01
FEWEST_LOOKS = 40  # ours: of fewer a share is chance
_VALUES = 16
_SAMPLED = 8  # parameters whose values are compared, ours: no code changes only others by hand
_ROWS, _LARGE = 512, 10_000  # of a table: that are looked at, and from how many on, ours
_ROUNDS = 4  # of all workers, whose batches are compared
_CHECKED = 4_096  # bytes

CALLS: Mapping[str, re.Pattern[str]] = {  # file and function that a switch, or a default, makes torch call
    "anomaly_detection": re.compile(r"[/\\]torch[/\\]fx[/\\]traceback\.py:.*format_stack$"),
    "argument_validation": re.compile(
        r"[/\\]torch[/\\]distributions[/\\](constraints\.py:|distribution\.py:Distribution\.(__init__|_validate_sample)$)"
    ),
    "recomputation": re.compile(
        r"[/\\]torch[/\\]utils[/\\]checkpoint\.py:(.*recompute_fn|CheckpointFunction\.backward)$"
    ),
}
_ENGINE = re.compile(r"[/\\]torch[/\\]autograd[/\\]")
_SEQUENCES = 1 << 60  # of nodes; a leaf has none
_PADDED_INDICES = 1_000_000  # more are not compared, ours


class _Look(Struct):
    """A graph. `nodes`: when made, name, positions of what each passes gradients to; `leaves`: identities by position.

    `versions` and `values` are of parameters that no optimizer was known to hold, the values of some; `dropped` are
    leaves whose gradient was gone before their optimizer had stepped.
    """

    nodes: list[tuple[int, str, list[int]]]
    leaves: dict[int, int]
    biases: set[int]
    versions: dict[int, int]
    values: dict[int, Any]
    dropped: set[int] = field(default_factory=set)


class TrainingFactsReader:
    """Of the loop on the thread that it is called on, as long as it wants to hear; of optimizers that are not known."""

    def __init__(self) -> None:
        self.wants_passes = self.wants_batches = True
        self.differentiates_twice = False
        self.optimizers: dict[int, tuple[int, int]] = {}  # their groups, and elements of all parameters
        self._count = self._newest_ns = 0  # backward passes
        self._looks: list[_Look] = []
        self._is_whole = True  # each of them: of two passes of a step that look the same one alone misleads
        self._leaves: dict[int, Callable[[], Any]] = {}  # of the newest look, weakly
        self._changed: list[Any] = []
        self._evaluated: set[int] = set()  # by the passes looked at
        self._again: list[tuple[int, int]] = []  # nodes of a pass that an earlier one had evaluated, and all
        self._is_on: list[tuple[bool, bool]] = []  # anomaly detection, a profiler
        self._padding: list[Any] = []  # columns of indices looked up, all in all rows the same
        self._batch_nodes: list[int] = []
        self._holders: dict[int, int] = {}  # of parameters, their optimizer
        self._stepped: set[int] = set()  # since the newest look
        self._tables: list[Callable[[], Any]] = []
        self._dense: dict[int, list[tuple[int, Any, float]]] = {}
        self._float64: list[float] = []
        self._emulated: list[float] = []
        self._iterator: Callable[[], Any] = object
        self._workers = 0
        self._sums: list[list[int]] = []

    def backward(self, root: Any) -> None:
        """A backward pass from `root` (a tensor or several) is about to begin."""
        self._count += 1
        began_ns, before_ns = perf_counter_ns(), self._newest_ns
        self._newest_ns = began_ns
        if self._count == LATE[-1]:
            self.wants_passes, self.wants_batches = False, self._workers > 1
        if self._count not in EARLY and self._count not in LATE:
            return
        with suppress(Exception):  # a tensor type of the user's may refuse anything
            if not in_graph_capture():
                self._look(root, began_ns + max(LEAST_NS, int(LEAST_FRACTION * (began_ns - before_ns))))

    def step(self, optimizer: Any) -> None:
        """An optimizer is about to step."""
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
        """A loader has given this."""
        if len(self._batch_nodes) < _ROUNDS:
            with suppress(Exception):
                computed = [part for part in arrays_in(batch) if getattr(part, "grad_fn", None) is not None]
                nodes, _, is_whole, _ = _walked(computed, perf_counter_ns() + LEAST_NS)
                self._batch_nodes.append(len(nodes) if is_whole else 0)
        if self._iterator() is not iterator:
            self._iterator, workers = weakref.ref(iterator), getattr(iterator, "_num_workers", 0)
            self._workers = workers if getattr(iterator, "_dataset_kind", 0) == 1 else 0  # an IterableDataset
            self._sums += [[]] if self._workers > 1 else []
        if self._workers > 1:
            with suppress(Exception):
                self._sums[-1].append(_sum_of(batch))
            self.wants_batches = len(self._sums[-1]) < _ROUNDS * self._workers

    def _look(self, root: Any, until_ns: int) -> None:
        import torch

        self._judge_gradients()
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
            return  # among ranks, what is computed with stands for what an optimizer holds
        loose = [p for p in leaves.values() if id(p) not in self._holders and isinstance(p, torch.nn.Parameter)]
        look = _Look(
            nodes,
            leaves={i: id(p) for i, p in leaves.items()},
            biases={i for i, p in leaves.items() if p.dim() < 2},
            versions={id(p): p._version for p in loose},
            values={id(p): some_values(p) for p in loose[:: max(1, len(loose) // _SAMPLED)]},
        )
        for early in self._looks if late else ():
            self._changed += [early.versions[i] != v for i, v in look.versions.items() if i in early.versions]
            self._changed += [(early.values[i] != v).any() for i, v in look.values.items() if i in early.values]
        if not late:
            self._looks.append(look)
            self._stepped.clear()
            self._leaves = {i: weakref.ref(p) for i, p in leaves.items()}
            wide = sum(p.numel() for p in leaves.values() if p.dtype is torch.float64)
            self._float64.append(wide / sum(p.numel() for p in leaves.values()))
            emulated = sum(p.numel() for p in leaves.values() if _is_emulated(p))
            self._emulated.append(emulated / sum(p.numel() for p in leaves.values()))
            tables = {i for _, name, to in nodes if name.startswith("Embedding") for i in to if i in leaves}
            self._tables = [weakref.ref(leaves[i]) for i in tables if len(leaves[i]) >= _LARGE]

    def _judge_gradients(self) -> None:
        """What has become of the gradients of the pass before: gone, while another optimizer has stepped?"""
        leaves, self._leaves = self._leaves, {}
        for i, leaf in leaves.items() if self._stepped else ():
            holder = self._holders.get(self._looks[-1].leaves[i])
            if holder and holder not in self._stepped and leaf().grad is None:
                self._looks[-1].dropped.add(i)

    def finish(self, looks: ThreadSamples | None, steps: Steps, origin_ns: int) -> TrainingFacts | None:
        """All that was read, and what `looks` show from the first step to the last; None without a pass, or a batch."""
        try:
            passes, unheld = self._passes()
            return TrainingFacts(
                anomaly_detection=bool(self._is_on) and all(anomaly for anomaly, _ in self._is_on),
                profiled=len(self._is_on) > len(EARLY) and all(profiler for _, profiler in self._is_on),
                calls=calls_in(looks, steps, origin_ns),
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
        except Exception:  # a GPU whose error stays
            return None

    def _passes(self) -> tuple[tuple[BackwardPass, ...], bool]:
        """Those that compute what nobody uses, each kind once, with the mean of it; whether no optimizer holds it."""
        unchanged = bool(self._changed) and not any(self._changed) and bool(self._holders)
        unused: dict[tuple[str, ...], list[list[float]]] = {}  # two passes of a step may look the same
        unheld = False
        for look in self._looks if self._is_whole else ():
            loose = {i for i, p in look.leaves.items() if unchanged and p in look.versions and p not in self._holders}
            unheld |= bool(loose)
            names, shares = _unused(look, look.dropped | loose)
            unused.setdefault(names, []).append(shares)
        means = {names: np.mean(rows, axis=0).tolist() for names, rows in unused.items()}
        return tuple(BackwardPass(names, tuple(s)) for names, s in means.items() if any(s)), unheld


def calls_in(looks: ThreadSamples | None, steps: Steps, origin_ns: int) -> dict[str, float]:
    """Of the looks from the first step to the last the share below each of `CALLS`; empty of too few."""
    if looks is None or not len(steps):
        return {}
    at_ns = np.array(looks.t_ns, np.int64) - origin_ns
    numbers = np.array(looks.stack, np.int64)[(at_ns >= steps.start_ns[0]) & (at_ns <= steps.end_ns[-1])]
    if len(numbers) < FEWEST_LOOKS:
        return {}
    names = []
    for stack in looks.stacks:  # within a backward pass only what it calls
        engine = next((i for i, spot in enumerate(stack) if _ENGINE.search(spot[0])), len(stack))
        names.append([f"{file}:{function}" for file, _, function in stack[:engine]])
    below = {call: np.array([any(map(pattern.search, stack)) for stack in names]) for call, pattern in CALLS.items()}
    return {call: float(rows[numbers].mean()) for call, rows in below.items() if rows[numbers].any()}


def graph_of(root: Any) -> Iterator[tuple[Any, list[int]]]:
    """The nodes of autograd's graph from `root` (a tensor or several) on, breadth first and each once.

    With the positions in this order of those that it passes gradients to.
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
    """The nodes as `_Look` has them, until that time; the leaves; whether that is all; lookups."""
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


def _unused(look: _Look, dead: set[int]) -> tuple[tuple[str, ...], list[float]]:
    """The nodes but leaves as autograd evaluates them, the latest made first, and of each what only `dead` leaves get.

    A bias costs next to nothing and does not count beside a weight.
    """
    order = sorted((i for i in range(len(look.nodes)) if i not in look.leaves), key=lambda i: -look.nodes[i][0])
    share = dict.fromkeys(dead, 1.0)
    for i in reversed(order):  # what a node passes gradients to was made before it
        to = [j for j in look.nodes[i][2] if j not in look.biases] or look.nodes[i][2]
        share[i] = sum(share.get(j, 0.0) == 1.0 for j in to) / max(1, len(to))
    return tuple(look.nodes[i][1] for i in order), [share[i] for i in order]


def _copies(sums: list[int], workers: int) -> int:
    """How many workers gave each batch: 1, unless all gave the same in each round, and another in the next."""
    rounds = [sums[i : i + workers] for i in range(0, len(sums) - workers + 1, workers)] if workers > 1 else []
    alike = len(rounds) > 1 and all(len(set(r)) == 1 for r in rounds) and len({r[0] for r in rounds}) == len(rounds)
    return workers if alike else 1


def _is_emulated(parameter: Any) -> bool:
    """Whether this CPU has no instructions for it."""
    import torch

    able = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}
    name = "" if parameter.is_cuda else able.get(parameter.dtype, "")
    return bool(name) and not getattr(torch.ops.mkldnn, name)()


def _is_the_same(indices: Any) -> Any:
    """Of each column whether all rows hold there what the first row begins or ends with; None: unknown."""
    if indices.dim() != 2 or not 2 <= len(indices) <= indices.numel() <= _PADDED_INDICES:
        return None
    same = [(indices == value).all(0) for value in (indices[0, 0], indices[0, -1])]
    return same[0] | same[1]


def _padding(columns: Sequence[Any]) -> float:
    """The least share of columns that are the same in all rows; what is the same in all columns is no text."""
    shares = [float(c.float().mean()) for c in columns if c is not None]
    return min((share for share in shares if share < 1), default=0.0)


def _ratio(counts: Sequence[tuple[int, int]]) -> float:
    return sum(part for part, _ in counts) / max(1, sum(whole for _, whole in counts))


def _sum_of(batch: Any) -> int:
    """Of the first bytes of its first tensor. Raises where that has none in the host's memory."""
    first = next(arrays_in(batch))
    return 0 if first.is_cuda else crc32(first.reshape(-1)[:_CHECKED].numpy().tobytes()[:_CHECKED])


def some_values(leaf: Any) -> Any:
    """A few of them, from all over the tensor: one row of an embedding may stay as it is."""
    flat = leaf.detach().reshape(-1)
    return flat[:: max(1, len(flat) // _VALUES)].clone()
