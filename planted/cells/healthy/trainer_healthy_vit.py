# /// cell
# causes = []
# because = "matrix products take the step"
# framework = "transformers"
# batch = 20
# steps = 10
# warmup = 3
# tries = { workers = "2", batch_size = "40" }
# cohort = "2026-11-21d"
# ///
"""A vision transformer on leaves of sick plants, as tensors in memory; the Hugging Face Trainer."""

import torch
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments, ViTConfig, ViTForImageClassification, set_seed

set_seed(38)


class Leaves(Dataset):
    def __init__(self, count, classes=6):
        self.pixels = torch.randn(count, 3, 32, 32)
        self.sickness = torch.randint(0, classes, (count,))

    def __len__(self):
        return len(self.sickness)

    def __getitem__(self, i):
        return {"pixel_values": self.pixels[i], "labels": self.sickness[i]}


config = ViTConfig(
    image_size=32, patch_size=4, hidden_size=192, num_hidden_layers=2, num_attention_heads=4, intermediate_size=768,
    hidden_act="relu", num_labels=6,
)  # fmt: skip
model = ViTForImageClassification(config)
leaves = Leaves(2000)

# %% the training cell
arguments = TrainingArguments(
    output_dir="leaves",
    num_train_epochs=2,
    per_device_train_batch_size=20,
    learning_rate=1e-4,
    weight_decay=0.05,
    lr_scheduler_type="cosine",
    optim="adamw_torch_fused",
    logging_steps=50,
    save_strategy="no",
    report_to="none",
    use_cpu=True,
    disable_tqdm=True,
    dataloader_pin_memory=False,
)
trainer = Trainer(model=model, args=arguments, train_dataset=leaves)
trainer.train()
