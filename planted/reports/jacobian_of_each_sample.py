# /// cell
# because = "The Jacobian is computed sample by sample with torch.autograd.functional.jacobian in a Python loop; one gradient per output dimension for the whole batch gives the same."
# thread = "https://github.com/anucvml/ddn/issues/6"
# line = "J = torch.stack([jacobian(decoder, zi, create_graph=True) for zi in z])"
# callee = "torch.autograd.functional.jacobian"
# faster = 19.07
# ///
import torch
import torch.nn as nn
from torch.autograd.functional import jacobian

torch.manual_seed(0)
data = torch.randn(4000, 3) @ torch.randn(3, 8)
data = torch.tanh(data) + 0.05 * torch.randn_like(data)
encoder = nn.Sequential(nn.Linear(8, 64), nn.SiLU(), nn.Linear(64, 3))
decoder = nn.Sequential(nn.Linear(3, 64), nn.SiLU(), nn.Linear(64, 8))
optimizer = torch.optim.Adam([*encoder.parameters(), *decoder.parameters()], lr=1e-3)
# %% the training cell
for step in range(60):
    x = data[torch.randint(4000, (24,))]
    z = encoder(x)
    recon = (decoder(z) - x).pow(2).mean()
    J = torch.stack([jacobian(decoder, zi, create_graph=True) for zi in z])
    metric = J.transpose(1, 2) @ J
    isometry = (metric - torch.eye(3)).pow(2).mean()
    loss = recon + 0.1 * isometry
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 10 == 0:
        print(step, recon.item(), isometry.item())
