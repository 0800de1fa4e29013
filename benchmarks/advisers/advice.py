"""What another tool's advice names, by its own words, and when the truth contradicts it. One rule for all tools.

An advice names the causes that its words stand for (`NAMES`). It names the true cause where one of them is accepted as
a headline of the case. It is contradicted

- where it says "larger batch" and the first cause is waiting for data: the wait grows with the batch;
- where it says "load data in other processes" and no cause of the case is in the loading;
- where it is about a GPU's units, memory or copies and the cell ran without a GPU;
- where the cell is healthy: it was measured that there is nothing to gain from any knob;
- where it names what is known to be none of a trace's causes (`PlantedTrace.never`).
"""

from __future__ import annotations

import html
import re
from collections.abc import Collection

OF_A_GPU = ("no_tf32", "no_mixed_precision", "blocking_copy", "memory_pressure", "launch_bound")
LOADING = ("data_starved", "cpu_preprocessing", "storage_bound", "slow_collate", "worker_restart", "cpu_oversubscribed")

NAMES: tuple[tuple[str, tuple[str, ...]], ...] = (
    # the TensorBoard plugin
    ("high time cost on input data loading", ("data_starved",)),
    ("launched by Tensor Cores eligible operators", ("no_mixed_precision",)),
    ("increase batch size to improve", ("small_batch",)),
    ("high time cost on communication", ("exposed_communication",)),
    ("at the limit of device memory capacity", ("memory_pressure",)),
    # torch.profiler._pattern_matcher
    ("Filled a CPU tensor and immediately moved it to GPU", ("blocking_copy",)),
    ("For loop indexing detected", ("slow_collate", "launch_bound")),
    ("enable TF32", ("no_tf32",)),
    ("Detected optimizer running with single tensor implementation", ("unfused_optimizer",)),
    ("Detected DataLoader running with synchronized implementation", ("data_starved",)),
    ("Detected gradient set to zero instead of None", ("unfused_optimizer",)),
    ("Detected matmul with dimension not aligned", ("odd_shapes",)),
    ("bias enabled in Conv2d that is followed by BatchNorm2d", ()),
)


def keys_of(advice: Collection[str]) -> list[str]:
    """The causes that these advices name."""
    found = [key for words, keys in NAMES if any(words in a for a in advice) for key in keys]
    return list(dict.fromkeys(found))


def names_truth(keys: Collection[str], accepted: Collection[str]) -> bool:
    """One of them is right."""
    return any(key in accepted for key in keys)


def contradicted(keys: Collection[str], causes: Collection[str], *, healthy: bool, on_gpu: bool) -> list[str]:
    """Those that the truth speaks against."""
    if healthy:
        return list(keys)
    waiting = any(cause in LOADING for cause in list(causes)[:1])
    in_loading = any(cause in LOADING for cause in causes)
    return [
        key
        for key in keys
        if (key in ("small_batch", "memory_underused") and waiting)
        or (key in LOADING and not in_loading)
        or (key in OF_A_GPU and not on_gpu)
    ]


def plain(advice: str) -> str:
    """Without markup, on one line."""
    return " ".join(html.unescape(re.sub(r"<[^>]+>", "", advice)).split())
