"""Cells on computing, written without a look at the rules and kept aside."""

from __future__ import annotations

from benchmarks.planted.planted import Planted

FRESH_COMPUTING: tuple[Planted, ...] = (
    Planted(
        "accelerate_soil_spectra", ("small_batch",),
        "a step for 4 spectra costs nearly as much as one for 64",
        (('"batch_size": 4,', '"batch_size": 64,'),),
        framework="accelerate", batch=4, cured_batch=64, steps=80, warmup=10, profiled=300,
    ),
    Planted(
        "trainer_full_stops_two_by_two", ("small_batch",),
        "eight rounds of 2 texts before each update: one round of 16 costs little more than one of 2",
        (
            ("per_device_train_batch_size=2,", "per_device_train_batch_size=16,"),
            ("gradient_accumulation_steps=8,", "gradient_accumulation_steps=1,"),
        ),
        framework="transformers", batch=16, rounds=8, steps=15, warmup=3,
    ),
    Planted(
        "offline_lander_few_transitions", ("small_batch",),
        "a step for 6 transitions costs nearly as much as one for 96",
        (("sampled = 6\n", "sampled = 96\n"),),
        batch=6, cured_batch=96, steps=200, warmup=20, profiled=800,
    ),
    Planted(
        "crystals_one_by_one", ("small_batch",),
        "a step for one crystal costs nearly as much as one for 16",
        (("split(1)", "split(16)"),),
        batch=1, cured_batch=16, steps=120, warmup=20, profiled=400,
    ),
    Planted(
        "accelerate_songs_heard_together", ("unfused_optimizer",),
        "AdamW goes a dozen times through 2.5 million weights, their gradients and averages",
        (("foreach=True", "fused=True"),),
        framework="accelerate", batch=256, steps=30, profiled=100,
    ),
    Planted(
        "level_and_trend_per_shop", ("unfused_optimizer",),
        "960 tiny tensors, for each of which SGD with momentum calls five operations",
        (('"foreach": False', '"fused": True'),),
        batch=90, steps=40, profiled=100,
    ),
    Planted(
        "scene_in_a_voxel_grid", ("unfused_optimizer",),
        "Adam goes a dozen times through two million cells, their gradients and averages",
        (("foreach=False", "fused=True"),),
        batch=256, steps=30, profiled=100,
    ),
    Planted(
        "lightning_voices_as_they_speak", ("unfused_attention",),
        "768 by 768 weights of each head go through memory again and again",
        ((
            """        scores = torch.matmul(q, k.mT) / q.shape[-1] ** 0.5
        scores = torch.where(self.to_come, float("-inf"), scores)
        weights = F.softmax(scores, dim=-1)
        y = torch.matmul(weights, v)
""",
            "        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)\n",
        ),),
        framework="lightning", batch=1, steps=12, warmup=3,
    ),
    Planted(
        "genomes_with_eager_llama", ("unfused_attention",),
        "768 by 768 weights of each head go through memory again and again",
        (('attn_implementation="eager"', 'attn_implementation="sdpa"'),),
        framework="transformers", batch=1, steps=12, warmup=3,
    ),
    Planted(
        "garments_from_noise", ("unfused_attention",),
        "784 by 784 weights of each picture go through memory again and again",
        ((
            """        w_ = torch.bmm(q.permute(0, 2, 1), k)
        w_ = w_ * (int(c) ** (-0.5))
        w_ = torch.exp(w_ - w_.amax(dim=2, keepdim=True))
        w_ = w_ / w_.sum(dim=2, keepdim=True)
        h_ = torch.bmm(v, w_.permute(0, 2, 1))
""",
            """        q, k, v = (t.permute(0, 2, 1).unsqueeze(1) for t in (q, k, v))
        h_ = F.scaled_dot_product_attention(q, k, v).squeeze(1).permute(0, 2, 1)
""",
        ),),
        batch=4, steps=12, warmup=3,
    ),
    Planted(
        "cracks_and_a_long_loss", ("memory_bound_ops",),
        "some thirty operations on half a million logits, each of which goes through memory, forward and backward",
        (("criterion = crack_loss", "criterion = torch.compile(crack_loss)"),),
        batch=8, steps=12, warmup=3,
    ),
    Planted(
        "accelerate_leaves_in_other_light", ("memory_bound_ops",),
        "some thirty operations on 800,000 numbers, each of which goes through memory",
        (("augment = other_light", "augment = torch.compile(other_light)"),),
        framework="accelerate", batch=16, steps=12, warmup=3, profiled=100,
    ),
    Planted(
        "vocoder_with_snakes", ("memory_bound_ops",),
        "an activation of a dozen operations on half a million numbers, each of which goes through memory",
        (("periodic = snake", "periodic = torch.compile(snake)"),),
        batch=4, steps=12, warmup=3,
    ),
    Planted(
        "healthy_nuclei_from_stains", (), "convolutions take the step",
        batch=16, steps=10, warmup=3, tries={"workers": "2", "fused_optimizer": "True", "batch_size": "32"},
    ),
    Planted(
        "healthy_chorales", (), "matrix products take the step; attention over 64 notes takes a moment",
        batch=24, steps=8, warmup=3, tries={"workers": "2", "batch_size": "48", "attention": "flash"},
    ),
)  # fmt: skip
