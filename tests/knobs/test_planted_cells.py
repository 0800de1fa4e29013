"""Each planted cell of the benchmarks runs under its knob, which takes effect and leaves nothing; no clock is read."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from benchmarks.planted_knobs import settings_kept
from gpulab.knobs.catalogue import KNOBS
from gpulab.run import Settings
from gpulab.snapshot.state import State
from gpulab.tuning.function_code import TextCode
from gpulab.tuning.plan import Arm
from gpulab.tuning.resolve import changes, resolve_arm
from gpulab.tuning.trial import Setting, Stopper, Trial, full_trial
from planted.catalogue import KNOBS as CELLS
from planted.catalogue import PlantedKnob

SHORT = Settings(steps=8, warmup=1, live=False, save=False, device="cpu")  # more steps than a cell's epoch has


@pytest.fixture(autouse=True)
def as_found(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("gpulab.tuning.trial.TRIAL_LIMIT_S", 250.0)  # compiling on a busy machine takes long
    torch.compiler.reset()  # what an earlier test compiled would be kept with ours
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with settings_kept():
        yield
    torch.set_num_threads(threads)


def test_eight_knobs_have_a_cell_for_each_truth() -> None:
    truths = defaultdict(list)
    for planted in CELLS:
        truths[planted.knob].append(planted.truth)
    assert len(truths) == 8
    assert all(sorted(t) == ["faster", "no measurable difference", "slower"] for t in truths.values())


ONE_OF_EACH = {  # the bench runs all of them
    "workers": "slower",
    "cache": "no measurable difference",
    "batch_size": "no measurable difference",
    "accumulate": "slower",
    "fused_optimizer": "faster",
    "channels_last": "slower",
    "attention": "no measurable difference",
    "compile": "no measurable difference",
}


@pytest.mark.parametrize("planted", [c for c in CELLS if ONE_OF_EACH[c.knob] == c.truth], ids=lambda c: c.name)
def test_the_knob_acts_in_its_cell_and_is_put_back(planted: PlantedKnob, torch_without_a_space: None) -> None:
    names = planted.namespace()
    code = TextCode.parsed(planted.text[1], names)
    state = State.of(names, code.names)
    before = photo(names)

    assert len(ONE_OF_EACH) == 8
    written = trial(Setting(code, {}, "as written"))
    set_as_written = settings(names)
    state.restore()
    assert photo(names) == before

    decided = resolve_arm(Arm({planted.knob: planted.value}), written.observation, code)
    if planted.knob == "compile" and decided.refused:
        pytest.skip(decided.refused)
    assert not decided.refused
    changed = trial(Setting(code, decided.knobs, planted.name))
    assert settings(names) == set_as_written, "the knob left something, which only restoring the state takes out"
    state.restore()
    KNOBS[planted.knob].forget()
    (check,) = changes(decided, written.observation, changed.effects, changed.run)
    assert check.state == "took effect", check.evidence
    assert photo(names) == before


def trial(setting: Setting) -> Trial:
    """A few steps with their trace."""
    found = full_trial(setting, SHORT, Stopper(), None, quiet=True)
    if found.error is not None:
        raise found.error
    assert SHORT.steps is not None and len(found.run.steps) >= SHORT.steps
    return found


def photo(names: dict[str, Any]) -> dict[str, object]:
    """What a user could notice after everything was put back, as plain data."""
    modules = modules_of(names)
    return {
        "names": sorted(names),
        "weights": [[(id(p), p.detach().contiguous().numpy().tobytes()) for p in m.parameters()] for m in modules],
        "gradients": [[p.grad is None for p in module.parameters()] for module in modules],
        "optimizer states": len(names["optimizer"].state),
        "random": torch.get_rng_state().tolist(),
        **settings(names),
    }


def settings(names: dict[str, Any]) -> dict[str, object]:
    """What training by itself does not change, and a knob does."""
    modules, optimizer = modules_of(names), names["optimizer"]
    return {
        "weights are laid out": [[(p.stride(), p.dtype) for p in module.parameters()] for module in modules],
        "modules": [[sorted(vars(m)) for m in module.modules()] for module in modules],
        "groups": [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups],
        "optimizer": sorted(vars(optimizer)),
        "loader": {k: v for k, v in vars(names["loader"]).items() if isinstance(v, bool | int | float | None)},
        "classes": (DataLoader.__iter__, DataLoader.__len__, nn.Module.__call__, type(optimizer).step),
        "back ends": (
            torch.backends.cuda.flash_sdp_enabled(),  # type: ignore[no-untyped-call]
            torch.backends.cuda.math_sdp_enabled(),  # type: ignore[no-untyped-call]
        ),
    }


def modules_of(names: dict[str, Any]) -> list[nn.Module]:
    """The model, or all there are."""
    return [value for value in names.values() if isinstance(value, nn.Module)]
