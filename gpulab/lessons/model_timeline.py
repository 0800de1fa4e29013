"""A model of a GPU's step to be turned by hand: kernel length, launch cost, synchronizations and data, as a timeline.

It explains and measures nothing: every drawing says so. The host starts one kernel after the other; the device runs
them in order, each when it was launched and the one before has ended. definitions.md, "Step on a GPU".
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Struct

from gpulab.lessons.figures import Block, ByHand, Lane, by_hand, draw_lanes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_KERNELS = 60  # drawn: more would be a comb


class Setting(Struct, frozen=True):
    """One step: all times in µs. `syncs`: after so many kernels, evenly spread, the host waits for the device."""

    kernels: int = 20
    kernel_us: float = 5.0
    launch_us: float = 10.0
    syncs: int = 0
    data_us: float = 0.0  # that the host waits for data at the beginning of each step
    graph: bool = False  # all kernels are started by one launch: a CUDA graph

    def __post_init__(self) -> None:
        if self.kernels < 1 or min(self.kernel_us, self.launch_us, self.data_us) < 0 or self.syncs < 0:
            raise ValueError("a step has at least one kernel, and no time or number is negative")


class PlayedStep(Struct, frozen=True):
    """What happens in the steps of a setting; `step_us` is the last one's, when it has settled."""

    host: list[Block]
    device: list[Block]
    step_us: float

    @property
    def busy_fraction(self) -> float:
        """Of the device, over the drawn steps."""
        end = max(block.end for block in (*self.host, *self.device))
        return sum(block.length for block in self.device) / end if end else 0.0


def play(setting: Setting, steps: int = 2) -> PlayedStep:
    """Play `steps` steps, one after the other."""
    host, device = Lane(), Lane()
    ends = [0.0]
    every = -(-setting.kernels // setting.syncs) if setting.syncs else 0
    for _ in range(steps):
        if setting.data_us:
            host.add(setting.data_us, "load", "data")
        for kernel in range(1, setting.kernels + 1):
            if not setting.graph or kernel == 1:
                host.add(setting.launch_us, "launch")
            device.add(setting.kernel_us, "compute", ready=host.free)
            if every and (kernel % every == 0 or kernel == setting.kernels) and not setting.graph:
                host.wait(device.free)
        ends.append(max(host.free, device.free))
    return PlayedStep(host.blocks, device.blocks, ends[-1] - ends[-2])


def draw(setting: Setting) -> Figure:
    """Host and device over time."""
    steps = 2 if setting.kernels <= MOST_KERNELS else 1
    played = play(setting, steps)
    drawn = "two steps" if steps == 2 else "a step"
    title = f"{drawn} of {played.step_us:.0f} µs; the device works {played.busy_fraction:.0%} of the time drawn"
    return draw_lanes([("host", played.host), ("device", played.device)], title, unit="µs")


def turn_by_hand() -> ByHand | Figure:
    """Sliders for the model; without ipywidgets the drawing of the first setting."""
    sliders = {
        "kernels": ("kernels", 1, MOST_KERNELS, 1),
        "kernel_us": ("kernel µs", 0.5, 60, 0.5),
        "launch_us": ("launch µs", 1, 30, 0.5),
        "syncs": ("syncs", 0, 10, 1),
        "data_us": ("data µs", 0, 500, 10),
        "graph": ("CUDA graph",),
    }
    return by_hand(draw, Setting(), sliders)
