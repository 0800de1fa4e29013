"""Lesson 06, memory: what fills it, who holds it, what fits, a model of an allocator, convolutions with fewer FLOPs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from msgspec import Struct, field
from msgspec.structs import replace
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from gpulab.analysis.memory_peak import PeakMemory, ledgers_of, memory_peak
from gpulab.api.memory import fit
from gpulab.api.profile import profile
from gpulab.devices.own_processes import marked
from gpulab.formatting import duration, size
from gpulab.lessons.check import (
    Checked,
    Mistakes,
    NotMeasured,
    Table,
    exercise,
    fault,
    right,
    seconds_of,
    time_pairs,
    wrong,
)
from gpulab.lessons.digits import DigitsInMemory
from gpulab.lessons.figures import A_MODEL, BLUE, Row, draw_rows, stacked
from gpulab.lessons.guesses import Question, share, times
from gpulab.lessons.measured import latest_experiment, latest_run, notes
from gpulab.lessons.ranks import saved_activations
from gpulab.lessons.training import default_device, forward_and_backward
from gpulab.memory.room import status_bytes
from gpulab.memory.survey import notebook, survey
from gpulab.memory_record import Holding
from gpulab.run import Run
from gpulab.tuning.code import Code
from gpulab.tuning.fit import Probe, Prober, line_through, prove_cure
from gpulab.user_code import CELL_WITHOUT_IPYTHON, PACKAGE_FOLDER
from gpulab.views.memory import Cured
from gpulab.views.report.memory_sections import COLOURS, title_of
from gpulab.views.waiting import waiting

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Block(nn.Module):
    """A residual block of an MLP."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.layers(x)
        return out


def deep_network(width: int = 128, depth: int = 8) -> nn.Sequential:
    """64 pixels → 10 classes, with `depth` blocks between them."""
    return nn.Sequential(nn.Linear(64, width), *(Block(width) for _ in range(depth)), nn.Linear(width, 10))


# -- what fills it -----------------------------------------------------------------------------------------------------


def activation_bytes(model: nn.Module, forward: Callable[[], Tensor]) -> tuple[int, Tensor]:
    """The bytes that autograd saves in one forward pass, each piece of memory once, without weights; and its result."""
    with saved_activations(model) as saved:
        result = forward()
    return saved.now_bytes, result


def _peak(run: Run) -> PeakMemory:
    """What filled the memory of a run at its peak. Raises NotMeasured if its ledger is missing."""
    peak = memory_peak(run)
    if peak is None:
        raise NotMeasured("That run has no ledger of its memory: run its cell again, for three steps at least.")
    return peak


def _activations_share() -> float:
    peak = _peak(latest_run("as-written"))
    return peak.share(peak.ledger.of("saved activations"))


def _activations(name: str) -> dict[str, int]:
    """The most bytes of activations in a ledger of each side of a comparison. Raises NotMeasured."""
    runs = {side.label: side.facts.run for side in latest_experiment(name).sides if side.facts is not None}
    counts = {label: [ledger.of("saved activations") for ledger in ledgers_of(run)] for label, run in runs.items()}
    return {label: max(each, default=0) for label, each in counts.items()}


def _kept_share() -> float:
    before, after = _activations("checkpointing").values()
    return after / max(1, before)


@notes
def activations_table(name: str) -> Table:
    """What each side of a comparison keeps for its backward pass, from its ledger."""
    return Table.of(("", "saved activations"), [(label, size(count)) for label, count in _activations(name).items()])


def _with_batch_size(name: str, count: int) -> str:
    """The text of that run's cell with another batch size. Raises NotMeasured."""
    return re.sub(r"batch_size = \d+", f"batch_size = {count}", latest_run(name).code)


