"""The record: one measured execution, frozen and columnar. No I/O, no conclusions.

Capture and trace readers produce a `Run`; analysis and views read it.

Clock: every `*_ns` column counts nanoseconds since the start of the run (`time.perf_counter_ns` based, one clock
for steps, samples and timeline). A reader that cannot align two sources on one clock says so in `Run.missing`.
"""

from __future__ import annotations

from enum import IntEnum, IntFlag
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import numpy.typing as npt
from msgspec import Struct, field
from msgspec.structs import asdict

from gpulab.formatting import duration, plural
from gpulab.memory_record import MemoryAccount

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

SCHEMA = 2

Int64 = npt.NDArray[np.int64]
Int32 = npt.NDArray[np.int32]
UInt8 = npt.NDArray[np.uint8]
Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]


class Phase(IntEnum):
    """The phase of the capture in which a step ran."""

    WARMUP = 0
    MEASURED = 1
    TRACED = 2


class StepFlag(IntFlag):
    """Why a step differs from the others."""

    FIRST = 1
    LAST = 2
    EPOCH_START = 4
    PROFILER_EDGE = 8  # the profiler started or stopped inside this step
    COMPILE = 16
    PARTIAL = 32  # ended by an exception, an interrupt or the end of the cell


class Category(IntEnum):
    """Kineto's own activity names; old upper-case spellings are translated by the reader."""

    UNKNOWN = 0
    CPU_OP = 1
    USER_ANNOTATION = 2
    CUDA_RUNTIME = 3
    CUDA_DRIVER = 4
    KERNEL = 5
    GPU_MEMCPY = 6
    GPU_MEMSET = 7
    CUDA_SYNC = 8
    PYTHON_FUNCTION = 9
    OVERHEAD = 10
    GPU_USER_ANNOTATION = 11


class Collective(IntEnum):
    """The collective operation of an NCCL kernel; `Timeline.extra["collective"]` holds the number."""

    ALL_REDUCE = 1
    REDUCE_SCATTER = 2
    ALL_GATHER = 3
    ALL_TO_ALL = 4
    BROADCAST = 5
    REDUCE = 6
    GATHER = 7
    SCATTER = 8
    SEND = 9
    RECEIVE = 10


DEVICE_CATEGORIES = (Category.KERNEL, Category.GPU_MEMCPY, Category.GPU_MEMSET)


def _no_column(kind: type[np.generic]) -> Any:
    return field(default_factory=lambda: np.empty(0, kind))


class Columns(Struct, frozen=True):
    """A table whose columns are its array fields, all of one length; a column with a default may be empty (unknown)."""

    def __len__(self) -> int:
        return len(getattr(self, self.__struct_fields__[0]))

    def columns(self) -> dict[str, npt.NDArray[Any]]:
        """The columns by name, in their order."""
        return {name: value for name, value in asdict(self).items() if isinstance(value, np.ndarray)}

    def to_frame(self) -> pd.DataFrame:
        """A pandas DataFrame, one row per row of the table. Raises ImportError if pandas is missing."""
        return _frame({name: column for name, column in self.columns().items() if len(column) == len(self)})

    def check(self, what: str) -> None:
        """Assert that all columns have the same length. Raises AssertionError naming the ones that differ."""
        optional = self.__struct_fields__[len(self.__struct_fields__) - len(self.__struct_defaults__) :]
        lengths = {name: len(column) for name, column in self.columns().items() if len(column) or name not in optional}
        assert len(set(lengths.values())) <= 1, f"{what} columns differ in length: {lengths}"


