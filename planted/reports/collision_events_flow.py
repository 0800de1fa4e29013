# /// cell
# cohort = "third"
# because = "healthy"
# ///
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
DIM = 32
mixing = torch.randn(DIM, DIM) / DIM ** 0.5
events = torch.sinh(0.6 * torch.randn(40000, DIM)) @ mixing
events = (events - events.mean(0)) / events.std(0)


class Coupling(nn.Module):
    def __init__(self, flip, width=384):
        super().__init__()
        self.flip = flip
        self.net = nn.Sequential(nn.Linear(DIM // 2, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU(),
                                 nn.Linear(width, DIM))
        nn.init.zeros_(self.net[-1].weight)
        nn.init.zeros_(self.net[-1].bias)

    def forward(self, x):
        a, b = x.chunk(2, 1)
        if self.flip:
            a, b = b, a
        shift, log_scale = self.net(a).chunk(2, 1)
        log_scale = 2 * torch.tanh(log_scale / 2)
        b = b * log_scale.exp() + shift
        return torch.cat([b, a] if self.flip else [a, b], 1), log_scale.sum(1)


class Flow(nn.Module):
    def __init__(self, depth=8):
        super().__init__()
        self.layers = nn.ModuleList(Coupling(i % 2 == 1) for i in range(depth))

    def forward(self, x):
        total = 0.0
        for layer in self.layers:
            x, log_det = layer(x)
            total = total + log_det
        return 0.5 * x.square().sum(1) - total


flow = Flow()
optimizer = torch.optim.Adam(flow.parameters(), lr=5e-4)
running = torch.zeros(())

# %% the training cell
for step in range(100):
    batch = events[torch.randint(len(events), (1024,))]
    loss = flow(batch).mean()
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
    running += loss.detach()
    if step % 25 == 24:
        print(f"step {step} negative log likelihood {running.item() / 25:.3f}")
        running.zero_()
print("last", loss.item())
