"""The interface between a running capture and the live views that show it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Protocol

from msgspec import Struct, field

if TYPE_CHECKING:  # the sampling process reads `SeriesInfo` here and starts without NumPy
    from gpulab.run import Float32, Run
    from gpulab.thresholds import Thresholds

CapturePhase = Literal["warm-up", "measuring", "profiling", "after profiling", "ending"]


class SeriesInfo(Struct, frozen=True):
    """The legend of one curve: quantity, unit and instrument."""

    name: str
    unit: str
    label: str
    source: str


class Status(Struct, frozen=True):
    """Progress of the run. `total` is the number of steps of the whole "run" or of one "epoch": `total_of`."""

    phase: CapturePhase
    step: int
    total: int | None
    total_of: str
    elapsed_s: float
    device_label: str  # "device: CPU", "device: NVIDIA H100 (GPU 0)"
    stop_requested: bool = False
    message: str = ""
    alert: str = ""  # a sentence about a problem that lasts


class Delta(Struct, frozen=True):
    """The data since the last `drain`.

    `steps`: float32 [k, 4]: end of the step in s since the run began, wall ms, data wait ms, samples per s (NaN:
    unknown). `samples[name]`: float32 [k, 2]: s since the run began, value.
    """

    status: Status
    steps: Float32
    samples: dict[str, Float32] = field(default_factory=dict)


class SoFar(Struct, frozen=True):
    """The run so far, without trace and curves, and the thresholds of its report."""

    run: Run
    thresholds: Thresholds


class Feed(Protocol):
    """The running capture as a monitor sees it. All methods may be called from any thread."""

    def series(self) -> tuple[SeriesInfo, ...]:
        """The curves that are measured; more may appear in the first tenths of a second."""

    def drain(self) -> Delta:
        """The data since the last call. One reader only."""

    def so_far(self) -> SoFar | None:
        """The run so far; None before there is anything to report."""

    def request_stop(self) -> None:
        """Ask the run to end at the next step boundary. Returns at once."""


class Monitor(Protocol):
    """A view of a running capture, e.g. the live view."""

    def begin(self, feed: Feed) -> None:
        """The run starts. Called on the main thread; must not block or raise."""

    def end(self) -> None:
        """The run has ended: stop reading the feed and leave no thread. Called on the main thread."""
