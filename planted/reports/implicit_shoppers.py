# /// cell
# cohort = "third"
# because = "Negatives are drawn one by one in Python, and each candidate is looked up in the user's plain list of purchases; draw the negatives of the whole batch at once and reject the bought ones with a boolean matrix."
# thread = "https://github.com/YuanchenBei/ColdRec/pull/9"
# line = "while negative in bought_by[user]:"
# callee = ""
# faster = 2.7
# ///
import random

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
random.seed(0)
rng = np.random.default_rng(0)
n_users, n_items = 3000, 5000
popularity = 1 / np.arange(1, n_items + 1) ** 0.7
popularity /= popularity.sum()
purchases = np.stack([rng.choice(n_items, 220, replace=False, p=popularity) for _ in range(n_users)])
bought_by = purchases.tolist()
pairs = torch.stack([torch.arange(n_users).repeat_interleave(220), torch.from_numpy(purchases).flatten()], 1)


class TwoTowers(nn.Module):
    def __init__(self, width=48):
        super().__init__()
        self.user = nn.Embedding(n_users, width)
        self.item = nn.Embedding(n_items, width)
        self.user_tower = nn.Sequential(nn.Linear(width, 64), nn.ReLU(), nn.Linear(64, 32))
        self.item_tower = nn.Sequential(nn.Linear(width, 64), nn.ReLU(), nn.Linear(64, 32))

    def forward(self, users, items):
        return (self.user_tower(self.user(users)).unsqueeze(1) * self.item_tower(self.item(items))).sum(-1)


def next_batch(size, n_negatives):
    batch = pairs[torch.randint(len(pairs), (size,))]
    negatives = []
    for user in batch[:, 0].tolist():
        drawn = []
        for _ in range(n_negatives):
            negative = random.randrange(n_items)
            while negative in bought_by[user]:
                negative = random.randrange(n_items)
            drawn.append(negative)
        negatives.append(drawn)
    return batch[:, 0], batch[:, 1], torch.tensor(negatives)


model = TwoTowers()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

# %% the training cell
for step in range(400):
    users, positives, negatives = next_batch(1024, 4)
    scores = model(users, torch.cat([positives[:, None], negatives], 1))
    loss = -F.logsigmoid(scores[:, :1] - scores[:, 1:]).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 50 == 0:
        print(step, "bpr", round(loss.item(), 4))
print("last", loss.item())
