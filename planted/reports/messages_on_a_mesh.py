# /// cell
# because = "healthy"
# ///
import torch
import torch.nn as nn

torch.manual_seed(0)
N, E, D = 2000, 8_000, 96
src, dst = torch.randint(0, N, (E,)), torch.randint(0, N, (E,))
state, change = torch.randn(N, 16), torch.randn(N, 3)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.message = nn.Sequential(nn.Linear(2 * D, D), nn.ReLU(), nn.Linear(D, D))
        self.update = nn.Sequential(nn.Linear(2 * D, D), nn.ReLU(), nn.Linear(D, D))

    def forward(self, h):
        m = self.message(torch.cat([h.index_select(0, src), h.index_select(0, dst)], 1))
        return h + self.update(torch.cat([h, torch.zeros_like(h).index_add(0, dst, m)], 1))


model = nn.Sequential(nn.Linear(16, D), nn.ReLU(), Layer(), Layer(), nn.Linear(D, 3))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
# %% the training cell
for step in range(40):
    noisy = state + 0.01 * torch.randn_like(state)
    loss = (model(noisy) - change).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 10 == 0:
        print("step", step, "loss", loss.item())
