# /// cell
# because = "healthy"
# ///
import torch
import torch.nn as nn

torch.manual_seed(0)


class Residual(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.a, self.b = nn.Conv2d(c, c, 3, padding=1, bias=False), nn.Conv2d(c, c, 3, padding=1, bias=False)
        self.na, self.nb = nn.BatchNorm2d(c), nn.BatchNorm2d(c)

    def forward(self, x):
        h = torch.relu(self.na(self.a(x)))
        return torch.relu(x + self.nb(self.b(h)))


net = nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), Residual(32), nn.MaxPool2d(2), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(),
                    Residual(64), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))
images, labels = torch.randn(2048, 3, 24, 24), torch.randint(0, 10, (2048,))
optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=50)
# %% the training cell
net.train()
for step in range(50):
    idx = torch.randint(0, 2048, (24,))
    loss = nn.functional.cross_entropy(net(images[idx]), labels[idx])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    scheduler.step()
    if step % 10 == 0:
        print(f"{step:4d} {loss.item():.4f}")
