"""Decoded trace events as columns: exact times, categories, lanes, and the arguments that gpulab uses."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal, InvalidOperation
from functools import cache, lru_cache
from itertools import count
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from gpulab.run import DEVICE_CATEGORIES, Category, Collective, Float64, Int64, MemoryEvents, UInt8
from gpulab.trace.event_decoder import (
    FLOWS,
    Args,
    DamageCount,
    Event,
    ExactInstant,
    ExactSpan,
    Instant,
    Label,
    MemoryArgs,
    Span,
    Value,
    exact_times,
)

FLOAT_EXACT_US = 2.0**43  # up to here, a float64 of microseconds resolves nanoseconds
LIMIT_NS = 1 << 61
NO_TIME = np.iinfo(np.int64).min

_CATEGORIES = {
    "cpu_op": Category.CPU_OP,
    "operator": Category.CPU_OP,
    "hpu_op": Category.CPU_OP,
    "user_annotation": Category.USER_ANNOTATION,
    "userannotation": Category.USER_ANNOTATION,
    "runtime": Category.CUDA_RUNTIME,
    "driver": Category.CUDA_DRIVER,
    "kernel": Category.KERNEL,
    "concurrent_kernel": Category.KERNEL,
    "gpu_memcpy": Category.GPU_MEMCPY,
    "memcpy": Category.GPU_MEMCPY,
    "gpu_memset": Category.GPU_MEMSET,
    "memset": Category.GPU_MEMSET,
    "cuda_sync": Category.CUDA_SYNC,
    "python_function": Category.PYTHON_FUNCTION,
    "overhead": Category.OVERHEAD,
    "gpu_user_annotation": Category.GPU_USER_ANNOTATION,
}
_LEGACY_PROCESSES = {"CPU functions": Category.CPU_OP, "CUDA functions": Category.KERNEL}  # torch.autograd.profiler
_BY_ENDING = {"_runtime": Category.CUDA_RUNTIME, "_driver": Category.CUDA_DRIVER}  # cuda_runtime, mtia_runtime, …
_DROPPED = 255
ACCELERATOR = 254  # rows with a device and a stream in a category that gpulab does not know
_ANNOTATIONS = (
    "ProfilerStep#",
    "enumerate(DataLoader)#",
    "Optimizer.step#",
    "Optimizer.zero_grad#",
    "Optimizer.zero_grad",
    "##",  # as written by DeepSpeed, TorchRec and HTA's examples: "## backward ##"
    "[",  # "[pl][profile]…", "[param|…]"
    "DistributedDataParallel.",
    "FullyShardedDataParallel.",
)
_PASSES = ("forward", "backward")  # no operator of torch has such a name
ON_DEVICE = (
    Category.KERNEL,
    Category.GPU_MEMCPY,
    Category.GPU_MEMSET,
    Category.GPU_USER_ANNOTATION,
    Category.CUDA_SYNC,
)
_ON_DEVICE = np.isin(np.arange(256), (*ON_DEVICE, ACCELERATOR))  # by category
_INT64 = np.iinfo(np.int64)

Key = tuple[Value, ...]  # process and thread, or "device", device number and stream number
Table = dict[str, npt.NDArray[Any]]


class Columns:
    """The content of a trace, collected piece by piece; names, categories and lanes are numbered across all pieces.

    Columns of spans: `start_ns` in the trace's own time, NO_TIME if missing; `duration_ns`, `name_id`, `lane_key`,
    `correlation`; `category`: Category, ACCELERATOR, or _DROPPED for rows that are not spans of the program.
    """

    def __init__(self) -> None:
        self.names: defaultdict[str, int] = defaultdict(count().__next__)
        self.lane_keys: defaultdict[Key, int] = defaultdict(count().__next__)
        self.memory: list[MemoryEvents] = []
        self.labels: list[Label] = []
        self.spans = 0
        self.events_read = 0
        self.flow_events = 0
        self.fractional = False
        self._pieces: defaultdict[str, list[npt.NDArray[Any]]] = defaultdict(list)
        self._extra: defaultdict[str, list[tuple[Int64, Float64]]] = defaultdict(list)

    def append(self, **columns: npt.NDArray[Any]) -> None:
        """Append spans."""
        for name, column in columns.items():
            self._pieces[name].append(column)
        self.spans += len(columns["start_ns"])

    def append_extra(self, rows: Int64, columns: Mapping[str, Float64]) -> None:
        """Add optional figures for some of the spans that are appended next."""
        of_all = rows + self.spans
        for name, column in columns.items():
            self._extra[name].append((of_all, column))

    def joined(self) -> Table:
        """Return all spans and remove them from here."""
        return {name: np.concatenate(self._pieces.pop(name)) for name in list(self._pieces)}

    def extra(self, order: Int64) -> dict[str, Float64]:
        """Return each optional column for the spans in this order, NaN if a span has no figure, and remove it here."""
        place = np.full(self.spans, -1, np.int32)
        place[order] = np.arange(len(order), dtype=np.int32)
        whole = {}
        for name in list(self._extra):
            rows, figures = map(np.concatenate, zip(*self._extra.pop(name), strict=True))
            at = place[rows]
            whole[name] = np.full(len(order), np.nan)
            whole[name][at[at >= 0]] = figures[at >= 0]
        return whole

    def add(self, text: bytes, events: list[Event], damage: DamageCount, where: str) -> None:
        """Add the events of one piece; `text` is the text from which they were decoded."""
        self.events_read += len(events)
        spans = [e for e in events if type(e) is Span]
        if len(spans) < len(events):
            self._add_others(text, events)
        if spans:
            self._add_spans(text, spans, damage, where)

    def _add_others(self, text: bytes, events: list[Event]) -> None:
        types = list(map(type, events))
        self.flow_events += sum(types.count(kind) for kind in FLOWS)
        if Label in types:
            self.labels += [e for e in events if type(e) is Label]
        if Instant not in types:
            return
        instants = [e for e in events if type(e) is Instant]
        at = self._times([e.ts for e in instants], lambda: exact_times(text, ExactInstant))
        memory = [i for i, e in enumerate(instants) if e.name == "[memory]" and e.args is not None and at[i] != NO_TIME]
        if memory:
            self.memory.append(memory_columns(at[memory], [instants[i].args or MemoryArgs() for i in memory]))

    def _add_spans(self, text: bytes, spans: list[Span], damage: DamageCount, where: str) -> None:
        n = len(spans)
        args = [e.args for e in spans]
        start = self._times([e.ts for e in spans], lambda: exact_times(text, ExactSpan))
        damage.note("missing ts", where, int((start == NO_TIME).sum()))
        category = np.fromiter(map(category_of, [e.cat for e in spans]), np.uint8, n)
        for i in np.flatnonzero(category == Category.UNKNOWN).tolist():
            category[i] = _category_by_place(spans[i])
        category[start == NO_TIME] = _DROPPED
        lane = np.fromiter(map(self.lane_keys.__getitem__, [(e.pid, e.tid) for e in spans]), np.int32, n)
        device = np.flatnonzero(_ON_DEVICE[category])
        of_device = [(spans[i], args[i] or Args()) for i in device.tolist()]
        lane[device] = [
            self.lane_keys["device", e.pid if a.device is None else a.device, e.tid if a.stream is None else a.stream]
            for e, a in of_device
        ]
        name_id = np.fromiter(map(self.names.__getitem__, [e.name for e in spans]), np.int32, n)
        products = [number for number in map(self.names.get, FACTORS) if number is not None]
        self.append_extra(device, extra_columns([a for _, a in of_device]))
        self.append_extra(*product_sizes(spans, np.flatnonzero(np.isin(name_id, products))))
        self.append(
            start_ns=start,
            duration_ns=_durations([e.dur for e in spans], device, damage, where),
            name_id=name_id,
            category=category,
            lane_key=lane,
            correlation=integers([None if a is None else a.correlation for a in args], 0),
        )

    def _times(self, spellings: list[Value], exact: Callable[[], list[msgspec.Raw]]) -> Int64:
        """Nanoseconds from microseconds, exactly: a float64 cannot hold the fraction of a Unix time."""
        types = set(map(type, spellings))
        if types == {int}:
            try:
                us = np.fromiter(spellings, np.int64, len(spellings))
                good = np.abs(us) < LIMIT_NS // 1000
                return np.where(good, np.where(good, us, 0) * 1000, NO_TIME)
            except OverflowError:
                pass
        value = floats(spellings)
        finite = np.abs(value[np.isfinite(value)])
        if float in types or str in types:
            self.fractional = self.fractional or bool((finite % 1).any())
            if len(finite) and finite.max() >= FLOAT_EXACT_US:
                raws = exact()
                self.fractional = self.fractional or any(b"." in bytes(r) for r in raws)
                return exact_ns(raws)
        return float_us_to_ns(value)


@cache
def category_of(name: str) -> int:
    """The category of Kineto's activity name in any spelling; _DROPPED for names that are not spans of the program."""
    folded = name.casefold().replace(" ", "_")
    by_ending = next((c for ending, c in _BY_ENDING.items() if folded.endswith(ending)), Category.UNKNOWN)
    return _DROPPED if folded == "trace" else int(_CATEGORIES.get(folded, by_ending))


