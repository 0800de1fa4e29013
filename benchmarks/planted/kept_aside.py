"""The cells kept aside, a third: chosen when they were written, before any rule was tried on them.

Spread over causes, frameworks, layers and healthy cells. While rules are built only the others are run.
"""

from __future__ import annotations

KEPT_ASIDE = frozenset(
    {
        "tokens_from_an_object_store",
        "accelerate_volumes",
        "lightning_one_worker",
        "trainer_tokenised_on_demand",
        "lightning_one_hot_collate",
        "trainer_short_epochs",
        "workers_times_threads",
        "lightning_checkpoints_often",
        "gradient_norms_in_a_log",
        "trainer_evaluates_often",
        "lightning_collect_callback",
        "compiled_with_a_schedule",
        "trainer_deep_and_narrow",
        "gan_four_at_a_time",
        "trainer_eager_attention",
        "accelerate_pooled_rows",
        "lightning_own_activation",
        "collated_then_validated",
        "trainer_saved_then_many_tensors",
        "healthy_lstm",
        "lightning_healthy_cnn",
        "accelerate_healthy_mlp",
        "gpu_lightning_prints",
        "gpu_cache_emptied_each_step",
        "gpu_slow_files",
        "gpu_pointwise_chain",
        "gpu_healthy_cnn",
    }
)
