# /// cell
# causes = []
# because = "the transformer computes nearly all the time, on 32 songs per step that lie in memory"
# framework = "transformers"
# batch = 32
# tries = { workers = "2" }
# cohort = "2026-11-22b"
# ///
"""Which bird sings? Mel spectrograms of a second, for an audio spectrogram transformer of three layers."""

import tempfile

import torch
from transformers import ASTConfig, ASTForAudioClassification, Trainer, TrainingArguments, set_seed

set_seed(80)
FRAMES, MELS, SPECIES = 64, 64, 30


class DawnChorus(torch.utils.data.Dataset):
    """Each species sings around a pitch of its own, before the noise of leaves."""

    def __init__(self, songs):
        self.species = torch.randint(0, SPECIES, (songs,))
        pitch = 2 * self.species[:, None] + 3 * torch.sin(torch.linspace(0, 9, FRAMES))[None]
        distance = torch.arange(MELS)[None, None] - pitch[..., None]
        self.mels = torch.exp(-distance.square() / 8) + 0.3 * torch.randn(songs, FRAMES, MELS)

    def __len__(self):
        return len(self.species)

    def __getitem__(self, song):
        return {"input_values": self.mels[song], "labels": self.species[song]}


config = ASTConfig(
    hidden_size=192,
    num_hidden_layers=3,
    num_attention_heads=4,
    intermediate_size=384,
    patch_size=16,
    frequency_stride=16,
    time_stride=8,
    max_length=FRAMES,
    num_mel_bins=MELS,
    num_labels=SPECIES,
)
chorus = DawnChorus(3840)

# %% the training cell
trainer = Trainer(
    model=ASTForAudioClassification(config),
    train_dataset=chorus,
    args=TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        num_train_epochs=3,
        per_device_train_batch_size=32,
        learning_rate=3e-4,
        optim="adamw_torch_fused",
        lr_scheduler_type="cosine",
        save_strategy="no",
        logging_strategy="epoch",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        dataloader_pin_memory=False,
    ),
)
trainer.train()
