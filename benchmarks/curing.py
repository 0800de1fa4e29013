"""What a cure really gains: the baseline, cured, and with the advised knobs, in short runs that alternate."""

from __future__ import annotations

import contextlib
import gc
import random
import sys
from collections.abc import Mapping
from time import monotonic
from typing import Any

from msgspec import Struct

from benchmarks.harness import ratio_with_interval
from planted.catalogue import Planted
from planted.judge import AGAIN
from planted.stopwatch import notebook, seconds_per_step

ROUNDS = (3, 10)  # at least, at most
BUDGET_S = {"sick": 9.0, "healthy": 18.0}  # more arms and finer differences


class Arm(Struct, frozen=True):
    """One way to run the cell. `samples`: per optimizer step."""

    label: str
    text: tuple[str, str]
    samples: int
    knobs: tuple[tuple[str, str], ...] = ()


def arms_of(planted: Planted, advised: Mapping[str, str]) -> list[Arm]:
    """As written first, then the cure, then the knobs that a finding advised; of a healthy cell those to be tried."""
    result = [Arm("as written", planted.text, planted.batch)]
    if planted.cure:
        result.append(Arm("cured", planted.edited(planted.cure), planted.cured_batch or planted.batch))
    if planted.second_cure:
        both = planted.edited(planted.cure + planted.second_cure)
        result.append(Arm("both cured", both, planted.cured_batch or planted.batch))
    if advised:
        result.append(_with_knobs(planted, "advised", advised))
    if planted.tries:
        result.append(Arm(AGAIN, planted.text, planted.batch))
    result += [_with_knobs(planted, f"{k}={v}", {k: v}) for k, v in planted.tries.items()]
    return result


def measured(planted: Planted, advised: Mapping[str, str]) -> dict[str, Any]:
    """Of each arm time per sample over that of the baseline, with an interval; or why it could not run."""
    arms, budget_s = arms_of(planted, advised), BUDGET_S["sick" if planted.causes else "healthy"]
    names = {arm.label: notebook(arm.text[0], planted.name) for arm in arms}
    ratios: dict[str, list[float]] = {arm.label: [] for arm in arms[1:]}
    written: list[float] = []
    failed: dict[str, str] = {}
    began, shuffled = monotonic(), random.Random(0)
    while len(written) < ROUNDS[0] or (len(written) < ROUNDS[1] and _room(began, len(written), budget_s)):
        order = [arm for arm in arms if arm.label not in failed]
        shuffled.shuffle(order)
        spent: dict[str, float] = {}
        for arm in order:
            try:
                spent[arm.label] = _once(planted, arm, names) / arm.samples
            except Exception as e:
                if arm.label == "as written":
                    raise
                failed[arm.label] = f"{type(e).__name__}: {e}".splitlines()[0]
        written.append(spent["as written"])
        for label, seconds in spent.items():
            if label in ratios:
                ratios[label].append(seconds / spent["as written"])
    result: dict[str, Any] = {label: ratio_with_interval(r) for label, r in ratios.items() if len(r) == len(written)}
    return {
        "us_per_sample": sorted(written)[len(written) // 2] * 1e6,
        "arms": result,
        "failed": failed,
        "seconds": monotonic() - began,
    }


def _room(began: float, done: int, budget_s: float) -> bool:
    spent = monotonic() - began
    return spent + spent / done < budget_s


def _with_knobs(planted: Planted, label: str, knobs: Mapping[str, str]) -> Arm:
    batch = int(knobs["batch_size"]) * planted.rounds if "batch_size" in knobs else planted.batch
    samples = batch * int(knobs.get("accumulate", 1))
    return Arm(label, planted.text, samples, tuple(knobs.items()))


def _once(planted: Planted, arm: Arm, names: dict[str, dict[str, Any]]) -> float:
    """Seconds per optimizer step."""
    if planted.fresh:
        compiler = sys.modules.get("torch._dynamo")
        if compiler is not None:
            compiler.reset()
        names[arm.label] = notebook(arm.text[0], planted.name)
    gc.collect()
    with contextlib.ExitStack() as stack:
        for name, value in arm.knobs:
            from gpulab.knobs.catalogue import KNOBS

            stack.enter_context(KNOBS[name].applied(KNOBS[name].parse(value)))
        counts = (planted.warmup, planted.steps)
        return seconds_per_step(arm.text[1], names[arm.label], *counts, planted.name, by_hand=planted.by_hand)
