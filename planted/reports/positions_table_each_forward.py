# /// cell
# because = "The sinusoidal position table is made anew in numpy, element by element in Python, at each forward."
# thread = "https://github.com/liruiw/HPT/pull/14"
# line = "return [position / np.power(10000, 2 * (j // 2) / d_hid) for j in range(d_hid)]"
# callee = "sinusoid_table"
# faster = 1.48
# ///
import numpy as np
import torch
import torch.nn as nn

torch.manual_seed(0)


def sinusoid_table(n_position, d_hid):
    def angles(position):
        return [position / np.power(10000, 2 * (j // 2) / d_hid) for j in range(d_hid)]

    table = np.array([angles(p) for p in range(n_position)])
    table[:, 0::2] = np.sin(table[:, 0::2])
    table[:, 1::2] = np.cos(table[:, 1::2])
    return torch.FloatTensor(table).unsqueeze(0)


class Policy(nn.Module):
    def __init__(self, d=96):
        super().__init__()
        self.token = nn.Linear(32, d)
        self.trunk = nn.TransformerEncoder(nn.TransformerEncoderLayer(d, 4, 192, batch_first=True, dropout=0.0), 2)
        self.head = nn.Linear(d, 7)

    def forward(self, x):
        h = self.token(x)
        h = h + sinusoid_table(h.shape[1], h.shape[2])
        return self.head(self.trunk(h).mean(1))


policy = Policy()
optimizer = torch.optim.AdamW(policy.parameters(), lr=3e-4)
episodes, expert = torch.randn(400, 128, 32), torch.randn(400, 7)
# %% the training cell
policy.train()
for it in range(80):
    idx = torch.randint(400, (8,))
    loss = nn.functional.huber_loss(policy(episodes[idx]), expert[idx])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if it % 20 == 0:
        print(it, loss.item())
