"""Cells with nothing to cure: each finding about them is a false alarm, and none of the knobs tried may gain."""

from __future__ import annotations

from benchmarks.planted.planted import Planted

FEED = {"workers": "2"}
FUSED = {"fused_optimizer": "True"}

HEALTHY = (
    Planted(
        "healthy_cnn", (), "convolutions take the step",
        batch=32, steps=10, warmup=3, tries=FEED | FUSED | {"batch_size": "64"},
    ),
    Planted(
        "healthy_mlp", (), "large matrix products take the step",
        batch=512, steps=6, warmup=2, tries=FEED | FUSED | {"batch_size": "1024"},
    ),
    Planted(
        "healthy_gpt_memory_map", (), "matrix products take the step; a batch is read in a moment",
        batch=8, steps=10, warmup=3, tries={"attention": "flash"},
    ),
    Planted(
        "lightning_healthy_cnn", (), "convolutions take the step",
        framework="lightning", batch=32, steps=8, warmup=3, tries=FEED | {"batch_size": "64"},
    ),
    Planted(
        "trainer_healthy_gpt", (), "matrix products take the step; the loss is logged every 50th",
        framework="transformers", batch=16, steps=6, warmup=2, tries=FEED | {"batch_size": "32"},
    ),
    Planted(
        "accelerate_healthy_mlp", (), "large matrix products take the step",
        framework="accelerate", batch=320, steps=10, warmup=3, tries=FEED | FUSED | {"batch_size": "640"},
    ),
    Planted(
        "healthy_lstm", (), "the LSTM's matrix products take the step",
        batch=128, steps=10, warmup=3, tries=FEED | {"batch_size": "256"},
    ),
    Planted(
        "healthy_autoencoder_saves_seldom", (), "saving and validating take a moment every 50th step",
        batch=512, steps=8, warmup=2, profiled=70, tries=FEED | {"batch_size": "1024"},
    ),
    Planted(
        "healthy_behind_workers", (), "two workers wait for the disk while the last batch is trained on",
        batch=24, steps=16, warmup=6, tries={"workers": "4"} | FUSED,
    ),
    Planted(
        "healthy_gan", (), "matrix products of both networks take the step",
        batch=320, steps=6, warmup=2, tries=FEED | FUSED | {"batch_size": "640"},
    ),
)  # fmt: skip
