"""Two small traces to keep: attention of cuDNN with the host far ahead, and replays of a CUDA graph.

Beside each stand the true times of its steps, by CUDA events of our own: what a report of the file must say.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import profile, schedule

from benchmarks.gpu_first.answer import Answer
from benchmarks.gpu_first.networks import gpt_of
from benchmarks.gpu_first.stage import Mark, Stage

WAIT, WARMUP, ACTIVE = 2, 2, 5
LIMIT_BYTES = 4 * 2**20
EXPECTED = f"at most {LIMIT_BYTES:,} bytes"
Step = Callable[[], None]


def measure(answer: Answer, stage: Stage, folder: str) -> None:
    """Write both."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    for name, make in (("cudnn_attention_run_ahead", attention), ("graph_replay", replay)):
        file = Path(folder, f"{name}.pt.trace.json.gz")
        with answer.guarded(f"trace {name}", EXPECTED):
            steps_ms = recorded(stage, make(stage), file)
            size = file.stat().st_size
            answer.figure(name, {"file": f"traces/{file.name}", "bytes": size, "true_step_ms": steps_ms})
            answer.check(f"trace {name}", EXPECTED, f"{size:,} bytes", agrees=size <= LIMIT_BYTES)
            if size > LIMIT_BYTES:
                file.unlink()
        stage.release()


def recorded(stage: Stage, step: Step, file: Path) -> list[float]:
    """Write the trace of a few steps in a row without any wait between them; the true times of the steps in it."""
    plan = schedule(wait=WAIT, warmup=WARMUP, active=ACTIVE, repeat=1)
    marks: list[Mark] = []
    stage.synchronize()

    def write(session: profile) -> None:
        session.export_chrome_trace(str(file))

    with profile(activities=stage.activities, schedule=plan, on_trace_ready=write) as session:
        for _ in range(WAIT + WARMUP + ACTIVE):
            step()
            marks.append(stage.mark())
            session.step()
    stage.synchronize()
    return [stage.apart_ms(earlier, later) for earlier, later in list(pairwise(marks))[-ACTIVE:]]


def attention(stage: Stage) -> Step:
    """Training of a small GPT in bf16 without a wait. Its attention is cuDNN's."""
    backend = SDPBackend.MATH if stage.simulated else SDPBackend.CUDNN_ATTENTION
    train = _training(stage)

    def step() -> None:
        with sdpa_kernel(backend):
            train()

    step()  # what is tuned or refused comes now
    return step


def replay(stage: Stage) -> Step:
    """The same training as one CUDA graph per step, and a copy of the inputs before it."""
    train = _training(stage, capturable=True)
    for _ in range(3):
        train()
    graph = stage.graph_of(train)
    inputs = torch.zeros(1024, device=stage.device)
    fresh = torch.ones_like(inputs)

    def step() -> None:
        inputs.copy_(fresh)
        graph()

    return step


def _training(stage: Stage, *, capturable: bool = False) -> Step:
    torch.manual_seed(0)
    batch, length = stage.size(8, 1), stage.size(2048, 16)
    model, tokens, targets = gpt_of(stage, blocks=stage.size(4, 1), batch=batch, length=length)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, capturable=capturable and not stage.simulated)

    def train() -> None:
        with torch.autocast(stage.device, dtype=torch.bfloat16):
            loss = F.cross_entropy(model(tokens), targets)
        optimizer.zero_grad(set_to_none=not capturable)
        loss.backward()
        optimizer.step()

    return train
