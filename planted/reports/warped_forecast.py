# /// cell
# cohort = "second"
# because = "The soft-DTW recursion is run for each pair of series of the batch by itself, cell by cell in Python; with a batch dimension in the recursion all pairs are done at once."
# thread = "https://github.com/Sleepwalking/pytorch-softdtw/issues/2"
# line = "losses = [self.alignment(p, t) for p, t in zip(prediction, target)]"
# callee = "SoftDTW.alignment"
# faster = 3.55
# ///
import torch
import torch.nn as nn

torch.manual_seed(0)


class SoftDTW(nn.Module):
    def __init__(self, gamma=0.1):
        super().__init__()
        self.gamma = gamma

    def alignment(self, p, t):
        cost = (p[:, None] - t[None, :]) ** 2
        n, m = cost.shape
        inf = cost.new_tensor(1e8)
        r = {(0, 0): cost.new_tensor(0.0)}
        for i in range(1, n + 1):
            r[i, 0] = inf
        for j in range(1, m + 1):
            r[0, j] = inf
        for i in range(1, n + 1):
            for j in range(1, m + 1):
                before = torch.stack([r[i - 1, j - 1], r[i - 1, j], r[i, j - 1]])
                r[i, j] = cost[i - 1, j - 1] - self.gamma * torch.logsumexp(-before / self.gamma, 0)
        return r[n, m]

    def forward(self, prediction, target):
        losses = [self.alignment(p, t) for p, t in zip(prediction, target)]
        return torch.stack(losses).mean()


class Seq2Seq(nn.Module):
    def __init__(self, horizon):
        super().__init__()
        self.encoder = nn.GRU(1, 64, batch_first=True)
        self.head = nn.Linear(64, horizon)

    def forward(self, x):
        out, _ = self.encoder(x.unsqueeze(-1))
        return self.head(out[:, -1])


time = torch.arange(4000) / 12
series = torch.sin(time) + 0.5 * torch.sin(time / 3.1) + 0.1 * torch.randn(4000)
model = Seq2Seq(8)
criterion = SoftDTW()
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
# %% the training cell
model.train()
for step in range(70):
    starts = torch.randint(3900, (6,))
    windows = torch.stack([series[s:s + 38] for s in starts])
    loss = criterion(model(windows[:, :30]), windows[:, 30:])
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    if step % 10 == 0:
        print(f"step {step}: {loss.item():.4f}")
print("last", loss.item())