def _category_by_place(span: Span) -> int:
    """The category of a span by its process or stream, if gpulab does not know its own category."""
    if isinstance(span.pid, str) and span.pid in _LEGACY_PROCESSES:
        return _LEGACY_PROCESSES[span.pid]
    args = span.args or Args()
    names_stream = args.stream_id is not None or None not in (args.device, args.stream)
    return ACCELERATOR if names_stream else Category.UNKNOWN


def is_kept(category: UInt8) -> npt.NDArray[np.bool_]:
    """Whether rows of a category belong in the record."""
    return np.asarray(category != _DROPPED)


def resolve_accelerator(category: UInt8, correlation: Int64) -> None:
    """In place: accelerator rows that a runtime call started become kernels if the trace has no other kernels."""
    calls = np.isin(category, (Category.CUDA_RUNTIME, Category.CUDA_DRIVER)) & (correlation > 0)
    rows = category == ACCELERATOR
    if not rows.any():
        return
    started = rows & np.isin(correlation, correlation[calls])
    category[rows] = Category.UNKNOWN
    if not np.isin(category, [int(c) for c in DEVICE_CATEGORIES]).any():
        category[started] = Category.KERNEL


def is_annotation(name: str) -> bool:
    """Whether the name is that of a mark that torch 1.8 to 1.12 recorded as an operator."""
    return name.startswith(_ANNOTATIONS) or name in _PASSES