class Steps(Columns, frozen=True):
    """One row per detected step, in order of time; all columns have the same length.

    Steps do not overlap. Time between two steps (evaluation, a new epoch's first line) belongs to no step.
    """

    number: Int64
    start_ns: Int64
    end_ns: Int64
    data_wait_ns: Int64  # blocked in the DataLoader (its __iter__ and __next__), on the training thread
    optimizer_ns: Int64  # inside Optimizer.step
    batch_count: Int64  # batches fetched in this step (gradient accumulation: more than one)
    sample_count: Int64  # -1: unknown
    phase: UInt8  # Phase
    flags: UInt8  # StepFlag
    # GPU time from the end of all earlier work to the end of the step's work; -1: unknown; empty: no GPU
    device_ns: Int64 = _no_column(np.int64)
    # Part of the step's wall time spent in gpulab's own marks and batch timing; empty: unknown
    own_ns: Int64 = _no_column(np.int64)
    # Number of values in a distributed model's inputs; -1: unknown; empty: no model is distributed
    input_values: Int64 = _no_column(np.int64)

    @property
    def wall_ns(self) -> Int64:
        """Wall time of each step on the host, which may be far ahead of a GPU."""
        return self.end_ns - self.start_ns

    @property
    def time_ns(self) -> Int64:
        """Time of each step without gpulab's own part: on the GPU if measured, else on the host."""
        host_ns = self.wall_ns - self.own_ns if len(self.own_ns) else self.wall_ns
        if not len(self.device_ns):
            return host_ns
        return np.where(self.device_ns >= 0, self.device_ns, host_ns)

    @classmethod
    def empty(cls) -> Steps:
        """Columns without a row."""
        i, u = np.empty(0, np.int64), np.empty(0, np.uint8)
        return cls(i, i, i, i, i, i, i, u, u)


class Series(Struct, frozen=True):
    """One curve: readings of one meter over the run.

    `label`: text for a legend; `source`: the instrument ("NVML", "NVML GPM", "psutil").
    A reading that failed is absent, never 0.
    """

    name: str  # e.g. gpu_utilization_pct, gpu_memory_used_bytes, power_w, sm_active_fraction, cpu_pct, rss_bytes
    unit: str
    label: str
    source: str
    t_ns: Int64
    value: Float64


# Bits of the curve "throttle_reasons": nvmlClocksEventReasons (nvml.h), without idle and user-set clocks.
THROTTLE_NAMES = {
    0x004: "power cap",
    0x008: "hardware slowdown",
    0x010: "synchronised boost with a slower GPU",
    0x020: "temperature (software)",
    0x040: "temperature (hardware)",
    0x080: "external power brake",
}


class Samples(Struct, frozen=True):
    """All curves of a run."""

    series: tuple[Series, ...] = ()

    def get(self, name: str) -> Series | None:
        """The curve of that name; None if it was not measured."""
        return next((s for s in self.series if s.name == name), None)

    def to_frame(self) -> pd.DataFrame:
        """A pandas DataFrame in long form: name, unit, source, t_ns, value."""
        counts = [len(s.t_ns) for s in self.series]
        columns: dict[str, Any] = {
            name: np.repeat(np.array([getattr(s, name) for s in self.series], dtype=object), counts)
            for name in ("name", "unit", "source")
        }
        columns["t_ns"] = np.concatenate([np.empty(0, np.int64), *(s.t_ns for s in self.series)])
        columns["value"] = np.concatenate([np.empty(0, np.float64), *(s.value for s in self.series)])
        return _frame(columns)


class Lane(Struct, frozen=True):
    """One row of a timeline: a host thread or a device stream."""

    kind: Literal["thread", "stream"]
    process: int  # host: process id; device: device index
    number: int  # thread id or stream id
    label: str = ""


class Timeline(Columns, frozen=True, eq=False, weakref=True):
    """Spans of the profiled window as columns, sorted by start (ties: longer first, so parents precede children).

    `names[name_id]` is a span's name, `lanes[lane_id]` its thread or stream. `correlation` joins a launch
    (cuda_runtime) with its kernel; 0: none. `window_ns` bounds the recording. `extra` holds optional columns of the
    same length (`bytes`, `blocks_per_sm`, `occupancy_pct`, …); NaN: the span has no value.
    """

    start_ns: Int64
    duration_ns: Int64
    name_id: Int32
    category: UInt8  # Category
    lane_id: Int32
    correlation: Int64
    names: tuple[str, ...]
    lanes: tuple[Lane, ...]
    window_ns: tuple[int, int]
    training_lane: int | None  # index into lanes: the thread that runs the training loop
    extra: dict[str, Float64] = field(default_factory=dict)

    def check(self, what: str) -> None:
        """As `Columns.check`, with the optional columns as well."""
        super().check(what)
        lengths = {name: len(column) for name, column in self.extra.items()}
        assert set(lengths.values()) <= {len(self)}, f"{what} columns differ in length: {lengths}, of {len(self)} rows"

    @property
    def end_ns(self) -> Int64:
        """End of each span."""
        return self.start_ns + self.duration_ns

    @property
    def has_device_events(self) -> bool:
        """Whether a GPU reported any kernel, copy or memset."""
        return bool(np.isin(self.category, [int(c) for c in DEVICE_CATEGORIES]).any())

    def to_frame(self) -> pd.DataFrame:
        """A pandas DataFrame, one row per span, names spelled out."""
        names = np.array(self.names, dtype=object)
        lanes = np.array([lane.label or f"{lane.kind} {lane.number}" for lane in self.lanes], dtype=object)
        columns = {
            "name": names[self.name_id] if len(self) else [],
            "category": [Category(c).name.lower() for c in self.category],
            "lane": lanes[self.lane_id] if len(self) else [],
            "start_ns": self.start_ns,
            "duration_ns": self.duration_ns,
            "correlation": self.correlation,
        }
        return _frame({**columns, **self.extra})


