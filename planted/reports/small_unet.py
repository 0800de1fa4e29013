# /// cell
# because = "healthy"
# ///
import torch
import torch.nn as nn

torch.manual_seed(0)


def double(i, o):
    return nn.Sequential(nn.Conv2d(i, o, 3, padding=1), nn.ReLU(), nn.Conv2d(o, o, 3, padding=1), nn.ReLU())


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.d1, self.d2, self.d3 = double(1, 16), double(16, 32), double(32, 64)
        self.pool = nn.MaxPool2d(2)
        self.u2, self.u1 = nn.ConvTranspose2d(64, 32, 2, 2), nn.ConvTranspose2d(32, 16, 2, 2)
        self.c2, self.c1, self.out = double(64, 32), double(32, 16), nn.Conv2d(16, 1, 1)

    def forward(self, x):
        a = self.d1(x)
        b = self.d2(self.pool(a))
        c = self.u2(self.d3(self.pool(b)))
        d = self.u1(self.c2(torch.cat([b, c], 1)))
        return self.out(self.c1(torch.cat([a, d], 1)))


tiles = torch.randn(200, 1, 64, 64)
roads = (nn.functional.avg_pool2d(tiles, 9, 1, 4) > 0.05).float()
unet = UNet()
optimizer = torch.optim.Adam(unet.parameters(), lr=1e-3)
loss_fn = nn.BCEWithLogitsLoss()
# %% the training cell
total = 0.0
for step in range(50):
    idx = torch.randint(0, 200, (8,))
    loss = loss_fn(unet(tiles[idx]), roads[idx])
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
    total += loss.item()
print(total / 50)
