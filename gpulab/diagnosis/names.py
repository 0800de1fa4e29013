"""What each finding is called on screen: a few plain words, as a title and within a sentence."""

from __future__ import annotations

from collections.abc import Mapping

NAMES: Mapping[str, str] = {
    "data_starved": "waiting for data",
    "cpu_preprocessing": "preparing the data on the CPU",
    "storage_bound": "reading the data from storage",
    "slow_collate": "putting batches together",
    "worker_restart": "starting the loader's workers anew",
    "cpu_oversubscribed": "more processes or threads than processor cores",
    "blocking_copy": "copies that make the program wait",
    "sync_points": "waiting for the GPU's results",
    "launch_bound": "starting work on the GPU",
    "small_batch": "small batches",
    "no_mixed_precision": "computing in full precision",
    "no_tf32": "matrix products without TF32",
    "unfused_attention": "attention computed in many steps",
    "unfused_optimizer": "an optimizer of many small operations",
    "memory_bound_ops": "many small operations one after the other",
    "layout": "rearranging data in memory",
    "odd_shapes": "sizes that do not suit the GPU",
    "allocator_thrash": "requesting GPU memory again and again",
    "memory_pressure": "memory that is nearly full",
    "memory_underused": "GPU memory that is hardly used",
    "checkpoint_save": "saving checkpoints",
    "logging_or_eval": "logging, evaluation and other work beside training",
    "recompilation": "compiling the model again and again",
    "gc_pause": "Python's garbage collection",
    "exposed_communication": "exchanging data with other GPUs",
    "straggler": "waiting for the slowest GPU",
    "gpu_shared": "sharing the GPU with other programs",
    "throttled": "a GPU that is slowed down",
    "wrong_device": "computing on the CPU although there is a GPU",
    "healthy": "nothing that holds training back",
    "cannot_tell": "what cannot be told",
}


def name_of(key: str) -> str:
    """The words for a key; of one that has none the key itself, spelled out."""
    return NAMES.get(key, key.replace("_", " "))
