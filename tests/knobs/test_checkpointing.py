"""Activation checkpointing of models that know nothing of it: the same training to the bit, with fewer bytes kept."""

from __future__ import annotations

import copy
import gc
import pickle
import random
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from msgspec.structs import replace
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gpulab.knobs.accumulation import ACCUMULATE
from gpulab.knobs.checkpointing import CHECKPOINTING
from gpulab.knobs.compile import COMPILE
from gpulab.knobs.knob import KnobEffects, Value
from gpulab.knobs.mixed_precision import AMP
from gpulab.knobs.observation import ObservedBlocks
from gpulab.knobs.repeated_blocks import IN_USE, NO_BLOCKS, observed_blocks, sites
from tests.knobs.scenes import NOTHING, SCENE, calling
from tests.support.knob_cells import Cell, observation_of, traced
from tests.support.leftovers import leftovers

WIDTH = 16


class Block(nn.Module):
    """A residual block with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.wide = nn.Linear(WIDTH, 4 * WIDTH)
        self.dropout = nn.Dropout(0.2)
        self.narrow = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.narrow(self.dropout(F.gelu(self.wide(self.norm(x)))))
        return y


class Stack(nn.Module):
    """Four blocks between two layers."""

    def __init__(self, block: Callable[[], nn.Module] = Block) -> None:
        super().__init__()
        self.first = nn.Linear(108, WIDTH)
        self.blocks = nn.ModuleList([block() for _ in range(4)])
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x.flatten(1))
        for block in self.blocks:
            x = self.through(block, x)
        logits: Tensor = self.head(x)
        return logits

    def through(self, block: nn.Module, x: Tensor) -> Tensor:
        y: Tensor = block(x)
        return y


class Encoder(nn.Module):
    """torch's own transformer, whose layers are called with masks by name."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(6, WIDTH)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, 2, 32, batch_first=True), 3)
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.encoder(self.embed(x.flatten(1, 2)), mask=nn.Transformer.generate_square_subsequent_mask(18))
        logits: Tensor = self.head(h.mean(1))
        return logits


