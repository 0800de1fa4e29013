"""The summary of a run: a few figures and its headline, stored beside it, so that lists need not open the run."""

from __future__ import annotations

from msgspec import Struct

VERSION = 3  # summaries of another version are computed anew


class RunSummary(Struct, frozen=True):
    """One run in short. None, and an empty text, is "not measurable" or "not set".

    `idle_fraction` is the share of its time in which its GPUs did nothing: of the typical step by the trace
    ("trace"), else of the whole run by the utilization curve ("curve"), which is at most the truth: a GPU counts as
    used there where one kernel ran. `idle_reason` says why there is none. `cpu_idle_fraction` is that of a run on
    the CPU, with the CPU as its device: the share of the typical step without computing or updating weights.
    """

    id: str
    name: str
    created: str  # ISO 8601, UTC
    outcome: str
    device: str  # "cpu" or "cuda"
    device_name: str
    gpu_count: int
    wall_s: float
    step_count: int
    step_us: float | None
    idle_fraction: float | None
    idle_source: str
    idle_reason: str
    headline: str
    level: str  # of the headline
    finding: str  # its key, and in plain words the `cause`
    cause: str
    source_line: str
    knob: str
    job_id: str = ""
    rank: int | None = None
    world_size: int | None = None
    node: str = ""
    cluster_id: str = ""
    queue: str = ""
    cpu_idle_fraction: float | None = None
    version: int = VERSION

    @property
    def gpu_hours(self) -> float:
        """How long it held its GPUs."""
        return self.gpu_count * self.wall_s / 3600

    @property
    def wasted_gpu_hours(self) -> float | None:
        """How long they did nothing in that time."""
        return None if self.idle_fraction is None else self.gpu_hours * self.idle_fraction
