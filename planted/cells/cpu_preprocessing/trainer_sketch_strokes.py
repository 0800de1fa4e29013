# /// cell
# causes = ["cpu_preprocessing"]
# because = "drawing, blurring and shrinking a sketch takes longer than training on it"
# also = ["data_starved"]
# framework = "transformers"
# batch = 16
# steps = 24
# warmup = 12
# cohort = "2026-11-21c"
# looked_at = true
#
# [[cure]]
# old = "train_dataset=SketchDataset(drawings)"
# new = "train_dataset=list(SketchDataset(drawings))"
# ///
"""A small ViT that tells sketches apart; each is drawn from its pen strokes when it is asked for. Trainer."""

import math
import random

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFilter
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments, ViTConfig, ViTForImageClassification, set_seed

set_seed(3)
CANVAS, SIZE = 192, 32


def scribble(kind):
    """A star, a spiral, a wave or a polygon, as a list of strokes of points."""
    turn, corners = random.uniform(0, 6.28), random.randint(3, 9)
    strokes = []
    for s in range(4):
        points = []
        for k in range(60):
            a = turn + 2 * math.pi * k / 60
            r = (36 + 36 * math.cos(corners * a), k, 66 + 12 * math.sin(9 * a), 60 - 6 * s)[kind]
            points.append((96 + r * math.cos(a) + random.gauss(0, 1), 96 + r * math.sin(a) + random.gauss(0, 1)))
        strokes.append(points)
    return strokes


class SketchDataset(Dataset):
    def __init__(self, drawings):
        self.drawings = drawings

    def __len__(self):
        return len(self.drawings)

    def __getitem__(self, index):
        strokes, label = self.drawings[index]
        image = Image.new("L", (CANVAS, CANVAS), 255)
        pen = ImageDraw.Draw(image)
        for stroke in strokes:
            pen.line(stroke, fill=0, width=5, joint="curve")
        image = image.filter(ImageFilter.GaussianBlur(2)).resize((SIZE, SIZE), Image.Resampling.LANCZOS)
        pixels = torch.from_numpy(np.array(image, dtype=np.float32) / 127.5 - 1)
        return {"pixel_values": pixels[None], "labels": label}


drawings = [(scribble(i % 4), i % 4) for i in range(400)]
config = ViTConfig(
    image_size=SIZE, patch_size=8, num_channels=1, hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
    intermediate_size=128, num_labels=4, hidden_act="relu",
)  # fmt: skip
model = ViTForImageClassification(config)

# %% the training cell
training_args = TrainingArguments(
    output_dir="sketches",
    num_train_epochs=8,
    per_device_train_batch_size=16,
    learning_rate=5e-4,
    warmup_steps=20,
    lr_scheduler_type="cosine",
    logging_steps=100,
    save_strategy="no",
    report_to=[],
    use_cpu=True,
    disable_tqdm=True,
    dataloader_pin_memory=False,
)
trainer = Trainer(model=model, args=training_args, train_dataset=SketchDataset(drawings))
result = trainer.train()
print(f"loss {result.training_loss:.3f}")
