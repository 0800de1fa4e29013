# /// cell
# cohort = "second"
# because = "The DataLoader's two worker processes are forked and torn down in every epoch although an epoch has only a few batches; persistent_workers=True keeps them."
# thread = "https://github.com/open-mmlab/mmpretrain/issues/196"
# line = "for x, y in train_loader:"
# callee = "DataLoader.__iter__"
# faster = 2.4
# ///
import numpy as np
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, Dataset

torch.manual_seed(11)


class Structures(Dataset):
    def __init__(self, n, seed):
        rng = np.random.default_rng(seed)
        self.positions = rng.uniform(0, 6, (n, 20, 3))
        self.charges = rng.integers(1, 5, (n, 20))

    def __len__(self):
        return len(self.positions)

    def __getitem__(self, i):
        p, q = self.positions[i], self.charges[i]
        d = np.linalg.norm(p[:, None] - p[None], axis=-1) + np.eye(len(p))
        m = q[:, None] * q[None] / d
        centres = np.linspace(0.5, 8, 32)
        rdf = np.exp(-4 * (d[..., None] - centres) ** 2).sum((0, 1))
        x = np.concatenate([np.linalg.eigvalsh(m), rdf / 20])
        return torch.from_numpy(x).float(), torch.tensor(m.sum() / 400, dtype=torch.float32)


train_loader = DataLoader(Structures(96, 0), batch_size=32, shuffle=True, num_workers=2)
model = nn.Sequential(nn.Linear(52, 512), nn.SiLU(), nn.Linear(512, 512), nn.SiLU(), nn.Linear(512, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)


def train_epoch():
    losses = []
    for x, y in train_loader:
        loss = nn.functional.huber_loss(model(x).squeeze(-1), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return sum(losses) / len(losses)


# %% the training cell
for epoch in range(40):
    mean = train_epoch()
    scheduler.step()
    if epoch % 10 == 9:
        print(f"epoch {epoch + 1} loss {mean:.4f}")
