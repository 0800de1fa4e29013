"""The NVML meter against a scripted GPU: every query stands alone, and no refusal is ever a 0."""

from __future__ import annotations

import inspect
import os
import sys
import time
from types import ModuleType
from typing import Any

import pytest

from gpulab.devices import nvml
from gpulab.devices.meters import Meter
from tests.support import fake_nvml as fakes

SIMPLE = {
    "gpu_utilization_pct",
    "gpu_memory_used_bytes",
    "power_w",
    "energy_j",
    "sm_clock_mhz",
    "temperature_c",
    "throttle_reasons",
    "other_gpu_processes",
}
COUNTERS = {name for name, *_ in nvml.GPM_SERIES}
UUID = "00000000-0000-0000-0000-0000000000a0"


@pytest.fixture(autouse=True)
def _host_pids(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvml, "sees_host_pids", lambda: True)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds that GPM sees, under the test's control."""
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    return now


def h100(**changes: Any) -> fakes.FakeScript:
    """An H100, with these entries of the script."""
    return {**fakes.h100(), **changes}  # type: ignore[typeddict-item]


def meter_of(script: fakes.FakeScript, uuid: str | None = UUID) -> tuple[Meter, ModuleType]:
    module = fakes.fake_nvml(script)
    return nvml.nvml_meter(uuid, os.getpid(), module), module


def readings(meter: Meter, clock: list[float], count: int = 1) -> list[dict[str, float | None]]:
    rows = []
    for _ in range(count):
        clock[0] += 0.1
        rows.append(dict(zip([s.name for s in meter.series()], meter.read(), strict=True)))
    return rows


def test_an_h100_gives_every_series_in_our_units(clock: list[float]) -> None:
    meter, _ = meter_of(fakes.h100())
    first, second, third = readings(meter, clock, 3)
    assert {s.name for s in meter.series()} == SIMPLE | COUNTERS
    assert {s.source for s in meter.series()} == {"NVML", "NVML GPM"}
    assert first["gpu_utilization_pct"] == 30
    assert second["power_w"] == 310
    assert (first["energy_j"], second["energy_j"]) == (12, 43)
    assert first["gpu_memory_used_bytes"] == 6 * 2**30
    assert first["sm_active_fraction"] is None, "two samples must lie at least 100 ms apart"
    assert second["sm_active_fraction"] == pytest.approx(0.42)
    assert second["tensor_active_fraction"] == pytest.approx(0.125)
    assert second["pcie_rx_mb_per_s"] == pytest.approx(2000 * 2**20 / 1e6)
    assert third["sm_active_fraction"] is None
    assert meter.missing() == ()


def test_a_t4_has_no_counters_and_says_why(clock: list[float]) -> None:
    meter, _ = meter_of(fakes.t4(), uuid="GPU-00000000-0000-0000-0000-0000000000B0")
    (row,) = readings(meter, clock)
    assert set(row) == SIMPLE
    assert row["throttle_reasons"] == 4, "the old name of the function is used where the new one is unknown"
    (missing,) = meter.missing()
    assert missing.what == ", ".join(nvml.GPM_LABELS)
    assert "Hopper" in missing.reason
    assert missing.since_ns is None


LOST = {
    "nvmlDeviceGetUtilizationRates": {"gpu_utilization_pct"},
    "nvmlDeviceGetMemoryInfo": {"gpu_memory_used_bytes"},
    "nvmlDeviceGetPowerUsage": {"power_w"},
    "nvmlDeviceGetTotalEnergyConsumption": {"energy_j"},
    "nvmlDeviceGetClockInfo": {"sm_clock_mhz"},
    "nvmlDeviceGetTemperature": {"temperature_c"},
    "nvmlDeviceGetComputeRunningProcesses": {"other_gpu_processes"},
    "nvmlGpmSampleGet": COUNTERS,
    "nvmlInit": SIMPLE | COUNTERS,
}
OF_DRIVER = ("LibraryNotFound", "DriverNotLoaded", "LibRmVersionMismatch")


@pytest.mark.parametrize("function", LOST)
@pytest.mark.parametrize("error", ["NotSupported", "NoPermission", "NotFound", "FunctionNotFound", *OF_DRIVER])
def test_one_refused_query_costs_only_its_own_series(function: str, error: str) -> None:
    meter, _ = meter_of(h100(errors={function: error}))
    assert {s.name for s in meter.series()} == (SIMPLE | COUNTERS) - LOST[function]
    assert len(meter.read()) == len(meter.series())
    (missing,) = meter.missing()
    assert missing.reason.startswith(nvml.REASONS[fakes.ERROR_CODES[error]]) and missing.since_ns is None
    assert (missing.what == "GPU curves") is (function == "nvmlInit")