def float_us_to_ns(value: Float64) -> Int64:
    """Nanoseconds; NO_TIME for values that are not times."""
    good = np.abs(np.where(np.isfinite(value), value, np.inf)) < LIMIT_NS / 1e3
    value = np.where(good, value, 0.0)
    whole = np.floor(value)
    ns = whole.astype(np.int64) * 1000 + np.rint((value - whole) * 1e3).astype(np.int64)
    return np.where(good, ns, NO_TIME)


def exact_ns(spellings: Sequence[msgspec.Raw]) -> Int64:
    """Nanoseconds from decimal microseconds as text; NO_TIME for texts that are not times."""
    texts = [bytes(r) for r in spellings]
    lengths = np.fromiter(map(len, texts), np.int64, len(texts))
    result = np.full(len(texts), NO_TIME, np.int64)
    for length in np.unique(lengths).tolist():
        rows = np.flatnonzero(lengths == length)
        of_length = texts if len(rows) == len(texts) else [texts[i] for i in rows.tolist()]
        result[rows] = _fixed_width_ns(of_length, length)
    return result


def _fixed_width_ns(texts: list[bytes], width: int) -> Int64:
    """For texts of exactly `width` characters: their digits are columns of a matrix."""
    digits = np.frombuffer(b"".join(texts), np.uint8).reshape(len(texts), width)
    dots = np.flatnonzero((digits == ord(".")).all(axis=0))
    is_digit = ((digits >= ord("0")) & (digits <= ord("9"))).all(axis=0)
    decimals = width - 1 - int(dots[0]) if len(dots) else 0
    if is_digit.sum() != width - len(dots) or len(dots) > 1 or decimals > 3 or width > 18 + len(dots):
        return np.array([_decimal_ns(t) for t in texts], np.int64)
    values = digits[:, is_digit].astype(np.int64) - ord("0")
    power = 10 ** np.arange(values.shape[1] - 1 + 3 - decimals, 2 - decimals, -1, dtype=np.int64)
    ns = values @ power
    return np.where(ns < LIMIT_NS, ns, NO_TIME)