class Hugging(nn.Module):
    """A small model of Hugging Face's, from a configuration, with dropout."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        transformers = pytest.importorskip("transformers")
        if kind == "gpt2":  # makes a cache of keys and values in each call
            config = transformers.GPT2Config(
                n_layer=3, n_embd=WIDTH, n_head=2, vocab_size=32, n_positions=128, bos_token_id=0, eos_token_id=0
            )
            self.model = transformers.GPT2LMHeadModel(config)
        else:
            config = transformers.BertConfig(
                num_hidden_layers=3, hidden_size=WIDTH, num_attention_heads=2, intermediate_size=32, vocab_size=32
            )
            self.model = transformers.BertForMaskedLM(config)

    def forward(self, x: Tensor) -> Tensor:
        tokens = (x.flatten(1) * 100).long().remainder(32)
        logits: Tensor = self.model(input_ids=tokens).logits.mean(1)[:, :4]
        return logits


def layers() -> nn.Module:
    parts = [part for _ in range(6) for part in (nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.1))]
    return nn.Sequential(nn.Flatten(), nn.Linear(108, WIDTH), *parts, nn.Linear(WIDTH, 4))


MODELS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "stack": (Stack, 4),
    "sequential": (layers, 4),
    "encoder": (Encoder, 3),
    "gpt2": (lambda: Hugging("gpt2"), 3),
    "bert": (lambda: Hugging("bert"), 3),
}


def cell_of(make: Callable[[], nn.Module]) -> Cell:
    """The same each time."""
    torch.manual_seed(0)
    random.seed(0)
    model = make()
    return Cell(model, torch.optim.AdamW(model.parameters(), lr=1e-2))


def outcome(cell: Cell) -> tuple[Any, ...]:
    """All that a training leaves: losses, weights, buffers, gradients, the next random numbers, attributes."""
    tensors = [*cell.model.parameters(), *cell.model.buffers(), *(p.grad for p in cell.model.parameters())]
    values = [None if t is None else t.detach().tolist() for t in tensors]
    attributes = [[*vars(m)] for m in cell.model.modules()]
    return cell.losses, values, torch.get_rng_state().tolist(), random.random(), attributes


def trained(make: Callable[[], nn.Module], *, on: bool, others: list[Any] | None = None) -> tuple[Any, KnobEffects]:
    effects = KnobEffects()
    cell = cell_of(make)
    try:
        with ExitStack() as undo:
            for knob, value in others or []:
                undo.enter_context(knob.applied(value))
            if on:
                effects = undo.enter_context(CHECKPOINTING.applied(True))
            cell.run(steps=4)
    finally:
        AMP.forget()
        CHECKPOINTING.forget()
    assert not leftovers(sweep=False)
    return outcome(cell), effects


# -- the same training -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_the_training_is_the_same_to_the_bit(name: str) -> None:
    make, blocks = MODELS[name]
    plain, _ = trained(make, on=False)
    checkpointed, effects = trained(make, on=True)
    assert plain == checkpointed
    assert effects.counts == {"checkpointed blocks": blocks, "recomputations": 4 * blocks} and not effects.refusals


@pytest.mark.parametrize("others", [[(AMP, "bf16")], [(AMP, "fp16"), (ACCUMULATE, 2)]], ids=["bf16", "fp16"])
def test_it_goes_with_other_settings(others: list[Any]) -> None:
    plain, _ = trained(Stack, on=False, others=others)
    checkpointed, effects = trained(Stack, on=True, others=others)
    assert plain == checkpointed and effects.counts["checkpointed blocks"] == 4


def kept_bytes(cell: Cell) -> int:
    """What is allocated and not freed while the loss is computed."""
    x = torch.ones(64, 3, 6, 6)
    with torch.profiler.profile(profile_memory=True) as profile:
        loss = cell.model(x).sum()
    loss.backward()
    return sum(int(event.self_cpu_memory_usage) for event in profile.key_averages())


@pytest.mark.parametrize("name", MODELS)
def test_fewer_bytes_are_kept_until_the_backward_pass(name: str) -> None:
    cell = cell_of(MODELS[name][0])
    cell.run(steps=1)
    plain = kept_bytes(cell)
    with CHECKPOINTING.applied(True):
        cell.run(steps=2)
        checkpointed = kept_bytes(cell)
    CHECKPOINTING.forget()
    assert 0 < checkpointed < 0.7 * plain, (checkpointed, plain)
    assert kept_bytes(cell) > 0.9 * plain


def test_the_edit_does_what_the_setting_does() -> None:
    for make in (Stack, layers, Encoder):
        plain, _ = trained(make, on=False)
        cell = cell_of(make)
        exec(observed_blocks(cell.model).edit, {"model": cell.model})
        cell.run(steps=4)
        assert outcome(cell)[:4] == plain[:4]
        cell = cell_of(make)
        before = kept_bytes(cell)
        exec(observed_blocks(cell.model).edit, {"model": cell.model})
        assert kept_bytes(cell) < 0.7 * before


# -- nothing is broken -------------------------------------------------------------------------------------------------


class Listening(Block):
    def forward(self, x: Any) -> Tensor:
        return super().forward(x[0])


class Counting(Block):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


class Remembering(Block):
    def __init__(self) -> None:
        super().__init__()
        self.means: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        self.means.append(x.mean().item())
        return super().forward(x)


class Averaging(Block):
    def __init__(self) -> None:
        super().__init__()
        self.mean: Tensor
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return super().forward(x - self.mean.clone())


class Skipping(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if random.random() < 0.7 else x


class Writing(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.mul_(0.5))


DRAWN = [0]


class Elsewhere(Block):
    def forward(self, x: Tensor) -> Tensor:
        DRAWN[0] += 1
        return super().forward(x * (1 + DRAWN[0]))


class Normed(Block):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)  # type: ignore[assignment]


class Hooked(Block):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []
        self.wide.register_forward_hook(lambda *_: self.seen.append(1))


class Parametrized(Block):
    def __init__(self) -> None:
        super().__init__()
        nn.utils.parametrizations.spectral_norm(self.wide)


class Activated(Block):
    """Keeps what it gives, not what it is given."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.relu(x))


class Lists(Stack):
    def through(self, block: nn.Module, x: Tensor) -> Tensor:
        y: Tensor = block([x])
        return y


class InPlace(Stack):
    def through(self, block: nn.Module, x: Tensor) -> Tensor:
        return x.add_(block(x))


