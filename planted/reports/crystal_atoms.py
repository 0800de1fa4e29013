# /// cell
# cohort = "fourth"
# because = "the atom features are picked per neighbour pair with index notation x[src]; its backward is a slow accumulating index_put, while index_select (or gather) computes the same with a fast backward"
# thread = "https://github.com/pytorch/pytorch/issues/15245"
# line = "pair = x[src] * weight"
# callee = "torch.Tensor.__getitem__"
# faster = 1.75
# ///
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(37)

ATOMS, NEIGHBOURS, DIM, CRYSTALS, PACKS = 4000, 14, 64, 100, 6


def make_pack():
    kind = torch.randint(0, 9, (ATOMS,))
    crystal = torch.arange(ATOMS) * CRYSTALS // ATOMS
    dst = torch.arange(ATOMS).repeat_interleave(NEIGHBOURS)
    src = (dst + torch.randint(-20, 21, dst.shape)).clamp(0, ATOMS - 1)
    dist = 1 + 4 * torch.rand(len(dst))
    radial = torch.exp(-(dist[:, None] - torch.linspace(1, 5, 16)) ** 2 / 0.2)
    energy = torch.zeros(ATOMS).index_add_(0, dst, (kind[src] - 4) * torch.exp(-dist))
    energy = torch.zeros(CRYSTALS).index_add_(0, crystal, energy) / 5
    return kind, crystal, src, dst, radial, energy


class FilterConv(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(DIM, DIM, bias=False)
        self.filter = nn.Linear(16, DIM)
        self.outer = nn.Sequential(nn.Linear(DIM, DIM), nn.SiLU(), nn.Linear(DIM, DIM))

    def forward(self, h, src, dst, radial):
        x = self.inner(h)
        weight = self.filter(radial)
        pair = x[src] * weight
        total = torch.zeros_like(x).index_add_(0, dst, pair)
        return h + self.outer(total)


class EnergyNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(9, DIM)
        self.convs = nn.ModuleList(FilterConv() for _ in range(3))
        self.head = nn.Sequential(nn.Linear(DIM, 32), nn.SiLU(), nn.Linear(32, 1))

    def forward(self, kind, crystal, src, dst, radial):
        h = self.embed(kind)
        for conv in self.convs:
            h = conv(h, src, dst, radial)
        atom = self.head(h).squeeze(1)
        return torch.zeros(CRYSTALS).index_add_(0, crystal, atom)


packs = [make_pack() for _ in range(PACKS)]
model = EnergyNet()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

# %% the training cell
for epoch in range(18):
    for kind, crystal, src, dst, radial, energy in packs:
        optimizer.zero_grad()
        loss = F.mse_loss(model(kind, crystal, src, dst, radial), energy)
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch} loss {loss.item():.4f}")
