# /// cell
# cause = "exposed_communication"
# because = "34 MB of gradients go in one all-reduce after the backward pass, and nothing runs beside it"
# cohort = "2026-11-25a"
# written_ms = 202.9
# without_ms = 148.1
# clock = "exchange alone"
#
# [[without]]
# old = "    dist.all_reduce(flat)\n"
# new = ""
# ///
"""An autoencoder of profiles; the gradients are averaged by hand, in one piece."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import parameters_to_vector


def average_gradients(module: nn.Module) -> None:
    """The mean over the ranks."""
    flat = parameters_to_vector([p.grad for p in module.parameters()])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    begin = 0
    for parameter in module.parameters():
        count = parameter.numel()
        parameter.grad.copy_(flat[begin : begin + count].view_as(parameter))
        begin += count


if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    encoder = nn.Sequential(nn.Linear(4096, 1024), nn.Tanh(), nn.Linear(1024, 64))
    decoder = nn.Sequential(nn.Linear(64, 1024), nn.Tanh(), nn.Linear(1024, 4096))
    model = nn.Sequential(encoder, decoder)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    torch.manual_seed(100 + dist.get_rank())
    profiles = torch.randn(2048, 4096)
    for epoch in range(2):
        for batch in profiles.split(24):
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(batch), batch)
            loss.backward()
            average_gradients(model)
            optimizer.step()
        print(f"rank {dist.get_rank()}, epoch {epoch}: {loss.item():.4f}")
    dist.destroy_process_group()