class MemoryEvents(Columns, frozen=True):
    """Allocations and releases reported while the profiler ran: one row each, in order of time.

    `bytes` is signed: a release is negative. Totals are the allocator's own, after the event; -1: not recorded.
    """

    t_ns: Int64
    bytes: Int64
    address: Int64  # the 64 bits of the pointer; 0: not recorded
    total_allocated_bytes: Int64
    total_reserved_bytes: Int64
    device_index: Int32  # -1: host memory


class Damage(Struct, frozen=True):
    """A defect of a trace file, and how often it occurs; the rest of the file was read."""

    name: str  # "truncated tail", "missing dur", "unreadable events", …
    count: int
    detail: str = ""  # its first occurrence


class DeviceProperties(Struct, frozen=True):
    """One GPU as the trace describes it; None: not in the trace."""

    id: int
    name: str | None = None
    total_memory_bytes: int | None = None
    sm_count: int | None = None  # AMD: compute units
    compute_capability: str | None = None  # "9.0"
    warp_size: int | None = None
    max_threads_per_sm: int | None = None
    max_threads_per_block: int | None = None
    registers_per_sm: int | None = None
    shared_memory_per_sm_bytes: int | None = None


class TraceOrigin(Struct, frozen=True):
    """The file that a timeline was read from: its format, its facts about the job, and its defects.

    `zero_ns` is the trace's own time at 0 of the timeline, plus `base_time_ns` if the trace has one (then it is Unix
    time); it aligns the ranks of a job on one clock.
    """

    path: str
    size_bytes: int
    text_bytes: int  # of JSON, after decompression
    clock: Literal["ns", "us"]  # resolution of its time stamps
    zero_ns: int
    events_read: int  # rows of traceEvents of any kind
    flow_events: int = 0  # arrows between spans: counted, not kept
    step_marks_duplicated: int = 0  # ProfilerStep copies on the device (gpu_user_annotation), never counted as steps
    base_time_ns: int | None = None
    schema_version: int | None = None
    rank: int | None = None
    world_size: int | None = None
    backend: str | None = None  # of torch.distributed
    versions: dict[str, str] = field(default_factory=dict)  # torch, cuda_runtime, cuda_driver, hip_runtime, …
    options: tuple[str, ...] = ()  # of torch.profiler: record_shapes, with_stack, profile_memory, …
    device_properties: tuple[DeviceProperties, ...] = ()
    damage: tuple[Damage, ...] = ()

    def damaged(self, name: str) -> int:
        """How often the defect occurs."""
        return sum(d.count for d in self.damage if d.name == name)

    @property
    def is_cut_short(self) -> bool:
        """Whether the file is truncated: PyTorch writes GPU events last, so an unknown part of them is missing."""
        return self.damaged("truncated tail") > 0


class Settings(Struct, frozen=True):
    """The settings that the user requested. None: gpulab chooses, and says so in `Run.choices`."""

    name: str = ""
    steps: int | None = None  # end the cell after this many steps
    warmup: int | None = None
    trace_steps: int | None = None
    trace: bool = True
    live: bool = True
    save: bool = True
    device: str = "auto"  # "auto", "cpu", "cuda", "cuda:1"
    whole: bool = False  # trace from the first line, for code without steps
    knobs: dict[str, str] = field(default_factory=dict)  # what was changed for this run, as written: workers → 4


class Device(Struct, frozen=True):
    """The device whose time is accounted: a GPU, or the CPU if there is none.

    "unknown": a trace file ends before it names the device.
    """

    kind: Literal["cpu", "cuda", "unknown"]
    name: str
    index: int | None = None
    uuid: str | None = None
    memory_total_bytes: int | None = None
    details: dict[str, str | int | float | None] = field(default_factory=dict)  # driver, sm_count, power_limit_w, …


