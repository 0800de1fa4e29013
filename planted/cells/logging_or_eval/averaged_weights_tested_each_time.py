# /// cell
# causes = ["logging_or_eval"]
# because = "after every second update the averaged weights are put in and tested on 2000 spectra"
# batch = 50
# steps = 30
# warmup = 4
# cohort = "2026-11-23"
#
# [[cure]]
# old = "eval_every=2"
# new = "eval_every=400"
# ///
# NIR wine spectra -> alcohol, sugar, acidity. EMA of the weights (decay .98) since the lr is large.
import contextlib

import numpy as np
import torch


class EMA:
    def __init__(self, model, decay):
        self.model, self.decay = model, decay
        self.shadow = {k: v.detach().clone() for k, v in model.state_dict().items()}

    @torch.no_grad()
    def update(self):
        for k, v in self.model.state_dict().items():
            self.shadow[k].lerp_(v, 1 - self.decay)

    @contextlib.contextmanager
    def applied(self):
        backup = {k: v.clone() for k, v in self.model.state_dict().items()}
        self.model.load_state_dict(self.shadow)
        yield self.model
        self.model.load_state_dict(backup)


def spectra(n, seed):
    r = np.random.default_rng(seed)
    conc = r.uniform(0, 1, (n, 3))
    nm = np.linspace(1100, 2500, 350)
    peaks = np.stack([np.exp(-(((nm - c) / w) ** 2)) for c, w in ((1695, 40), (2080, 60), (1940, 90))])
    x = conc @ peaks + 0.02 * r.standard_normal((n, 350)) + 0.1 * r.standard_normal((n, 1))
    return torch.from_numpy(x).float(), torch.from_numpy(conc).float()


def train(model, opt, x, y, xt, yt, *, epochs, bs=50, eval_every=2):
    ema = EMA(model, 0.98)
    trace, k = [], 0
    for _ in range(epochs):
        perm = torch.randperm(len(x))
        for j in range(0, len(x), bs):
            b = perm[j : j + bs]
            loss = torch.nn.functional.mse_loss(model(x[b]), y[b])
            opt.zero_grad()
            loss.backward()
            opt.step()
            ema.update()
            k += 1
            if k % eval_every == 0:
                with ema.applied() as m, torch.no_grad():
                    rmsep = ((m(xt) - yt) ** 2).mean(0).sqrt()
                trace.append(rmsep)
    return trace


torch.manual_seed(3)
x, y = spectra(3000, 1)
xt, yt = spectra(2000, 2)

# %% the training cell
model = torch.nn.Sequential(
    torch.nn.Linear(350, 400), torch.nn.ELU(), torch.nn.Linear(400, 400), torch.nn.ELU(), torch.nn.Linear(400, 3)
)
opt = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9, fused=True)
trace = train(model, opt, x, y, xt, yt, epochs=4)
print("RMSEP alcohol/sugar/acid:", trace[-1].tolist() if trace else "not yet")
