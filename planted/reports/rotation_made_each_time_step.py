# /// cell
# because = "The orthogonal recurrent weight is a parametrization, computed anew at each access, i.e. at each of the time steps; parametrize.cached() computes it once per forward."
# thread = "https://github.com/lezcano/geotorch/issues/34"
# line = "h = torch.tanh(self.inp(x[:, t]) + self.rec(h))"
# callee = "torch.nn.utils.parametrizations._Orthogonal.forward (matrix_exp)"
# faster = 5.72
# ///
import torch
import torch.nn as nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import orthogonal

torch.manual_seed(0)


class OrthogonalRNN(nn.Module):
    def __init__(self, n_in=4, n_hidden=64, n_out=8):
        super().__init__()
        self.inp = nn.Linear(n_in, n_hidden)
        self.rec = orthogonal(nn.Linear(n_hidden, n_hidden, bias=False), orthogonal_map="matrix_exp")
        self.out = nn.Linear(n_hidden, n_out)

    def forward(self, x):
        h = x.new_zeros(len(x), 64)
        for t in range(x.shape[1]):
            h = torch.tanh(self.inp(x[:, t]) + self.rec(h))
        return self.out(h)


sequences = torch.randn(1000, 30, 4)
answers = (sequences[:, 0] > 0).long() @ torch.tensor([1, 2, 4, 0])
rnn = OrthogonalRNN()
optimizer = torch.optim.Adam(rnn.parameters(), lr=1e-3)
# %% the training cell
for step in range(70):
    idx = torch.randint(1000, (32,))
    loss = nn.functional.cross_entropy(rnn(sequences[idx]), answers[idx])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 10 == 0:
        print(step, loss.item())
