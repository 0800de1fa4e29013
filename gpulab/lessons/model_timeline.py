"""A model of a GPU's step to be turned by hand: kernel length, launch cost, synchronizations and data, as a timeline.

It explains and measures nothing: every drawing says so. The host starts one kernel after the other; the device runs
them in order, each when it was launched and the one before has ended. definitions.md, "Step on a GPU".
"""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from gpulab.lessons.figures import Block, draw_lanes, png

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

    host: tuple[Block, ...]
    device: tuple[Block, ...]
    step_us: float

    @property
    def busy_fraction(self) -> float:
        """Of the device, over the drawn steps."""
        end = max(block.start + block.length for block in (*self.host, *self.device))
        return sum(block.length for block in self.device) / end if end else 0.0


def play(setting: Setting, steps: int = 2) -> PlayedStep:
    """Play `steps` steps, one after the other."""
    host: list[Block] = []
    device: list[Block] = []
    host_free = device_free = 0.0
    ends = [0.0]
    every = -(-setting.kernels // setting.syncs) if setting.syncs else 0
    for _ in range(steps):
        if setting.data_us:
            host.append(Block(host_free, setting.data_us, "load", "data"))
            host_free += setting.data_us
        for kernel in range(setting.kernels):
            if not setting.graph or kernel == 0:
                host.append(Block(host_free, setting.launch_us, "launch"))
                host_free += setting.launch_us
            start = max(host_free, device_free)
            device.append(Block(start, setting.kernel_us, "compute"))
            device_free = start + setting.kernel_us
            waits = every and ((kernel + 1) % every == 0 or kernel + 1 == setting.kernels)
            if waits and not setting.graph and device_free > host_free:
                host.append(Block(host_free, device_free - host_free, "wait"))
                host_free = device_free
        ends.append(max(host_free, device_free))
    return PlayedStep(tuple(host), tuple(device), ends[-1] - ends[-2])


def draw(setting: Setting) -> Figure:
    """Host and device over time."""
    steps = 2 if setting.kernels <= MOST_KERNELS else 1
    played = play(setting, steps)
    drawn = "two steps" if steps == 2 else "a step"
    title = f"{drawn} of {played.step_us:.0f} µs; the device works {played.busy_fraction:.0%} of the time drawn"
    return draw_lanes([("host", played.host), ("device", played.device)], title, unit="µs")


class ByHand:
    """Sliders for a model. A page without a kernel, such as GitHub's, shows the drawing of the first setting."""

    def __init__(self, sliders: Any, first: Callable[[], Figure]) -> None:
        self.sliders = sliders
        self._first = first

    def __repr__(self) -> str:
        return "The model as the sliders have it at first. To turn it, run this cell in a notebook with widgets."

    def _repr_mimebundle_(self, **_: object) -> dict[str, Any]:
        """A front end with widgets takes the sliders, every other one the image."""
        widget = self.sliders._repr_mimebundle_() if self.sliders._repr_mimebundle_ else {}
        image = base64.b64encode(png(self._first())).decode("ascii")
        return {**widget, "text/plain": repr(self), "image/png": image}


def turn_by_hand() -> ByHand | Figure:
    """Sliders for the model; without ipywidgets the drawing of the first setting."""
    try:
        from ipywidgets import FloatSlider, IntSlider, ToggleButton, interactive
    except ImportError:
        return draw(Setting())
    from IPython.display import display

    def shown(**values: Any) -> None:
        display(draw(Setting(**values)))  # type: ignore[no-untyped-call]

    later = {"continuous_update": False}
    sliders = interactive(
        shown,
        kernels=IntSlider(20, 1, MOST_KERNELS, description="kernels", **later),
        kernel_us=FloatSlider(value=5.0, min=0.5, max=60, step=0.5, description="kernel µs", **later),
        launch_us=FloatSlider(value=10.0, min=1, max=30, step=0.5, description="launch µs", **later),
        syncs=IntSlider(0, 0, 10, description="syncs", **later),
        data_us=FloatSlider(value=0.0, min=0, max=500, step=10, description="data µs", **later),
        graph=ToggleButton(False, description="CUDA graph"),
    )
    return ByHand(sliders, lambda: draw(Setting()))
