# /// cell
# causes = ["unfused_optimizer"]
# because = "AdaGrad written out by hand goes seven times through four million numbers"
# also = ["memory_bound_ops"]
# batch = 512
# steps = 20
# warmup = 4
# by_hand = true
# cohort = "2026-11-23"
#
# [[cure]]
# old = '''
# G = {k: np.full(p.shape, 0.1, np.float32) for k, p in params.items()}
# G = {k: torch.from_numpy(g) for k, g in G.items()}
# '''
# new = '''
# adagrad = torch.optim.Adagrad(params.values(), lr=eta, initial_accumulator_value=0.1, eps=1e-8, fused=True)
# '''
#
# [[cure]]
# old = '''
#     with torch.no_grad():
#         for k, p in params.items():
#             G[k] = G[k] + p.grad**2
#             p.data = p.data - eta * p.grad / (torch.sqrt(G[k]) + 1e-8)
#             p.grad = None
# '''
# new = '''
#     adagrad.step()
#     adagrad.zero_grad()
# '''
# ///
# GloVe for ingredients. My numpy version from 2017, autograd now does the gradients.
import numpy as np
import torch

np.random.seed(2014)
torch.manual_seed(2014)

V = 20_000  # ingredients incl. misspellings
D = 100
x_max, alpha, eta = 100.0, 0.75, 0.05

# co-occurrences: (i, j, count), zipf-ish
nnz = 200_000
i = (np.random.pareto(1.1, nnz) * 20).astype(np.int64) % V
j = (np.random.pareto(1.1, nnz) * 20).astype(np.int64) % V
count = 1 + np.random.pareto(1.0, nnz)
i, j = torch.from_numpy(i), torch.from_numpy(j)
log_count = torch.from_numpy(np.log(count).astype(np.float32))
weight = torch.from_numpy(np.minimum(1, (count / x_max) ** alpha).astype(np.float32))


def init(*shape):
    return torch.tensor((np.random.rand(*shape) - 0.5) / D, dtype=torch.float32, requires_grad=True)


params = {"W": init(V, D), "C": init(V, D), "bw": init(V), "bc": init(V)}

# %% the training cell
G = {k: np.full(p.shape, 0.1, np.float32) for k, p in params.items()}
G = {k: torch.from_numpy(g) for k, g in G.items()}
costs = []
for t in range(180):
    b = torch.randint(0, nnz, (512,))
    dot = (params["W"][i[b]] * params["C"][j[b]]).sum(1)
    diff = dot + params["bw"][i[b]] + params["bc"][j[b]] - log_count[b]
    J = (weight[b] * diff**2).mean()
    J.backward()
    with torch.no_grad():
        for k, p in params.items():
            G[k] = G[k] + p.grad**2
            p.data = p.data - eta * p.grad / (torch.sqrt(G[k]) + 1e-8)
            p.grad = None
    costs.append(J.item())
    if t % 60 == 59:
        print(t + 1, np.mean(costs[-60:]))