Launcher = Literal["torchrun", "Slurm", "MPI", "Kubernetes", "torch.distributed"]


class Job(Struct, frozen=True):
    """The distributed job in which the run is one rank; one command has started all its processes.

    `id` is the same in all ranks and in no other job. None: unknown.
    """

    id: str
    rank: int
    launcher: Launcher
    world_size: int | None = None
    local_rank: int | None = None  # rank within the node
    node: str = ""
    cluster_id: str = ""  # for `squeue` and `scancel`; of a task of an array: "12_3"
    queue: str = ""  # of the cluster; Slurm's partition


class Environment(Struct, frozen=True):
    """The machine and the software, as far as they matter for interpreting the figures."""

    python: str
    platform: str
    cpu: str
    logical_cores: int | None
    usable_cores: float | None  # affinity and cgroup quota
    memory_total_bytes: int | None
    packages: dict[str, str] = field(default_factory=dict)  # torch, numpy, lightning, …
    hostname: str = ""
    compute_threads: int | None = None  # torch's threads for one CPU operator; None: unknown
    affinity_cores: int | None = None  # cores on which the scheduler may run the process; None: unknown
    core_quota: float | None = None  # cores that the control group (container) allows at once; None: no quota


class _Compared(Struct, frozen=True, eq=False):
    """Records that are equal if their `key` is equal."""

    @property
    def key(self) -> tuple[object, ...]:
        raise NotImplementedError

    def __eq__(self, other: object) -> bool:
        return isinstance(other, type(self)) and self.key == other.key

    def __ne__(self, other: object) -> bool:  # Struct's own `__ne__` does not use `__eq__`
        return not self == other

    def __hash__(self) -> int:
        return hash(self.key)


class Loader(_Compared, frozen=True, eq=False):
    """The DataLoader that fed the steps."""

    dataset: str
    dataset_length: int | None
    batch_size: int | None
    num_workers: int
    prefetch_factor: int | None
    pin_memory: bool
    persistent_workers: bool
    length: int | None  # batches per epoch
    iterable: bool
    own_collate: bool | None = None  # whether the user passed a collate_fn; None: unknown
    # Observed during the run, not compared:
    remade: bool | None = None  # created anew for each epoch, so its workers cannot persist
    batch_tensors: int | None = None  # tensors of a batch; each is transferred separately
    worker_threads: int | None = None  # threads of one operator in a worker
    # Lines of the user's code that make a batch, as `str(Place)`; empty if a library makes it:
    items_line: str = ""  # the dataset's method that returns an item
    transform_line: str = ""
    collate_line: str = ""
    sampler_line: str = ""

    @property
    def key(self) -> tuple[object, ...]:
        """The constructor's settings."""
        last = self.__struct_fields__.index("own_collate")
        return tuple(getattr(self, name) for name in self.__struct_fields__[: last + 1])


class Batches(Columns, frozen=True):
    """How long batches took to make, timed in the process that made them; one row per batch, in order of arrival.

    The first batches all have a row; later ones are a random sample, so that timing stays within a budget.

    `read_ns` is the dataset's own time (`__getitem__`, `__getitems__`, `__next__`) without its transforms. Transforms
    are recognized only in the attributes `transform`, `transforms` and `target_transform`; others count as reading.
    """

    worker: Int32  # -1: the training process itself
    start_ns: Int64  # the worker begins the batch
    end_ns: Int64  # the batch is collated and about to be sent
    read_ns: Int64
    transform_ns: Int64
    collate_ns: Int64
    read_cpu_ns: Int64  # CPU time of the process in this part; the rest of the wall time is waiting
    transform_cpu_ns: Int64
    collate_cpu_ns: Int64
    item_count: Int64
    core_wait_ns: Int64  # runnable without a core, in all three parts; -1: unknown
    asked_ns: Int64  # the training loop begins to wait for the batch; -1: never
    answered_ns: Int64  # the training loop gets the batch; -1: never
    pin_ns: Int64  # copy to page-locked memory; -1: not measured, 0: not pinned
    # How many batches the row represents: its own and the untimed batches before it; empty: one
    stands_for: Int64 = _no_column(np.int64)

    @property
    def weight(self) -> Int64:
        """The weight of each row in sums over batches: `stands_for`, or 1."""
        return self.stands_for if len(self.stands_for) else np.ones(len(self), np.int64)


