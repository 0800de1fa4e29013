"""What must not break: the user's code and the user's own exception, each in a process that may be lost."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import gpulab
from benchmarks.conductor import reason_of
from benchmarks.gpu_first.answer import Answer
from benchmarks.gpu_first.stage import Stage
from gpulab.capture import recorder
from gpulab.run import Run

STEPS = 16
GRAPH_AT = 8  # the last step that is captured in its turn


def measure(answer: Answer, stage: Stage, probe: str) -> None:
    """Run one probe, then look for what it left behind."""
    _PROBES[probe](answer, stage)
    left = left_behind()
    answer.check(f"{_words(probe)}: left behind", "nothing", ", ".join(left) or "nothing", agrees=not left)


def left_behind() -> list[str]:
    """What a run of gpulab may leave in this process."""
    left = [f"thread {t.name}" for t in threading.enumerate() if t.name.startswith("gpulab")]
    if torch._C._autograd._profiler_enabled():
        left.append("a profiler that runs")
    if recorder.active is not None:
        left.append("an active capture")
    return left


def _words(probe: str) -> str:
    return probe.replace("_", " ")


def _profiled(stage: Stage, loop: Callable[[], None]) -> tuple[Run | None, BaseException | None]:
    """The run of the loop and what the loop raised."""
    door = gpulab.profile("probe", device=stage.device, live=False, save=False, show=False)
    try:
        with door:
            loop()
    except Exception as e:
        return door.run, e
    return door.run, None


def _reason(error: BaseException | None) -> str:
    return "nothing was raised" if error is None else reason_of(error)


# -- a CUDA graph captured in step 1, 2, … 8, where a window of gpulab's may begin or end ------------------------------


def graph_capture(answer: Answer, stage: Stage) -> None:
    """The user captures a whole step, the optimizer's included; the replayed graphs give the same weights as alone."""
    alone = _captured_loop(stage, at=3)
    alone.run()
    for at in range(1, stage.size(GRAPH_AT, 2) + 1):
        loop = _captured_loop(stage, at)
        _, error = _profiled(stage, loop.run)
        what = f"a step captured as a graph after {at} steps"
        answer.check(what, "nothing was raised", _reason(error), agrees=error is None)
        if error is None:
            same = torch.allclose(loop.weight.detach(), alone.weight.detach(), atol=1e-6)
            answer.check(f"{what}: weights", "as without gpulab", "the same" if same else "different", agrees=same)


class _captured_loop:
    """A loop that trains one weight, its first `at` steps eagerly, the others as replays of a graph."""

    def __init__(self, stage: Stage, at: int) -> None:
        self._stage, self._at = stage, at
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.ones(64, 64, device=stage.device))
        self._x = torch.randn(64, 64, device=stage.device) / 8
        self._optimizer = torch.optim.Adam([self.weight], lr=1e-3, capturable=not stage.simulated)
        side = None if stage.simulated else torch.cuda.Stream()
        self._side: Any = side

    def _step(self) -> None:
        self._optimizer.zero_grad(set_to_none=False)
        (self._x @ self.weight).square().mean().backward()
        self._optimizer.step()

    def run(self) -> None:
        """As PyTorch's notes on CUDA graphs have it: warm up on a side stream, capture, replay."""
        if self._stage.simulated:
            for _ in range(STEPS):
                self._step()
            return
        self._side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._side):
            for _ in range(self._at):
                self._step()
        torch.cuda.current_stream().wait_stream(self._side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):  # nothing is executed while it is captured
            self._step()
        for _ in range(STEPS - self._at):
            graph.replay()
        torch.cuda.synchronize()


# -- a device-side assert, whose error comes later and never goes away -------------------------------------------------


def device_assert(answer: Answer, stage: Stage) -> None:
    """An index beyond the end in every step of the window: the user's own exception is the one that is seen."""
    run, error = _profiled(stage, _asserting(stage))
    _judge_assert(answer, error)
    outcome = "no run" if run is None else run.outcome
    answer.check("outcome of the run", "failed", outcome, agrees=outcome == "failed")


def assert_in_experiment(answer: Answer, stage: Stage) -> None:
    """The same in an experiment, which synchronizes, reads losses and puts the state back."""
    loop = _asserting(stage)
    try:
        gpulab.experiment(
            "loop(scale)", {"scale": 2}, namespace={"loop": lambda _: loop(), "scale": 1}, **_quick(stage)
        )
    except Exception as e:
        _judge_assert(answer, e)
    else:
        _judge_assert(answer, None)


def _asserting(stage: Stage) -> Callable[[], None]:
    weight = nn.Parameter(torch.ones(8, 8, device=stage.device))
    optimizer = torch.optim.SGD([weight], lr=1e-3)
    places = torch.zeros(4, dtype=torch.long, device=stage.device)

    def loop() -> None:
        for step in range(STEPS):
            optimizer.zero_grad()
            weight[places + (100 if step >= 4 else 0)].sum().backward()
            optimizer.step()
        stage.synchronize()

    return loop


def _judge_assert(answer: Answer, error: BaseException | None) -> None:
    words = _reason(error)
    agrees = error is not None and ("device-side assert" in str(error) or "out of bounds" in str(error))
    answer.check("what the user sees", "the device-side assert", words, agrees=agrees)


