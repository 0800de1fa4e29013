"""Cells whose computing itself could be had cheaper: optimizer, batch, attention, memory layout, pointwise chains."""

from __future__ import annotations

from benchmarks.planted.planted import Planted

COMPUTING = (
    Planted(
        "deep_and_narrow", ("unfused_optimizer",),
        "164 small tensors, for each of which AdamW calls a dozen operations; twice the batch brings as much",
        (("foreach=False", "fused=True"),),
        also=("small_batch",), batch=64, steps=50,
    ),
    Planted(
        "lightning_many_heads", ("unfused_optimizer",),
        "202 small tensors, for each of which Adam calls a dozen operations",
        (("foreach=False", "fused=True"),),
        framework="lightning", batch=64, steps=50,
    ),
    Planted(
        "trainer_deep_and_narrow", ("unfused_optimizer",),
        "292 small tensors, for each of which AdamW calls a dozen operations; twice the batch brings as much",
        (('optim="adamw_torch"', 'optim="adamw_torch_fused"'),),
        also=("small_batch",), framework="transformers", batch=16, steps=20,
    ),
    Planted(
        "two_samples_at_a_time", ("small_batch",),
        "a step for 2 samples costs nearly as much as one for 64",
        (("BATCH_SIZE = 2", "BATCH_SIZE = 64"),),
        batch=2, cured_batch=64, steps=200, warmup=10, profiled=100,
    ),
    Planted(
        "trainer_batch_of_one", ("small_batch",),
        "a step for one short sequence costs nearly as much as one for 16",
        (("per_device_train_batch_size=1", "per_device_train_batch_size=16"),),
        framework="transformers", batch=1, cured_batch=16, steps=60, profiled=100,
    ),
    Planted(
        "gan_four_at_a_time", ("small_batch",),
        "an iteration for 4 points costs nearly as much as one for 64",
        (("batch_size = 4", "batch_size = 64"),),
        batch=4, cured_batch=64, steps=100, profiled=100,
    ),
    Planted(
        "lightning_autoencoder_of_four", ("small_batch",),
        "a step for 4 readings costs nearly as much as one for 64",
        (("size = 4", "size = 64"),),
        framework="lightning", batch=4, cured_batch=64, steps=100, profiled=100,
    ),
    Planted(
        "attention_by_hand", ("unfused_attention",),
        "1024 by 1024 weights of each head go through memory five times",
        ((
            """        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        mask = torch.triu(torch.ones(x.shape[1], x.shape[1], dtype=torch.bool), diagonal=1)
        scores = scores.masked_fill(mask, float("-inf"))
        h = torch.softmax(scores, dim=-1) @ v
""",
            "        h = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)\n",
        ),),
        steps=12, warmup=3, profiled=30,
    ),
    Planted(
        "trainer_eager_attention", ("unfused_attention",),
        "1024 by 1024 weights of each head go through memory again and again",
        (('attn_implementation="eager")', 'attn_implementation="sdpa")'),),
        framework="transformers", steps=8, warmup=2, profiled=30,
    ),
    Planted(
        "lightning_set_attention", ("unfused_attention",),
        "800 by 800 weights of each head go through memory again and again",
        ((
            """        weights = torch.einsum("bhnd,bhmd->bhnm", q, k) * q.shape[-1] ** -0.5
        weights = torch.exp(weights - weights.amax(-1, keepdim=True))
        weights = weights / weights.sum(-1, keepdim=True)
        h = torch.einsum("bhnm,bhmd->bhnd", weights, v)
""",
            "        h = nn.functional.scaled_dot_product_attention(q, k, v)\n",
        ),),
        framework="lightning", batch=2, steps=10, warmup=3, profiled=30,
    ),
    Planted(
        "channels_back_and_forth", ("layout",),
        "each norm copies its input twice, to bring the channels to the end and back",
        (
            ("        x = x.permute(0, 2, 3, 1).contiguous()\n", "        x = x.permute(0, 2, 3, 1)\n"),
            ("        return x.permute(0, 3, 1, 2).contiguous()\n", "        return x.permute(0, 3, 1, 2)\n"),
            ("data = TensorDataset(", "net = net.to(memory_format=torch.channels_last)\ndata = TensorDataset("),
        ),
        batch=8, steps=12, warmup=3,
    ),
    Planted(
        "accelerate_pooled_rows", ("layout",),
        "pooling over 32 channels: only with the channels side by side can vector instructions be used",
        (
            ("nn.Linear(32, 10),\n)", "nn.Linear(32, 10),\n).to(memory_format=torch.channels_last)"),
            ("model(x)", "model(x.to(memory_format=torch.channels_last))"),
        ),
        framework="accelerate", batch=8, steps=12, warmup=3, profiled=30,
    ),
    Planted(
        "pendulum_step_by_step", ("memory_bound_ops",),
        "sixty cheap operations on 400,000 numbers, each of which goes through memory",
        (("simulate = model", "simulate = torch.compile(model)"),),
        steps=8, warmup=3, profiled=30,
    ),
    Planted(
        "lightning_own_activation", ("memory_bound_ops",),
        "an activation of eight operations and a norm of seven, each of which goes through memory",
        (("gelu_by_hand(self.grow(self.shrink(norm_by_hand(x))))", "gelu(self.grow(self.shrink(norm(x))))"),),
        framework="lightning", batch=1024, steps=10, warmup=3, profiled=30,
    ),
)  # fmt: skip
