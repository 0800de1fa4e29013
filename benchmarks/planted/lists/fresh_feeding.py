"""Cells on feeding, written without a look at the rules and kept aside."""

from __future__ import annotations

from benchmarks.planted.planted import Planted

WAITING = ("data_starved",)  # is as true of every cell that waits for its data

FRESH_FEEDING: tuple[Planted, ...] = (
    Planted(
        "seismic_picks_one_worker", ("cpu_preprocessing",),
        "one worker filters 16 events and takes their envelopes and spectrograms while a step takes a few milliseconds",
        ((
            "events = Events(waveforms, labels)",
            "events = Events(waveforms, labels)\nevents = [events[n] for n in range(len(events))]",
        ),),
        also=WAITING, batch=16, steps=32, warmup=16,
    ),
    Planted(
        "accelerate_border_weights", ("cpu_preprocessing",),
        "a distance transform for each nucleus of each image, in each epoch",
        (("weight_maps=None)\nloader", "weight_maps=[border_weights(owner) for _, owner in dishes])\nloader"),),
        also=WAITING, framework="accelerate", batch=8, steps=40, warmup=10,
    ),
    Planted(
        "graph_transformer_positions", ("cpu_preprocessing",),
        "shortest paths, eigenvectors and random walks of each of 20 molecules, in each epoch",
        (("Molecules(molecules, precompute=False)", "Molecules(molecules, precompute=True)"),),
        also=WAITING, batch=20, steps=36, warmup=12,
    ),
    Planted(
        "flood_chips_two_workers", ("storage_bound",),
        "two requests of 6 ms for each of 12 chips, and two workers to wait for them",
        (("num_workers=2", "num_workers=8"),),
        also=WAITING, batch=12, steps=36, warmup=18,
    ),
    Planted(
        "trainer_wake_words_on_a_share", ("storage_bound",),
        "each of 16 recordings waits 1.2 ms for each of its blocks, one after the other",
        (("opener=open_on_share)", "opener=open)"),),
        also=WAITING, framework="transformers", batch=16, steps=30, warmup=10,
    ),
    Planted(
        "lightning_hard_negatives_fetched", ("storage_bound",),
        "four passages of each of 16 queries wait 1.2 ms for the server, one after the other",
        (("num_workers=0", "num_workers=4, persistent_workers=True"),),
        also=WAITING, framework="lightning", batch=16, steps=30, warmup=15,
    ),
    Planted(
        "lightning_joints_drawn_in_collate", ("slow_collate",),
        "49 pixels around each of 144 joints of a batch are set one by one",
        (("collate_fn=draw_targets)", "collate_fn=draw_targets_vectorised)"),),
        framework="lightning", batch=16, steps=20, warmup=5,
    ),
    Planted(
        "trainer_sessions_with_negatives", ("slow_collate",),
        "24,576 items of a batch are drawn one by one",
        (("data_collator=NegativeSamplingCollator", "data_collator=FastNegativeSamplingCollator"),),
        framework="transformers", batch=32, steps=40, warmup=10,
    ),
    Planted(
        "replay_of_stacked_frames", ("slow_collate",),
        "the frames of 64 transitions become lists of numbers, and these a tensor",
        (("collate_fn=to_batch)", "collate_fn=to_batch_stacked)"),),
        batch=64, steps=40, warmup=10,
    ),
    Planted(
        "bearing_anomalies", ("worker_restart",),
        "an epoch of 6 steps of a few milliseconds, and each starts two processes anew",
        (("prefetch_factor=2", "prefetch_factor=2, persistent_workers=True"),),
        batch=32, steps=60, warmup=6, profiled=90,
    ),
    Planted(
        "lightning_loaders_made_anew", ("worker_restart",),
        "an epoch of 8 steps of a few milliseconds, and each has a new loader with two new processes",
        (("reload_dataloaders_every_n_epochs=1", "reload_dataloaders_every_n_epochs=0"),),
        framework="lightning", batch=50, steps=64, warmup=8, profiled=96,
    ),
    Planted(
        "telemetry_from_a_topic", ("data_starved",),
        "one reader waits 40 ms for each batch, while a step takes a few milliseconds",
        (("readers=1), batch_size=None", "readers=6), batch_size=None"),),
        also=("storage_bound",), batch=64, steps=40, warmup=12,
    ),
    Planted(
        "ppo_with_node_threads", ("cpu_oversubscribed",),
        "four threads on two cores wait for each other in each small convolution",
        (("num_threads: int = 4", "num_threads: int = 1"),),
        batch=32, steps=20, profiled=40, fresh=True,
    ),
    Planted(
        "healthy_speaker_vectors", (), "convolutions take the step, and two workers are ahead",
        batch=16, steps=16, warmup=6, tries={"workers": "4", "fused_optimizer": "True", "batch_size": "32"},
    ),
    Planted(
        "trainer_healthy_vit", (), "matrix products take the step",
        framework="transformers", batch=20, steps=10, warmup=3, tries={"workers": "2", "batch_size": "40"},
    ),
)  # fmt: skip
