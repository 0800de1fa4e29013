"""Cells that wait for their data, and healthy ones that do not, kept aside until they had been run."""

from __future__ import annotations

from benchmarks.planted.planted import Planted

WAITING = ("data_starved",)  # is as true of every cell that waits for its data

MORE_FEEDING: tuple[Planted, ...] = (
    Planted(
        "lightning_ecg_filters", ("cpu_preprocessing",),
        "each trace is median-filtered, band-passed and resampled again in each epoch",
        ((
            "Beats(traces, labels, transform=cleaned)",
            "Beats([cleaned(trace) for trace in traces], labels)",
        ),),
        also=WAITING, framework="lightning", batch=16, steps=24, warmup=12,
    ),
    Planted(
        "trainer_sketch_strokes", ("cpu_preprocessing",),
        "drawing, blurring and shrinking a sketch takes longer than training on it",
        (("train_dataset=SketchDataset(drawings)", "train_dataset=list(SketchDataset(drawings))"),),
        also=WAITING, framework="transformers", batch=16, steps=24, warmup=12,
    ),
    Planted(
        "point_pairs_behind_one_worker", ("cpu_preprocessing",),
        "one worker seeks neighbours and normals of 16 clouds while a step takes a few milliseconds",
        ((
            "TwoViews(shapes, prepare=estimate_normals)",
            "TwoViews([estimate_normals(s) for s in shapes], prepare=lambda cloud: cloud)",
        ),),
        also=WAITING, batch=16, steps=30, warmup=15,
    ),
    Planted(
        "recommender_feature_store", ("storage_bound",),
        "each of 32 users waits 1.5 ms for the feature store, one after the other",
        (("def get_many(self, users)", "def __getitems__(self, users)"),),
        also=WAITING, batch=32, steps=24, warmup=8,
    ),
    Planted(
        "accelerate_tiles_over_the_wire", ("storage_bound",),
        "two files of each of 8 tiles wait 4 ms for the share, one after the other",
        (("batch_size=8, shuffle=True)", "batch_size=8, shuffle=True, num_workers=4, persistent_workers=True)"),),
        also=WAITING, framework="accelerate", batch=8, steps=30, warmup=15,
    ),
    Planted(
        "trainer_pairs_of_boxes", ("slow_collate",),
        "two numbers of each of 2700 pairs of boxes of a batch are set one by one",
        (("data_collator=collate_with_relations,", "data_collator=collate_with_relations_fast,"),),
        framework="transformers", batch=8, steps=24, warmup=12,
    ),
    Planted(
        "ward_events_pivoted", ("slow_collate",),
        "a data frame is made, pivoted and filled for each of the 16 stays of a batch",
        (("collate_fn=pivoted", "collate_fn=scattered"),),
        batch=16, steps=24, warmup=12,
    ),
    Planted(
        "mazes_made_on_the_fly", ("data_starved",),
        "eight mazes are dug and measured in Python between one step and the next",
        ((
            "DataLoader(Mazes(seed=0, count=2400), batch_size=8)",
            "DataLoader(list(Mazes(seed=0, count=240)) * 10, batch_size=8)",
        ),),
        also=("cpu_preprocessing",), batch=8, steps=30, warmup=8,
    ),
    Planted(
        "distilled_on_random_subsets", ("worker_restart",),
        "a round of 8 steps of a few milliseconds, and each starts two processes anew",
        (("num_workers=2", "num_workers=0"),),
        batch=40, steps=64, warmup=8, profiled=100,
    ),
    Planted(
        "forecast_with_cluster_threads", ("cpu_oversubscribed",),
        "8 threads wait for each other in each small layer",
        (("torch.set_num_threads(8)", "torch.set_num_threads(1)"),),
        batch=32, steps=15, warmup=3, profiled=30, fresh=True,
    ),
    Planted(
        "diffusion_warped_and_collected", ("cpu_preprocessing", "gc_pause"),
        "each image is warped with splines, and all that the notebook holds is walked over every 20th step",
        (("Cells(images, warp=True)", "Cells([elastic(i, np.random.default_rng(0)) for i in images], warp=False)"),),
        second_cure=(("            gc.collect()  # keeps the memory low\n", "            pass\n"),),
        also=WAITING, batch=16, steps=40, warmup=20,
    ),
    Planted(
        "accelerate_archive_and_states", ("storage_bound", "checkpoint_save"),
        "each of 16 look-ups waits 4 ms, and 9 MB of states are written every fourth step",
        (("batch_size=16, shuffle=True)", "batch_size=16, shuffle=True, num_workers=6, persistent_workers=True)"),),
        second_cure=(("SAVE_STEPS = 4", "SAVE_STEPS = 4000"),),
        also=WAITING, framework="accelerate", batch=16, steps=32, warmup=16,
    ),
    Planted(
        "healthy_mixer_two_workers", (), "matrix products take the step, and two workers are ahead",
        batch=24, steps=16, warmup=6,
        tries={"workers": "4", "fused_optimizer": "True", "batch_size": "48"},
    ),
    Planted(
        "trainer_healthy_bert", (), "matrix products take the step",
        framework="transformers", batch=20, steps=8, warmup=3, tries={"workers": "2", "batch_size": "40"},
    ),
)  # fmt: skip
