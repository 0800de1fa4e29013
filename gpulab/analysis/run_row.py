"""One run as one flat row of figures, for tables that other programs read: a name and a type for every column."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from gpulab.analysis.facts import Facts, facts
from gpulab.run import Run

Cell = str | int | float | bool | None
ColumnType = type[str] | type[int] | type[float] | type[bool]

COLUMNS: Mapping[str, ColumnType] = MappingProxyType(
    {
        "id": str,
        "name": str,
        "created": str,  # ISO 8601, UTC
        "source": str,
        "outcome": str,
        "outcome_detail": str,
        "device": str,  # "cpu" or "cuda"
        "device_name": str,
        "step_median_us": float,  # of unprofiled steps after warm-up; steps.select says which
        "step_p10_us": float,
        "step_p90_us": float,
        "counted_step_count": int,
        "step_count": int,
        "samples_per_s": float,
        "steps_per_s": float,
        "busy_fraction": float,  # of the profiled steps; a CPU has none
        "kernel_busy_fraction": float,
        "data_wait_fraction": float,  # median wait in the DataLoader over the median step
        "outside_steps_fraction": float,
        "code_wall_us": float,
        "peak_allocated_bytes": int,
        "peak_reserved_bytes": int,
        "peak_rss_bytes": int,
        "memory_total_bytes": int,
        "batch_size": int,
        "num_workers": int,
        "prefetch_factor": int,
        "pin_memory": bool,
        "persistent_workers": bool,
        "dataset": str,
        "setting_steps": int,
        "setting_warmup": int,
        "setting_trace_steps": int,
        "setting_trace": bool,
        "setting_device": str,
        "setting_whole": bool,
        "knobs": str,  # what was changed for the run: "workers=4, amp=bf16"; empty: the code as written
        "python": str,
        "torch": str,
        "cpu": str,
        "usable_cores": float,
        "hostname": str,
    }
)


def run_row(run: Run) -> dict[str, Cell]:
    """The row of a run with exactly the keys of `COLUMNS`, in their order; None is "not measurable" or "not set"."""
    found = facts(run)
    row = {**_record(run), **_figures(found), **_settings(run)}
    return {name: row[name] for name in COLUMNS}


def _record(run: Run) -> dict[str, Cell]:
    environment, memory = run.environment, run.memory
    return {
        "id": run.id,
        "name": run.settings.name,
        "created": run.created,
        "source": run.source,
        "outcome": run.outcome,
        "outcome_detail": run.outcome_detail,
        "device": run.device.kind,
        "device_name": run.device.name,
        "step_count": len(run.steps),
        "code_wall_us": run.code_wall_ns / 1e3,
        "peak_allocated_bytes": memory.peak_allocated_bytes,
        "peak_reserved_bytes": memory.peak_reserved_bytes,
        "peak_rss_bytes": memory.peak_rss_bytes,
        "memory_total_bytes": memory.total_bytes,
        "python": environment.python,
        "torch": environment.packages.get("torch"),
        "cpu": environment.cpu,
        "usable_cores": environment.usable_cores,
        "hostname": environment.hostname,
    }


def _figures(found: Facts) -> dict[str, Cell]:
    step, account = found.step_us, found.breakdown
    return {
        "step_median_us": step.median if step else None,
        "step_p10_us": step.p10 if step else None,
        "step_p90_us": step.p90 if step else None,
        "counted_step_count": step.count if step else 0,
        "samples_per_s": found.samples_per_s,
        "steps_per_s": found.steps_per_s,
        "busy_fraction": account.busy_fraction if account else None,
        "kernel_busy_fraction": account.kernel_busy_fraction if account else None,
        "data_wait_fraction": found.data_wait_fraction,
        "outside_steps_fraction": found.outside_steps_fraction,
    }


def _settings(run: Run) -> dict[str, Cell]:
    asked, loader = run.settings, run.loader
    return {
        "batch_size": loader.batch_size if loader else None,
        "num_workers": loader.num_workers if loader else None,
        "prefetch_factor": loader.prefetch_factor if loader else None,
        "pin_memory": loader.pin_memory if loader else None,
        "persistent_workers": loader.persistent_workers if loader else None,
        "dataset": loader.dataset if loader else None,
        "setting_steps": asked.steps,
        "setting_warmup": asked.warmup,
        "setting_trace_steps": asked.trace_steps,
        "setting_trace": asked.trace,
        "setting_device": asked.device,
        "setting_whole": asked.whole,
        "knobs": ", ".join(f"{knob}={value}" for knob, value in asked.knobs.items()),
    }
