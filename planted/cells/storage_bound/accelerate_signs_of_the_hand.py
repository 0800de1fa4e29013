# /// cell
# causes = ["storage_bound"]
# because = "one worker waits 3.5 ms for a clip's frames and as long for its sign, several steps' time for a batch"
# framework = "accelerate"
# batch = 8
# steps = 36
# warmup = 12
# cohort = "2026-11-22c"
#
# [[cure]]
# old = "num_workers=1"
# new = "num_workers=4"
# ///
"""Signs of a sign language from short clips, trained with Accelerate; the clips come out of a bucket in two parts."""

import argparse
import time
import zlib

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, Dataset

parser = argparse.ArgumentParser()
parser.add_argument("--bucket", default="signs-2024")
parser.add_argument("--clips", type=int, default=480)
parser.add_argument("--signs", type=int, default=12)
parser.add_argument("--batch-size", type=int, default=8)
parser.add_argument("--epochs", type=int, default=3)
args = parser.parse_args([])
set_seed(5)


class Bucket:
    """Stands for the client of an object store: get_object(key) -> bytes."""

    latency = 0.0035

    def __init__(self, name):
        self.name, self.objects = name, {}

    def put_object(self, key, body):
        self.objects[key] = body

    def get_object(self, key):
        time.sleep(self.latency)
        return self.objects[key]


def fill(bucket, clips, signs):
    rng = np.random.default_rng(5)
    t, y, x = np.meshgrid(np.arange(8), np.arange(24), np.arange(24), indexing="ij")
    keys = []
    for clip in range(clips):
        sign = int(rng.integers(signs))
        angle = 2 * np.pi * sign / signs
        hand_y, hand_x = 12 + t * np.sin(angle), 12 + t * np.cos(angle)
        frames = 200 * np.exp(-((y - hand_y) ** 2 + (x - hand_x) ** 2) / 8) + rng.integers(0, 30, t.shape)
        key = f"clips/{clip:06d}"
        bucket.put_object(f"{key}/frames.z", zlib.compress(frames.astype(np.uint8).tobytes(), 1))
        bucket.put_object(f"{key}/sign.txt", str(sign).encode())
        keys.append(key)
    return keys


class ClipsInBucket(Dataset):
    def __init__(self, bucket, keys):
        self.bucket, self.keys = bucket, keys

    def __len__(self):
        return len(self.keys)

    def __getitem__(self, i):
        key = self.keys[i]
        raw = zlib.decompress(self.bucket.get_object(f"{key}/frames.z"))
        frames = torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(1, 8, 24, 24)
        sign = int(self.bucket.get_object(f"{key}/sign.txt"))
        return frames.float().div_(255), sign


def clip_network(signs):
    return nn.Sequential(
        nn.Conv3d(1, 16, (1, 5, 5), stride=(1, 2, 2), padding=(0, 2, 2)),
        nn.ReLU(),
        nn.Conv3d(16, 32, (3, 3, 3), stride=(1, 2, 2), padding=1),
        nn.ReLU(),
        nn.Conv3d(32, 48, (3, 3, 3), stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(48 * 4 * 3 * 3, signs),
    )


bucket = Bucket(args.bucket)
dataset = ClipsInBucket(bucket, fill(bucket, args.clips, args.signs))

# %% the training cell
accelerator = Accelerator(cpu=True)
loader = DataLoader(dataset, args.batch_size, shuffle=True, num_workers=1, persistent_workers=True, prefetch_factor=4)
net = clip_network(args.signs)
opt = torch.optim.AdamW(net.parameters(), lr=1e-3, fused=True)
net, opt, loader = accelerator.prepare(net, opt, loader)

for epoch in range(args.epochs):
    net.train()
    running = torch.zeros(())
    for frames, sign in loader:
        opt.zero_grad()
        loss = nn.functional.cross_entropy(net(frames), sign)
        accelerator.backward(loss)
        opt.step()
        running += loss.detach()
    accelerator.print(f"[{epoch}] loss {running.item() / len(loader):.3f}")