def test_a_query_lost_in_the_middle_is_missing_since_then(clock: list[float]) -> None:
    meter, module = meter_of(h100(fails_after={"nvmlDeviceGetTemperature": (4, "GpuIsLost")}))  # one call opens it
    before_ns = time.perf_counter_ns()
    rows = readings(meter, clock, 10)
    assert [row["temperature_c"] for row in rows] == [44, 44, 44] + [None] * 7
    assert all(row["gpu_utilization_pct"] is not None for row in rows)
    (missing,) = meter.missing()
    assert missing.what == "temperature"
    assert missing.since_ns is not None
    assert before_ns <= missing.since_ns <= time.perf_counter_ns()
    assert module.state.calls["nvmlDeviceGetTemperature"] == 7, "a lost query is not asked for again"


def test_failures_that_pass_are_gaps_and_not_a_loss(clock: list[float]) -> None:
    script = fakes.h100()
    meter, _ = meter_of(script)
    script["errors"] = {"nvmlDeviceGetTemperature": "Timeout"}
    failed = readings(meter, clock, 2)
    script["errors"] = {}
    (again,) = readings(meter, clock)
    script["errors"] = {"nvmlDeviceGetTemperature": "Timeout"}
    failed += readings(meter, clock, 2)
    assert [row["temperature_c"] for row in failed] == [None] * 4
    assert again["temperature_c"] == 44
    assert meter.missing() == ()


def test_one_counter_may_fail_alone(clock: list[float]) -> None:
    meter, _ = meter_of(h100(errors={"gpm:5": "NotSupported"}))
    rows = readings(meter, clock, 8)
    assert all(row["tensor_active_fraction"] is None for row in rows)
    assert [v for row in rows if (v := row["sm_active_fraction"]) is not None] == pytest.approx([0.42] * 4)
    (missing,) = meter.missing()
    assert (missing.what, missing.since_ns) == ("tensor active", None)


