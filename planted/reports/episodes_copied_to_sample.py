# /// cell
# because = "sample() copies the whole filled part of every buffer before it picks 256 transitions from it; the copying is not needed."
# thread = "https://github.com/TianhongDai/hindsight-experience-replay/issues/1"
# line = "stored = {key: self.buffers[key][:self.size].copy() for key in self.buffers}"
# callee = "ndarray.copy"
# faster = 1.65
# ///
import numpy as np
import torch
import torch.nn as nn

np.random.seed(0); torch.manual_seed(0)
T, OBS, GOAL, ACT = 50, 25, 3, 4


class Buffer:
    def __init__(self, capacity):
        self.capacity, self.size = capacity, 0
        self.buffers = {"obs": np.empty((capacity, T + 1, OBS)), "ag": np.empty((capacity, T + 1, GOAL)),
                        "g": np.empty((capacity, T, GOAL)), "actions": np.empty((capacity, T, ACT))}

    def store(self, obs, ag, g, actions):
        n = len(obs)
        for key, value in zip(("obs", "ag", "g", "actions"), (obs, ag, g, actions)):
            self.buffers[key][self.size:self.size + n] = value
        self.size += n

    def sample(self, batch_size):
        stored = {key: self.buffers[key][:self.size].copy() for key in self.buffers}
        stored["obs_next"] = stored["obs"][:, 1:, :]
        stored["ag_next"] = stored["ag"][:, 1:, :]
        return relabel(stored, batch_size)


def relabel(episodes, batch_size, future_p=0.8):
    n = episodes["actions"].shape[0]
    who, when = np.random.randint(0, n, batch_size), np.random.randint(T, size=batch_size)
    out = {key: episodes[key][who, when] for key in episodes}
    her = np.where(np.random.uniform(size=batch_size) < future_p)[0]
    offset = (np.random.uniform(size=batch_size) * (T - when)).astype(int)
    out["g"][her] = episodes["ag"][who[her], (when + 1 + offset)[her]]
    out["r"] = -(np.linalg.norm(out["ag_next"] - out["g"], axis=1, keepdims=True) > 0.05).astype(np.float32)
    return {key: torch.as_tensor(value, dtype=torch.float32) for key, value in out.items()}


memory = Buffer(3000)
for _ in range(10):
    memory.store(np.random.randn(180, T + 1, OBS), np.random.randn(180, T + 1, GOAL), np.random.randn(180, T, GOAL), np.random.randn(180, T, ACT))
actor = nn.Sequential(nn.Linear(OBS + GOAL, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, ACT), nn.Tanh())
critic = nn.Sequential(nn.Linear(OBS + GOAL + ACT, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 1))
actor_opt, critic_opt = torch.optim.Adam(actor.parameters(), lr=1e-3), torch.optim.Adam(critic.parameters(), lr=1e-3)
# %% the training cell
for update in range(250):
    b = memory.sample(256)
    state, nxt = torch.cat([b["obs"], b["g"]], 1), torch.cat([b["obs_next"], b["g"]], 1)
    with torch.no_grad():
        target = (b["r"] + 0.98 * critic(torch.cat([nxt, actor(nxt)], 1))).clamp(-50, 0)
    critic_loss = (critic(torch.cat([state, b["actions"]], 1)) - target).pow(2).mean()
    critic_opt.zero_grad(); critic_loss.backward(); critic_opt.step()
    actor_loss = -critic(torch.cat([state, actor(state)], 1)).mean()
    actor_opt.zero_grad(); actor_loss.backward(); actor_opt.step()
    if update % 50 == 0:
        print(update, critic_loss.item(), actor_loss.item())
