# /// cell
# cohort = "fourth"
# because = "the recurrent weight is an orthogonal parametrization, so every access self.rec(h) in the time loop computes the matrix exponential anew (and its backward); wrap the forward in torch.nn.utils.parametrize.cached() so that it is computed once a step"
# thread = "https://github.com/lezcano/geotorch/issues/34"
# line = "h = torch.tanh(self.inp(x[:, t]) + self.rec(h))"
# callee = "torch.matrix_exp"
# faster = 9.3
# ///
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import orthogonal

torch.manual_seed(11)

HIDDEN, LENGTH, BATCH = 80, 50, 64


def make_pulses(n):
    values = torch.rand(n, LENGTH)
    marks = torch.zeros(n, LENGTH)
    first = torch.randint(0, LENGTH // 2, (n,))
    second = torch.randint(LENGTH // 2, LENGTH, (n,))
    rows = torch.arange(n)
    marks[rows, first] = 1
    marks[rows, second] = 1
    return torch.stack([values, marks], dim=2), (values * marks).sum(1)


class MemoryRNN(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.hidden = hidden
        self.inp = nn.Linear(2, hidden)
        self.rec = orthogonal(nn.Linear(hidden, hidden, bias=False))
        self.out = nn.Linear(hidden, 1)

    def forward(self, x):
        h = x.new_zeros(x.size(0), self.hidden)
        for t in range(x.size(1)):
            h = torch.tanh(self.inp(x[:, t]) + self.rec(h))
        return self.out(h).squeeze(1)


inputs, targets = make_pulses(4096)
model = MemoryRNN(HIDDEN)
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

# %% the training cell
for step in range(150):
    pick = torch.randint(0, len(inputs), (BATCH,))
    x, y = inputs[pick], targets[pick]
    optimizer.zero_grad()
    pred = model(x)
    loss = F.mse_loss(pred, y)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    if step % 25 == 0:
        print(f"step {step} mse {loss.item():.4f}")
