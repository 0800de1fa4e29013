"""Makes one flat row of figures from a run, for tables that other programs read; columns have a name and a type."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from gpulab.analysis.facts import Facts, facts
from gpulab.formatting import settings_words
from gpulab.run import Run

Cell = str | int | float | bool | None
ColumnType = type[str] | type[int] | type[float] | type[bool]

_FIGURES: Mapping[str, tuple[ColumnType, Callable[[Facts], Cell]]] = {
    "id": (str, lambda f: f.run.id),
    "name": (str, lambda f: f.run.settings.name),
    "created": (str, lambda f: f.run.created),  # ISO 8601, UTC
    "source": (str, lambda f: f.run.source),
    "outcome": (str, lambda f: f.run.outcome),
    "outcome_detail": (str, lambda f: f.run.outcome_detail),
    "device": (str, lambda f: f.run.device.kind),  # "cpu" or "cuda"
    "device_name": (str, lambda f: f.run.device.name),
    "step_median_us": (
        float,
        lambda f: f.step_us.median if f.step_us else None,
    ),
    "step_p10_us": (float, lambda f: f.step_us.p10 if f.step_us else None),
    "step_p90_us": (float, lambda f: f.step_us.p90 if f.step_us else None),
    "counted_step_count": (int, lambda f: f.step_us.count if f.step_us else 0),
    "step_count": (int, lambda f: len(f.run.steps)),
    "samples_per_s": (float, lambda f: f.samples_per_s),
    "steps_per_s": (float, lambda f: f.steps_per_s),
    "busy_fraction": (
        float,
        lambda f: f.breakdown.busy_fraction if f.breakdown else None,
    ),
    "kernel_busy_fraction": (float, lambda f: f.breakdown.kernel_busy_fraction if f.breakdown else None),
    "data_wait_fraction": (float, lambda f: f.data_wait_fraction),
    "outside_steps_fraction": (float, lambda f: f.outside_steps_fraction),
    "code_wall_us": (float, lambda f: f.run.code_wall_ns / 1e3),
    "peak_allocated_bytes": (int, lambda f: f.run.memory.peak_allocated_bytes),
    "peak_reserved_bytes": (int, lambda f: f.run.memory.peak_reserved_bytes),
    "peak_rss_bytes": (int, lambda f: f.run.memory.peak_rss_bytes),
    "memory_total_bytes": (int, lambda f: f.run.memory.total_bytes),
    "batch_size": (int, lambda f: f.run.loader.batch_size if f.run.loader else None),
    "num_workers": (int, lambda f: f.run.loader.num_workers if f.run.loader else None),
    "prefetch_factor": (int, lambda f: f.run.loader.prefetch_factor if f.run.loader else None),
    "pin_memory": (bool, lambda f: f.run.loader.pin_memory if f.run.loader else None),
    "persistent_workers": (bool, lambda f: f.run.loader.persistent_workers if f.run.loader else None),
    "dataset": (str, lambda f: f.run.loader.dataset if f.run.loader else None),
    "setting_steps": (int, lambda f: f.run.settings.steps),
    "setting_warmup": (int, lambda f: f.run.settings.warmup),
    "setting_trace_steps": (int, lambda f: f.run.settings.trace_steps),
    "setting_trace": (bool, lambda f: f.run.settings.trace),
    "setting_device": (str, lambda f: f.run.settings.device),
    "setting_whole": (bool, lambda f: f.run.settings.whole),
    "knobs": (str, lambda f: _changes(f.run)),  # what was changed for the run; empty: the baseline
    "python": (str, lambda f: f.run.environment.python),
    "torch": (str, lambda f: f.run.environment.packages.get("torch")),
    "cpu": (str, lambda f: f.run.environment.cpu),
    "usable_cores": (float, lambda f: f.run.environment.usable_cores),
    "hostname": (str, lambda f: f.run.environment.hostname),
}
COLUMNS: Mapping[str, ColumnType] = MappingProxyType({name: kind for name, (kind, _) in _FIGURES.items()})


def run_row(run: Run) -> dict[str, Cell]:
    """The row of a run with exactly the keys of `COLUMNS`, in their order; None is "not measurable" or "not set"."""
    of_run = facts(run)
    return {name: figure(of_run) for name, (_, figure) in _FIGURES.items()}


def _changes(run: Run) -> str:
    """The changes as a user sets them: "workers=4, amp=bf16"."""
    return settings_words(run.settings.knobs)
