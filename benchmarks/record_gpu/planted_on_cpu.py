"""The planted GPU cells where the CPU stands in for a GPU: so small that each of their lines runs within a second."""

from __future__ import annotations

import re

Edits = tuple[tuple[str, str], ...]

EVERYWHERE: Edits = (
    ('"cuda"', '"cpu"'),
    ("torch.compile(model)", "model"),
    ("torch.compile(net)", "net"),
    ("pin_memory=True, ", ""),
    (", pin_memory=True", ""),
    (".pin_memory()", ""),
    ("num_workers=8", "num_workers=1"),
    ("num_workers=4", "num_workers=1"),
)
OF: dict[str, Edits] = {
    "gpu_cache_emptied_each_step": (("2048", "32"),),
    "gpu_pageable_volumes": (("randn(128, 8, 64, 64, 64)", "randn(128, 8, 16, 16, 16)"), ("16 * 8**3", "16 * 2**3")),
    "gpu_healthy_cnn": (
        ("randn(256, 3, 96, 96)", "randn(256, 3, 8, 8)"),
        ("16_384", "512"),
        ("batch_size=128", "batch_size=4"),
        ("block(64, 256), block(256, 256), block(256, 512, 2), block(512, 512)", "block(64, 128)"),
        ("Linear(512, 10)", "Linear(128, 10)"),
    ),
    "gpu_healthy_gpt": (
        ("= 1024, 16, 8, 8192", "= 32, 2, 2, 64"),
        ("(200, 16, 1025)", "(200, 2, 17)"),
    ),
    "gpu_hundreds_of_small_layers": (("range(300)", "range(10)"),),
    "gpu_pointwise_chain": (("64, 1024, 1024", "8, 32, 32"),),
    "gpu_trainer_without_bf16": (
        ("8192, (2048, 512)", "64, (512, 16)"),
        (
            "vocab_size=8192, n_positions=512, n_embd=1024, n_layer=8",
            "vocab_size=64, n_positions=16, n_embd=64, n_layer=2",
        ),
        ("    tf32=True,\n", "    use_cpu=True,\n"),
        ("per_device_train_batch_size=16", "per_device_train_batch_size=4"),
        ("dataloader_num_workers=2", "dataloader_num_workers=1"),
    ),
    "gpu_products_in_full_precision": (("4096", "32"), ("8192", "64")),
    "gpu_odd_vocabulary": (("50257", "257"), ("8192", "16")),
    "gpu_accelerate_batch_of_two": (
        ("randn(20_000, 32, 256)", "randn(512, 8, 256)"),
        ("randn(20_000, 1)", "randn(512, 1)"),
    ),
    "gpu_slow_files": (("randn(64, 3, 128, 128)", "randn(64, 3, 16, 16)"), ("batch_size=32", "batch_size=4")),
    "gpu_lightning_prints": (
        ("8192", "1024"),
        ('accelerator="gpu"', 'accelerator="cpu"'),
        ("batch_size=256", "batch_size=16"),
        ("max_epochs=10", "max_epochs=1"),
    ),
    "gpu_metrics_each_step": (("batch_size=256", "batch_size=16"), ("8192", "2048")),
    "gpu_attention_by_hand": (("randn(8, 2048, 512", "randn(2, 32, 512"), ("range(6)", "range(2)")),
    "gpu_adamw_tensor_by_tensor": (("layer, 40", "layer, 4"), ("randn(32, 256, 256", "randn(2, 8, 256")),
    "gpu_model_left_on_the_cpu": (
        ("randn(2048, 3, 64, 64)", "randn(512, 3, 64, 64)"),
        ("(2048,)", "(512,)"),
        ("batch_size=32", "batch_size=4"),
    ),
}


def on_cpu(name: str, text: str) -> str:
    """The text of that planted cell with its small sizes."""
    for old, new in (*OF.get(name, ()), *EVERYWHERE):
        text = text.replace(old, new)
    return re.sub(r"\n{4,}", "\n\n\n", text)
