# /// cell
# causes = ["storage_bound"]
# because = "each vignette is waited for 3 ms in the process that trains"
# framework = "transformers"
# batch = 16
# cohort = "2026-11-22b"
#
# [[cure]]
# old = "dataloader_num_workers=0"
# new = '''
# dataloader_num_workers=4,
#     dataloader_persistent_workers=True'''
# ///
"""A small vision transformer names plankton in pictures from a camera buoy, with the Hugging Face Trainer."""

import io
import tempfile
import time

import numpy as np
import torch
from PIL import Image
from transformers import Trainer, TrainingArguments, ViTConfig, ViTForImageClassification, set_seed

set_seed(8)
KINDS = ["copepod", "diatom", "larva", "radiolarian", "salp", "detritus"]
SIDE = 48


class Buoy:
    """Answers with the vignette of a number, as a PNG."""

    answers_after_s = 0.003

    def __init__(self, vignettes):
        self._memory_card = []
        for vignette in vignettes:
            written = io.BytesIO()
            Image.fromarray(vignette).save(written, format="PNG", compress_level=1)
            self._memory_card.append(written.getvalue())

    def __len__(self):
        return len(self._memory_card)

    def request(self, number):
        time.sleep(self.answers_after_s)
        return self._memory_card[number]


class Vignettes(torch.utils.data.Dataset):
    def __init__(self, buoy, kinds):
        self.buoy, self.kinds = buoy, kinds

    def __len__(self):
        return len(self.buoy)

    def __getitem__(self, number):
        picture = np.asarray(Image.open(io.BytesIO(self.buoy.request(number))), dtype=np.float32)
        return {"pixel_values": torch.from_numpy(picture / 127.5 - 1)[None], "labels": self.kinds[number]}


rng = np.random.default_rng(8)
kinds = rng.integers(0, len(KINDS), 640).tolist()
rows = np.arange(SIDE)
stripes = np.stack([np.sin(rows * (k + 1) / 5)[:, None] * np.cos(rows / (k + 2)) for k in range(len(KINDS))])
vignettes = (128 + 60 * stripes[kinds] + rng.normal(0, 15, (640, SIDE, SIDE))).clip(0, 255).astype(np.uint8)
plankton = Vignettes(Buoy(vignettes), kinds)

# %% the training cell
config = ViTConfig(
    image_size=SIDE,
    patch_size=8,
    num_channels=1,
    hidden_size=96,
    num_hidden_layers=3,
    num_attention_heads=4,
    intermediate_size=192,
    num_labels=len(KINDS),
)
arguments = TrainingArguments(
    output_dir=tempfile.mkdtemp(),
    max_steps=200,
    per_device_train_batch_size=16,
    learning_rate=5e-4,
    lr_scheduler_type="cosine",
    dataloader_num_workers=0,
    dataloader_pin_memory=False,
    use_cpu=True,
    save_strategy="no",
    logging_strategy="no",
    report_to="none",
    disable_tqdm=True,
)
Trainer(model=ViTForImageClassification(config), args=arguments, train_dataset=plankton).train()
