"""Cells with two causes, the costlier one first: its cure alone must gain, and the second cure must gain on top."""

from __future__ import annotations

from benchmarks.planted.planted import Planted

LAYERED = (
    Planted(
        "slow_files_many_tensors", ("storage_bound", "unfused_optimizer"),
        "40 ms of waiting for ten files, then 164 tensors updated one by one",
        (("num_workers=0", "num_workers=6, persistent_workers=True"),),
        second_cure=(("foreach=False", "fused=True"),),
        also=("data_starved",), batch=10, steps=24, warmup=16,
    ),
    Planted(
        "lightning_decoded_then_saved", ("cpu_preprocessing", "checkpoint_save"),
        "each image is sharpened at three scales, then 13 MB are written every fourth step",
        (("dataset = Images()", "dataset = Prepared()"),),
        second_cure=(("EVERY = 4", "EVERY = 4000"),),
        also=("data_starved",), framework="lightning", batch=8, steps=20, warmup=12,
    ),
    Planted(
        "collated_then_validated", ("slow_collate", "logging_or_eval"),
        "1280 numbers of a batch are set one by one, then 3000 rows are predicted every tenth step",
        (("collate_fn=cell_by_cell", "collate_fn=at_once"),),
        second_cure=(("CHECK_EVERY = 10", "CHECK_EVERY = 10_000"),),
        batch=32, steps=50, warmup=10,
    ),
    Planted(
        "trainer_saved_then_many_tensors", ("checkpoint_save", "unfused_optimizer"),
        "everything is written after each step, then 292 tensors are updated one by one",
        (("save_steps=1", "save_steps=1000"),),
        second_cure=(('optim="adamw_torch"', 'optim="adamw_torch_fused"'),),
        framework="transformers", batch=8, steps=12, warmup=3, profiled=40,
    ),
    Planted(
        "accelerate_collected_then_validated", ("gc_pause", "logging_or_eval"),
        "garbage is collected after each step, and 4096 rows are predicted every fourth",
        (("        gc.collect()\n", ""),),
        second_cure=(("VALIDATE_EVERY = 4", "VALIDATE_EVERY = 4000"),),
        framework="accelerate", batch=128, steps=24, warmup=4,
    ),
    Planted(
        "restarted_then_logged", ("worker_restart", "logging_or_eval"),
        "two processes start for each six batches, then six histograms are logged every fourth step",
        (("num_workers=2)", "num_workers=2, persistent_workers=True)"),),
        second_cure=(("LOG_EVERY = 4", "LOG_EVERY = 4000"),),
        batch=32, steps=48, warmup=6, profiled=100,
    ),
)  # fmt: skip