class CoreTimes(Columns, frozen=True):
    """CPU time of the training thread: readings about 10 ms apart, and around the profiler's window.

    Columns except `t_ns` and `profiler` are running totals with an arbitrary zero.
    """

    t_ns: Int64
    cpu_ns: Int64  # CPU time of the training thread
    wait_ns: Int64  # runnable without a core; -1: unknown
    process_cpu_ns: Int64  # CPU time of all threads of the process
    profiler: UInt8  # 1: gpulab started or stopped the profiler since the previous reading


class CoreUse(Columns, frozen=True):
    """Who used the cores that the process may use: readings from the beginning of the run to its end.

    Columns except `t_ns` are running totals with an arbitrary zero; -1: unknown.
    """

    t_ns: Int64
    tree_cpu_ns: Int64  # CPU time of the process and its children, without gpulab's own processes
    others_cpu_ns: Int64  # CPU time of all other programs, and of a virtual machine's host
    stolen_ns: Int64  # the host's part of `others_cpu_ns`
    pool_wait_ns: Int64  # runnable without a core: sum over the process's threads except the training thread
    workers_wait_ns: Int64  # runnable without a core: sum over the threads of child processes
    pressure_ns: Int64  # some program of the machine was runnable without a core
    quota_periods: Int64  # periods of the control group's CPU quota
    throttled_periods: Int64  # periods in which the quota ran out


_CONTINUES = ("(", "[", "{", ",", "\\")  # a line with such an end is continued


class Unit(Struct, frozen=True):
    """A statement of several lines, or a loop within a function, unless the loop contains whole training steps."""

    first: int
    last: int
    text: str = ""  # of its first line, without indent


class Excerpt(Struct, frozen=True):
    """A few lines of the user's source around a slow line, as they were when they ran."""

    file: str  # as `Place` has it
    first: int  # the number of the first of these lines
    lines: tuple[str, ...]


class Place(_Compared, frozen=True, eq=False):
    """A line of the user's code. `file`: "cell" for the profiled cell, "cell [3]" for another, else Python's file name.

    Line numbers of the profiled cell are those that the notebook shows, its `%%gpuprofile` included.
    """

    file: str
    line: int
    function: str = ""
    text: str = ""  # the line itself, without indent
    units: tuple[Unit, ...] = ()  # enclosing units, the innermost first

    @property
    def key(self) -> tuple[object, ...]:
        """The line, without its enclosing units."""
        return self.file, self.line, self.function, self.text

    def __str__(self) -> str:
        where = f"line {self.line} of the cell" if self.file == "cell" else f"{self.file}, line {self.line}"
        more = " …" if self.text.endswith(_CONTINUES) else ""
        return f"{where}: {self.text}{more}" if self.text else where


PauseKind = Literal["gc", "checkpoint_save", "logging", "evaluation", "compile", "callback"]


class Pause(Struct, frozen=True):
    """Time in which the training thread does not train, within a step or between two steps."""

    kind: PauseKind
    start_ns: int
    end_ns: int
    place: int = -1  # index into `Run.places`; -1: unknown
    detail: str = ""  # "generation 2", the name of a written file


class PauseSum(Struct, frozen=True):
    """Pauses without a record of their own: shorter than a millisecond, or beyond the first ten thousand."""

    kind: PauseKind
    count: int
    total_ns: int


class StackSamples(Columns, frozen=True):
    """Stack samples of the training thread, taken every few milliseconds while the profiler ran.

    Each row represents the time since the previous row, the first row the time since `began_ns`. `exact`: another
    process took the samples, so the thread could not bias them. Otherwise a sample is delayed while a long call holds
    the GIL, and then shows the line of that call.
    """

    t_ns: Int64
    place: Int32  # index into `Run.places`: the innermost line of the user's own code; -1: none
    began_ns: int = 0
    exact: bool = False
    # 1: in code that makes the next batch: at such a line of the loop, or called from one; empty: unknown
    prepares_batch: UInt8 = _no_column(np.uint8)

    @property
    def since_ns(self) -> Int64:
        """Start of the time that each sample represents; it ends with the sample."""
        if not len(self.t_ns):
            return self.t_ns
        return np.concatenate(([min(self.began_ns, int(self.t_ns[0]))], self.t_ns[:-1]))


