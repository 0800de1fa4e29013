"""Cells on hosting, written without a look at the rules and kept aside."""

from __future__ import annotations

from benchmarks.planted.planted import Planted

FRESH_HOSTING: tuple[Planted, ...] = (
    Planted(
        "keywords_tested_all_the_time", ("logging_or_eval",),
        "1024 clips are predicted after every second step of 64",
        (("TESTS_PER_EPOCH = 18", "TESTS_PER_EPOCH = 1"),),
        batch=64, steps=36, warmup=6,
    ),
    Planted(
        "lightning_seismograms_drawn", ("logging_or_eval",),
        "a figure is drawn and written as a picture after each step",
        (("Gallery(waves[:2])", "Gallery(waves[:2], every_n_batches=1000)"),),
        framework="lightning", batch=128, steps=24, needs=("matplotlib",),
    ),
    Planted(
        "trainer_singular_values_watched", ("logging_or_eval",),
        "the singular values of twelve matrices after each step",
        (('RankWatch(FOLDER / "ranks.csv")', 'RankWatch(FOLDER / "ranks.csv", look_every=1000)'),),
        framework="transformers", batch=8, steps=24,
    ),
    Planted(
        "warehouse_played_greedily", ("logging_or_eval",),
        "90 days are played, one after the other, after every second update",
        (("if update % 2 == 0:", "if update % 2000 == 1999:"),),
        batch=256, steps=40, warmup=6, profiled=100,
    ),
    Planted(
        "lightning_crash_insurance", ("checkpoint_save",),
        "10 MB of embeddings are written every second step, of which a step changes a few rows",
        (("every_n_steps=2,", "every_n_steps=2000,"),),
        framework="lightning", batch=512, steps=30, warmup=4,
    ),
    Planted(
        "trainer_saves_by_a_fraction", ("checkpoint_save",),
        "model, optimizer and random states are written after each of 200 steps",
        (("save_steps=0.005", "save_steps=0.99"),),
        framework="transformers", batch=16, steps=20, warmup=4,
    ),
    Planted(
        "citations_filmed", ("checkpoint_save",),
        "half a megabyte of weights is compressed after each step",
        (("stride=1)", "stride=1000)"),),
        steps=20, warmup=3,
    ),
    Planted(
        "genome_on_a_spot_instance", ("checkpoint_save",),
        "8 MB are written, copied, and read twice for their checksums after each step",
        (("persist_every_steps = 1 ", "persist_every_steps = 1000 "),),
        batch=32, steps=20, warmup=3,
    ),
    Planted(
        "accelerate_pairs_tidied_up", ("gc_pause",),
        "clear_device_cache has no device, but collects garbage among all the captions after each backward",
        (("        clear_device_cache(garbage_collection=True)\n", ""),),
        framework="accelerate", batch=128, steps=30,
    ),
    Planted(
        "facts_in_micro_batches", ("gc_pause",),
        "gc.collect() walks over the parsed dump and all modules in each step",
        (("    finally:\n        gc.collect()\n", "    finally:\n        pass\n"),),
        batch=256, steps=30,
    ),
    Planted(
        "molecules_of_any_size", ("recompilation",),
        "dynamic=False: compiled anew for each batch, as each has another number of atoms",
        (("dynamic=False", "dynamic=True"),),
        batch=24, steps=6, warmup=2, profiled=16, fresh=True,
    ),
    Planted(
        "lightning_layers_left_out", ("recompilation",),
        "the tuple of the blocks that are run is nearly always a new one, for which the net is compiled anew",
        (('torch.compile(self.net, backend="aot_eager")', "self.net"),),
        framework="lightning", batch=128, steps=6, warmup=2, profiled=16, fresh=True,
    ),
    Planted(
        "land_cover_over_the_share", ("storage_bound", "logging_or_eval"),
        "each of 10 tiles waits 4 ms for the share, and 48 tiles are mapped and scored every sixth step",
        (("num_workers=0", "num_workers=6, persistent_workers=True"),),
        second_cure=(("SCORE_EVERY = 6", "SCORE_EVERY = 6000"),),
        also=("data_starved",), batch=10, steps=24, warmup=12,
    ),
    Planted(
        "accelerate_healthy_spectra", (), "matrix products take the step; logging and saving are seldom",
        framework="accelerate", batch=480, steps=10, warmup=3,
        tries={"workers": "2", "fused_optimizer": "True", "batch_size": "960"},
    ),
    Planted(
        "lightning_healthy_fraud", (), "matrix products take the step; an epoch ends with a short validation",
        framework="lightning", batch=768, steps=10, warmup=3,
        tries={"workers": "2", "fused_optimizer": "True", "batch_size": "1536"},
    ),
)  # fmt: skip
