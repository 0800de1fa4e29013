# /// cell
# because = "The attention logits are computed from an N x N x 2F tensor of all concatenated pairs; splitting the vector a in two and adding by broadcast gives the same from N x N."
# thread = "https://github.com/diegoantognini/pyGAT/pull/63"
# line = "pairs = torch.cat([Wh.repeat_interleave(n, 0), Wh.repeat(n, 1)], dim=1)"
# callee = "torch.cat / repeat_interleave"
# faster = 13.01
# ///
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
N, F_IN, F_HID = 420, 100, 24
x = torch.randn(N, F_IN)
adj = (torch.rand(N, N) < 0.02) | torch.eye(N, dtype=torch.bool)
y = x[:, :5].argmax(1)


class GAT(nn.Module):
    def __init__(self, f_in, f_out):
        super().__init__()
        self.W = nn.Parameter(torch.randn(f_in, f_out) / f_in ** 0.5)
        self.a = nn.Parameter(torch.randn(2 * f_out, 1) / f_out ** 0.5)

    def logits(self, Wh):
        n = Wh.shape[0]
        pairs = torch.cat([Wh.repeat_interleave(n, 0), Wh.repeat(n, 1)], dim=1)
        return (pairs @ self.a).view(n, n)

    def forward(self, h):
        Wh = h @ self.W
        e = F.leaky_relu(self.logits(Wh), 0.2).masked_fill(~adj, -9e15)
        return e.softmax(1) @ Wh


layer1, layer2 = GAT(F_IN, F_HID), GAT(F_HID, 5)
optimizer = torch.optim.Adam([*layer1.parameters(), *layer2.parameters()], lr=5e-3)
# %% the training cell
for epoch in range(45):
    out = layer2(F.elu(layer1(x)))
    loss = F.cross_entropy(out, y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if epoch % 10 == 0:
        print(epoch, loss.item(), (out.argmax(1) == y).float().mean().item())