def _decimal_ns(text: bytes) -> int:
    try:
        ns = int((Decimal(text.decode().strip('"').strip()) * 1000).to_integral_value())
    except (InvalidOperation, ValueError, OverflowError):
        return int(NO_TIME)
    return ns if -LIMIT_NS < ns < LIMIT_NS else int(NO_TIME)


def floats(values: Sequence[Value]) -> Float64:
    """Numbers in any spelling as float64; NaN for other values."""
    try:
        return np.array(values, np.float64)  # None becomes NaN, text is parsed
    except (TypeError, ValueError, OverflowError):
        return np.array([_float(v) for v in values], np.float64)


def _float(value: Value) -> float:
    try:
        return float("nan" if value is None else value)
    except (ValueError, OverflowError):
        return float("nan")


def integers(values: Sequence[Value], missing: int) -> Int64:
    """Whole numbers in any spelling as int64; `missing` for other values."""
    try:
        return np.fromiter([missing if v is None else v for v in values], np.int64, len(values))
    except (TypeError, ValueError, OverflowError):
        return np.array([integer(v, missing) for v in values], np.int64)


def integer(value: Value, missing: int) -> int:
    """A whole number in any spelling that fits into 64 bits; else `missing`."""
    try:
        whole = int(value) if isinstance(value, int | float) else int(str(value), 0)
    except (ValueError, OverflowError):
        return missing
    return whole if _INT64.min <= whole <= _INT64.max else missing


def _durations(spellings: list[Value], device: Int64, damage: DamageCount, where: str) -> Int64:
    """Durations in ns. A missing or negative duration becomes 0 and is noted, separately for rows of the `device`."""
    types = set(map(type, spellings))
    ns = float_us_to_ns(floats(spellings))
    if not types <= {int, float}:
        damage.note("dur as text", where, sum(isinstance(d, str) for d in spellings))
    for name, broken in (("missing dur", ns == NO_TIME), ("negative dur", (ns < 0) & (ns != NO_TIME))):
        if broken.any():
            on_device = int(broken[device].sum())
            damage.note(f"{name} on the device", where, on_device)
            damage.note(name, where, int(broken.sum()) - on_device)
    return np.maximum(ns, 0)


def extra_columns(args: list[Args]) -> dict[str, Float64]:
    """One value per row of a device, NaN if the trace has none; columns without any value are left out."""
    columns = {
        "bytes": [a.bytes for a in args],
        "blocks_per_sm": [a.blocks_per_sm for a in args],
        "occupancy_pct": [a.occupancy for a in args],
        **collective_columns(args),
    }
    return {name: floats(values) for name, values in columns.items() if values.count(None) < len(values)}


def memory_columns(t_ns: Int64, args: Sequence[MemoryArgs]) -> MemoryEvents:
    """The content of `[memory]` events at these times."""
    host = integers([a.device_type for a in args], 0) == 0
    device = np.where(host, -1, integers([a.device_id for a in args], -1))
    return MemoryEvents(
        t_ns=t_ns,
        bytes=integers([a.bytes for a in args], 0),
        address=integers([_wrapped(a.address) for a in args], 0),
        total_allocated_bytes=integers([a.allocated for a in args], -1),
        total_reserved_bytes=integers([a.reserved for a in args], -1),
        device_index=np.clip(device, -1, 1 << 20).astype(np.int32),
    )


def _wrapped(address: Value) -> Value:
    """An unsigned pointer as int64: the upper half wraps to negative numbers, the 64 bits stay the same."""
    return address - (1 << 64) if isinstance(address, int) and (1 << 63) <= address < (1 << 64) else address


COLUMNS = ("product_m", "product_n", "product_k")
# Which of an operator's inputs are the two factors.
FACTORS = {
    "aten::mm": (0, 1),
    "aten::bmm": (0, 1),
    "aten::addmm": (1, 2),
    "aten::baddbmm": (1, 2),
    "aten::_addmm_activation": (1, 2),
    "aten::_scaled_mm": (0, 1),
}


_dims: msgspec.json.Decoder[list[object]] = msgspec.json.Decoder(list)


