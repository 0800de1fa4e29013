# /// cell
# causes = ["small_batch"]
# because = "a step for 2 tiles costs nearly as much as one for 32"
# framework = "transformers"
# batch = 2
# cured_batch = 32
# profiled = 100
# cohort = "2026-11-21c"
# looked_at = true
#
# [[cure]]
# old = "per_device_train_batch_size=2"
# new = "per_device_train_batch_size=32"
# ///
"""A small vision transformer looks at two satellite tiles per step; the Hugging Face Trainer."""

import torch
from transformers import Trainer, TrainingArguments, ViTConfig, ViTForImageClassification

make = torch.Generator().manual_seed(12)
land = torch.randint(0, 6, (3200,), generator=make)
tiles = torch.randn(3200, 4, 16, 16, generator=make) + 0.3 * land[:, None, None, None]


class Tiles(torch.utils.data.Dataset):
    def __len__(self):
        return len(tiles)

    def __getitem__(self, i):
        return {"pixel_values": tiles[i], "labels": land[i]}


config = ViTConfig(
    image_size=16,
    patch_size=4,
    num_channels=4,
    hidden_size=48,
    intermediate_size=96,
    num_hidden_layers=3,
    num_attention_heads=3,
    num_labels=6,
)

# %% the training cell
model = ViTForImageClassification(config)
arguments = TrainingArguments(
    output_dir="tiles",
    max_steps=400,
    per_device_train_batch_size=2,
    learning_rate=3e-4,
    optim="adamw_torch_fused",
    lr_scheduler_type="cosine",
    save_strategy="no",
    logging_steps=100,
    report_to="none",
    use_cpu=True,
    disable_tqdm=True,
    dataloader_pin_memory=False,
)
Trainer(model=model, args=arguments, train_dataset=Tiles()).train()
