"""Cells on computing and hosting, written last, without a look at the rules, and kept aside."""

from __future__ import annotations

from benchmarks.planted.planted import Planted

LATEST_HOSTING: tuple[Planted, ...] = (
    Planted(
        "accelerate_hives_before_swarming", ("checkpoint_save",),
        "the smoothed loss falls in nearly every step, and each time weights and the optimizer's state are written",
        (("momentum=0.98, patience=1", "momentum=0.98, patience=1000"),),
        framework="accelerate", batch=24, steps=30, warmup=6,
    ),
    Planted(
        "trainer_names_pronounced", ("logging_or_eval",),
        "the edit distance of each name is found in Python in each step, and each sixtieth is logged",
        (("report_every = 1\n", "report_every = 59\n"),),
        framework="transformers", batch=32, steps=30, warmup=6,
    ),
    Planted(
        "sherds_by_their_fabric", ("logging_or_eval",),
        "1500 sections are embedded, and their neighbours and silhouette found, after every third step",
        (("every=3)", "every=1000)"),),
        batch=192, steps=30, warmup=6,
    ),
    Planted(
        "clades_that_radiate", ("gc_pause",),
        "the garbage collector walks over the museum and all modules when every eighth sample is put away",
        (("            gc.collect()\n", "            pass\n"),),
        batch=20, steps=32, warmup=8,
    ),
    Planted(
        "lightning_loans_added_up", ("unfused_optimizer",),
        "an AdamW written out by hand goes a score of times through 1.5 million weights and their averages",
        ((
            "HouseAdamW(self.parameters(), lr=self.hparams.lr, weight_decay=self.hparams.weight_decay)",
            "torch.optim.AdamW(\n            self.parameters(), lr=self.hparams.lr, "
            "weight_decay=self.hparams.weight_decay, fused=True\n        )",
        ),),
        framework="lightning", batch=32, steps=30, warmup=5,
    ),
    Planted(
        "retina_that_spikes", ("small_batch",),
        "three gestures per step, whose 40 ticks are gone through one by one however many gestures there are",
        (("per_step=3", "per_step=48"), ("step * 3 >= shown", "step * 48 >= 16 * shown")),
        batch=3, cured_batch=48, steps=30, warmup=5,
    ),
    Planted(
        "bytes_of_server_logs", ("unfused_attention",),
        "768 by 768 weights of each of four heads go through memory again and again",
        ((
            """        logits = torch.matmul(q, k.mT) / self.size**0.5
        logits = logits + self.bias
        attend = torch.softmax(logits.float(), dim=-1).type_as(q)
        mixed = torch.matmul(attend, v)
""",
            "        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=self.bias[None])\n",
        ),),
        batch=2, steps=20, warmup=5,
    ),
    Planted(
        "dust_layers_in_the_ice", ("cpu_oversubscribed",),
        "eight threads on two cores",
        (("--threads=8", "--threads=2"),),
        batch=6, steps=20, warmup=5, fresh=True,
    ),
    Planted(
        "ballads_into_modern_words", ("memory_bound_ops",),
        "a loss of ten operations on 3.5 million numbers, each of which goes through memory, forward and backward",
        ((
            "criterion = LabelSmoothing(MODERN, padding=PAD, smoothing=0.1)",
            "smooth = nn.CrossEntropyLoss(ignore_index=PAD, label_smoothing=0.1)\n\n\n"
            "def criterion(logits, target):\n    return smooth(logits.flatten(0, 1), target.flatten())\n\n\n",
        ),),
        batch=24, steps=30, warmup=10,
    ),
    Planted(
        "accelerate_looms_by_their_hum", (),
        "matrix products on two thousand frames take the step; the hums lie in memory",
        framework="accelerate", batch=40, steps=16, warmup=3, tries={"workers": "2", "batch_size": "80"},
    ),
)  # fmt: skip
