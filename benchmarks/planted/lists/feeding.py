"""Cells that wait for their data."""

from __future__ import annotations

from benchmarks.planted.planted import Planted

WAITING = ("data_starved",)  # is as true of every cell that waits for its data

FEEDING = (
    Planted(
        "photos_on_a_network_disk", ("storage_bound",),
        "each of 16 items waits 3 ms for its file, one after the other",
        (("num_workers=0", "num_workers=4, persistent_workers=True"),),
        also=WAITING, batch=16, steps=20, warmup=12,
    ),
    Planted(
        "tokens_from_an_object_store", ("storage_bound",),
        "every eighth sequence waits 12 ms for its shard, in the training process",
        (("DataLoader(Stream(), batch_size=16)", "DataLoader(Stream(), batch_size=16, num_workers=4)"),),
        also=WAITING, batch=16, steps=24, warmup=12,
    ),
    Planted(
        "lightning_spectrograms", ("storage_bound",),
        "each of 8 files waits 5 ms for the disk, one after the other",
        (("num_workers=0", "num_workers=4, persistent_workers=True"),),
        also=WAITING, framework="lightning", batch=8, steps=24, warmup=12,
    ),
    Planted(
        "trainer_remote_documents", ("storage_bound",),
        "each of 8 documents waits 6 ms for the server, one after the other",
        (("dataloader_num_workers=0", "dataloader_num_workers=4, dataloader_persistent_workers=True"),),
        also=WAITING, framework="transformers", batch=8, steps=20, warmup=12,
    ),
    Planted(
        "accelerate_volumes", ("storage_bound",),
        "each of 10 crops waits 4 ms for its pages, one after the other",
        (("shuffle=True)", "shuffle=True, num_workers=4, persistent_workers=True)"),),
        also=WAITING, framework="accelerate", batch=10, steps=24, warmup=12,
    ),
    Planted(
        "lightning_one_worker", ("data_starved",),
        "one worker reads 16 frames of 4 ms each while a step takes a few milliseconds",
        (("num_workers=1", "num_workers=6"),),
        also=("storage_bound",), framework="lightning", batch=16, steps=24, warmup=16,
    ),
    Planted(
        "features_at_training_time", ("data_starved",),
        "each of 16 records waits 1.5 ms for the query, and then as long for its features",
        (("shuffle=True)", "shuffle=True, num_workers=4, persistent_workers=True)"),),
        also=("storage_bound", "cpu_preprocessing"), batch=16, steps=24, warmup=12,
    ),
    Planted(
        "jpeg_augment", ("cpu_preprocessing",),
        "decoding, rotating and blurring a photo takes longer than training on it",
        (
            (
                "dataset = Photos(1152)",
                "photos = Photos(1152, train=False)\ndataset = [photos[i] for i in range(144)] * 8",
            ),
        ),
        also=WAITING, batch=16, warmup=12, steps=24, needs=("PIL",),
    ),
    Planted(
        "trainer_tokenised_on_demand", ("cpu_preprocessing",),
        "900 words are split, counted and matched for each text, in each epoch",
        (("train_dataset=Texts(TEXTS)", "train_dataset=Encoded(TEXTS)"),),
        also=WAITING, framework="transformers", batch=16, warmup=12, steps=24,
    ),
    Planted(
        "lightning_audio_features", ("cpu_preprocessing",),
        "a Fourier transform of each recording each time it is asked for",
        (("dataset = Recordings()", "dataset = prepared()"),),
        also=WAITING, framework="lightning", batch=8, warmup=12, steps=30,
    ),
    Planted(
        "accelerate_compressed_rows", ("cpu_preprocessing",),
        "decompressing and averaging a row takes longer than training on it",
        (("DataLoader(Rows(PACKED)", "DataLoader(Unpacked(PACKED)"),),
        also=WAITING, framework="accelerate", batch=32, warmup=12, steps=24,
    ),
    Planted(
        "padded_by_hand", ("slow_collate",),
        "the batch is padded number by number in Python",
        (("collate_fn=collate_by_hand", "collate_fn=collate_padded"),),
        batch=64, warmup=12, steps=30,
    ),
    Planted(
        "trainer_collator_in_python", ("slow_collate",),
        "the collator sets each token and each label of the batch on its own",
        (("data_collator=masked)", "data_collator=masked_at_once)"),),
        framework="transformers", batch=16, warmup=12, steps=24,
    ),
    Planted(
        "molecules_in_lists", ("slow_collate",),
        "the adjacency matrix of a batch is written entry by entry",
        (("collate_fn=one_graph)", "collate_fn=one_graph_at_once)"),),
        batch=24, warmup=12, steps=40,
    ),
    Planted(
        "lightning_one_hot_collate", ("slow_collate",),
        "120 letters of each of 32 pieces are set one by one",
        (("collate_fn=one_hot)", "collate_fn=one_hot_at_once)"),),
        framework="lightning", batch=32, warmup=12, steps=30,
    ),
    Planted(
        "short_epochs", ("worker_restart",),
        "an epoch of 8 steps of a few milliseconds, and each starts two processes anew",
        (("num_workers=2)", "num_workers=2, persistent_workers=True)"),),
        batch=32, steps=64, warmup=8, profiled=100,
    ),
    Planted(
        "lightning_short_epochs", ("worker_restart",),
        "an epoch of 10 steps, and each starts two processes anew",
        (("num_workers=2)", "num_workers=2, persistent_workers=True)"),),
        framework="lightning", batch=16, steps=60, warmup=10, profiled=100,
    ),
    Planted(
        "trainer_short_epochs", ("worker_restart",),
        "an epoch of 6 steps, and each starts two processes anew",
        (("dataloader_persistent_workers=False", "dataloader_persistent_workers=True"),),
        framework="transformers", batch=8, steps=48, warmup=6, profiled=100,
    ),
    Planted(
        "too_many_threads", ("cpu_oversubscribed",),
        "twice as many threads as cores wait for each other in each small layer",
        (("2 * os.cpu_count()", "max(1, os.cpu_count() // 2)"),),
        batch=16, steps=25, fresh=True,
    ),
    Planted(
        "workers_times_threads", ("cpu_oversubscribed",),
        "four workers of four threads each, on two cores, beside the training",
        (
            ("worker_init_fn=four_threads", "worker_init_fn=one_thread"),
            ("num_workers=4", "num_workers=2"),
        ),
        batch=16, steps=16, warmup=8, profiled=60, fresh=True,
    ),
)  # fmt: skip
