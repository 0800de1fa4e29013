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


class LeNetLike(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 3, padding=1)
        self.conv2 = nn.Conv2d(8, 16, 3, padding=1)
        self.conv3 = nn.Conv2d(16, 16, 3, padding=1)
        self.bn1 = nn.GroupNorm(2, 8)
        self.bn2 = nn.GroupNorm(2, 16)
        self.bn3 = nn.GroupNorm(2, 16)
        self.fc1 = nn.Linear(16 * 4 * 4, 64)
        self.fc2 = nn.Linear(64, 32)
        self.fc3 = nn.Linear(32, 10)

    def forward(self, x):
        x = F.relu(self.bn1(self.conv1(x)))
        x = F.max_pool2d(F.relu(self.bn2(self.conv2(x))), 2)
        x = F.relu(self.bn3(self.conv3(x)))
        x = x.view(x.size(0), -1)
        x = F.relu(self.fc1(x))
        x = F.relu(self.fc2(x))
        return self.fc3(x)


net = LeNetLike()
eta = 0.005
sgd = torch.optim.SGD(net.parameters(), lr=eta)

# %% the training cell
for epoch in range(5):
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
