# /// cell
# cohort = "fourth"
# because = "ReplayBuffer.sample copies every stored episode of every array before it picks 256 transitions, so each update pays for the whole buffer and the more so the more it holds; take views (drop .copy()) and copy only the picked transitions"
# thread = "https://github.com/TianhongDai/hindsight-experience-replay/issues/1"
# line = "temp_buffers[key] = self.buffers[key][:self.current_size].copy()"
# callee = "numpy.ndarray.copy"
# faster = 3.2
# ///
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(3)
rng = np.random.default_rng(3)

HORIZON, OBS, GOAL, ACT = 50, 10, 3, 4
GAMMA, POLYAK, BATCH = 0.98, 0.95, 256


def compute_reward(achieved, goal):
    return -(np.linalg.norm(achieved - goal, axis=-1) > 0.05).astype(np.float32)


def observe(pos, vel):
    speed = np.linalg.norm(vel, axis=-1, keepdims=True)
    return np.concatenate([pos, vel, pos - vel, speed], axis=-1)


class ReachEnv:
    def __init__(self, n=1):
        self.n = n

    def reset(self):
        self.pos = rng.uniform(-0.1, 0.1, (self.n, 3))
        self.vel = np.zeros((self.n, 3))
        self.goal = rng.uniform(-0.5, 0.5, (self.n, 3))
        return observe(self.pos, self.vel), self.pos.copy(), self.goal.copy()

    def step(self, action):
        self.vel = 0.7 * self.vel + 0.03 * action[:, :3]
        self.pos = np.clip(self.pos + self.vel, -1, 1)
        return observe(self.pos, self.vel), self.pos.copy()


class ReplayBuffer:
    def __init__(self, size):
        self.size = size
        self.current_size = 0
        self.buffers = {
            "obs": np.empty([size, HORIZON + 1, OBS]),
            "ag": np.empty([size, HORIZON + 1, GOAL]),
            "g": np.empty([size, HORIZON, GOAL]),
            "actions": np.empty([size, HORIZON, ACT]),
        }

    def store(self, episodes):
        n = len(episodes["actions"])
        end = min(self.current_size + n, self.size)
        for key in self.buffers:
            self.buffers[key][end - n:end] = episodes[key]
        self.current_size = end

    def sample(self, batch_size):
        temp_buffers = {}
        for key in self.buffers.keys():
            temp_buffers[key] = self.buffers[key][:self.current_size].copy()
        temp_buffers["obs_next"] = temp_buffers["obs"][:, 1:, :]
        temp_buffers["ag_next"] = temp_buffers["ag"][:, 1:, :]
        return her_transitions(temp_buffers, batch_size)


def her_transitions(buffers, batch_size):
    n = buffers["actions"].shape[0]
    ep = rng.integers(0, n, batch_size)
    t = rng.integers(0, HORIZON, batch_size)
    out = {key: buffers[key][ep, t].copy() for key in buffers}
    her = np.where(rng.uniform(size=batch_size) < 0.8)[0]
    offset = (rng.uniform(size=batch_size) * (HORIZON - t)).astype(int)
    future = t + 1 + offset
    out["g"][her] = buffers["ag"][ep[her], future[her]]
    out["r"] = compute_reward(out["ag_next"], out["g"])
    return out


class Actor(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(OBS + GOAL, 128), nn.ReLU(),
                                 nn.Linear(128, 128), nn.ReLU(),
                                 nn.Linear(128, ACT), nn.Tanh())

    def forward(self, obs, goal):
        return self.net(torch.cat([obs, goal], dim=1))


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(OBS + GOAL + ACT, 128), nn.ReLU(),
                                 nn.Linear(128, 128), nn.ReLU(),
                                 nn.Linear(128, 1))

    def forward(self, obs, goal, action):
        return self.net(torch.cat([obs, goal, action], dim=1))


def run_episodes(env, policy):
    obs, ag, goal = env.reset()
    eps = {"obs": [obs], "ag": [ag], "g": [], "actions": []}
    for _ in range(HORIZON):
        action = policy(obs, goal)
        obs, ag = env.step(action)
        eps["obs"].append(obs)
        eps["ag"].append(ag)
        eps["g"].append(goal)
        eps["actions"].append(action)
    return {key: np.stack(value, axis=1) for key, value in eps.items()}


def random_policy(obs, goal):
    return rng.uniform(-1, 1, (len(obs), ACT))


actor, critic = Actor(), Critic()
actor_target, critic_target = Actor(), Critic()
actor_target.load_state_dict(actor.state_dict())
critic_target.load_state_dict(critic.state_dict())
actor_opt = torch.optim.Adam(actor.parameters(), lr=1e-3)
critic_opt = torch.optim.Adam(critic.parameters(), lr=1e-3)

buffer = ReplayBuffer(8000)
buffer.store(run_episodes(ReachEnv(3000), random_policy))
env = ReachEnv(2)


def noisy_policy(obs, goal):
    with torch.no_grad():
        action = actor(torch.as_tensor(obs, dtype=torch.float32),
                       torch.as_tensor(goal, dtype=torch.float32)).numpy()
    return np.clip(action + 0.2 * rng.standard_normal(action.shape), -1, 1)


# %% the training cell
for epoch in range(10):
    for cycle in range(5):
        buffer.store(run_episodes(env, noisy_policy))
        for update in range(20):
            batch = {k: torch.as_tensor(v, dtype=torch.float32)
                     for k, v in buffer.sample(BATCH).items()}
            with torch.no_grad():
                next_action = actor_target(batch["obs_next"], batch["g"])
                next_q = critic_target(batch["obs_next"], batch["g"], next_action)
                target = batch["r"].unsqueeze(1) + GAMMA * next_q
                target = target.clamp(-1 / (1 - GAMMA), 0)
            critic_loss = F.mse_loss(critic(batch["obs"], batch["g"], batch["actions"]), target)
            critic_opt.zero_grad()
            critic_loss.backward()
            critic_opt.step()

            action = actor(batch["obs"], batch["g"])
            actor_loss = -critic(batch["obs"], batch["g"], action).mean() + (action ** 2).mean()
            actor_opt.zero_grad()
            actor_loss.backward()
            actor_opt.step()

        with torch.no_grad():
            for net, tgt in ((actor, actor_target), (critic, critic_target)):
                for p, q in zip(net.parameters(), tgt.parameters()):
                    q.mul_(POLYAK).add_(p, alpha=1 - POLYAK)
    print(f"epoch {epoch} critic {critic_loss.item():.4f} actor {actor_loss.item():.4f}")
