"""Cells on computing and hosting, written without a look at the rules after the fresh ones."""

from __future__ import annotations

from benchmarks.planted.planted import Planted

LATER_HOSTING: tuple[Planted, ...] = (
    Planted(
        "antenna_gain_surrogate", ("checkpoint_save",),
        "weights and the optimizer's state are written after every second step",
        (("save_every: int = 2", "save_every: int = 1000"),),
        batch=128, steps=30, warmup=6,
    ),
    Planted(
        "trainer_addresses_into_fields", ("checkpoint_save",),
        "a callback writes weights and the optimizer's state after every third step",
        (("every=3", "every=1000"),),
        framework="transformers", batch=16, steps=30, warmup=6,
    ),
    Planted(
        "storm_surge_at_the_pier", ("logging_or_eval",),
        "the whole last winter is forecast after every third step",
        (("check_every=3", "check_every=1000"),),
        batch=64, steps=30, warmup=6,
    ),
    Planted(
        "lightning_frost_in_orchards", ("logging_or_eval",),
        "the area under the curve and its interval are found by bootstrap, for the log, in each step",
        (("interval_every=1", "interval_every=1000"),),
        framework="lightning", batch=96, steps=30, warmup=5,
    ),
    Planted(
        "cuisine_from_the_ingredients", ("gc_pause",),
        "the garbage collector walks over all recipes after each step",
        (("        gc.collect()\n", ""),),
        batch=256, steps=30, warmup=5,
    ),
    Planted(
        "turbines_each_calibrated", ("unfused_optimizer",),
        "AdamW goes through 1200 small tensors one by one",
        (("foreach=False", "fused=True"),),
        batch=16, steps=30, warmup=5,
    ),
    Planted(
        "accelerate_languages_by_ngrams", ("unfused_optimizer",),
        "Adam passes over a table of four million numbers once for each of its operations",
        (("foreach=False", "fused=True"),),
        framework="accelerate", batch=64, steps=30, warmup=5,
    ),
    Planted(
        "seal_dives_from_depth", ("small_batch",),
        "three dives per step, whose 120 seconds are gone through one by one however many dives there are",
        (("batch=3", "batch=32"),),
        batch=3, cured_batch=32, steps=30, warmup=5,
    ),
    Planted(
        "lightning_spectra_to_fingerprints", ("small_batch",),
        "four spectra per step, which reads and updates seven million weights however many spectra there are",
        (("batch_size=4", "batch_size=32"),),
        framework="lightning", batch=4, cured_batch=32, steps=30, warmup=5,
    ),
    Planted(
        "trainer_birds_at_dawn", (),
        "the transformer computes nearly all the time, on 32 songs per step that lie in memory",
        framework="transformers", batch=32, steps=30, warmup=5,
        tries={"workers": "2"},
    ),
)  # fmt: skip
