# /// cell
# cohort = "fourth"
# because = "The stream shuffles open tar members and reads them only afterwards: reading an older member of a tar.gz seeks backwards, which restarts the decompression from the beginning of the archive. Cure: read and decode the clips before the shuffle (or use plain tar files)."
# thread = "https://github.com/meta-pytorch/data/issues/668"
# line = "data = handle.read()"
# callee = "gzip.GzipFile.seek"
# faster = 7.3
# ///
import io
import os
import random
import tarfile
import tempfile
import wave

import numpy as np
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, IterableDataset

torch.manual_seed(0)
folder = tempfile.mkdtemp()
species, rate, length = 8, 8000, 2048


def record_archive(path, n, rng):
    with tarfile.open(path, "w:gz", compresslevel=6) as archive:
        for i in range(n):
            kind = int(rng.integers(species))
            t = np.arange(length) / rate
            pitch = 500 + 300 * kind + rng.normal(0, 60)
            sweep = rng.normal(0, 400)
            call = np.sin(2 * np.pi * (pitch * t + sweep * t ** 2)) * rng.uniform(0.2, 0.8)
            call = call + rng.normal(0, 0.05, length)
            samples = (np.clip(call, -1, 1) * 255).astype(np.int16) * 128
            file = io.BytesIO()
            with wave.open(file, "wb") as sound:
                sound.setnchannels(1)
                sound.setsampwidth(2)
                sound.setframerate(rate)
                sound.writeframes(samples.tobytes())
            info = tarfile.TarInfo(f"{kind}_{i:05d}.wav")
            info.size = len(file.getvalue())
            archive.addfile(info, io.BytesIO(file.getvalue()))


class CallStream(IterableDataset):
    def __init__(self, archives, buffer_size, seed):
        self.archives = archives
        self.buffer_size = buffer_size
        self.random = random.Random(seed)

    def members(self):
        for path in self.archives:
            archive = tarfile.open(path)
            for member in archive:
                yield member.name, archive.extractfile(member)

    def shuffled(self, items):
        buffer = []
        for item in items:
            if len(buffer) < self.buffer_size:
                buffer.append(item)
                continue
            k = self.random.randrange(self.buffer_size)
            chosen, buffer[k] = buffer[k], item
            yield chosen
        self.random.shuffle(buffer)
        yield from buffer

    def decode(self, name, handle):
        data = handle.read()
        with wave.open(io.BytesIO(data)) as sound:
            samples = np.frombuffer(sound.readframes(length), dtype=np.int16)
        return torch.from_numpy(samples.astype(np.float32) / 32768), int(name.split("_")[0])

    def __iter__(self):
        for name, handle in self.shuffled(self.members()):
            yield self.decode(name, handle)


class CallNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("window", torch.hann_window(256))
        self.body = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1),
            nn.Flatten(), nn.Linear(32, species),
        )

    def forward(self, x):
        spectrum = torch.stft(x, 256, 64, window=self.window, return_complex=True).abs()
        return self.body(torch.log1p(spectrum).unsqueeze(1))


rng = np.random.default_rng(5)
archives = []
for k in range(4):
    archives.append(os.path.join(folder, f"calls_{k}.tar.gz"))
    record_archive(archives[-1], 260, rng)

stream = CallStream(archives, buffer_size=100, seed=0)
model = CallNet()
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
criterion = nn.CrossEntropyLoss()
loader = DataLoader(stream, batch_size=16)

# %% the training cell
for epoch in range(2):
    for step, (calls, kinds) in enumerate(loader):
        loss = criterion(model(calls), kinds)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 25 == 0:
            print(f"epoch {epoch} step {step} loss {loss.item():.4f}")
