"""Each knob's answers before anything runs: what it finds, what it refuses and why, what values it has, what keeps it.

One line for each: the rules themselves are in the knobs, and nothing here trains.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from gpulab.errors import UsageError
from gpulab.knobs import loader_options
from gpulab.knobs.catalogue import KNOBS
from gpulab.knobs.compile import COMPILE
from gpulab.knobs.distributed import GLOO_WAITS, HAS_ONE, NO_DDP, NONE_SHARDED
from gpulab.knobs.knob import StepTimes, Value
from gpulab.knobs.loader_options import NO_LOADER, WORKERS, with_settings
from gpulab.knobs.observation import Observation
from tests.knobs.scenes import NOTHING, SCENE, calling, in_parallel, loading, optimizing
from tests.support.knob_cells import CPU, H100, T4

ITERABLE, ON_GPU = loading(iterable=True), replace(SCENE, device=H100)
FLASH = replace(SCENE, attention="flash")
FROM_MAIN = {method: loading(dataset_from_main=True, start_method=method) for method in ("fork", "spawn", "forkserver")}

REFUSALS: list[tuple[str, Value, Observation, str]] = [  # "" where it can be
    *((name, 2, ITERABLE, "IterableDataset") for name in ("workers", "prefetch", "persistent_workers", "batch_size")),
    *((name, 2, replace(NOTHING, device=H100), NO_LOADER) for name in ("workers", "prefetch", "pin_memory", "cache")),
    ("workers", 2, SCENE, ""),
    ("workers", 2, FROM_MAIN["spawn"], "spawn cannot import it; move it to a .py file"),
    ("workers", 2, FROM_MAIN["forkserver"], "forkserver cannot import it"),
    ("workers", 0, FROM_MAIN["spawn"], ""),
    ("workers", 2, FROM_MAIN["fork"], ""),
    ("workers", 2, loading(start_method="spawn"), ""),
    ("prefetch", 4, SCENE, "set workers=2 together with it"),
    ("prefetch", 4, with_settings(SCENE, {"workers": 2, "prefetch": 4}), ""),
    ("prefetch", 4, with_settings(loading(num_workers=1), {"workers": 0}), "workers=2"),
    ("persistent_workers", True, SCENE, "workers=2"),
    ("persistent_workers", True, with_settings(SCENE, {"workers": 2}), ""),
    ("persistent_workers", False, SCENE, ""),
    ("batch_size", 2, loading(custom_batch_sampler=True), "its own batch_sampler"),
    ("batch_size", 2, loading(batch_size=None), "batch_size=None"),
    ("batch_size", 101, SCENE, "the largest is batch_size=100"),
    ("batch_size", 100, SCENE, ""),
    ("batch_size", 0, SCENE, "at least 1"),
    ("pin_memory", True, SCENE, "torch does not pin memory here"),
    ("pin_memory", False, SCENE, ""),
    ("pin_memory", True, ON_GPU, ""),
    ("cache", True, SCENE, ""),
    ("cache", True, ITERABLE, "IterableDataset"),
    ("channels_last", True, SCENE, ""),
    *(("channels_last", True, of, "convolution") for of in (NOTHING, calling(has_convolution=False))),
    ("channels_last", True, calling(memory_format=None), "convolution"),
    ("attention", "math", replace(SCENE, operators=frozenset({"aten::mm"})), "hand-written attention"),
    ("attention", "math", SCENE, "only in a trace"),
    ("attention", "math", FLASH, ""),
    ("attention", "efficient", FLASH, "needs a GPU"),
    ("attention", "efficient", replace(FLASH, device=H100), ""),
    ("compile", "default", calling(parameter_count=0), "no torch.nn.Module"),
    ("compile", "default", calling(compiled=True), "already calls torch.compile"),
    ("compile", "off", calling(compiled=True), ""),
    ("compile", "off", SCENE, ""),
    ("compile", "reduce-overhead", SCENE, "CUDA graphs"),
    ("compile", "default", replace(SCENE, device=replace(T4, details={"compute_capability": "6.1"})), "7.0"),
    ("fused_optimizer", True, SCENE, ""),
    ("fused_optimizer", True, NOTHING, "no optimizer"),
    (
        "fused_optimizer",
        True,
        optimizing(class_name="RMSprop", supports_fused=False),
        "RMSprop has no fused implementation",
    ),
    ("fused_optimizer", False, optimizing(class_name="RMSprop"), ""),
    ("fused_optimizer", True, optimizing(parameter_devices=("xla:0",)), "xla"),
    ("fused_optimizer", True, optimizing(parameter_dtypes=("complex64",)), "complex64"),
    ("accumulate", 4, SCENE, ""),
    ("accumulate", 2, NOTHING, "no optimizer"),
    ("accumulate", 2, optimizing(class_name="LBFGS", takes_closure=True), "LBFGS"),
    ("accumulate", 2, replace(SCENE, grad_scaler=True), "GradScaler"),
    *(("amp", value, SCENE, "") for value in ("fp16", "bf16", "off")),
    ("amp", "bf16", NOTHING, "no torch.nn.Module"),
    ("amp", "fp16", calling(parameter_dtypes=("bfloat16",)), "already"),
    ("amp", "bf16", calling(parameter_dtypes=("float64",)), "float64"),
    ("amp", "fp16", replace(SCENE, grad_scaler=True), "GradScaler"),
    ("amp", "bf16", replace(SCENE, grad_scaler=True), ""),
    ("amp", "fp16", optimizing(takes_closure=True), "closure"),
    ("amp", "bf16", replace(SCENE, device=T4), "Tesla T4"),
    ("amp", "bf16", ON_GPU, ""),
    ("compile", "default", replace(SCENE, differentiates_twice=True), "create_graph"),
    ("tf32", True, SCENE, "CPU"),
    ("tf32", True, replace(NOTHING, device=T4), "Tesla T4"),
    ("tf32", True, replace(NOTHING, device=H100, tf32=False), ""),
    ("compute_threads", 1, SCENE, ""),
    *((name, False, SCENE, "does not run with") for name in ("anomaly", "validate_args")),
    ("anomaly", False, replace(SCENE, checks=frozenset({"anomaly"})), ""),
    ("compute_threads", 1, ON_GPU, "GPU"),
    ("compute_threads", 1, replace(SCENE, compute_threads=None), "not observed"),
    *((name, 2, SCENE, NO_DDP) for name in ("bucket_cap_mb", "comm_hook", "local_sgd")),
    *((name, 2, in_parallel(), "") for name in ("bucket_cap_mb", "comm_hook", "local_sgd")),
    ("local_sgd", 1, SCENE, ""),
    ("reshard_after_forward", False, SCENE, NONE_SHARDED),
    ("comm_hook", "fp16", in_parallel(hook=True), HAS_ONE),
    ("comm_hook", "powersgd", in_parallel(buckets=2), GLOO_WAITS),
    ("comm_hook", "powersgd", in_parallel(), ""),
    ("comm_hook", "powersgd", in_parallel("nccl", 2), ""),
]


@pytest.mark.parametrize(("name", "value", "scene", "words"), REFUSALS)
def test_what_cannot_be_is_refused_with_the_reason(
    name: str, value: Value, scene: Observation, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader_options, "pins_nothing_here", lambda: True)
    refused = KNOBS[name].refuses(scene, value)
    assert (refused is None) if not words else words in str(refused)


FOUND: list[tuple[str, Observation, Value | None]] = [
    *((name, NOTHING, None) for name in ("workers", "prefetch", "pin_memory", "persistent_workers", "batch_size")),
    *((name, NOTHING, None) for name in ("cache", "channels_last", "attention", "fused_optimizer", "accumulate")),
    *((name, NOTHING, None) for name in ("amp", "tf32", "compute_threads", "anomaly")),
    ("workers", loading(num_workers=1), 1),
    ("prefetch", loading(num_workers=1, prefetch_factor=2), 2),
    ("pin_memory", SCENE, False),
    ("persistent_workers", loading(persistent_workers=True), True),
    ("batch_size", SCENE, 8),
    ("cache", SCENE, False),
    ("channels_last", SCENE, False),
    ("channels_last", calling(memory_format="channels_last"), True),
    ("channels_last", calling(memory_format="mixed"), None),
    ("attention", FLASH, "auto"),
    ("attention", replace(SCENE, operators=frozenset({"aten::mm"})), None),
    ("compile", SCENE, "off"),
    ("compile", calling(compiled=True), None),
    ("fused_optimizer", SCENE, False),
    ("fused_optimizer", optimizing(fused=True), True),
    ("accumulate", SCENE, 1),
    ("amp", SCENE, "off"),
    ("amp", calling(autocast_dtype="bfloat16"), "bf16"),
    ("tf32", replace(ON_GPU, tf32=False), False),
    ("compute_threads", SCENE, 2),
    ("validate_args", replace(SCENE, checks=frozenset({"validate_args"})), True),
]


@pytest.mark.parametrize(("name", "scene", "value"), FOUND)
def test_the_value_that_is_there(name: str, scene: Observation, value: Value | None) -> None:
    assert KNOBS[name].value_in(scene) == value


VALUES: list[tuple[str, str, Value | str]] = [  # a text is what the error names
    ("workers", "3", 3),
    ("workers", "-1", "≥ 0"),
    ("workers", "2.4", "an integer"),
    ("batch_size", " 16 ", 16),
    ("pin_memory", "true", True),
    ("pin_memory", "onn", "pin_memory=on"),
    ("attention", "flahs", "attention=flash"),
    ("compile", "reduce", "compile=reduce-overhead"),
    ("accumulate", "inf", "≥ 1"),
    ("amp", "bf61", "amp=bf16"),
    ("tf32", "False", False),
    ("compute_threads", "0", "≥ 1"),
    ("bucket_cap_mb", "25", 25),
    ("bucket_cap_mb", "0.5", 0.5),
    ("bucket_cap_mb", "1e2", 100),
    *(("bucket_cap_mb", text, "a number of MB") for text in ("0", "-1", "nan", "inf", "a lot")),
]


@pytest.mark.parametrize(("name", "text", "value"), VALUES)
def test_a_value_is_read_or_answered_with_what_is_valid(name: str, text: str, value: Value | str) -> None:
    if not isinstance(value, str):
        parsed = KNOBS[name].parse(text)
        assert parsed == value and type(parsed) is type(value)
        return
    with pytest.raises(UsageError, match=value) as caught:
        KNOBS[name].parse(text)
    assert f"got {text!r}" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("name", KNOBS)
def test_nonsense_is_answered_and_what_keeps_a_value_is_python(name: str) -> None:
    for text in ("nonsense", ""):
        with pytest.raises(UsageError, match=f"^{name} must be .*got {text!r}") as caught:
            KNOBS[name].parse(text)
        assert "\n" not in str(caught.value)
    assert [KNOBS["amp"].parse(text) for text in (" BF16 ", "float16", "off")] == ["bf16", "fp16", "off"]
    for value in KNOBS[name].options:
        edit = KNOBS[name].code_edit(SCENE, value)
        compile(edit.snippet.replace("…", "..."), "snippet", "exec")
        if edit.call and not edit.wraps:
            assert f"{edit.call}(" in edit.snippet and f"{edit.keyword}={edit.literal}" in edit.snippet


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("pin_memory", True, "DataLoader(…, pin_memory=True)"),
        ("workers", 4, "DataLoader(…, num_workers=4)"),
        ("fused_optimizer", True, "torch.optim.AdamW(…, fused=True)"),
        ("cache", True, "range(len(dataset))"),
        ("channels_last", True, "memory_format=torch.channels_last"),
        ("compile", "reduce-overhead", 'mode="reduce-overhead"'),
        ("accumulate", 4, "4"),
        ("amp", "bf16", 'torch.autocast("cpu", dtype=torch.bfloat16)'),
        ("amp", "fp16", "GradScaler"),
        ("compute_threads", 1, "set_num_threads(1)"),
        ("anomaly", False, "set_detect_anomaly(False)"),
        ("validate_args", False, "set_default_validate_args(False)"),
    ],
)
def test_what_keeps_a_value(name: str, value: Value, words: str) -> None:
    assert words in KNOBS[name].code_edit(SCENE, value).snippet


def test_little_shared_memory_is_said_and_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader_options, "shared_memory_bytes", lambda: 64 * 2**20)
    assert "64.0 MiB" in WORKERS.cautions(SCENE, 2)[0] and WORKERS.cautions(SCENE, 0) == ()
    assert WORKERS.refuses(SCENE, 2) is None
    monkeypatch.setattr(loader_options, "pins_nothing_here", lambda: False)
    assert KNOBS["pin_memory"].refuses(SCENE, True) is None, "there is a GPU to pin for"
    with WORKERS.applied(1) as log:
        pass
    assert "Bus error" in log.notes[0]


def test_compile_needs_a_compiler_and_headers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refusal(**changes: Any) -> str:
        return str(COMPILE.refuses(replace(SCENE, **changes), "default"))

    monkeypatch.setattr(shutil, "which", lambda command: None)
    assert "C++ compiler" in refusal()
    monkeypatch.setattr(shutil, "which", lambda command: "/bin/true")
    monkeypatch.setattr(torch, "__file__", "/home/me/torch/__init__.py")
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    assert "header files" in refusal()
    (tmp_path / "Python.h").touch()
    assert COMPILE.refuses(SCENE, "default") is None
    monkeypatch.setattr(torch, "__file__", "/home/me/my work/torch/__init__.py")
    assert "a path contains a space" in refusal() and "/home/me/my work" in refusal()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "Triton" in refusal(device=H100)


@pytest.mark.parametrize(
    ("now", "cores", "tried"), [(2, 2.0, [1]), (1, 2.0, [2]), (1, 1.0, []), (16, 16.0, [8]), (4, 16.0, [16, 2])]
)
def test_a_climb_tries_half_the_threads_or_all_cores(now: int, cores: float, tried: list[int]) -> None:
    assert KNOBS["compute_threads"].next_values(now, StepTimes(cores)) == tried
    assert Observation(CPU).compute_threads is None