def test_samples_are_two_and_freed_before_nvml_ends(clock: list[float]) -> None:
    meter, module = meter_of(fakes.h100())
    readings(meter, clock, 20)
    assert len(module.state.samples) == 2
    meter.close()
    meter.close()
    assert all(sample.freed for sample in module.state.samples)
    assert module.state.open_sessions == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_process_reads_nothing_and_frees_nothing(clock: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    meter, module = meter_of(fakes.h100())
    real = os.getpid()
    calls = dict(module.state.calls)
    with monkeypatch.context() as forked:  # only here: the fixtures ask for this process's number afterwards
        forked.setattr(os, "getpid", lambda: real + 1)
        (row,) = readings(meter, clock)
        meter.close()
    assert set(row.values()) == {None}
    assert module.state.calls == calls


def test_without_the_package_there_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    (missing,) = nvml.nvml_meter(None, os.getpid()).missing()
    assert "nvidia-ml-py" in missing.reason


def test_devices_are_found_by_uuid_and_not_by_index() -> None:
    assert nvml.nvml_index_for(None, fakes.fake_nvml(fakes.h100())) == 0, "the only GPU needs no UUID"
    module = fakes.fake_nvml(h100(devices=[{"name": "A", "uuid": "GPU-AAAA"}, {"name": "B", "uuid": "GPU-bbbb"}]))
    assert nvml.nvml_index_for("BBBB", module) == 1
    assert nvml.nvml_index_for("GPU-aaaa", module) == 0
    assert nvml.nvml_index_for("cccc", module) is None
    assert nvml.nvml_index_for(None, module) is None, "two GPUs and no UUID: nothing can be said"
    assert nvml.nvml_index_for("aaaa", fakes.fake_nvml(fakes.no_driver())) is None
    assert module.state.open_sessions == 0


def test_a_mig_part_is_read_by_its_own_handle(clock: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    script = fakes.h100()
    script["devices"].append({"name": "A", "uuid": "GPU-split", "parts": [{"name": "B", "uuid": "MIG-part"}]})
    module = fakes.fake_nvml(script)
    assert nvml.nvml_index_for("MIG-part", module) == 1, "the GPU it is a part of"
    asked: list[object] = []
    memory = module.nvmlDeviceGetMemoryInfo

    def noted(handle: object, *version: object) -> Any:
        asked.append(handle)
        return memory(handle, *version)

    monkeypatch.setattr(module, "nvmlDeviceGetMemoryInfo", noted)
    meter = nvml.nvml_meter("part", os.getpid(), module)
    (row,) = readings(meter, clock)
    assert row["gpu_memory_used_bytes"] == 6 * 2**30 and set(asked) == {(1, 0)}


def test_a_mig_part_has_its_own_counters(clock: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    script = fakes.h100()
    parts: list[fakes.FakeDevice] = [
        {"name": "B", "uuid": f"MIG-{name}", "instance": number} for name, number in (("one", 1), ("other", 5))
    ]
    script["devices"].append({"name": "A", "uuid": "GPU-split", "parts": parts})
    module = fakes.fake_nvml(script)
    asked: list[tuple[object, int]] = []
    sample_of = module.nvmlGpmMigSampleGet

    def noted(gpu: object, instance: int, sample: object) -> Any:
        asked.append((gpu, instance))
        return sample_of(gpu, instance, sample)

    monkeypatch.setattr(module, "nvmlGpmMigSampleGet", noted)
    meter = nvml.nvml_meter("MIG-other", os.getpid(), module)
    _, last = readings(meter, clock, 2)
    labels = {s.name: s.label for s in meter.series()}
    assert last["power_w"] == 310 and last["sm_clock_mhz"] == 1980 and last["sm_active_fraction"] == pytest.approx(0.42)
    whole = {name for name, label in labels.items() if label.endswith("(whole GPU)")}
    assert whole >= {"power_w", "energy_j", "sm_clock_mhz", "temperature_c", "throttle_reasons"}
    assert whole.isdisjoint({"gpu_memory_used_bytes", "other_gpu_processes", *COUNTERS})
    assert set(asked) == {(1, 5)}, "the GPU's handle, the part's instance"
    assert "gpu_utilization_pct" not in last and any("utilization" in m.what for m in meter.missing())
    meter.close()
    assert module.state.open_sessions == 0


def test_pynvml_has_the_mig_calls_that_are_made_here() -> None:
    pynvml = pytest.importorskip("pynvml")
    for name in ("nvmlGpmMigSampleGet", "nvmlGpmSampleGet", "nvmlDeviceGetGpuInstanceId", "nvmlDeviceGetPowerUsage"):
        real, fake = (inspect.signature(getattr(of, name)) for of in (pynvml, fakes._Fake({})))
        assert len(real.parameters) == len(fake.parameters), name


def test_an_unknown_gpu_is_missing_and_nothing_stays_open() -> None:
    meter, module = meter_of(fakes.h100(), uuid="GPU-ffff")
    assert meter.series() == ()
    assert "GPU-ffff" in meter.missing()[0].reason
    assert module.state.open_sessions == 0


def test_other_processes_are_those_outside_our_tree(clock: list[float]) -> None:
    meter, _ = meter_of(h100(processes=[os.getpid(), 1]))
    rows = readings(meter, clock, 10)
    assert [row["other_gpu_processes"] for row in rows].count(1.0) == 1, "listed once a second"


def test_in_a_container_other_processes_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvml, "sees_host_pids", lambda: False)
    meter, _ = meter_of(fakes.h100())
    assert "other_gpu_processes" not in {s.name for s in meter.series()}
    assert "host's ids" in meter.missing()[0].reason


def test_pcie_throughput_is_never_asked() -> None:
    assert not hasattr(fakes.fake_nvml(fakes.h100()), "nvmlDeviceGetPcieThroughput")
    meter, _ = meter_of(fakes.h100())
    assert meter.missing() == (), "no query needs a function that the fake lacks"


def test_the_fake_has_the_names_and_codes_of_the_real_module() -> None:
    pynvml = pytest.importorskip("pynvml")
    fake = fakes.fake_nvml(fakes.h100())
    for name in vars(fake):
        if name.startswith(("nvml", "NVML", "c_nvml")):
            assert hasattr(pynvml, name), name
    for name, code in fakes.ERROR_CODES.items():
        assert type(pynvml.NVMLError(code)).__name__.lower().replace("_", "") == f"nvmlerror{name.lower()}"
    for name, metric in {"SM_UTIL": 2, "SM_OCCUPANCY": 3, "ANY_TENSOR_UTIL": 5, "DRAM_BW_UTIL": 10}.items():
        assert getattr(pynvml, f"NVML_GPM_METRIC_{name}") == metric
    assert (pynvml.NVML_GPM_METRIC_PCIE_TX_PER_SEC, pynvml.NVML_GPM_METRIC_PCIE_RX_PER_SEC) == (20, 21)
