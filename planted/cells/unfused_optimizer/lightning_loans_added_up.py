# /// cell
# causes = ["unfused_optimizer"]
# because = "an AdamW written out by hand goes a score of times through 1.5 million weights and their averages"
# framework = "lightning"
# batch = 32
# cohort = "2026-11-22c"
# looked_at = true
#
# [[cure]]
# old = "HouseAdamW(self.parameters(), lr=self.hparams.lr, weight_decay=self.hparams.weight_decay)"
# new = '''
# torch.optim.AdamW(
#             self.parameters(), lr=self.hparams.lr, weight_decay=self.hparams.weight_decay, fused=True
#         )'''
# ///
"""The risk of a loan as a sum of curves, one small net for each of its features, with an optimizer of the house."""

import lightning as L
import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, TensorDataset

L.seed_everything(733, verbose=False)
FEATURES, HIDDEN = 160, 96


class HouseAdamW(Optimizer):
    """Adam with decoupled decay, line by line as in the model documentation that the auditors have."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["step"], state["m"], state["v"] = 0, torch.zeros_like(p), torch.zeros_like(p)
                state["step"] += 1
                state["m"] = beta1 * state["m"] + (1 - beta1) * p.grad
                state["v"] = beta2 * state["v"] + (1 - beta2) * p.grad**2
                m_hat = state["m"] / (1 - beta1 ** state["step"])
                v_hat = state["v"] / (1 - beta2 ** state["step"])
                p.sub_(group["lr"] * group["weight_decay"] * p)
                p.sub_(group["lr"] * m_hat / (v_hat.sqrt() + group["eps"]))
        return loss


def per_feature(*shape, scale):
    return nn.Parameter(torch.randn(FEATURES, *shape) * scale)


class Curves(nn.Module):
    """For each feature a net of its own, side by side in one product."""

    def __init__(self):
        super().__init__()
        self.w1, self.b1 = per_feature(1, HIDDEN, scale=1.0), per_feature(1, HIDDEN, scale=0.5)
        self.w2, self.b2 = per_feature(HIDDEN, HIDDEN, scale=HIDDEN**-0.5), per_feature(1, HIDDEN, scale=0.0)
        self.w3 = per_feature(HIDDEN, 1, scale=HIDDEN**-0.5)

    def forward(self, x):
        h = torch.relu(x.T.unsqueeze(-1) * self.w1 + self.b1)
        h = torch.relu(torch.baddbmm(self.b2, h, self.w2))
        return torch.bmm(h, self.w3).squeeze(-1).T


class LoanRisk(L.LightningModule):
    def __init__(self, lr=2e-3, weight_decay=1e-2):
        super().__init__()
        self.save_hyperparameters()
        self.curves = Curves()
        self.base = nn.Parameter(torch.zeros(()))

    def training_step(self, batch, _):
        features, defaulted = batch
        loss = nn.functional.binary_cross_entropy_with_logits(self.base + self.curves(features).mean(1), defaulted)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return HouseAdamW(self.parameters(), lr=self.hparams.lr, weight_decay=self.hparams.weight_decay)


features = torch.randn(6400, FEATURES)
defaulted = (torch.sin(2 * features[:, :40]).sum(1) + features[:, 40:80].abs().sum(1) > 33).float()

# %% the training cell
risk = LoanRisk()
loans = DataLoader(TensorDataset(features, defaulted), batch_size=32, shuffle=True, drop_last=True)
trainer = L.Trainer(
    max_epochs=1,
    accelerator="cpu",
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(risk, loans)
