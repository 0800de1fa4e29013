# /// cell
# causes = ["cpu_preprocessing"]
# because = """\
#   one worker filters 16 events and takes their envelopes and spectrograms while a step takes a few milliseconds"""
# also = ["data_starved"]
# batch = 16
# steps = 32
# warmup = 16
# cohort = "2026-11-21d"
#
# [[cure]]
# old = "events = Events(waveforms, labels)"
# new = '''
# events = Events(waveforms, labels)
# events = [events[n] for n in range(len(events))]'''
# ///
"""Earthquake or quarry blast, from spectrograms of three components that one worker filters anew for each batch."""

import numpy as np
import torch
from scipy import signal
from torch import nn
from torch.utils.data import DataLoader, Dataset

torch.manual_seed(1906)
FS, SECONDS = 100, 60
BAND = signal.butter(4, (1.0, 20.0), "bandpass", fs=FS, output="sos")


def synthetic_event(rng, quarry):
    t = np.arange(FS * SECONDS) / FS
    trace = 0.3 * rng.standard_normal((3, t.size)).cumsum(1) / 20
    for onset, frequency in ((12 + 4 * rng.random(), 9), (22 + 8 * rng.random(), 2 if quarry else 5)):
        after = np.clip(t - onset, 0, None)
        trace += rng.uniform(0.5, 2, (3, 1)) * after * np.exp(-after / 4) * np.sin(2 * np.pi * frequency * after)
    return trace


class Events(Dataset):
    """Waveforms in memory; what the network sees is computed on access."""

    def __init__(self, waveforms, labels):
        self.waveforms = waveforms
        self.labels = labels

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, n):
        trace = signal.detrend(self.waveforms[n], axis=-1)
        trace = signal.sosfiltfilt(BAND, trace, axis=-1)
        envelope = np.abs(signal.hilbert(trace, axis=-1))
        trace = trace / (envelope.max() + 1e-9)
        _, _, power = signal.spectrogram(trace, fs=FS, nperseg=128, noverlap=64, window="hann")
        image = np.log10(power[:, :48] + 1e-8).astype(np.float32)
        return torch.from_numpy(image), self.labels[n]


rng = np.random.default_rng(1906)
labels = [int(v) for v in rng.integers(0, 2, 256)]
waveforms = [synthetic_event(rng, bool(v)) for v in labels]

net = nn.Sequential(
    nn.Conv2d(3, 16, 5, stride=2, padding=2),
    nn.ReLU(),
    nn.Conv2d(16, 32, 3, stride=2, padding=1),
    nn.ReLU(),
    nn.Conv2d(32, 32, 3, padding=1),
    nn.ReLU(),
    nn.AdaptiveAvgPool2d(1),
    nn.Flatten(),
    nn.Linear(32, 2),
)
opt = torch.optim.AdamW(net.parameters(), lr=2e-3, fused=True)
plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(opt, patience=3)

# %% the training cell
events = Events(waveforms, labels)
train_loader = DataLoader(events, batch_size=16, shuffle=True, num_workers=1, persistent_workers=True)

for epoch in range(15):
    net.train()
    epoch_loss = torch.zeros(())
    for image, label in train_loader:
        opt.zero_grad()
        loss = nn.functional.cross_entropy(net(image), label)
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 5.0)
        opt.step()
        epoch_loss += loss.detach()
    plateau.step(epoch_loss)
