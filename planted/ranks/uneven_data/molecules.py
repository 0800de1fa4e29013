# /// cell
# cause = "uneven_data"
# because = "12 molecules in each step of both ranks, but of 380 atoms in rank 1 and of 40 in rank 0"
# cohort = "2026-11-25b"
# written_ms = 88.3
# without_ms = 46.2
# clock = "processor"
#
# [[without]]
# old = 'ATOMS = {"small.sdf": 40, "proteins.pdb": 380}'
# new = 'ATOMS = {"small.sdf": 210, "proteins.pdb": 210}'
# ///
"""Energies of molecules, by messages between neighbouring atoms; each process reads one of the files."""

import torch
import torch.distributed as dist
from torch import Tensor, nn

ATOMS = {"small.sdf": 40, "proteins.pdb": 380}
NEIGHBOURS = 8
WIDTH = 96


def molecule(atoms: int, generator: torch.Generator) -> tuple[Tensor, Tensor, float]:
    """Elements, pairs of neighbours, energy."""
    atoms = int(atoms * (0.9 + 0.2 * torch.rand((), generator=generator).item()))
    elements = torch.randint(0, 12, (atoms,), generator=generator)
    pairs = torch.randint(0, atoms, (2, atoms * NEIGHBOURS), generator=generator)
    return elements, pairs, elements.float().mean().item()


def joined(molecules: list) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Several molecules as one graph of separate parts."""
    counts = [len(elements) for elements, _, _ in molecules]
    begins = [sum(counts[:i]) for i in range(len(counts))]
    elements = torch.cat([m[0] for m in molecules])
    pairs = torch.cat([m[1] + begin for m, begin in zip(molecules, begins, strict=True)], dim=1)
    owner = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    return elements, pairs, owner, torch.tensor([m[2] for m in molecules])


class Messages(nn.Module):
    """Three rounds of messages, then the mean over the atoms."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = nn.Embedding(12, WIDTH)
        self.send = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.update = nn.ModuleList(nn.Linear(2 * WIDTH, WIDTH) for _ in range(3))
        self.energy = nn.Linear(WIDTH, 1)

    def forward(self, elements, pairs, owner, molecules: int):
        atoms = self.elements(elements)
        for send, update in zip(self.send, self.update, strict=True):
            messages = torch.relu(send(atoms))[pairs[0]]
            heard = torch.zeros_like(atoms).index_add(0, pairs[1], messages) / NEIGHBOURS
            atoms = atoms + torch.relu(update(torch.cat([atoms, heard], dim=1)))
        energy = self.energy(atoms).squeeze(1)
        total = energy.new_zeros(molecules).index_add(0, owner, energy)
        return total / torch.bincount(owner, minlength=molecules)


if __name__ == "__main__":
    dist.init_process_group(backend="gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(21)
    net = Messages()
    optimizer = torch.optim.Adam(net.parameters(), lr=5e-4)
    generator = torch.Generator().manual_seed(rank)
    atoms = list(ATOMS.values())[rank]
    library = [molecule(atoms, generator) for _ in range(120)]
    for epoch in range(8):
        order = torch.randperm(len(library), generator=generator).tolist()
        for begin in range(0, len(order), 12):
            *graph, energies = joined([library[i] for i in order[begin : begin + 12]])
            loss = (net(*graph, len(energies)) - energies).square().mean()
            optimizer.zero_grad()
            loss.backward()
            flat = nn.utils.parameters_to_vector(p.grad for p in net.parameters())
            dist.all_reduce(flat)
            nn.utils.vector_to_parameters(flat / world, [p.grad for p in net.parameters()])
            optimizer.step()
        print(f"{rank}: epoch {epoch}, {loss.item():.4f}")
    dist.destroy_process_group()
