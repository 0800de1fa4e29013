# /// cell
# because = "The hidden state is carried from window to window without detach() and the graph is retained, so that each backward runs through all earlier windows."
# thread = "https://discuss.pytorch.org/t/training-gets-slow-down-by-each-batch-slowly/4460"
# line = "loss.backward(retain_graph=True)"
# callee = "autograd backward"
# ///
import torch
import torch.nn as nn

torch.manual_seed(0)
n_days, width = 128, 16
load = torch.sin(torch.arange(360 * n_days, dtype=torch.float32) / 5).view(360, n_days, 1) + 0.1 * torch.randn(360, n_days, 1)


class Forecaster(nn.Module):
    def __init__(self):
        super().__init__()
        self.gru = nn.GRU(1, 48, batch_first=True)
        self.out = nn.Linear(48, 1)

    def forward(self, x, h):
        y, h = self.gru(x, h)
        return self.out(y), h


model = Forecaster()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
# %% the training cell
for k in range(45):
    houses = load[8 * k:8 * k + 8]
    hidden = torch.zeros(1, 8, 48)
    optimizer.zero_grad()
    for start in range(0, n_days - width + 1, width):
        window = houses[:, start:start + width]
        pred, hidden = model(window[:, :-1], hidden)
        loss = nn.functional.mse_loss(pred, window[:, 1:])
        loss.backward(retain_graph=True)
    optimizer.step()
    if k % 9 == 0:
        print(k, loss.item())
