"""Three small networks with the operators of most trainings: convolutions, attention, plain products."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.gpu_first.stage import Stage


class Gpt(nn.Module):
    """Causal attention blocks over token embeddings."""

    def __init__(self, blocks: int, width: int, heads: int, vocabulary: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(_Block(width, heads) for _ in range(blocks))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        """Scores of the next token."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        scores: Tensor = self.head(x)
        return scores.flatten(0, 1)


class _Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self._heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(2, (self._heads, -1)).transpose(1, 2) for part in self.attend(self.norm_1(x)).chunk(3, dim=2)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.project(mixed)
        y: Tensor = x + self.mlp(self.norm_2(x))
        return y


Network = tuple[nn.Module, Tensor, Tensor]  # with inputs and targets


def cnn(stage: Stage) -> Network:
    """Convolutions with batch norm."""
    batch, side = stage.size(64, 2), stage.size(64, 8)
    layers: list[nn.Module] = []
    for channels_in, channels_out in ((8, 64), (64, 128), (128, 256)):
        layers += [nn.Conv2d(channels_in, channels_out, 3, padding=1), nn.BatchNorm2d(channels_out), nn.ReLU()]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 10)).to(stage.device)
    return model, torch.randn(batch, 8, side, side, device=stage.device), _classes(stage, batch, 10)


def mlp(stage: Stage) -> Network:
    """Linear layers."""
    width, batch = stage.size(2048, 32), stage.size(1024, 4)
    model = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Linear(width, 16))
    return model.to(stage.device), torch.randn(batch, width, device=stage.device), _classes(stage, batch, 16)


def gpt(stage: Stage) -> Network:
    """Two attention blocks."""
    return gpt_of(stage, blocks=2, batch=stage.size(8, 1), length=stage.size(1024, 16))


def gpt_of(stage: Stage, *, blocks: int, batch: int, length: int) -> Network:
    """Attention blocks with heads of 64."""
    width, vocabulary = stage.size(512, 32), stage.size(4096, 64)
    model = Gpt(blocks, width, max(1, width // 64), vocabulary).to(stage.device)
    tokens = torch.randint(0, vocabulary, (batch, length), device=stage.device)
    return model, tokens, _classes(stage, batch * length, vocabulary)


def _classes(stage: Stage, count: int, classes: int) -> Tensor:
    return torch.randint(0, classes, (count,), device=stage.device)


NETWORKS: dict[str, Callable[[Stage], Network]] = {"CNN": cnn, "GPT": gpt, "MLP": mlp}
