# /// cell
# causes = ["small_batch"]
# because = "one digit goes through the network per step"
# batch = 1
# cured_batch = 32
# steps = 40
# profiled = 100
# cohort = "2026-11-23"
#
# [[cure]]
# old = "X_train.split(1), y_train.split(1)"
# new = "X_train.split(32), y_train.split(32)"
# ///
# Exercise sheet 5, "Stochastic gradient descent"
# 5.1 Implement the update rule from the lecture:  theta <- theta - eta * grad L(x_i, y_i)   for i = 1..n

import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

torch.manual_seed(5)

X, y = load_digits(return_X_y=True)
X = torch.tensor(X / 16, dtype=torch.float32).reshape(-1, 1, 8, 8)
y = torch.tensor(y)
X_train, X_test, y_train, y_test = train_test_split(X, y, test_size=0.25, random_state=5)


class Block(nn.Module):
    """5.2 b) residual block"""

    def __init__(self, c):
        super().__init__()
        self.conv1 = nn.Conv2d(c, c, 3, padding=1)
        self.norm1 = nn.GroupNorm(2, c)
        self.conv2 = nn.Conv2d(c, c, 3, padding=1)
        self.norm2 = nn.GroupNorm(2, c)

    def forward(self, x):
        h = F.relu(self.norm1(self.conv1(x)))
        h = self.norm2(self.conv2(h))
        return F.relu(x + h)


class MyResNet(nn.Module):
    def __init__(self, c=8, n_blocks=9):
        super().__init__()
        self.first = nn.Conv2d(1, c, 3, padding=1)
        self.blocks = nn.Sequential(*[Block(c) for i in range(n_blocks)])
        self.fc1 = nn.Linear(c * 4 * 4, 64)
        self.fc2 = nn.Linear(64, 10)

    def forward(self, x):
        x = F.relu(self.first(x))
        x = self.blocks(x)
        x = F.max_pool2d(x, 2)
        x = x.view(x.size(0), -1)
        x = F.relu(self.fc1(x))
        return self.fc2(x)


net = MyResNet()
eta = 0.005
sgd = torch.optim.SGD(net.parameters(), lr=eta)

# %% the training cell
for epoch in range(2):
    net.train()
    for x_i, y_i in zip(X_train.split(1), y_train.split(1), strict=True):
        sgd.zero_grad()
        L = F.cross_entropy(net(x_i), y_i)
        L.backward()
        sgd.step()
    net.eval()
    with torch.no_grad():
        acc = (net(X_test).argmax(1) == y_test).float().mean()
    print(f"epoch {epoch + 1}: test accuracy {acc:.3f}")
