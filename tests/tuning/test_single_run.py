"""`--set`: one run with something changed, of a cell that may never have run as written."""

from __future__ import annotations

import multiprocessing
import sys
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch.utils.data import DataLoader, TensorDataset

import gpulab
from gpulab.errors import UsageError
from gpulab.run import Change, Run
from gpulab.tuning.code import Code
from gpulab.tuning.execute import Execution
from gpulab.tuning.record import Experiment
from gpulab.tuning.resolve import Objects, ResolvedArm, check_arms, observation_of, remember, resolve
from gpulab.tuning.runner import Runner
from gpulab.tuning.schedule import Arm, Plan
from tests.tuning.cells import CELL as LOOP

NO_READER = Code.of_text("lr = 0.1", {})
OWN_SAMPLER = """
from torch.utils.data import BatchSampler, SequentialSampler
class Batches(BatchSampler):
    pass
loader = DataLoader(data, batch_sampler=Batches(SequentialSampler(data), 4, False))
"""


def before(code: Code, **settings: Any) -> ResolvedArm:
    """What is known of settings before anything runs."""
    return resolve(Arm(settings), code, Objects(code, observation_of(code)))


def execution_of(cell: str, names: dict[str, Any], **settings: Any) -> Execution:
    code = Code.of_text(cell, names)
    return Execution(code, before(code, **settings))


def ran(cell: str, names: dict[str, Any], **settings: Any) -> tuple[Change, ...]:
    """What the report says of the changes."""
    execution = execution_of(cell, names, **settings)
    assert not execution.arm.refusal, execution.arm.refusal
    with (
        gpulab.profile(live=False, save=False, show=False, device="cpu", execution=execution) as profile,
        execution.applied() as code,
    ):
        code.run()
    found: Run = profile.run
    return found.changes


# -- evidence of a cell that was never seen -------------------------------------------------------------------------


def test_real_changes_take_effect(names: dict[str, Any]) -> None:
    changes = ran(LOOP, names, amp="bf16", attention="math", batch_size=2, fused_optimizer=True)
    assert {change.state for change in changes} == {"took effect"}, changes
    assert [change.found for change in changes] == ["", "", "4", "off"]
    evidence = ("returned bfloat16", "_scaled_dot_product_attention_math", "batches of 2 samples", "_fused_adamw_")
    assert all(words in change.evidence for words, change in zip(evidence, changes, strict=True)), changes


def test_autocast_of_the_cell_is_switched_off(names: dict[str, Any]) -> None:
    body = "\n".join("    " + line for line in LOOP.strip().splitlines())
    (change,) = ran(f"with torch.autocast('cpu', dtype=torch.bfloat16):\n{body}", names, amp="off")
    assert change.state == "took effect", change


def test_what_speaks_against_it_is_told_afterwards(names: dict[str, Any]) -> None:
    exec("model = nn.Linear(8, 3)", names)
    layout, batch, amp, lr = ran("lr = 0.1\n" + LOOP, names, channels_last=True, batch_size=4, amp="off", lr=0.5)
    assert {change.state for change in (layout, batch, amp, lr)} == {"no effect"}
    assert "2D convolution" in layout.evidence
    assert "already has batch_size=4" in batch.evidence and "in fp32 already" in amp.evidence
    assert lr.evidence == "nothing read the variable while the code ran"


# -- what is known from before --------------------------------------------------------------------------------------


def test_a_loader_that_another_cell_made_anew_is_seen(names: dict[str, Any]) -> None:
    code = Code.of_text(LOOP, names)
    exec(OWN_SAMPLER, names)
    refused = before(code, batch_size=8).refusal
    assert "its own batch_sampler" in refused
    observation = changing_scene(code)
    remember(code, observation)
    assert observation_of(code) is observation
    names["loader"] = names["DataLoader"](names["data"], batch_size=16)
    assert observation_of(code) is None, "the cell reads another loader now"
    (change,) = ran(LOOP, names, batch_size=8)
    assert (change.found, change.state) == ("16", "took effect")


def test_a_remembered_observation_never_refuses(names: dict[str, Any]) -> None:
    code = Code.of_text(LOOP, names)
    observation = changing_scene(code)
    remember(code, replace(observation, loaders=(replace(observation.loaders[0], custom_batch_sampler=True),)))
    assert observation_of(code) is not None
    assert not before(code, batch_size=8).refusal


def changing_scene(code: Code) -> Any:
    from gpulab.knobs.observer import observe

    with gpulab.profile(live=False, save=False, show=False, device="cpu") as profile, observe() as seen:
        code.run()
    return seen.observation(profile.run)


# -- what is certain before anything runs ---------------------------------------------------------------------------


LOCAL = """
class Items(Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, i):
        return data[i]
items = Items()
"""