class OwnBatches(Struct, frozen=True):
    """Stack samples outside the profiled steps of a loop without a DataLoader, and how many were in batch-making code.

    Each sample represents the time since the previous sample.
    """

    looks: int
    looked_ns: int
    preparing_looks: int  # samples at a line that makes the next batch, or called from one
    preparing_ns: int


CallKind = Literal["library", "own", "aside", "batch", "layer", "operator"]
CALL_KINDS: tuple[CallKind, ...] = get_args(CallKind)
BESIDE_KINDS = CALL_KINDS[:4]  # the training itself


class CallLooks(Columns, frozen=True):
    """Sparse stack samples of the training thread over the whole run: the active call, one row per sample.

    `kind` is an index into `CALL_KINDS`: a library's function ("library"); a user's function ("own"); a call that the
    loss does not depend on ("aside"); a call that makes the next batch ("batch"). Within the training itself, without
    updates: a line that calls a module ("layer"), or operators ("operator"). `exact` as in `StackSamples`.
    """

    t_ns: Int64
    place: Int32  # index into `Run.places`: the user's line that makes the call; -1: none
    callee: Int32  # index into `Run.callees`; -1: as `place`
    within: Int32  # index into `Run.places`: the innermost line of the user's own code; -1: none
    kind: UInt8
    exact: bool = True
    holds_lock: UInt8 = _no_column(np.uint8)  # 1: the thread held the interpreter's lock; empty: unknown


class LoadingLooks(Columns, frozen=True):
    """Stack samples of batch-making code, in the training process or in workers, taken by another process.

    One row per line. `count`: samples; `collating`: 1 inside `collate_fn`.
    """

    place: Int32  # index into `Run.places`: the innermost line of the user's own code; -1: none
    collating: UInt8
    count: Int64


class BackwardPass(Struct, frozen=True):
    """A backward pass with unused gradients: its nodes in order of evaluation, and the unused share of each node."""

    nodes: tuple[str, ...]
    unused: tuple[float, ...]


class DenseGradient(Struct, frozen=True):
    """An embedding with a dense gradient: its rows, the share of them that a step uses, its share of the parameters."""

    rows: int
    used_fraction: float
    parameters_fraction: float


class TrainingFacts(Struct, frozen=True):
    """Facts read from torch's state at a few early backward passes.

    `calls`: the share of stack samples below functions that torch calls only because of a setting. Fractions of the
    nodes of backward passes: `repeated_fraction` were evaluated by an earlier pass too, `batch_nodes_fraction` belong
    to code that makes the batch. `padding_fraction`: padding columns among the indices that an embedding looks up.
    """

    anomaly_detection: bool = False
    profiled: bool = False  # a profiler was active each time
    calls: dict[str, float] = field(default_factory=dict)
    repeated_fraction: float = 0.0
    batch_nodes_fraction: float = 0.0
    padding_fraction: float = 0.0
    emulated_fraction: float = 0.0  # of the parameters: this CPU has no instructions for their dtype
    passes: tuple[BackwardPass, ...] = ()
    unheld: bool = False  # True: no optimizer has these parameters; False: gradients are dropped before a step
    differentiates_twice: bool = False  # create_graph=True: a gradient is itself differentiated
    float64_fraction: float = 0.0  # of the parameters
    dense_gradients: tuple[DenseGradient, ...] = ()
    batch_copies: int = 1  # workers that yielded the same batch


class Alert(Struct, frozen=True):
    """A lasting problem that the live view reported. `until_ns` is None if it lasted to the end."""

    key: str  # of the finding that it hints at, "data_starved", or "gpu_idle"
    words: str
    since_ns: int
    until_ns: int | None = None


class Memory(Struct, frozen=True):
    """Peaks over the run; None: the device does not report them."""

    peak_allocated_bytes: int | None = None  # torch.cuda.max_memory_allocated
    peak_reserved_bytes: int | None = None
    peak_rss_bytes: int | None = None  # process tree
    total_bytes: int | None = None


TRACE_DROPPED = "trace_not_kept"  # key in `Run.missing` if only other ranks of the job keep their trace


class Missing(Struct, frozen=True):
    """A quantity that could not be measured, and why. `since_ns` is set if the measurement stopped during the run.

    `key` is a stable name for programs: "steps", "breakdown", "curves" (all curves of an instrument), "curve" (one
    curve), "memory", "loader" (a worker died), "workers" (they cannot start), "trace_file", "live_view", "ranks"
    (processes that the code starts itself), "empty_loader" (it yielded no batch); for a loaded trace "step_time"
    (unprofiled) and "device" (its name and size).
    """

    what: str
    reason: str
    since_ns: int | None = None
    key: str = ""


