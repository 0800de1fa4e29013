"""The summary of a run: a few figures and its headline, stored next to it, so that lists need not open the run."""

from __future__ import annotations

from msgspec import Struct

VERSION = 3  # summaries of other versions are recomputed


class RunSummary(Struct, frozen=True):
    """One run in short. None or an empty text: not measurable, or not set.

    `idle_fraction` is the share of time in which the run's GPUs were idle: of the typical step from the trace
    ("trace"), else of the whole run from the utilization curve ("curve"), a lower bound because a GPU counts as used
    while any kernel runs. `idle_reason` says why it is None. `cpu_idle_fraction` is for a run on the CPU, with the CPU
    as its device: the share of the typical step without computing or updating weights.
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
    finding: str  # the finding's key; `cause` names it in plain words
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
        """GPU time that the run occupied, in hours."""
        return self.gpu_count * self.wall_s / 3600

    @property
    def wasted_gpu_hours(self) -> float | None:
        """The idle part of `gpu_hours`."""
        return None if self.idle_fraction is None else self.gpu_hours * self.idle_fraction