@notes
def draw_peaks(name: str, batch_sizes: Sequence[int]) -> Figure:
    """What fills the memory at the peak with each batch size: bars, from three steps each of that run's cell.

    The cell runs as if it was run again: the notebook's variables are then those of the last batch size.
    """
    peaks = []
    with waiting("running the cell with each batch size"):
        for count in batch_sizes:
            code = compile(_with_batch_size(name, count), CELL_WITHOUT_IPYTHON, "exec")
            with profile(f"batch of {count}", steps=3, trace=False, live=False, save=False, show=False) as profiled:
                exec(code, notebook()[1])
            peaks.append(_peak(profiled.run))
    kinds = [kind for kind in COLOURS if any(peak.ledger.of(kind) for peak in peaks)]
    rows = [
        Row(f"batch of {count}", stacked((peak.ledger.of(kind) / 2**20, COLOURS[kind]) for kind in kinds))
        for count, peak in zip(batch_sizes, peaks, strict=True)
    ]
    legend = {title_of(kind): COLOURS[kind] for kind in kinds}
    return draw_rows(rows, "what fills the memory at its peak", "MiB, measured", legend=legend)


# -- a batch that does not fit -----------------------------------------------------------------------------------------

_CHILD = "from gpulab.lessons.memory import run_in_little_memory as run; run(*__import__('json').load(open(0)))"
_IMPORTS = "import torch; from torch.nn import functional; from torch.utils.data import DataLoader, TensorDataset"
_MALLOC = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}  # glibc gives freed tensors back at once
LONGEST_S = 120.0