def product_sizes(spans: Sequence[Span], products: npt.NDArray[np.intp]) -> tuple[Int64, dict[str, Float64]]:
    """The spans that are products of two matrices of known shapes, and their m, n and k: [m, k] by [k, n].

    `products` are the rows whose names are among FACTORS.
    """
    sizes = {}
    for i in products.tolist():
        args = spans[i].args
        if args is not None and (size := _sizes(bytes(args.input_dims), FACTORS[spans[i].name])) is not None:
            sizes[i] = size
    table = np.array([*sizes.values()], dtype=np.float64).reshape(-1, 3)
    return np.array([*sizes], np.int64), {name: table[:, i] for i, name in enumerate(COLUMNS)} if sizes else {}


@lru_cache(maxsize=4096)
def _sizes(spellings: bytes, factors: tuple[int, int]) -> tuple[int, int, int] | None:
    """The sizes m, n and k; None if the shapes are not those of a product: another spelling, or an odd file."""
    try:
        dims = _dims.decode(spellings)
    except (msgspec.MsgspecError, RecursionError):
        return None
    if len(dims) <= factors[1]:
        return None
    a, b = _shape(dims[factors[0]]), _shape(dims[factors[1]])
    if a is None or b is None or a[-1] != b[-2]:
        return None
    return a[-2], b[-1], a[-1]


def _shape(dims: object) -> list[int] | None:
    """The shape of a matrix or of a batch of matrices."""
    if not isinstance(dims, list) or len(dims) < 2:
        return None
    return dims if all(type(n) is int and 0 < n < 1 << 53 for n in dims) else None


# Bytes of an element, by the c10 name of its type.
ELEMENT_BYTES = {
    **dict.fromkeys(("Byte", "Char", "Bool", "Float8_e4m3fn", "Float8_e5m2", "Float8_e4m3fnuz", "Float8_e5m2fnuz"), 1),
    **dict.fromkeys(("Short", "UInt16", "Half", "BFloat16"), 2),
    **dict.fromkeys(("Int", "UInt32", "Float", "ComplexHalf"), 4),
    **dict.fromkeys(("Long", "UInt64", "Double", "ComplexFloat"), 8),
    "ComplexDouble": 16,
}
# In the spellings of PyTorch's process groups: "_allgather_base", "all_gather_into_tensor_coalesced", "alltoallv", …
_KINDS = (
    ("allreduce", Collective.ALL_REDUCE),
    ("reducescatter", Collective.REDUCE_SCATTER),
    ("allgather", Collective.ALL_GATHER),
    ("alltoall", Collective.ALL_TO_ALL),
    ("broadcast", Collective.BROADCAST),
    ("reduce", Collective.REDUCE),
    ("gather", Collective.GATHER),
    ("scatter", Collective.SCATTER),
    ("send", Collective.SEND),
    ("recv", Collective.RECEIVE),
)


def collective_columns(args: Sequence[Args]) -> dict[str, list[Value]]:
    """One value per row, None if the row is not a collective or the trace has no value.

    The size, in bytes, is that of nccl-tests: the larger of input and output.
    """
    if all(a.collective is None for a in args):
        return {}
    exchanges = [Args() if a.collective is None else a for a in args]
    kinds = [_kind(a.collective) for a in exchanges]
    return {
        "collective": [None if kind is None else int(kind) for kind in kinds],
        "message_bytes": [None if k is None else _message_bytes(a) for a, k in zip(exchanges, kinds, strict=True)],
        "group_size": [a.group_size for a in exchanges],
        "process_group": [_number(a.process_group) for a in exchanges],
        "collective_sequence": [a.sequence for a in exchanges],
    }


def _kind(name: Value) -> Collective | None:
    if not isinstance(name, str):
        return None
    spelled = name.lower().replace("_", "")
    return next((kind for part, kind in _KINDS if part in spelled), None)


def _message_bytes(args: Args) -> float | None:
    width = ELEMENT_BYTES.get(str(args.element_type))
    counts = [n for n in (args.elements_in, args.elements_out) if isinstance(n, int | float) and math.isfinite(n)]
    return float(max(counts)) * width if width is not None and counts and max(counts) > 0 else None


def _number(name: Value) -> int | None:
    """The number of a process group (PyTorch numbers its groups); None for other names."""
    return int(name) if isinstance(name, str) and name.isascii() and name.isdecimal() and len(name) < 10 else None