class Choice(Struct, frozen=True):
    """A decision of gpulab, with its reason."""

    what: str
    value: str
    reason: str


class Change(Struct, frozen=True):
    """One setting that was changed for a run without an edit of its code, and whether it took effect.

    `state`: "took effect", "no effect", "cannot tell"; `evidence`: how that is known, a sentence without a full stop.
    """

    name: str
    value: str
    found: str  # the value in the code; "": unknown
    kind: str  # what it changes: "DataLoader option", "variable", …
    state: str
    evidence: str


class Observer(Struct, frozen=True):
    """The cost of measuring."""

    hooks_ns: int = 0  # over all steps: marks at a calibrated cost each, plus gpulab's work at the marks
    own_ns: int = 0  # wall time of gpulab's own start and of starting and stopping the profiler
    profiler_start_ns: int | None = None
    profiler_stop_ns: int | None = None
    event_count: int = 0
    window_truncated: str | None = None  # why the window ended early
    profiler_stays: bool = True  # CUPTI stays in the process after the window and slows CUDA calls


Outcome = Literal["completed", "stopped", "interrupted", "failed"]


class Run(Struct, frozen=True):
    """One measured execution of a cell, a `with` block, a script, or one loaded trace."""

    id: str
    created: str  # ISO 8601, UTC
    source: Literal["cell", "statement", "block", "script", "trace"]
    settings: Settings
    device: Device
    environment: Environment
    steps: Steps
    samples: Samples
    timeline: Timeline | None
    wall_ns: int
    outcome: Outcome
    step_source: str  # "DataLoader", "Optimizer.step", "gpulab.step()", "whole cell", "ProfilerStep", "whole window"
    outcome_detail: str = ""  # e.g. "ValueError: …"
    code: str = ""  # the cell's text
    loader: Loader | None = None
    memory: Memory = field(default_factory=Memory)
    observer: Observer = field(default_factory=Observer)
    missing: tuple[Missing, ...] = ()
    choices: tuple[Choice, ...] = ()
    traced_numbers: tuple[int, ...] = ()  # step numbers wholly inside timeline.window_ns
    origin: TraceOrigin | None = None  # of a loaded trace
    memory_events: MemoryEvents | None = None  # None: not recorded
    changes: tuple[Change, ...] = ()
    batches: Batches | None = None  # None: not timed; `missing` says why
    pauses: tuple[Pause, ...] = ()
    more_pauses: tuple[PauseSum, ...] = ()
    stack: StackSamples | None = None
    places: tuple[Place, ...] = ()
    loading_looks: LoadingLooks | None = None  # None: not sampled
    call_looks: CallLooks | None = None  # None: not sampled
    callees: tuple[str, ...] = ()  # functions in stack samples, as a user writes them
    excerpts: tuple[Excerpt, ...] = ()  # source around the lines with the most samples
    alerts: tuple[Alert, ...] = ()
    core_times: CoreTimes | None = None  # None: not measured
    core_use: CoreUse | None = None
    job: Job | None = None  # None: a single process
    own_batches: OwnBatches | None = None  # None: a DataLoader feeds the steps, or the source is unknown
    training: TrainingFacts | None = None  # None: not examined
    memory_account: MemoryAccount | None = None  # None: not taken
    schema: int = SCHEMA

    @property
    def name(self) -> str:
        """The user's name for the run, or its id."""
        return self.settings.name or self.id

    @property
    def traced_rows(self) -> npt.NDArray[np.intp]:
        """Rows of `steps` that lie entirely inside the profiled window."""
        return np.flatnonzero(np.isin(self.steps.number, self.traced_numbers))

    @property
    def reached_step_limit(self) -> bool:
        """Whether the run ended at its limit of steps."""
        return self.outcome == "stopped" and self.settings.steps is not None and len(self.steps) >= self.settings.steps

    @property
    def code_wall_ns(self) -> int:
        """Wall time of the code itself, without gpulab's own start and without starting and stopping the profiler."""
        ours = self.observer
        before = (ours.profiler_start_ns or 0) + (ours.profiler_stop_ns or 0)  # older records have only these
        return max(0, self.wall_ns - (ours.own_ns or before))

    def __repr__(self) -> str:
        device = "CPU" if self.device.kind == "cpu" else self.device.name
        steps, took = plural(len(self.steps), "step"), duration(self.code_wall_ns / 1e3)
        return f"<Run {self.name!r}: {steps} on {device}, {took}, {self.outcome}>"

    def plot(self) -> Figure:
        """A matplotlib figure with your rcParams: where a step's time goes, all steps, the device's curves.

        Raises UsageError if nothing was measured that it could show.
        """
        figure: Figure = import_module("gpulab.views.plot").plot_run(self)  # by name: the record knows no view
        return figure

    def check(self) -> None:
        """Assert the record's invariants. Raises AssertionError naming the broken rule."""
        for columns, what in (
            (self.steps, "step"),
            (self.timeline, "timeline"),
            (self.memory_events, "memory"),
            (self.batches, "batch"),
            (self.core_times, "core time"),
            (self.core_use, "core use"),
            (self.stack, "stack"),
            (self.call_looks, "call"),
            (self.loading_looks, "loading"),
        ):
            if columns is not None:
                columns.check(what)
        s = self.steps
        if len(s.own_ns):
            assert (s.own_ns >= 0).all() and (s.own_ns <= s.wall_ns).all(), "gpulab's own time exceeds its step"
        assert (s.end_ns >= s.start_ns).all(), "a step ends before it starts"
        assert (s.start_ns[1:] >= s.end_ns[:-1]).all(), "steps overlap"
        assert (s.data_wait_ns >= 0).all() and (s.data_wait_ns <= s.wall_ns).all(), "data wait exceeds its step"
        assert (s.optimizer_ns >= 0).all() and (s.optimizer_ns <= s.wall_ns).all(), "optimizer exceeds its step"
        assert set(self.traced_numbers) <= set(s.number.tolist()), "a traced step is not among the steps"
        for series in self.samples.series:
            assert len(series.t_ns) == len(series.value), f"{series.name}: times and values differ in length"
        if self.timeline is not None:
            assert (np.diff(self.timeline.start_ns) >= 0).all(), "timeline is not sorted"
            assert (self.timeline.duration_ns >= 0).all(), "a span has a negative duration"
            assert self.timeline.window_ns[0] <= self.timeline.window_ns[1], "the window ends before it starts"
        for timed, what in (
            (self.memory_events, "memory events"),
            (self.core_times, "core times"),
            (self.core_use, "core use"),
        ):
            assert timed is None or (np.diff(timed.t_ns) >= 0).all(), f"{what} are not sorted"
        if self.batches is not None:
            assert (self.batches.end_ns >= self.batches.start_ns).all(), "a batch ends before it starts"
        for pause in self.pauses:
            assert pause.end_ns >= pause.start_ns, "a pause ends before it starts"
        self._check_places()

    def _check_places(self) -> None:
        """Assert that every index into `places`, `callees` and `CALL_KINDS` is valid."""
        place, callee, kind = len(self.places), len(self.callees), len(CALL_KINDS)
        indices: list[tuple[npt.NDArray[Any], int]] = [(np.array([pause.place for pause in self.pauses]), place)]
        if self.stack is not None:
            indices += [(self.stack.place, place)]
        if self.loading_looks is not None:
            indices += [(self.loading_looks.place, place)]
        if (calls := self.call_looks) is not None:
            indices += [(calls.place, place), (calls.within, place), (calls.callee, callee), (calls.kind, kind)]
        for index, count in indices:
            assert ((index >= -1) & (index < count)).all(), "an index is out of range: of a place, a callee or a kind"


class Ranks(Struct, frozen=True):
    """The ranks of one distributed job, each a run loaded from its own trace."""

    path: str  # the folder
    runs: dict[int, Run]  # by rank, ascending; never empty
    world_size: int | None  # according to the traces
    problems: tuple[Missing, ...] = ()  # skipped files and absent ranks, and why

    def __repr__(self) -> str:
        of = f" of {self.world_size}" if self.world_size else ""
        return f"<Ranks {self.path!r}: {len(self.runs)}{of}>"


def _frame(columns: dict[str, Any]) -> pd.DataFrame:
    try:
        import pandas as pd
    except ImportError as e:
        raise ImportError("A DataFrame needs pandas: pip install pandas") from e
    return pd.DataFrame(columns)
