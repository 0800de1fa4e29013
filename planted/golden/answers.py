"""What gpulab says of one case: the report's document and predictions of settings, and how two answers differ."""

from __future__ import annotations

import json
import lzma
import math
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import zip_longest
from pathlib import Path
from typing import Any

import msgspec

from planted.golden.cases import FOLDER, Case

ANSWERS = FOLDER / "answers.json.xz"
TOLERANCE = 1e-9  # relative: another order of a sum
UNLIKE_HERE = {"path", "source", "trace_path", "environment", "versions"}  # keys that differ between machines
SETTINGS: tuple[Mapping[str, str], ...] = (
    {"workers": "0"}, {"workers": "2"}, {"workers": "4"}, {"workers": "2", "persistent_workers": "True"},
    {"cache": "True"}, {"persistent_workers": "True"}, {"amp": "bf16"}, {"tf32": "True"}, {"attention": "flash"},
    {"fused_optimizer": "True"}, {"compile": "default"}, {"accumulate": "2"},
    {"batch_size": "8"}, {"batch_size": "64"},
)  # fmt: skip
MOST_CHARACTERS = 160  # of a value in a difference


def answer(case: Case) -> dict[str, Any]:
    """The answers to one case, as they come back from JSON."""
    from gpulab.api.reading import report
    from gpulab.run import Run

    run = _input(case)
    found: dict[str, Any] = {"report": report(run).json()}
    if isinstance(run, Run):
        found["predictions"] = {_words(settings): _predicted(run, settings) for settings in SETTINGS}
    plain: dict[str, Any] = json.loads(json.dumps(found, default=str), object_hook=_of_any_machine)
    return plain


def _of_any_machine(fields: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in fields.items() if key not in UNLIKE_HERE}


def _input(case: Case) -> Any:
    if case.kind == "run":
        from gpulab.store.folders import read

        return read(Path(case.path))
    if case.kind == "trace":
        from gpulab.api.reading import open_run

        return open_run(case.path)
    from planted.simulated.record import record

    loop = _loops()[case.name.removeprefix("loop ")]
    return record(loop.loop, loop.gpu, peak_memory_fraction=loop.peak_memory_fraction).run


@cache
def _loops() -> dict[str, Any]:
    from planted.simulated.loops import LOOPS

    return {loop.name: loop for loop in LOOPS}


def _predicted(run: Any, settings: Mapping[str, str]) -> Any:
    from gpulab.analysis.facts import facts
    from gpulab.prediction.predict import predict

    return msgspec.to_builtins(predict(facts(run), settings))


def _words(settings: Mapping[str, str]) -> str:
    return " ".join(f"{name}={value}" for name, value in settings.items())


def load() -> dict[str, Any]:
    """The kept answers, by case."""
    stored: dict[str, Any] = json.loads(lzma.decompress(ANSWERS.read_bytes()))
    return stored


def save(answers: Mapping[str, Any]) -> None:
    """Keep these answers from now on."""
    text = json.dumps(answers, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    ANSWERS.write_bytes(lzma.compress(text.encode(), preset=9))


def differences(stored: Any, now: Any, where: str = "") -> Iterator[str]:
    """One line for each value that is another, gone or new. Numbers may differ by rounding."""
    if isinstance(stored, dict) and isinstance(now, dict):
        for key in sorted(stored.keys() | now.keys()):
            name = f"{where}.{key}" if where else key
            yield from differences(stored.get(key, _ABSENT), now.get(key, _ABSENT), name)
    elif isinstance(stored, list) and isinstance(now, list):
        for index, (one, other) in enumerate(zip_longest(stored, now, fillvalue=_ABSENT)):
            yield from differences(one, other, f"{where}[{index}]")
    elif not _same(stored, now):
        yield f"{where}: {_short(stored)} → {_short(now)}"


class _Absent:
    def __repr__(self) -> str:
        return "absent"


_ABSENT = _Absent()


def _same(stored: Any, now: Any) -> bool:
    numbers = all(isinstance(value, float | int) and not isinstance(value, bool) for value in (stored, now))
    if numbers and float in (type(stored), type(now)):
        return math.isclose(stored, now, rel_tol=TOLERANCE, abs_tol=1e-12) or (math.isnan(stored) and math.isnan(now))
    return type(stored) is type(now) and bool(stored == now)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= MOST_CHARACTERS else f"{text[:MOST_CHARACTERS]}… ({len(text)} characters)"
