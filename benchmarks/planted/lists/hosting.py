"""Cells that do something else than training: saving, logging, validating, collecting garbage, compiling."""

from __future__ import annotations

from benchmarks.planted.planted import Planted

HOSTING = (
    Planted(
        "saved_every_few_steps", ("checkpoint_save",),
        "15 MB are written every fourth step",
        (("SAVE_EVERY = 4", "SAVE_EVERY = 4000"),),
        batch=128, steps=40, warmup=4,
    ),
    Planted(
        "lightning_checkpoints_often", ("checkpoint_save",),
        "14 MB are written every second step, and none is thrown away",
        (("EVERY = 2", "EVERY = 2000"),),
        framework="lightning", batch=64, steps=30, warmup=4,
    ),
    Planted(
        "trainer_saves_often", ("checkpoint_save",),
        "model, optimizer and random states are written every second step",
        (("save_steps=2", "save_steps=2000"),),
        framework="transformers", batch=8, steps=20, warmup=4,
    ),
    Planted(
        "validated_every_few_steps", ("logging_or_eval",),
        "256 images are predicted after every fifth step of 32",
        (("validate_every = 5", "validate_every = 500"),),
        batch=32, steps=25,
    ),
    Planted(
        "histograms_each_step", ("logging_or_eval",),
        "twelve histograms after each step",
        (("LOG_EVERY = 1", "LOG_EVERY = 1000"),),
        batch=128, steps=40, needs=("tensorboard",),
    ),
    Planted(
        "gradient_norms_in_a_log", ("logging_or_eval",),
        "six figures of each of 22 gradients are sorted out, written and flushed after each step",
        (("    for name, parameter in model.named_parameters():", "    for name, parameter in []:"),),
        batch=128, steps=40,
    ),
    Planted(
        "lightning_validates_often", ("logging_or_eval",),
        "six validation batches after every fourth training batch",
        (("val_check_interval=4", "val_check_interval=40"),),
        framework="lightning", batch=32, steps=32, warmup=4,
    ),
    Planted(
        "trainer_evaluates_often", ("logging_or_eval",),
        "six evaluation batches after every third training batch",
        (("eval_steps=3", "eval_steps=3000"),),
        framework="transformers", batch=16, steps=24, warmup=3,
    ),
    Planted(
        "accelerate_samples_each_tenth_step", ("logging_or_eval",),
        "300 characters are sampled one after the other after every tenth step",
        (("SAMPLE_EVERY = 10", "SAMPLE_EVERY = 10_000"),),
        framework="accelerate", batch=16, steps=40, warmup=10,
    ),
    Planted(
        "collected_every_eighth_step", ("gc_pause",),
        "gc.collect() walks over all that the notebook holds every eighth step",
        (("            gc.collect()\n", "            pass\n"),),
        batch=256, steps=32, warmup=8,
    ),
    Planted(
        "lightning_collect_callback", ("gc_pause",),
        "a callback collects garbage every fifth batch",
        (("callbacks=[Collect()]", "callbacks=[]"),),
        framework="lightning", batch=128, steps=25,
    ),
    Planted(
        "compiled_for_each_length", ("recompilation",),
        "dynamic=False: the model is compiled anew for each new length",
        (("ids, tags = sentences(step)", "ids, tags = sentences_of_one_length(step)"),),
        batch=16, steps=8, warmup=2, profiled=25, fresh=True,
    ),
    Planted(
        "compiled_with_a_schedule", ("recompilation",),
        "a string that the compiled loss reads is another one in each step",
        (("torch.compile(criterion, backend=\"aot_eager\")", "criterion"),),
        batch=32, steps=8, warmup=2, profiled=30, fresh=True,
    ),
)  # fmt: skip
