# /// cell
# because = "The HDF5 file is written in gzip chunks of 1000 rows, but read one row at a time in shuffled order: each read inflates a whole chunk of several MB."
# thread = "https://github.com/AshleyLab/OpenMHC/issues/16"
# line = "x = torch.from_numpy(self.file[\"X\"][i])"
# callee = "h5py Dataset.__getitem__"
# faster = 4.15
# ///
import os, tempfile
import h5py
import numpy as np
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, Dataset

torch.manual_seed(0)
rng = np.random.default_rng(0)
h5_path = os.path.join(tempfile.mkdtemp(), "wearables.h5")
n_days, n_steps, n_sensors = 6000, 96, 19
with h5py.File(h5_path, "w") as f:
    base = np.round(np.cumsum(rng.standard_normal((1000, n_steps, n_sensors)), axis=1), 1).astype(np.float32)
    d = f.create_dataset("X", (n_days, n_steps, n_sensors), "f4", chunks=(1000, n_steps, n_sensors), compression="gzip", compression_opts=4)
    for k in range(0, n_days, 1000):
        d[k:k + 1000] = base + k / 1000
    f["y"] = rng.integers(0, 3, n_days)


class Days(Dataset):
    def __init__(self, path):
        self.file = h5py.File(path, "r")
        self.y = self.file["y"][:]

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        x = torch.from_numpy(self.file["X"][i])
        return x, int(self.y[i])


class DayNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.GRU(n_sensors, 64, batch_first=True)
        self.out = nn.Linear(64, 3)

    def forward(self, x):
        return self.out(self.rnn(x)[0][:, -1])


model = DayNet()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
days = Days(h5_path)
loader = DataLoader(days, batch_size=4, shuffle=True)
# %% the training cell
model.train()
for step, (x, y) in enumerate(loader):
    if step == 50:
        break
    logits = model(x)
    loss = nn.functional.cross_entropy(logits, y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 10 == 0:
        print(step, loss.item())
