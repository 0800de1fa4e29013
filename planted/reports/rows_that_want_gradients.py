# /// cell
# because = "The dataset's tensors have requires_grad=True, so that every row indexed by the DataLoader and the stacking of them become part of the graph: backward (twice, for the second derivatives) runs through hundreds of select nodes."
# thread = "https://discuss.pytorch.org/t/slow-backward-with-dataloader/200166"
# line = "self.t.requires_grad = True"
# callee = "autograd (SelectBackward/StackBackward) in loss.backward()"
# faster = 2.6
# ///
import torch
from torch.utils.data import DataLoader, Dataset

torch.manual_seed(0)


class Collocation(Dataset):
    def __init__(self, n):
        self.x, self.y, self.t = (torch.rand(n, 1) for _ in range(3))
        self.u = torch.sin(torch.pi * self.x) + torch.cos(torch.pi * self.y) + self.t
        self.x.requires_grad = True
        self.y.requires_grad = True
        self.t.requires_grad = True

    def __len__(self):
        return self.u.shape[0]

    def __getitem__(self, i):
        return self.x[i], self.y[i], self.t[i], self.u[i]


def d(out, inp):
    return torch.autograd.grad(out.sum(), inp, create_graph=True)[0]


net = torch.nn.Sequential(torch.nn.Linear(3, 50), torch.nn.Tanh(), torch.nn.Linear(50, 50), torch.nn.Tanh(), torch.nn.Linear(50, 1))
optimiser = torch.optim.Adam(net.parameters(), lr=1e-3)
points = Collocation(2000)
loader = DataLoader(points, batch_size=400, shuffle=True)
# %% the training cell
for epoch in range(30):
    for x, y, t, u in loader:
        optimiser.zero_grad()
        pred = net(torch.cat((x, y, t), dim=1))
        u_t, u_x, u_y = d(pred, t), d(pred, x), d(pred, y)
        u_xx, u_yy = d(u_x, x), d(u_y, y)
        loss = ((u_t - (u_xx + u_yy)) ** 2).mean() + ((pred - u) ** 2).mean()
        loss.backward()
        optimiser.step()
    if epoch % 10 == 0:
        print(epoch, loss.item())