@notes
def fit_in_little_memory(name: str, batch_size: int, mebibytes: int) -> Table:
    """Fit the cell of that run, with that batch size, in a process of its own that may take so much more memory."""
    words, request = [sys.executable, "-c", _CHILD], json.dumps([_with_batch_size(name, batch_size), mebibytes])
    path = os.pathsep.join(filter(None, (str(PACKAGE_FOLDER.parent), os.environ.get("PYTHONPATH"))))
    environ = {**os.environ, **_MALLOC, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    try:
        with waiting("searching in a process with little memory"):
            done = subprocess.run(
                words,
                input=request,
                capture_output=True,
                text=True,
                timeout=LONGEST_S,
                env=marked(environ),
            )
    except subprocess.TimeoutExpired:
        raise NotMeasured(f"The process did not end within {LONGEST_S:g} seconds.") from None
    if done.returncode:
        why = (done.stderr.strip().splitlines() or ["it was killed"])[-1]
        raise NotMeasured(f"The process with little memory ended early: {why}")
    return Table(tuple(line for line in done.stdout.rstrip().splitlines() if not line.startswith("The rest: ")))


def run_in_little_memory(code: str, mebibytes: int) -> None:
    """In a child process: limit its memory, fit the cell's batch size, and try the present one with checkpointing."""
    import resource

    names = {"__name__": "__main__", "digits": DigitsInMemory(), "device": torch.device("cpu")}
    exec(_IMPORTS, names)
    cell = Code.of_text(code, {**names, "deep_network": deep_network})
    prober, probes = Prober(cell), list[Probe]()
    prober.within(lambda: probes.append(prober.run({"batch_size": 16, "checkpointing": True})))  # imports
    used = status_bytes("VmSize")
    if used is None:
        sys.exit("this system does not say how much memory a process has")
    resource.setrlimit(resource.RLIMIT_AS, (used + (mebibytes << 20), resource.RLIM_INFINITY))
    fitted = fit(cell, show=False)
    prober.within(lambda: probes.append(prober.run({})))
    if probes[-1].fits:
        sys.exit("the batch fits here as it is")
    print(fitted.text())
    prober.within(lambda: print(Cured(fitted.result, prove_cure(prober, {"checkpointing": True}), None).text()))


# -- the allocator, a model --------------------------------------------------------------------------------------------


class Allocator(Struct):
    """A model of a caching allocator: segments that it got from the device, cut into blocks, first fit.

    Sizes in MiB. `split`: a free block may be cut for a smaller request, as PyTorch does.
    """

    capacity: int = 100
    split: bool = True
    blocks: list[tuple[int, str]] = field(default_factory=list)  # size, name; "" is free
    fault: str = ""

    @property
    def reserved(self) -> int:
        return sum(size for size, _ in self.blocks)

    @property
    def allocated(self) -> int:
        return sum(size for size, name in self.blocks if name)

    def allocate(self, name: str, size: int) -> bool:
        """Take the first free block that is large enough, else memory of the device; False if neither exists."""
        for i, (free, owner) in enumerate(self.blocks):
            if not owner and free >= size:
                rest = [(free - size, "")] if self.split and free > size else []
                block_size = size if self.split else free
                self.blocks[i : i + 1] = [(block_size, name), *rest]
                return True
        if self.reserved + size > self.capacity:
            largest = max((free for free, owner in self.blocks if not owner), default=0)
            free_bytes = self.capacity - self.allocated
            self.fault = f"out of memory: {size} wanted, {free_bytes} free in all, {largest} in one piece"
            return False
        self.blocks.append((size, name))
        return True

    def free(self, name: str) -> None:
        """Give a block back to the cache; free neighbours become one."""
        merged: list[tuple[int, str]] = []
        for amount, owner in ((s, "" if o == name else o) for s, o in self.blocks):
            if merged and not merged[-1][1] and not owner:
                merged[-1] = (merged[-1][0] + amount, "")
            else:
                merged.append((amount, owner))
        self.blocks = merged


def fragmented() -> list[Allocator]:
    """The stages of batches with changing sizes: in the end enough memory is free, but no piece is large enough."""
    full = Allocator()
    for name, amount in (("A", 20), ("B", 15), ("C", 25), ("D", 15), ("E", 20)):
        full.allocate(name, amount)
    holes = deepcopy(full)
    for name in ("A", "C", "E"):
        holes.free(name)
    failing = deepcopy(holes)
    failing.allocate("F", 40)
    return [full, holes, failing]


def draw_allocators(stages: Iterable[Allocator]) -> Figure:
    """The blocks of each stage in a row; it says that it is a model."""
    rows = []
    for number, allocator in enumerate(stages, start=1):
        bars = stacked((amount, BLUE if name else "#E3E3E3") for amount, name in allocator.blocks)
        labelled = [
            replace(bar, label=f"{name or 'free'} {amount}", ink="white" if name else "black")
            for bar, (amount, name) in zip(bars, allocator.blocks, strict=True)
        ]
        rows.append(Row(f"stage {number}", labelled))
        rows += [Row("", (), allocator.fault)] if allocator.fault else []
    figure = draw_rows(rows, "blocks of a caching allocator", "MiB", note=A_MODEL)
    figure.axes[0].set_xlim(0, 100)
    return figure


# -- fewer FLOPs -------------------------------------------------------------------------------------------------------


def convolutions(channels: int = 64) -> dict[str, nn.Module]:
    """Three convolutions with `channels`: ordinary, depthwise-separable, inverted residual (expanded 4 times)."""
    wide = 4 * channels
    return {
        "ordinary": nn.Conv2d(channels, channels, 3, padding=1),
        "depthwise-separable": nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1, groups=channels), nn.Conv2d(channels, channels, 1)
        ),
        "inverted residual": nn.Sequential(
            nn.Conv2d(channels, wide, 1),
            nn.ReLU6(),
            nn.Conv2d(wide, wide, 3, padding=1, groups=wide),
            nn.ReLU6(),
            nn.Conv2d(wide, channels, 1),
        ),
    }


def convolution_table(channels: int = 64, pixels: int = 32, batch: int = 8) -> Table:
    """Parameters, FLOP, kept bytes and time of a forward and backward pass of each convolution, measured in turn."""
    device = default_device()
    x = torch.randn(batch, channels, pixels, pixels, device=device)
    modules = {name: module.to(device) for name, module in convolutions(channels).items()}
    with waiting("measuring three kinds of convolution"):
        rows = [_convolution_row(name, module, modules["ordinary"], x) for name, module in modules.items()]
    head = ("convolution", "parameters", "MFLOP", "kept", "time", "against the ordinary one")
    return Table.of(head, rows)


