"""What a trace file says beside its events: the devices, the rank, the clock, the versions, the profiler's options."""

from __future__ import annotations

import json
from collections.abc import Mapping

from msgspec.structs import replace

from gpulab.run import DeviceProperties, TraceOrigin
from gpulab.trace.events import DamageCount

_OPTIONS = ("record_shapes", "with_stack", "profile_memory", "with_flops", "with_modules")
_VERSIONS = ("cuda_runtime", "cuda_driver", "hip_runtime", "hip_driver", "cupti", "roctracer", "torch", "pytorch")


def complete(origin: TraceOrigin, head: bytes, tail: bytes, damage: DamageCount) -> TraceOrigin:
    """The origin with what stands before and after the events; what is broken there is noted and left out."""
    head = head.strip().removeprefix(b"\xef\xbb\xbf").lstrip()
    if not head.startswith(b"{"):
        return origin
    fields = _parsed(head + b"]" + tail)
    if fields is None:
        if tail:
            damage.note("unreadable metadata", "after the events")
        fields = _parsed(head + b"]}")
    return _completed(origin, fields or {})


def _parsed(text: bytes) -> dict[str, object] | None:
    try:
        value, _ = json.JSONDecoder(strict=False).raw_decode(text.decode("utf-8", "replace").strip())
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _completed(origin: TraceOrigin, fields: Mapping[str, object]) -> TraceOrigin:
    job = _mapping(fields.get("distributedInfo"))
    devices = fields.get("deviceProperties")
    base_time_ns = _whole(fields.get("baseTimeNanoseconds"))
    versions = {}
    for name in _VERSIONS:
        value = fields.get(f"{name}_version")
        if isinstance(value, int | float | str) and not isinstance(value, bool):
            versions[name] = _spelled(name, value)
    return replace(
        origin,
        zero_ns=origin.zero_ns + (base_time_ns or 0),
        base_time_ns=base_time_ns,
        schema_version=_whole(fields.get("schemaVersion")),
        rank=_whole(job.get("rank")),
        world_size=_whole(job.get("world_size")),
        backend=_text(job.get("backend")),
        versions=versions,
        options=tuple(o for o in _OPTIONS if fields.get(o) in (1, True, "1")),
        device_properties=tuple(_device(_mapping(d), i) for i, d in enumerate(devices))
        if isinstance(devices, list)
        else (),
    )


def _spelled(name: str, value: int | float | str) -> str:
    """CUDA counts 12.4 as 12040, HIP 6.4.43483 as 60443483."""
    if isinstance(value, int) and name.startswith("cuda"):
        return f"{value // 1000}.{value % 1000 // 10}"
    if isinstance(value, int) and name.startswith("hip"):
        return f"{value // 10_000_000}.{value // 100_000 % 100}.{value % 100_000}"
    return str(value)[:100]


def _device(given: Mapping[str, object], position: int) -> DeviceProperties:
    major, minor = _whole(given.get("computeMajor")), _whole(given.get("computeMinor"))
    number = _whole(given.get("id"))
    return DeviceProperties(
        id=position if number is None else number,
        name=_text(given.get("name")),
        total_memory_bytes=_whole(given.get("totalGlobalMem")),
        sm_count=_whole(given.get("numSms")),
        compute_capability=None if major is None or minor is None else f"{major}.{minor}",
        warp_size=_whole(given.get("warpSize")),
        max_threads_per_sm=_whole(given.get("maxThreadsPerMultiprocessor")),
        max_threads_per_block=_whole(given.get("maxThreadsPerBlock")),
        registers_per_sm=_whole(given.get("regsPerMultiprocessor")),
        shared_memory_per_sm_bytes=_whole(
            given.get("sharedMemPerMultiprocessor", given.get("maxSharedMemoryPerMultiProcessor"))
        ),
    )


def _mapping(value: object) -> Mapping[str, object]:
    return value if isinstance(value, dict) else {}


def _whole(value: object) -> int | None:
    """A whole number, also one written as text; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        whole = int(value)
    except (ValueError, OverflowError):
        return None
    return whole if abs(whole) < 1 << 63 else None


def _text(value: object) -> str | None:
    return value.encode("utf-8", "replace").decode()[:500] if isinstance(value, str) and value else None
