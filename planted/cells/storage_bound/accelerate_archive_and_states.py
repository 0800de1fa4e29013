# /// cell
# causes = ["storage_bound", "checkpoint_save"]
# because = "each of 16 look-ups waits 4 ms, and 9 MB of states are written every fourth step"
# also = ["data_starved"]
# framework = "accelerate"
# batch = 16
# steps = 32
# warmup = 16
# cohort = "2026-11-21c"
# looked_at = true
#
# [[cure]]
# old = "batch_size=16, shuffle=True)"
# new = "batch_size=16, shuffle=True, num_workers=6, persistent_workers=True)"
#
# [[second_cure]]
# old = "SAVE_STEPS = 4"
# new = "SAVE_STEPS = 4000"
# ///
"""A caption scorer over features kept in an archive that answers slowly; its whole state is kept every fourth step."""

import tempfile
import time

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, Dataset

torch.manual_seed(8)
SAVE_STEPS = 4
output_dir = tempfile.mkdtemp()


class Archive(Dataset):
    """Features of pictures and of their captions; a look-up waits for the archive's turn."""

    def __init__(self, n, wait=0.004):
        self.n, self.wait = n, wait
        self.pictures, self.captions = torch.randn(n, 256), torch.randn(n, 128)

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        time.sleep(self.wait)
        return self.pictures[i], self.captions[i]


class Match(nn.Module):
    def __init__(self, dim=512):
        super().__init__()
        self.picture = nn.Sequential(nn.Linear(256, dim), nn.ReLU(), nn.Linear(dim, dim))
        self.caption = nn.Sequential(nn.Linear(128, dim), nn.ReLU(), nn.Linear(dim, dim))
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, picture, caption):
        p, c = self.picture(picture), self.caption(caption)
        return self.scale.exp() * nn.functional.normalize(p, dim=-1) @ nn.functional.normalize(c, dim=-1).T


# %% the training cell
accelerator = Accelerator(cpu=True)
model = Match()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, total_iters=40)
loader = DataLoader(Archive(800), batch_size=16, shuffle=True)
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

global_step = 0
for epoch in range(4):
    for picture, caption in loader:
        with accelerator.accumulate(model):
            scores = model(picture, caption)
            loss = nn.functional.cross_entropy(scores, torch.arange(len(scores)))
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        global_step += 1
        if global_step % SAVE_STEPS == 0:
            accelerator.save_state(f"{output_dir}/last")
