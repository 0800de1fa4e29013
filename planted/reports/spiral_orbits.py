# /// cell
# cohort = "fourth"
# because = "the adaptive solver runs with its default tolerances rtol=1e-7, atol=1e-9, far below what float32 data and the loss need, so it takes many tiny steps (each 6 evaluations of the network, forward and backward); pass looser tolerances (rtol=1e-4, atol=1e-5) or a fixed-step method"
# thread = "https://github.com/rtqichen/torchdiffeq/issues/84"
# line = "pred = odeint(func, y0, t_win)"
# callee = "odeint"
# faster = 3.75
# ///
import torch
import torch.nn as nn

torch.manual_seed(5)

C = [0.0, 1 / 5, 3 / 10, 4 / 5, 8 / 9, 1.0, 1.0]
A = [
    [],
    [1 / 5],
    [3 / 40, 9 / 40],
    [44 / 45, -56 / 15, 32 / 9],
    [19372 / 6561, -25360 / 2187, 64448 / 6561, -212 / 729],
    [9017 / 3168, -355 / 33, 46732 / 5247, 49 / 176, -5103 / 18656],
    [35 / 384, 0.0, 500 / 1113, 125 / 192, -2187 / 6784, 11 / 84],
]
E = [71 / 57600, 0.0, -71 / 16695, 71 / 1920, -17253 / 339200, 22 / 525, -1 / 40]


def hermite(t, t0, t1, y0, y1, k0, k1):
    h = t1 - t0
    s = (t - t0) / h
    a = (1 + 2 * s) * (1 - s) ** 2
    b = s * (1 - s) ** 2
    c = s ** 2 * (3 - 2 * s)
    d = s ** 2 * (s - 1)
    return a * y0 + b * h * k0 + c * y1 + d * h * k1


def odeint(func, y, times, rtol=1e-7, atol=1e-9):
    t, k1, out = times[0], func(times[0], y), [y]
    with torch.no_grad():
        scale = atol + rtol * y.abs()
        d0 = (y / scale).pow(2).mean().sqrt().item()
        d1 = (k1 / scale).pow(2).mean().sqrt().item()
        h = 0.01 * d0 / max(d1, 1e-12)
    while len(out) < len(times):
        ks = [k1]
        for i in range(1, 7):
            yi = y + h * sum(a * k for a, k in zip(A[i], ks) if a)
            ks.append(func(t + C[i] * h, yi))
        with torch.no_grad():
            err = h * sum(e * k for e, k in zip(E, ks) if e)
            tol = atol + rtol * torch.maximum(y.abs(), yi.abs())
            ratio = max((err / tol).pow(2).mean().sqrt().item(), 1e-10)
        if ratio <= 1:
            while len(out) < len(times) and times[len(out)] <= t + h + 1e-9:
                out.append(hermite(times[len(out)], t, t + h, y, yi, ks[0], ks[6]))
            t, y, k1 = t + h, yi, ks[6]
        h = h * min(10.0, max(0.2, 0.9 * ratio ** -0.2))
    return torch.stack(out)


class TrueDynamics(nn.Module):
    def forward(self, t, y):
        return (y ** 3) @ torch.tensor([[-0.1, 2.0], [-2.0, -0.1]])


class ODEFunc(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 50), nn.Tanh(), nn.Linear(50, 2))
        for m in self.net:
            if isinstance(m, nn.Linear):
                nn.init.normal_(m.weight, std=0.1)
                nn.init.zeros_(m.bias)

    def forward(self, t, y):
        return self.net(y ** 3)


POINTS, WINDOW, BATCH = 125, 20, 32
t_all = [25.0 * i / (POINTS - 1) for i in range(POINTS)]
with torch.no_grad():
    orbit = odeint(TrueDynamics(), torch.tensor([[2.0, 0.0]]), t_all)[:, 0]
t_win = t_all[:WINDOW]


def get_batch():
    start = torch.randint(0, POINTS - WINDOW, (BATCH,))
    y0 = orbit[start]
    y = torch.stack([orbit[start + i] for i in range(WINDOW)])
    return y0, y


func = ODEFunc()
optimizer = torch.optim.RMSprop(func.parameters(), lr=1e-3)

# %% the training cell
for itr in range(180):
    y0, y = get_batch()
    optimizer.zero_grad()
    pred = odeint(func, y0, t_win)
    loss = (pred - y).abs().mean()
    loss.backward()
    optimizer.step()
    if itr % 30 == 0:
        print(f"iter {itr} loss {loss.item():.4f}")
