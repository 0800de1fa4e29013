"""What the step computes, and what it does besides: cells kept aside until they had been run."""

from __future__ import annotations

from benchmarks.planted.planted import Planted

MORE_COMPUTING: tuple[Planted, ...] = (
    Planted(
        "lightning_report_of_each_beat", ("logging_or_eval",),
        "a report, five ROC curves and five precision-recall curves of 1024 beats after each step",
        (("report = Report(every=1)", "report = Report(every=1000)"),),
        framework="lightning", batch=64, steps=40, warmup=20,
    ),
    Planted(
        "lesions_measured_each_step", ("logging_or_eval",),
        "72 distance transforms of the batch's masks after each step",
        (("MEASURE_EVERY = 1", "MEASURE_EVERY = 1000"),),
        batch=12, steps=30,
    ),
    Planted(
        "ranked_for_every_user", ("logging_or_eval",),
        "three million scores are sorted after every fourth step",
        (("if i % 4 == 3:", "if i % 4000 == 3999:"),),
        batch=512, steps=32, warmup=4, profiled=100,
    ),
    Planted(
        "ensemble_of_sixty", ("unfused_optimizer",),
        "360 small tensors, for each of which AdamW calls more than a dozen operations, also by foreach",
        (("foreach=True", "fused=True"),),
        batch=1440, steps=40, profiled=100,
    ),
    Planted(
        "lightning_a_table_per_column", ("unfused_optimizer",),
        "144 small tensors, for each of which Adam calls a dozen operations",
        (("torch.optim.Adam(self.parameters(), lr=2e-3)", "torch.optim.Adam(self.parameters(), lr=2e-3, fused=True)"),),
        framework="lightning", batch=128, steps=40,
    ),
    Planted(
        "diffusion_of_four", ("small_batch",),
        "a step for 4 curves costs nearly as much as one for 64",
        (("batch_size=4", "batch_size=64"),),
        batch=4, cured_batch=64, steps=100, warmup=10, profiled=400,
    ),
    Planted(
        "trainer_two_tiles", ("small_batch",),
        "a step for 2 tiles costs nearly as much as one for 32",
        (("per_device_train_batch_size=2", "per_device_train_batch_size=32"),),
        framework="transformers", batch=2, cured_batch=32, steps=30, profiled=100,
    ),
    Planted(
        "trainer_saves_each_short_epoch", ("checkpoint_save",),
        "model, optimizer and random states are written after each epoch, which has two steps",
        (('save_strategy="epoch"', 'save_strategy="no"'),),
        framework="transformers", batch=8, steps=24, warmup=4,
    ),
    Planted(
        "published_for_the_actors", ("checkpoint_save",),
        "5 MB are written, and waited for on the disk, after each step",
        (("PUBLISH_EVERY = 1", "PUBLISH_EVERY = 1000"),),
        batch=64, steps=30,
    ),
    Planted(
        "picture_as_a_function", ("memory_bound_ops",),
        "an activation of five operations on 400,000 numbers, each of which goes through memory, forward and backward",
        (("torch.where(x > 0, x, self.a * (torch.exp(x) - 1))", "nn.functional.elu(x, self.a)"),),
        batch=25600, steps=12, warmup=3,
    ),
    Planted(
        "accelerate_traffic_heads", ("unfused_attention",),
        "768 by 768 weights of each head go through memory again and again",
        ((
            """        affinity = q @ k.transpose(1, 2) / q.size(-1) ** 0.5
        affinity = affinity.masked_fill(self.past == 0, -1e9)
        affinity = F.softmax(affinity, dim=2)
        return torch.bmm(affinity, v)
""",
            """        q, k, v = q.unsqueeze(1), k.unsqueeze(1), v.unsqueeze(1)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).squeeze(1)
""",
        ),),
        framework="accelerate", batch=2, steps=12, warmup=3,
    ),
    Planted(
        "memory_freed_every_sixth_update", ("gc_pause",),
        "gc.collect() walks over a hundred thousand objects after every sixth update",
        (("            free_memory()\n", "            pass\n"),),
        batch=64, steps=30,
    ),
    Planted(
        "sleep_stages_turned_around", ("layout",),
        "each block copies its input to have time last, and its output to have it in the middle again",
        (
            ("        y = x.transpose(1, 2).contiguous()\n        y = self.conv(y)\n", "        y = self.conv(x)\n"),
            ("        y = y.transpose(1, 2).contiguous()\n", ""),
            ("        x = self.stem(x)\n", "        x = self.stem(x).transpose(1, 2).contiguous()\n"),
            ("x.mean(1)", "x.mean(2)"),
        ),
        batch=16, steps=12, warmup=3,
    ),
    Planted(
        "dreams_of_any_length", ("recompilation",),
        "the loop over the horizon is compiled anew for each length that is drawn",
        (('torch.compile(world, backend="aot_eager")', "world"),),
        batch=64, steps=8, warmup=2, profiled=25, fresh=True,
    ),
    Planted(
        "healthy_distillation", (), "matrix products of teacher and student take the step",
        batch=384, steps=10, warmup=3, tries={"workers": "2", "fused_optimizer": "True", "batch_size": "768"},
    ),
    Planted(
        "lightning_healthy_patches", (), "matrix products take the step; attention over 32 patches takes a moment",
        framework="lightning", batch=16, steps=8, warmup=3, tries={"workers": "2", "attention": "flash"},
    ),
)  # fmt: skip
