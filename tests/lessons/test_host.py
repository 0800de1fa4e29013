"""Lesson 09: the network in both ways; its exercises are in answers/."""

from __future__ import annotations

import torch

from gpulab.lessons.host import ManyHeads


def test_stacked_heads_are_the_same_heads() -> None:
    torch.manual_seed(0)
    loop = ManyHeads(4, 8)
    stacked = ManyHeads(4, 8, stacked=True)
    stacked.load_state_dict(loop.state_dict())
    x = torch.randn(3, 4, 8)
    assert torch.allclose(loop(x), stacked(x), atol=1e-6)
