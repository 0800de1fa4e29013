# /// cell
# causes = ["checkpoint_save"]
# because = "model, optimizer and random states are written after each of 200 steps"
# framework = "transformers"
# batch = 16
# steps = 20
# warmup = 4
# cohort = "2026-11-21d"
#
# [[cure]]
# old = "save_steps=0.005"
# new = "save_steps=0.99"
# ///
"""A small vision transformer on galaxies; save_steps is a fraction that was meant as a percentage; Trainer."""

import tempfile

import torch
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments, ViTConfig, ViTForImageClassification

torch.manual_seed(17)


class Galaxies(Dataset):
    """Blobs that are more or less stretched, in four classes."""

    def __init__(self, count=512, size=32):
        self.labels = torch.randint(0, 4, (count,))
        axis = torch.linspace(-1, 1, size)
        y, x = torch.meshgrid(axis, axis, indexing="ij")
        stretch = (1.0 + self.labels.float()).view(-1, 1, 1)
        glow = torch.exp(-8 * (x.square() * stretch + y.square() / stretch))
        self.images = glow.unsqueeze(1).repeat(1, 3, 1, 1) + 0.1 * torch.randn(count, 3, size, size)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        return {"pixel_values": self.images[i], "labels": self.labels[i]}


config = ViTConfig(
    image_size=32, patch_size=8, hidden_size=192, intermediate_size=576, num_hidden_layers=3, num_attention_heads=4,
    num_labels=4,
)  # fmt: skip
galaxies = Galaxies()

# %% the training cell
folder = tempfile.TemporaryDirectory()
model = ViTForImageClassification(config)
args = TrainingArguments(
    folder.name,
    max_steps=200,
    per_device_train_batch_size=16,
    learning_rate=3e-4,
    warmup_steps=20,
    weight_decay=0.05,
    max_grad_norm=1.0,
    optim="adamw_torch_fused",
    save_strategy="steps",
    save_steps=0.005,
    save_total_limit=1,
    logging_steps=50,
    report_to=[],
    use_cpu=True,
    disable_tqdm=True,
    dataloader_pin_memory=False,
)
Trainer(model=model, args=args, train_dataset=galaxies).train()
folder.cleanup()
