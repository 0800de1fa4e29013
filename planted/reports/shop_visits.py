# /// cell
# cohort = "fourth"
# because = "rows of the embedding tables that are no longer visited keep an Adam momentum that decays by 0.9 a step into denormal floats (after some 700 steps), and arithmetic on denormals is many times slower on the CPU, so optimizer.step() gets slower and slower; torch.set_flush_denormal(True) at the start"
# thread = "https://github.com/chelsea0x3b/dfdx/issues/59"
# line = "optimizer.step()"
# callee = "torch.optim.Adam.step"
# faster = 2.2
# ///
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(29)
rng = np.random.default_rng(29)

USERS, ITEMS, DIM, BATCH, STEPS = 30000, 5000, 16, 256, 3000

launch = rng.integers(0, USERS, 400 * BATCH)
regulars = rng.choice(USERS, 600, replace=False)
later = regulars[rng.integers(0, len(regulars), (STEPS - 400) * BATCH)]
user = np.concatenate([launch, later])
item = (rng.zipf(1.3, len(user)) * 7 + user) % ITEMS
taste_u = rng.standard_normal((USERS, 4))
taste_i = rng.standard_normal((ITEMS, 4))
score = (taste_u[user] * taste_i[item]).sum(1)
bought = (score + 0.3 * rng.standard_normal(len(user)) > 0).astype(np.float32)

user = torch.from_numpy(user)
item = torch.from_numpy(item)
bought = torch.from_numpy(bought)


class VisitModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.user = nn.Embedding(USERS, DIM)
        self.item = nn.Embedding(ITEMS, DIM)
        self.mlp = nn.Sequential(nn.Linear(2 * DIM, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, u, i):
        return self.mlp(torch.cat([self.user(u), self.item(i)], dim=1)).squeeze(1)


model = VisitModel()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

# %% the training cell
for step in range(STEPS):
    batch = slice(step * BATCH, (step + 1) * BATCH)
    optimizer.zero_grad()
    logit = model(user[batch], item[batch])
    loss = F.binary_cross_entropy_with_logits(logit, bought[batch])
    loss.backward()
    optimizer.step()
    if step % 500 == 0:
        print(f"step {step} loss {loss.item():.4f}")
