"""Memory in JupyterLab as its user meets it: a cell dies, a click makes it fit; re-runs that leak are told by name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from playwright.sync_api import expect

from tests.browser.conftest import OpenNotebook

pytestmark = pytest.mark.browser

MINUTES = 120_000  # ms: each click runs the cell a dozen times
SETUP = """
import ctypes, resource
ctypes.CDLL(None).mallopt(-3, 65536)  # freed tensors go back at once, as on a GPU
import torch
torch.set_num_threads(1)
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
%load_ext gpulab

class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))

data = TensorDataset(torch.randn(120_000, 64), torch.randint(0, 10, (120_000,)))
"""
WARM = """%%gpuprofile --steps 6 --no-live
batch_size = 64
model = nn.Sequential(*[Block(64) for _ in range(8)], nn.Linear(64, 10))
optimizer = torch.optim.Adam(model.parameters())
for x, y in DataLoader(data, batch_size=batch_size):
    loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
LIMIT = """
used = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmSize")) * 1024
resource.setrlimit(resource.RLIMIT_AS, (used + 300 * 2**20, resource.RLIM_INFINITY))
"""
DEAD = WARM.replace("batch_size = 64", "batch_size = 24_000")
LEAK = """%%gpuprofile --steps 6 --no-live --no-trace
model = nn.Sequential(*[Block(64) for _ in range(2)], nn.Linear(64, 10))
optimizer = torch.optim.Adam(model.parameters())
for x, y in DataLoader(data, batch_size=256):
    loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
KEEP = """%%gpuprofile --no-live --no-trace
for x, y in DataLoader(data, batch_size=5000):
    loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
validation.append(model(data.tensors[0][:2000]).mean())
"""


@pytest.mark.slow("the cell runs about thirty times: fit, proof, price")
def test_a_dead_cell_is_explained_and_made_to_fit(open_notebook: OpenNotebook, shots: Path) -> None:
    notebook = open_notebook([SETUP, WARM, LIMIT, DEAD, "%gpulab memory"])
    for index in range(3):
        notebook.run_cell(index)
    notebook.start_cell(3)
    output = notebook.output(3)
    expect(output).to_contain_text("Out of memory in", timeout=MINUTES)
    expect(output).to_contain_text("Who held the memory")
    expect(output).to_contain_text("DefaultCPUAllocator")  # the user's own exception
    notebook.wait_finished(3)
    notebook.screenshot(shots / "memory-post-mortem.png", output)
    output.get_by_role("button", name="Find the batch_size that fits").click()
    expect(output).to_contain_text(re.compile(r"batch_size=[\d,]+ fits: peak"), timeout=MINUTES)
    notebook.screenshot(shots / "memory-fit.png", output)
    expect(output.get_by_role("button", name="accumulate")).to_be_visible()  # the buttons are renewed after the result
    output.get_by_role("button", name="Try checkpointing=on").click()
    expect(output).to_contain_text("checkpointing=on with batch_size=24,000 fits", timeout=MINUTES)
    expect(output).to_contain_text("Same")
    notebook.screenshot(shots / "memory-proof.png", output)
    notebook.run_cell(4)
    expect(notebook.output(4)).to_contain_text("to free it")
    notebook.screenshot(shots / "memory-owners.png", notebook.output(4))


@pytest.mark.slow("a cell runs four times")
def test_reruns_that_leak_are_told_by_name_and_freed(open_notebook: OpenNotebook, shots: Path) -> None:
    first = LEAK.replace("%%gpuprofile --steps 6 --no-live --no-trace\n", "validation = []\n")
    notebook = open_notebook([SETUP, first, KEEP, "%gpulab memory", "%gpulab memory --free validation"])
    for index in (0, 1, 2, 2):
        notebook.run_cell(index)
        expect(notebook.output(2)).not_to_contain_text("Each run of this cell")
    notebook.run_cell(2)
    expect(notebook.output(2)).to_contain_text("Each run of this cell keeps")
    expect(notebook.output(2)).to_contain_text("validation")
    notebook.screenshot(shots / "memory-leak.png", notebook.output(2))
    notebook.run_cell(3)
    expect(notebook.output(3)).to_contain_text("del validation")
    notebook.screenshot(shots / "memory-owners-leak.png", notebook.output(3))
    notebook.run_cell(4)
    expect(notebook.output(4)).to_contain_text("came back")
    notebook.screenshot(shots / "memory-freed.png", notebook.output(4))
