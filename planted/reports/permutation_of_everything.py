# /// cell
# because = "To draw 512 transitions, a permutation of all 1.5 million is generated and sliced at each update; drawing 512 random integers is enough."
# thread = "https://github.com/DeepX-inc/machina/issues/179"
# line = "idx = torch.randperm(n_transitions)[:512]"
# callee = "torch.randperm"
# faster = 10.03
# ///
import torch
import torch.nn as nn

torch.manual_seed(0)
n_transitions = 1_500_000
obs = torch.randn(n_transitions, 6)
act = torch.randn(n_transitions, 2)
ret = obs[:, 0] * act[:, 0] + obs[:, 1] + 0.1 * torch.randn(n_transitions)
value = nn.Sequential(nn.Linear(8, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 1))
optim_v = torch.optim.Adam(value.parameters(), lr=3e-4)
# %% the training cell
for it in range(150):
    idx = torch.randperm(n_transitions)[:512]
    pred = value(torch.cat([obs[idx], act[idx]], dim=1)).squeeze(1)
    v_loss = 0.5 * (pred - ret[idx]).pow(2).mean()
    optim_v.zero_grad()
    v_loss.backward()
    optim_v.step()
    if it % 30 == 0:
        print(it, v_loss.item())
