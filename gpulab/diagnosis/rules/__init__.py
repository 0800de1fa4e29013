"""The rules, in one literal list: a new one is a function in a file of its family and a line here."""

from __future__ import annotations

from gpulab.diagnosis.case import Rule
from gpulab.diagnosis.rules import (
    cores,
    epochs,
    feeding,
    fusing,
    launching,
    memory,
    optimizing,
    overall,
    pauses,
    placement,
    precision,
    ranks,
    shapes,
    sharing,
    transfers,
)

PAUSES = (pauses.checkpoint_save, pauses.logging_or_eval)  # with thresholds above the silence
RULES: tuple[Rule, ...] = (
    # the host: feeding the step, and what else its program does
    feeding.data_starved,
    feeding.cpu_preprocessing,
    feeding.storage_bound,
    feeding.slow_collate,
    epochs.worker_restart,
    cores.cpu_oversubscribed,
    placement.wrong_device,
    pauses.checkpoint_save,
    pauses.logging_or_eval,
    pauses.recompilation,
    pauses.gc_pause,
    # the device: what is launched on it, copied to it and computed on it
    launching.launch_bound,
    launching.small_batch,
    transfers.sync_points,
    transfers.blocking_copy,
    precision.no_mixed_precision,
    precision.no_tf32,
    fusing.unfused_attention,
    optimizing.unfused_optimizer,
    fusing.memory_bound_ops,
    shapes.layout,
    shapes.odd_shapes,
    memory.allocator_thrash,
    memory.memory_pressure,
    memory.memory_underused,
    ranks.exposed_communication,
    sharing.gpu_shared,
    sharing.throttled,
    # where none of these speaks
    overall.cannot_tell,
    overall.healthy,
)
