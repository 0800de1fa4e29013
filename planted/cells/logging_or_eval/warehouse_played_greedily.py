# /// cell
# causes = ["logging_or_eval"]
# because = "90 days are played, one after the other, after every second update"
# batch = 256
# steps = 40
# warmup = 6
# profiled = 100
# cohort = "2026-11-21d"
# looked_at = true
#
# [[cure]]
# old = "if update % 2 == 0:"
# new = "if update % 2000 == 1999:"
# ///
"""Deep Q-learning of when to reorder stock; how good the policy is gets measured on whole seasons, again and again."""

import torch
from torch import nn

torch.manual_seed(21)
PRODUCTS, ORDERS, HORIZON, DISCOUNT = 16, 5, 90, 0.97


class Warehouse:
    """Many warehouses side by side: stock and forecasts of all products; an order arrives the day after."""

    def __init__(self, count, seed):
        self.g = torch.Generator().manual_seed(seed)
        self.count = count
        self.reset()

    def reset(self):
        self.stock = torch.full((self.count, PRODUCTS), 5.0)
        self.trend = torch.rand(self.count, PRODUCTS, generator=self.g) * 3
        return self.observed()

    def observed(self):
        return torch.cat([self.stock / 10, self.trend], -1)

    def step(self, order):
        amount = 2.0 * order.unsqueeze(1)
        demand = torch.poisson(self.trend, generator=self.g)
        sold = torch.minimum(self.stock, demand)
        self.stock = (self.stock - sold + amount).clamp(max=30)
        reward = (sold - 0.1 * self.stock - 0.3 * (demand - sold)).mean(-1)
        return self.observed(), reward


class ReplayBuffer:
    def __init__(self, size=8192):
        self.size, self.at, self.full = size, 0, False
        self.before = torch.zeros(size, 2 * PRODUCTS)
        self.after = torch.zeros(size, 2 * PRODUCTS)
        self.order = torch.zeros(size, dtype=torch.long)
        self.reward = torch.zeros(size)

    def add(self, before, order, reward, after):
        where = (self.at + torch.arange(len(order))) % self.size
        self.before[where], self.order[where], self.reward[where], self.after[where] = before, order, reward, after
        self.at = (self.at + len(order)) % self.size

    def sample(self, count):
        i = torch.randint(self.size, (count,))
        return self.before[i], self.order[i], self.reward[i], self.after[i]


def q_network(width=320):
    return nn.Sequential(
        nn.Linear(2 * PRODUCTS, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, ORDERS)
    )


def season(policy, warehouse):
    """What the greedy policy earns in a season."""
    with torch.no_grad():
        state, earned = warehouse.reset(), 0.0
        for _ in range(HORIZON):
            state, reward = warehouse.step(policy(state).argmax(-1))
            earned = earned + reward
    return earned.mean().item()


world, proving_ground = Warehouse(32, seed=0), Warehouse(64, seed=1)

# %% the training cell
q, q_slow = q_network(), q_network()
q_slow.load_state_dict(q.state_dict())
optimizer = torch.optim.RMSprop(q.parameters(), lr=5e-4)
buffer, returns = ReplayBuffer(), []
state = world.reset()
for update in range(240):
    with torch.no_grad():
        order = q(state).argmax(-1)
    explore = torch.rand(len(order)) < max(0.05, 1 - update / 150)
    order = torch.where(explore, torch.randint(ORDERS, order.shape), order)
    after, reward = world.step(order)
    buffer.add(state, order, reward, after)
    state = after

    s, a, r, s2 = buffer.sample(256)
    with torch.no_grad():
        target = r + DISCOUNT * q_slow(s2).amax(-1)
    loss = nn.functional.huber_loss(q(s).gather(1, a[:, None])[:, 0], target)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(q.parameters(), 5.0)
    optimizer.step()
    with torch.no_grad():
        for slow, fast in zip(q_slow.parameters(), q.parameters(), strict=True):
            slow.lerp_(fast, 0.01)
    if update % 2 == 0:
        returns.append(season(q, proving_ground))
