"""What a running capture tells whoever watches it, without knowing who that is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Protocol

from msgspec import Struct, field

if TYPE_CHECKING:  # the sampling process reads `SeriesInfo` here and starts without NumPy
    from gpulab.run import Float32, Run
    from gpulab.thresholds import Thresholds

CapturePhase = Literal["warm-up", "measuring", "profiling", "after profiling", "ending"]


class SeriesInfo(Struct, frozen=True):
    """The legend of one curve: what is read, in which unit, by which instrument."""

    name: str
    unit: str
    label: str
    source: str


class Status(Struct, frozen=True):
    """Where the run stands. `total` steps are planned of a "run", or are those of one whole "epoch": `total_of`."""

    phase: CapturePhase
    step: int
    total: int | None
    total_of: str
    elapsed_s: float
    device_label: str  # "device: CPU", "device: NVIDIA H100 (GPU 0)"
    stop_requested: bool = False
    message: str = ""
    alert: str = ""  # a sentence about what has gone wrong for long


class Delta(Struct, frozen=True):
    """What is new since the last `drain`.

    `steps`: float32 [k, 4]: end of the step in s since the run began, wall ms, data wait ms, samples per s (NaN where
    unknown). `samples[name]`: float32 [k, 2]: s since the run began, value.
    """

    status: Status
    steps: Float32
    samples: dict[str, Float32] = field(default_factory=dict)


class SoFar(Struct, frozen=True):
    """The run until now, without trace and curves, and the limits by which it is judged at its end."""

    run: Run
    thresholds: Thresholds


class Feed(Protocol):
    """The running capture as a monitor sees it. All methods may be called from any thread."""

    def series(self) -> tuple[SeriesInfo, ...]:
        """The curves measured so far; may grow in the first tenths of a second."""

    def drain(self) -> Delta:
        """What is new since the last call. One reader only."""

    def so_far(self) -> SoFar | None:
        """What a sentence about it can rest on; None while that is nothing."""

    def request_stop(self) -> None:
        """Ask the run to end at the next step boundary. Returns at once."""


class Monitor(Protocol):
    """Something that shows a run while it goes on, e.g. the live view."""

    def begin(self, feed: Feed) -> None:
        """The run starts. Called on the main thread; must not block or raise."""

    def end(self) -> None:
        """The run is over: stop reading the feed, leave no thread. Called on the main thread."""
