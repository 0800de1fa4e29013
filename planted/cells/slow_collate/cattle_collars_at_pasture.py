# /// cell
# causes = ["slow_collate"]
# because = "strength, pitch and roll are worked out in Python for each reading of each stretch, and padded as lists"
# batch = 20
# steps = 40
# warmup = 8
# cohort = "2026-11-22c"
#
# [[cure]]
# old = '''
#         rows, last = [], sample["seconds"][0]
#         for second, (x, y, z) in zip(sample["seconds"], sample["g"], strict=True):
#             strength = math.sqrt(x * x + y * y + z * z)
#             pitch = math.atan2(x, math.sqrt(y * y + z * z))
#             roll = math.atan2(y, z)
#             rows.append([x, y, z, strength - 1, pitch, roll, second - last])
#             last = second
#         masks.append([1.0] * len(rows) + [0.0] * (longest - len(rows)))
#         while len(rows) < longest:
#             rows.append([0.0] * 7)
#         xs.append(rows)
#     kinds = torch.tensor([sample["kind"] for sample in samples])
#     return torch.tensor(xs, dtype=torch.float32).transpose(1, 2), torch.tensor(masks), kinds
# '''
# new = '''
#         seconds, (x, y, z) = sample["seconds"], sample["g"].T
#         strength, pitch = np.sqrt(x * x + y * y + z * z), np.arctan2(x, np.hypot(y, z))
#         since = np.diff(seconds, prepend=seconds[0])
#         rows = np.zeros((7, longest), dtype=np.float32)
#         rows[:, : len(x)] = np.stack([x, y, z, strength - 1, pitch, np.arctan2(y, z), since])
#         masks.append(np.arange(longest) < len(x))
#         xs.append(rows)
#     kinds = torch.tensor([sample["kind"] for sample in samples])
#     return torch.from_numpy(np.stack(xs)), torch.from_numpy(np.stack(masks)).float(), kinds
# '''
# ///
"""What a cow does (grazes, walks, ruminates, lies) from the accelerometer in her collar; stretches of any length."""

import math

import numpy as np
import torch
from torch import nn

BEHAVIOURS = ("grazes", "walks", "ruminates", "lies")


def herd(stretches, seed):
    rng = np.random.default_rng(seed)
    for _ in range(stretches):
        kind = int(rng.integers(len(BEHAVIOURS)))
        seconds = np.cumsum(rng.exponential(0.1, rng.integers(150, 300)))
        sway = np.sin(seconds[:, None] * (0.7 + kind) + np.array([0, 1, 2])) * (0.1 + 0.2 * kind)
        yield {"seconds": seconds, "g": sway + rng.normal(0, 0.2, sway.shape) + [0, 0, 1], "kind": kind}


def make_batch(samples):
    longest = max(len(sample["seconds"]) for sample in samples)
    xs, masks = [], []
    for sample in samples:
        rows, last = [], sample["seconds"][0]
        for second, (x, y, z) in zip(sample["seconds"], sample["g"], strict=True):
            strength = math.sqrt(x * x + y * y + z * z)
            pitch = math.atan2(x, math.sqrt(y * y + z * z))
            roll = math.atan2(y, z)
            rows.append([x, y, z, strength - 1, pitch, roll, second - last])
            last = second
        masks.append([1.0] * len(rows) + [0.0] * (longest - len(rows)))
        while len(rows) < longest:
            rows.append([0.0] * 7)
        xs.append(rows)
    kinds = torch.tensor([sample["kind"] for sample in samples])
    return torch.tensor(xs, dtype=torch.float32).transpose(1, 2), torch.tensor(masks), kinds


def depthwise(n_in, n_out):
    return nn.Sequential(nn.Conv1d(n_in, n_out, 9, padding=4), nn.ReLU())


class Collar(nn.Module):
    def __init__(self, width=48):
        super().__init__()
        self.layers = nn.Sequential(depthwise(7, width), depthwise(width, width), depthwise(width, width))
        self.behaviour = nn.Linear(width, len(BEHAVIOURS))

    def forward(self, x, mask):
        seen = self.layers(x) * mask[:, None]
        return self.behaviour(seen.sum(-1) / mask.sum(-1, keepdim=True))


torch.manual_seed(77)
stretches = list(herd(800, 77))
collar = Collar()
adamw = torch.optim.AdamW(collar.parameters(), lr=2e-3, fused=True)

# %% the training cell
loader = torch.utils.data.DataLoader(stretches, batch_size=20, shuffle=True, collate_fn=make_batch)
epochs, done = 4, 0
while done < epochs:
    seen, loss_sum = 0, 0.0
    for x, mask, kinds in loader:
        loss = nn.functional.cross_entropy(collar(x, mask), kinds)
        adamw.zero_grad(set_to_none=True)
        loss.backward()
        adamw.step()
        loss_sum += loss.detach() * len(kinds)
        seen += len(kinds)
    done += 1
    print(f"{done}/{epochs}: {loss_sum / seen:.3f}")