class Checkpoints(Stack):
    def through(self, block: nn.Module, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(block, x, use_reentrant=False)
        return y


class Saves(Stack):
    def through(self, block: nn.Module, x: Tensor) -> Tensor:
        with torch.autograd.graph.save_on_cpu():
            y: Tensor = block(x)
        return y


LEFT_OUT: list[tuple[Callable[[], nn.Module], str]] = [
    (lambda: Lists(Listening), "an argument is a list"),
    (lambda: Stack(Counting), "changes its buffers or attributes"),
    (lambda: Stack(Remembering), "changes its buffers or attributes"),
    (lambda: Stack(Averaging), "changes its buffers or attributes"),
    (lambda: Stack(Parametrized), "changes its buffers or attributes"),
    (lambda: Stack(Skipping), "random numbers from Python or NumPy"),
    (lambda: Stack(Writing), "it changes its input in place"),
    (lambda: Stack(Normed), "BatchNorm1d twice"),
    (lambda: Stack(Hooked), "a hook inside it would run twice"),
    (lambda: InPlace(Activated), "its input is changed in place"),
    (Checkpoints, "decides where its saved tensors are"),
    (Saves, "decides where its saved tensors are"),
    (lambda: nn.Sequential(nn.Flatten(), nn.Linear(108, 4)), NO_BLOCKS),
]


@pytest.mark.parametrize(("make", "words"), LEFT_OUT)
def test_what_cannot_be_computed_twice_runs_as_it_is(make: Callable[[], nn.Module], words: str) -> None:
    plain, _ = trained(make, on=False)
    checkpointed, effects = trained(make, on=True)
    assert plain == checkpointed and words in " ".join(effects.refusals) and not effects.counts["checkpointed blocks"]


def test_a_block_of_unknown_state_is_left_out() -> None:
    cell = cell_of(lambda: Stack(Elsewhere))
    with CHECKPOINTING.applied(True) as effects:
        cell.run(steps=2)
    CHECKPOINTING.forget()
    assert "does not give the same values" in effects.refusals[0] and not effects.counts


def test_evaluation_and_calls_without_gradients_are_left() -> None:
    cell = cell_of(Stack)
    x = torch.ones(2, 3, 6, 6)
    with CHECKPOINTING.applied(True) as effects:
        with torch.no_grad():
            cell.model(x)
        cell.model.eval()
        cell.model(x).sum().backward()
        assert not effects.counts and CHECKPOINTING.verify(SCENE, True, effects, Any).state == "no effect"  # type: ignore[arg-type]
        cell.model.train()
        loss = cell.model(x).sum()
        assert CHECKPOINTING.evidence(SCENE, True, effects, Any).state == "no effect"  # type: ignore[arg-type]
        loss.backward()
        assert CHECKPOINTING.evidence(SCENE, True, effects, Any).state == "took effect"  # type: ignore[arg-type]
    CHECKPOINTING.forget()


def test_hooks_of_a_block_fire_once_for_each_call() -> None:
    cell, fired = cell_of(Stack), []
    block = cell.model.get_submodule("blocks.1")
    block.register_forward_hook(lambda *_: fired.append("after"))
    block.register_forward_pre_hook(lambda *_: fired.append("before"))
    block.register_full_backward_hook(lambda *_: fired.append("backward"))
    with CHECKPOINTING.applied(True) as effects:
        cell.run(steps=2)
        assert fired == ["before", "after", "backward"] * 2 and effects.counts["checkpointed blocks"] == 4
        cell.model.get_submodule("blocks.1.wide").register_forward_hook(lambda *_: fired.append("inside"))
        cell.run(steps=1)
        assert fired.count("inside") == 1 and "hook inside" in effects.refusals[0]
    CHECKPOINTING.forget()


def test_the_model_can_be_copied_replaced_and_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    cell = cell_of(Stack)
    attributes = [[*vars(m)] for m in cell.model.modules()]
    with CHECKPOINTING.applied(True) as effects:
        loss = cell.model(torch.ones(2, 3, 6, 6)).sum()
        twin, pickled = copy.deepcopy(cell.model), pickle.loads(pickle.dumps(cell.model))
        loss.backward()
        assert [[*vars(m)] for m in twin.modules()] == [[*vars(m)] for m in pickled.modules()] == attributes
        setattr(cell.model.get_submodule("blocks"), "2", nn.Identity())
        cell.run(steps=1)
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            cell.model(torch.ones(2, 3, 6, 7))
        with monkeypatch.context() as patch:
            patch.setattr(Block, "forward", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                Stack()(torch.ones(2, 3, 6, 6))
        assert all("forward" not in vars(m) for m in cell.model.modules())
        assert effects.counts["checkpointed blocks"] == 4 + 3
    CHECKPOINTING.forget()


def test_no_model_is_held() -> None:
    with CHECKPOINTING.applied(True):
        for make in (Stack, layers):
            cell = cell_of(make)
            cell.run(steps=1)
            del cell
            gc.collect()
            assert not CHECKPOINTING._models.values()


def test_a_compiled_model_is_left() -> None:
    torch.compiler.reset()
    cell = cell_of(Stack)
    cell.model.compile(backend="eager")
    with CHECKPOINTING.applied(True) as effects:
        cell.run(steps=1)
    assert "compiled code itself" in effects.refusals[0] and not effects.counts
    CHECKPOINTING.forget()
    with suppress(Exception):
        COMPILE.forget()
    torch.compiler.reset()


def test_several_ranks_are_checkpointed_too() -> None:
    from torch import distributed as dist
    from torch._C._distributed_c10d import HashStore
    from torch.nn.parallel import DistributedDataParallel

    def wrapped() -> nn.Module:
        return DistributedDataParallel(Stack())

    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        plain, _ = trained(wrapped, on=False)
        checkpointed, effects = trained(wrapped, on=True)
        assert plain == checkpointed and effects.counts["checkpointed blocks"] == 4
        assert "in model.module.blocks:" in observed_blocks(wrapped()).edit
    finally:
        dist.destroy_process_group()


# -- answers -----------------------------------------------------------------------------------------------------------


def test_what_is_observed_decides_and_a_trace_shows_it() -> None:
    found = observation_of(cell_of(Stack))
    assert CHECKPOINTING.value_in(found) is False and CHECKPOINTING.refuses(found, True) is None
    assert CHECKPOINTING.code_edit(found, True).snippet.splitlines()[2].startswith("for block in model.blocks:")
    run, (effects,) = traced(cell_of(Stack), (CHECKPOINTING, True))
    CHECKPOINTING.forget()
    said = CHECKPOINTING.verify(found, True, effects, run)
    assert (said.state, said.evidence) == (
        "took effect",
        "4 blocks checkpointed, computed again 24 times in backward passes",
    )
    assert CHECKPOINTING.verify(found, False, KnobEffects(), run).state == "no effect"
    own = observation_of(cell_of(Checkpoints))
    assert CHECKPOINTING.value_in(own) is True and CHECKPOINTING.value_in(CHECKPOINTING.without(own)) is False
    assert CHECKPOINTING.refuses(own, True) == IN_USE


def test_hugging_faces_own_switch_is_seen_and_is_the_edit() -> None:
    model = Hugging("bert").model
    edit = observed_blocks(model).edit
    assert "_checkpointing_enable(" in edit
    exec(edit, {"model": model})
    assert observed_blocks(model).in_use and observed_blocks(model).refusal == IN_USE


REFUSED: list[tuple[Value, Any, str]] = [
    (True, NOTHING, "no torch.nn.Module"),
    (True, SCENE, NO_BLOCKS),
    (False, SCENE, ""),
    (True, calling(blocks=ObservedBlocks(2, "")), ""),
    (True, calling(blocks=ObservedBlocks(0, "", "no block can be computed twice: …")), "computed twice"),
    (True, calling(blocks=ObservedBlocks(2, ""), compiled=True), "compiled code itself"),
    (True, replace(calling(blocks=ObservedBlocks(2, "")), differentiates_twice=True), "create_graph"),
    (True, replace(SCENE, operators=frozenset({"CheckpointFunction"})), IN_USE),
    (False, calling(blocks=ObservedBlocks(2, "", "", in_use=True)), "leave that out"),
]


@pytest.mark.parametrize(("value", "scene", "words"), REFUSED)
def test_what_is_refused_before_it_runs(value: Value, scene: Any, words: str) -> None:
    refused = CHECKPOINTING.refuses(scene, value)
    assert (refused is None) if not words else words in str(refused)


def test_the_blocks_are_those_that_keep_the_fewest_layers() -> None:
    def paths(model: nn.Module) -> list[tuple[str, int]]:
        return [(site.path, site.segments) for site in sites(model)]

    stages = nn.Sequential(*(nn.Sequential(Block(), Block()) for _ in range(3)))
    assert paths(stages) == [(f"{i}.{j}", 1) for i in range(3) for j in range(2)], "not the stages"
    both = nn.Transformer(WIDTH, 2, 2, 2)
    assert paths(both) == [(f"{part}.layers.{i}", 1) for part in ("encoder", "decoder") for i in range(2)]
    assert paths(layers()) == [("", 5)]
    circular = Stack()
    circular.blocks[0].whole = circular
    assert len(paths(circular)) == 4
    assert not paths(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)))
    assert observed_blocks(stages).edit.splitlines()[2].startswith("for block in [*model[0], *model[1], *model[2]]:")
