"""The rules, in one literal list: a new one is a function in a file of its family and a line here."""

from __future__ import annotations

from gpulab.diagnosis.context import Rule
from gpulab.diagnosis.rules import (
    cores,
    dataloader,
    dataloader_workers,
    distributed,
    launches,
    memory,
    operations,
    optimizer,
    pauses,
    placement,
    precision,
    sharing,
    transfers,
    verdicts,
)

PAUSES = (pauses.checkpoint_save, pauses.logging_or_eval)  # with thresholds above the silence
RULES: tuple[Rule, ...] = (
    # the host: feeding the step, and what else its program does
    dataloader.data_starved,
    dataloader.cpu_preprocessing,
    dataloader.storage_bound,
    dataloader.slow_collate,
    dataloader_workers.worker_restart,
    cores.cpu_oversubscribed,
    placement.wrong_device,
    pauses.checkpoint_save,
    pauses.logging_or_eval,
    pauses.recompilation,
    pauses.gc_pause,
    # the device: what is launched on it, copied to it and computed on it
    launches.launch_bound,
    launches.small_batch,
    transfers.sync_points,
    transfers.blocking_copy,
    precision.no_mixed_precision,
    precision.no_tf32,
    operations.unfused_attention,
    optimizer.unfused_optimizer,
    operations.memory_bound_ops,
    operations.layout,
    operations.odd_shapes,
    memory.allocator_thrash,
    memory.memory_pressure,
    memory.memory_underused,
    distributed.exposed_communication,
    sharing.gpu_shared,
    sharing.throttled,
    # where none of these speaks
    verdicts.cannot_tell,
    verdicts.healthy,
)
