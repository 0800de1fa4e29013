"""Cells that need a GPU: what the CPU device has no equal of."""

from __future__ import annotations

from functools import partial

from benchmarks.planted.planted import Planted

_On = partial(Planted, gpu=True)

ON_GPU = (
    _On(
        "gpu_metrics_each_step", ("sync_points",),
        "28 figures are brought to the CPU in each step, and each waits for the GPU",
        (("        watched(loss, logits, y)\n", ""),),
        also=("logging_or_eval", "launch_bound"), batch=256, steps=60, warmup=10,
    ),
    _On(
        "gpu_lightning_prints", ("sync_points",),
        "two figures of each of 16 layers are printed in each step",
        (("            print(", "            continue\n            print("),),
        also=("logging_or_eval", "launch_bound"), framework="lightning", batch=256, steps=60, warmup=10,
    ),
    _On(
        "gpu_pageable_volumes", ("blocking_copy",),
        "134 MB per step go to the GPU from pageable memory",
        (
            ("num_workers=8", "num_workers=8, pin_memory=True"),
            ("x.to(device), y.to(device)", "x.to(device, non_blocking=True), y.to(device, non_blocking=True)"),
        ),
        also=("data_starved",), batch=16, steps=30, warmup=40,
    ),
    _On(
        "gpu_hundreds_of_small_layers", ("launch_bound",),
        "thousands of operations of a few microseconds each",
        (
            ("nn.functional.mse_loss(model(x), y)", "nn.functional.mse_loss(compiled(x), y)"),
            ("for step in", 'compiled = torch.compile(model, mode="reduce-overhead")\nfor step in'),
        ),
        also=("small_batch",), steps=40, warmup=10,
    ),
    _On(
        "gpu_trainer_without_bf16", ("no_mixed_precision",),
        "matrix products take the step, in TF32 where bf16 would be twice as fast",
        (("bf16=False", "bf16=True"),),
        framework="transformers", batch=16, steps=20,
    ),
    _On(
        "gpu_products_in_full_precision", ("no_tf32",),
        "matrix products take the step, in 32 bits",
        (("TF32 = False", "TF32 = True"),),
        also=("no_mixed_precision",), steps=20,
    ),
    _On(
        "gpu_attention_by_hand", ("unfused_attention",),
        "2048 by 2048 weights of each head go through memory again and again",
        ((
            """        weights = torch.softmax(q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1]), -1)
        h = weights @ v
""",
            "        h = nn.functional.scaled_dot_product_attention(q, k, v)\n",
        ),),
        batch=8, steps=20,
    ),
    _On(
        "gpu_cache_emptied_each_step", ("allocator_thrash",),
        "all cached memory is given back after each step and asked for again in the next",
        (("    torch.cuda.empty_cache()\n", ""),),
        also=("sync_points",), steps=40,
    ),
    _On(
        "gpu_adamw_tensor_by_tensor", ("unfused_optimizer",),
        "480 tensors, for each of which AdamW launches a dozen kernels",
        (("foreach=False", "fused=True"),),
        also=("launch_bound",), steps=40,
    ),
    _On(
        "gpu_model_left_on_the_cpu", ("wrong_device",),
        "model and data are on the CPU, beside an idle GPU",
        (('torch.device("cpu")', 'torch.device("cuda")'),),
        batch=32, steps=10, profiled=30,
    ),
    _On(
        "gpu_slow_files", ("storage_bound",),
        "each of 32 pictures waits 2 ms, one after the other",
        (("num_workers=0", "num_workers=8, persistent_workers=True"),),
        also=("data_starved",), batch=32, steps=24, warmup=20,
    ),
    _On(
        "gpu_accelerate_batch_of_two", ("small_batch",),
        "two sequences of 32 tokens leave the GPU all but empty",
        (("size = 2", "size = 64"),),
        also=("launch_bound", "memory_underused"), framework="accelerate", batch=2, cured_batch=64, steps=60,
        warmup=40,
    ),
    _On(
        "gpu_pointwise_chain", ("memory_bound_ops",),
        "twenty cheap operations on 64 million numbers each",
        (("wave = activation", "wave = torch.compile(activation)"),),
        steps=20,
    ),
    _On(
        "gpu_odd_vocabulary", ("odd_shapes",),
        "products with 50257 columns cannot use the fast kernels; with 50304 they can",
        (("VOCABULARY = 50257", "VOCABULARY = 50304"),),
        steps=30,
    ),
    _On(
        "gpu_healthy_gpt", (), "matrix products in bf16 take the step",
        steps=10, warmup=5, tries={"fused_optimizer": "True", "attention": "flash"},
    ),
    _On(
        "gpu_healthy_cnn", (), "convolutions in bf16 take the step, and workers are ahead",
        batch=128, steps=20, warmup=20, tries={"workers": "12", "channels_last": "True"},
    ),
)  # fmt: skip
