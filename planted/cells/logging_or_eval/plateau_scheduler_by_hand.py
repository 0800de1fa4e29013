# /// cell
# causes = ["logging_or_eval"]
# because = "a learning rate schedule written by hand asks for the loss of the whole validation set after each step"
# batch = 64
# cohort = "2026-11-23"
#
# [[cure]]
# old = '''
#         self.calls += 1
# '''
# new = '''
#         self.calls += 1
#         if self.calls % 250:
#             return
# '''
# ///
import itertools
from collections.abc import Callable

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from sklearn.preprocessing import StandardScaler
from torch import nn

# Reproducing the "reduce on plateau" ablation, table 4. Digits instead of MNIST so that it runs on the laptop.


class ReduceWhenStuck:
    """lr /= 2 once the validation loss has not improved for `patience` calls."""

    def __init__(self, optimizer: torch.optim.Optimizer, validate: Callable[[], float], patience: int = 60) -> None:
        self.optimizer = optimizer
        self.validate = validate
        self.patience = patience
        self.best = float("inf")
        self.bad = 0
        self.calls = 0

    def step(self) -> None:
        self.calls += 1
        value = self.validate()
        if value < self.best - 1e-4:
            self.best, self.bad = value, 0
            return
        self.bad += 1
        if self.bad > self.patience:
            for group in self.optimizer.param_groups:
                group["lr"] *= 0.5
            self.bad = 0


digits = load_digits()
features = StandardScaler().fit_transform(digits.data)
Xtr, Xva, ytr, yva = train_test_split(features, digits.target, test_size=0.4, random_state=0, stratify=digits.target)
Xtr, Xva = (torch.tensor(a, dtype=torch.float32) for a in (Xtr, Xva))
ytr, yva = (torch.tensor(a) for a in (ytr, yva))


def mlp(*sizes: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise(sizes[:-1]):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(sizes[-2], sizes[-1]))


torch.manual_seed(4)
net = mlp(64, 512, 512, 512, 10)
criterion = nn.CrossEntropyLoss()


@torch.no_grad()
def validation_loss() -> float:
    net.eval()
    value = criterion(net(Xva), yva).item()
    net.train()
    return value


# %% the training cell
optimizer = torch.optim.SGD(net.parameters(), lr=0.1, fused=True)
schedule = ReduceWhenStuck(optimizer, validation_loss)
for epoch in range(12):
    for rows in torch.randperm(len(Xtr)).split(64):
        optimizer.zero_grad()
        criterion(net(Xtr[rows]), ytr[rows]).backward()
        optimizer.step()
        schedule.step()
    print(f"epoch {epoch:2d}  lr {optimizer.param_groups[0]['lr']:.4f}  best val {schedule.best:.4f}")
