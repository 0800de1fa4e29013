# /// cell
# cause = "uneven_data"
# because = "both ranks take 24 tracks a step, without DDP, but ferries have 40 positions and trawlers 240"
# cohort = "2026-11-27"
# written_ms = 99.3
# without_ms = 47.9
#
# [[without]]
# old = "POSITIONS = [40, 240]"
# new = "POSITIONS = [140, 140]"
# ///
"""Where will a ship be in an hour? One process learns from ferries, one from trawlers; gradients are averaged."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils.rnn import pad_sequence

POSITIONS = [40, 240]  # ferries, trawlers
FEATURES = 5


def tracks(length: int, seed: int) -> list[torch.Tensor]:
    """Walks of about that length."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(int(0.9 * length), int(1.1 * length), (480,), generator=generator)
    return [torch.randn(n, FEATURES, generator=generator).cumsum(0) / n**0.5 for n in lengths.tolist()]


class Ship(nn.Module):
    """A recurrent network over the positions."""

    def __init__(self) -> None:
        super().__init__()
        self.past = nn.LSTM(FEATURES, 112, batch_first=True)
        self.future = nn.Linear(112, 2)

    def forward(self, batch):
        return self.future(self.past(batch)[0][:, -1])


def averaged(net: nn.Module) -> None:
    gradients = [parameter.grad for parameter in net.parameters()]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    for gradient, mean in zip(gradients, flat.split([g.numel() for g in gradients])):
        gradient.copy_(mean.view_as(gradient))


dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(77)
net = Ship()
optimizer = torch.optim.RMSprop(net.parameters(), lr=1e-3)
mine = tracks(POSITIONS[rank], rank)
for epoch in range(4):
    for begin in range(0, len(mine), 24):
        batch = pad_sequence(mine[begin : begin + 24], batch_first=True)
        loss = nn.functional.smooth_l1_loss(net(batch[:, :-1]), batch[:, -1, :2])
        optimizer.zero_grad()
        loss.backward()
        averaged(net)
        optimizer.step()
    print(f"rank {rank}, epoch {epoch}: {loss.item():.4f}")
dist.destroy_process_group()