# -- out of memory in one arm, a good arm after it ---------------------------------------------------------------------

HUNGRY = """
for step in range(2000):
    ballast = torch.empty(ballast_gib * 2**28, device=device)
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    del ballast
"""


def out_of_memory(answer: Answer, stage: Stage) -> None:
    """The first arm asks for more memory than there is; the second is measured as if nothing had been."""
    torch.manual_seed(0)
    model = nn.Linear(256, 256).to(stage.device)
    names: dict[str, Any] = {
        "torch": torch,
        "device": stage.device,
        "model": model,
        "x": torch.randn(64, 256, device=stage.device),
        "optimizer": torch.optim.SGD(model.parameters(), lr=1e-4),
        "ballast_gib": 0,
    }
    try:
        compared = gpulab.experiment(HUNGRY, {"ballast_gib": [100_000, 1]}, namespace=names, **_quick(stage))
    except Exception as e:
        answer.check("an arm without memory, then a good one", "both are told", _reason(e), agrees=False)
        return
    comparisons = compared.comparisons
    said = [f"{c.b.label}: {c.verdict}, {c.b.failure or 'ran'}" for c in comparisons]
    agrees = len(comparisons) == 2 and bool(comparisons[0].b.failure) and not comparisons[1].b.failure
    answer.check(
        "an arm without memory, then a good one", "the first failed, the second ran", "; ".join(said), agrees=agrees
    )


# -- a CUDA graph of torch.compile that gives its loss back, and overwrites it -----------------------------------------

RETURNED = """
for step in range(2000):
    optimizer.zero_grad()
    loss = model(x)
    loss.backward()
    optimizer.step()
"""


class _WithLoss(nn.Module):
    """As nanoGPT and Hugging Face do it: the module itself gives the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 256))

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.layers(x).square().mean()
        return loss


def overwritten_loss(answer: Answer, stage: Stage) -> None:
    """compile=reduce-overhead around a module that returns its loss: an experiment reads all losses at its end."""
    model = _WithLoss().to(stage.device)
    names: dict[str, Any] = {
        "model": model if stage.simulated else torch.compile(model, mode="reduce-overhead"),
        "x": torch.randn(64, 256, device=stage.device),
        "optimizer": torch.optim.SGD(model.parameters(), lr=1e-4),
        "run_name": "first",
    }
    what = "reduce-overhead with the loss inside forward"
    try:
        exec(RETURNED.replace("2000", "5"), dict(names))
        stage.synchronize()
    except Exception as e:
        answer.unmeasured(what, "an experiment ends", f"the cell does not run even without gpulab: {_reason(e)}")
        return
    try:
        compared = gpulab.experiment(
            RETURNED + "    last = run_name\n", {"run_name": "second"}, namespace=names, **_quick(stage)
        )
    except Exception as e:
        answer.check(what, "an experiment ends", _reason(e), agrees=False)
        return
    loss = compared.only.loss
    seen = 0 if loss is None else sum(value == value for value in loss.a)
    answer.check(what, "an experiment ends", f"it ended: {compared.only.verdict}", agrees=True)
    answer.check("losses that were read", "at least one", str(seen), agrees=seen > 0)


# -- a second GPU ------------------------------------------------------------------------------------------------------


def second_gpu(answer: Answer, stage: Stage) -> None:
    """A cell on cuda:1: its name, its figures, and no context on the GPU that it does not use."""
    expected = "the second GPU's own figures"
    count = 0 if stage.simulated else torch.cuda.device_count()
    if count < 2:
        answer.unmeasured("a cell on cuda:1", expected, f"{count} GPU{'s' if count != 1 else ''} here")
        return
    device = torch.device("cuda", 1)
    x = torch.randn(2048, 2048, device=device)
    weight = nn.Parameter(torch.ones(2048, 2048, device=device))
    optimizer = torch.optim.SGD([weight], lr=1e-4)

    def loop() -> None:
        for _ in range(STEPS):
            optimizer.zero_grad()
            (x @ weight).mean().backward()
            optimizer.step()

    with gpulab.profile("second GPU", live=False, save=False, show=False) as door:
        loop()
    answer.check("index of the device", "1", str(door.run.device.index), agrees=door.run.device.index == 1)
    peak = door.run.memory.peak_allocated_bytes
    answer.check("peak memory", "more than 0", str(peak), agrees=bool(peak))
    context = torch.cuda.memory_reserved(0)
    answer.check("memory of torch on the GPU that is not used", "0 bytes", f"{context} bytes", agrees=context == 0)


def _quick(stage: Stage) -> dict[str, Any]:
    """Options of an experiment that is soon over."""
    return {"steps": 5, "pairs": 2, "save": False, "show": False}


_PROBES: dict[str, Callable[[Answer, Stage], None]] = {
    "graph_capture": graph_capture,
    "device_assert": device_assert,
    "assert_in_experiment": assert_in_experiment,
    "out_of_memory": out_of_memory,
    "overwritten_loss": overwritten_loss,
    "second_gpu": second_gpu,
}
