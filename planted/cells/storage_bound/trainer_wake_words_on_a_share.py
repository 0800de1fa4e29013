# /// cell
# causes = ["storage_bound"]
# because = "each of 16 recordings waits 1.2 ms for each of its blocks, one after the other"
# also = ["data_starved"]
# framework = "transformers"
# batch = 16
# warmup = 10
# cohort = "2026-11-21d"
# looked_at = true
#
# [[cure]]
# old = "opener=open_on_share)"
# new = "opener=open)"
# ///
"""Wake words with the Trainer; the recordings are opened on the office share, which answers block by block."""

import io
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset
from transformers import PretrainedConfig, PreTrainedModel, Trainer, TrainingArguments, set_seed
from transformers.modeling_outputs import SequenceClassifierOutput

set_seed(16_000)
RATE, WORDS = 4000, 8
recordings = Path("recordings")
recordings.mkdir(exist_ok=True)
rng = np.random.default_rng(16)
t = np.arange(RATE) / RATE
for n in range(320):
    tone = np.sin(2 * np.pi * (200 + 90 * (n % WORDS)) * t * (1 + 0.02 * rng.standard_normal()))
    pcm = 9000 * tone + 1500 * rng.standard_normal(RATE)
    (recordings / f"{n % WORDS}_{n:03}.pcm").write_bytes(pcm.astype("<i2").tobytes())


class ShareFile(io.BytesIO):
    """A file on the share: a round trip for each block of 2 KiB."""

    BLOCK, ROUND_TRIP = 2048, 0.0012

    def read(self, size=-1):
        found = []
        while size != 0:
            time.sleep(self.ROUND_TRIP)
            block = super().read(self.BLOCK if size < 0 else min(size, self.BLOCK))
            found.append(block)
            if len(block) < self.BLOCK:
                break
            size = size if size < 0 else size - len(block)
        return b"".join(found)


def open_on_share(path, mode="rb"):
    return ShareFile(Path(path).read_bytes())


class WakeWords(Dataset):
    def __init__(self, folder, opener=open):
        self.paths, self.opener = sorted(folder.glob("*.pcm")), opener

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, i):
        with self.opener(self.paths[i], "rb") as file:
            pcm = np.frombuffer(file.read(), dtype="<i2")
        return {"input_values": torch.from_numpy(pcm.astype(np.float32) / 32768), "labels": int(self.paths[i].name[0])}


class WakeWordConfig(PretrainedConfig):
    model_type = "wake_word"

    def __init__(self, width=48, num_words=WORDS, **kwargs):
        self.width, self.num_words = width, num_words
        super().__init__(**kwargs)


class WakeWordModel(PreTrainedModel):
    config_class = WakeWordConfig
    main_input_name = "input_values"

    def __init__(self, config):
        super().__init__(config)
        w = config.width
        self.encoder = nn.Sequential(
            nn.Conv1d(1, w, 80, stride=16), nn.ReLU(), nn.Conv1d(w, w, 5, stride=2), nn.ReLU(),
            nn.Conv1d(w, 2 * w, 5, stride=2), nn.ReLU(), nn.AdaptiveAvgPool1d(1), nn.Flatten(),
        )  # fmt: skip
        self.classifier = nn.Linear(2 * w, config.num_words)
        self.post_init()

    def forward(self, input_values, labels=None):
        logits = self.classifier(self.encoder(input_values[:, None]))
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        return SequenceClassifierOutput(loss=loss, logits=logits)


# %% the training cell
training_args = TrainingArguments(
    output_dir="wake_words",
    per_device_train_batch_size=16,
    num_train_epochs=8,
    learning_rate=1e-3,
    lr_scheduler_type="linear",
    warmup_steps=15,
    label_smoothing_factor=0.0,
    logging_steps=100,
    save_strategy="no",
    report_to="none",
    use_cpu=True,
    disable_tqdm=True,
    dataloader_pin_memory=False,
)
trainer = Trainer(
    model=WakeWordModel(WakeWordConfig()),
    args=training_args,
    train_dataset=WakeWords(recordings, opener=open_on_share),
)
trainer.train()