@pytest.mark.parametrize(
    "cell",
    [
        LOOP,
        f"loader = DataLoader(Items(), batch_size=4)\n{LOOP}",
        f"loader = torch.utils.data.DataLoader(items, batch_size=4)\n{LOOP}",
        "train()",
    ],
)
def test_workers_that_cannot_import_the_dataset(
    names: dict[str, Any], cell: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    exec(LOCAL + "loader = DataLoader(items, batch_size=4)\ndef train():\n    for x in loader: pass", names)
    code = Code.of_text(cell, names)
    assert not before(code, workers=2).refusal
    main = sys.modules["__main__"]
    monkeypatch.setattr(main, "__spec__", None)
    monkeypatch.delattr(main, "__file__", raising=False)
    monkeypatch.setattr(multiprocessing, "get_start_method", lambda allow_none=False: "spawn")
    with pytest.raises(UsageError, match=r"workers=2: .*spawn cannot import it; move it to a \.py file"):
        check_arms([Arm({"workers": 2})], code)
    assert not before(code, workers=0).refusal
    names["loader"] = DataLoader(TensorDataset(torch.ones(8)), batch_size=4)
    assert not before(Code.of_text(f"len(items)\n{LOOP}", names), workers=2).refusal, "it is not loaded from"


# -- variables ------------------------------------------------------------------------------------------------------


def test_a_literal_holds_afterwards_what_the_cell_assigns(names: dict[str, Any]) -> None:
    (change,) = ran("hidden = 64\nsize = hidden * 2\n" + LOOP, names, hidden=512)
    assert (change.kind, change.found, change.state) == ("variable", "64", "took effect")
    assert (names["hidden"], names["size"]) == (64, 1024)


def test_a_value_is_of_the_cells_loader_and_a_literal_is_left(
    names: dict[str, Any],
) -> None:
    cell = "hidden = 64\nhidden += 1\nloader = DataLoader(data, batch_size=16)\n" + LOOP
    batch, _ = ran(cell, names, batch_size=8, hidden=512)
    assert (batch.found, batch.state, names["hidden"]) == ("16", "took effect", 513)


def test_what_built_the_model_is_no_variable_of_its_training(names: dict[str, Any]) -> None:
    names["hidden"] = 64
    names["model"].hidden = 64
    with pytest.raises(UsageError, match="hidden is 64 in the notebook, but this code does not appear to read it"):
        before(Code.of_text(LOOP, names), hidden=512)


# -- what is the same as the cell has it ----------------------------------------------------------------------------


def compared(names: dict[str, Any], cell: str = LOOP, *, interleaved: bool = True, **settings: Any) -> Experiment:
    plan = Plan((Arm(settings),), block_steps=2, pairs=2, interleaved=interleaved, save=False)
    return Runner(Code.of_text(cell, names), plan).run()


def test_values_as_found_make_no_other_training_and_no_edit(names: dict[str, Any]) -> None:
    cell = "lr = 0.1\nrate = [lr]\n" + LOOP
    found = compared(names, cell, interleaved=False, pin_memory=False, batch_size=4, amp="off", lr=0.1)
    side = found.sides[1]
    assert [c.state for c in side.checks] == ["no effect"] * 4 and side.edit == ""
    assert [c.evidence for c in side.checks if c.name == "lr"] == ["the value is already 0.1"]
    assert found.comparisons[0].loss is not None and found.comparisons[0].loss.verdict == "same"
    assert "another" not in found.comparisons[0].loss.words


def test_only_what_changed_is_an_edit_and_another_training(names: dict[str, Any]) -> None:
    found = compared(names, "lr = 0.1\nscale = 1.0\nrate = [scale]\n" + LOOP, lr=0.5, scale=2.0, accumulate=1)
    assert "scale" in found.sides[1].edit and "lr = 0.5" not in found.sides[1].edit
    decided = resolve(Arm({"lr": 0.5, "batch_size": 4}), NO_READER, changing_scene(Code.of_text(LOOP, names)))
    assert decided.changes_training(()) == "your code computes with another `lr`"
    idle = Change("lr", "0.5", "0.1", "variable", "no effect", "")
    assert decided.changes_training((idle,)) == ""


def test_a_setting_that_was_refused_has_no_edit(names: dict[str, Any]) -> None:
    exec("model = nn.Linear(8, 3)", names)
    found = compared(names, channels_last=True)
    assert found.sides[1].failure and found.sides[1].edit == ""


def test_objects_that_cannot_be_looked_at_cost_nothing(names: dict[str, Any]) -> None:
    exec(
        "class Odd(DataLoader):\n    @property\n    def collate_fn(self): raise OSError\n"
        "    @collate_fn.setter\n    def collate_fn(self, f): pass\n"
        "class Dark:\n    @property\n    def __dict__(self): raise OSError\n"
        "odd, dark = Odd(data), Dark()",
        names,
    )
    assert not before(Code.of_text("print(odd, dark)\n" + LOOP, names), batch_size=5000).refusal