def _convolution_row(name: str, module: nn.Module, ordinary: nn.Module, x: Tensor) -> tuple[str, ...]:
    parameters = sum(p.numel() for p in module.parameters())
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        module(x)
    saved, _ = activation_bytes(module, lambda: module(x).sum())
    before, after = (seconds_of(partial(forward_and_backward, m, x)) for m in (ordinary, module))
    speed = time_pairs(before, after, pairs=5, budget_s=6.0)
    words = "" if name == "ordinary" else speed.words
    mega = counter.get_total_flops() / 1e6
    return name, f"{parameters:,}", f"{mega:.0f}", size(saved), duration(1e6 * speed.after_s), words


# -- the exercises -----------------------------------------------------------------------------------------------------


@exercise("Put the owner's name in place of the dots, let go of it and of the outputs, then run both cells again.")
def check_free(owner: Any) -> Checked:
    """Whether `owner` is the name that grows with each run, and neither it nor an output holds memory any more."""
    account = latest_run("watched").memory_account
    growth = account and (account.rerun or next(iter(account.growth), None))
    if not account or not growth:
        raise NotMeasured("The latest run 'watched' shows no growth: run its cell three times.")
    name = re.split(r"[\[. ]", growth.owner)[0]
    if owner != name:
        return wrong(f"It is not {owner!r}: the finding says which name grows with each run, and it is a text.")
    before = _bytes_of(rf"{name}\b", account.ledgers[-1].holdings)
    rows = [row for rows in survey(*notebook()).owners.values() for row in rows]
    cures = {name: (rf"{name}\b", f"del {name}"), "Out": (r"(Out|_+\d*)\b", "%gpulab memory --free out")}
    for what, (owners, cure) in cures.items():
        if (held := _bytes_of(owners, rows)) > 1_000_000:
            return wrong(f"{what} still holds {size(held)}: {cure}. Look again with %gpulab memory.")
    left = sum(row.bytes for row in rows)
    return right(f"{name} held {size(before)} in the last run and holds nothing now; {size(left)} of tensors are left.")


def _bytes_of(owners: str, rows: Iterable[Holding]) -> int:
    return sum(row.bytes for row in rows if re.match(owners, row.owner))


def _largest(budget: float, first: tuple[int, float], second: tuple[int, float]) -> int:
    predicted = line_through({first[0]: int(first[1]), second[0]: int(second[1])}).largest(budget)
    return predicted[0] if predicted is not None else 0


LARGEST_MISTAKES: Mistakes = (
    ("Memory is not proportional to the batch: m0 is there without any sample.", lambda m, a, b: m * b[0] // b[1]),
    ("m0 is there, too: take it from the budget first.", lambda m, a, b: m * (b[0] - a[0]) // (b[1] - a[1])),
    ("So many fit beside the first batch.", lambda m, a, b: (m - a[1]) * (b[0] - a[0]) // (b[1] - a[1])),
    ("One sample more than fits: round down.", lambda m, a, b: _largest(m, a, b) + 1),
)


@exercise()
def check_largest(largest: Any) -> Checked:
    """Whether `largest(budget, first, second)` is the batch at which m0 + m1·B reaches the budget, rounded down."""
    cases = [(60e6, (64, 20e6), (256, 32e6)), (100.1e6, (8, 11e6), (32, 11.7e6)), (16e9, (16, 6e9), (48, 9.5e9))]
    hint = fault(
        largest,
        _largest,
        cases,
        LARGEST_MISTAKES,
        otherwise="m1 is the bytes of one sample, from the difference; then m0; then (budget - m0) / m1, rounded down.",
        name="largest",
    )
    return wrong(hint) if hint else right("m1 from the difference, m0 from the rest: %gpulab fit does the same.")


QUESTIONS: Mapping[str, Question] = {
    "activations": share(
        "What share of all tensors at the peak are saved activations?",
        _activations_share,
        "of all tensors at the peak are saved activations",
    ),
    "kept": share(
        "What share of the activations does a step still keep with checkpoints?",
        _kept_share,
        "of the activations are kept with checkpoints",
    ),
    "checkpointing": times(
        "What speedup does checkpointing give? (0.5: 2× slower)", "checkpointing", "with checkpointing"
    ),
    "copies": times("What speedup does dropping the needless copies give?", "copies", "without needless copies"),
}
