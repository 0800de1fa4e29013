"""How settings and sweeps are read, and what decides between a knob and a variable."""

from __future__ import annotations

import ast
from typing import Any

import pytest
from msgspec.structs import replace

from gpulab.diagnosis.catalogue import kinds
from gpulab.errors import UsageError
from gpulab.knobs.catalogue import KNOBS, decide, grid, knobs_against, parse_settings, parse_sweeps, parsed_value
from gpulab.knobs.knob import setting_text
from gpulab.knobs.observation import Observation
from gpulab.knobs.variables import Variables
from tests.knobs.scenes import NOTHING, SCENE

LOADER = SCENE.loaders[0]
CELL = Variables.of(ast.parse("hidden = 64\nf(hidden, batch_size, net)"), {"batch_size": 8, "net": object()})


def none(name: str) -> bool:
    return False


def anything(name: str) -> bool:
    return True


@pytest.mark.parametrize("name", KNOBS)
def test_what_a_knob_says_of_itself_is_consistent(name: str) -> None:
    knob = KNOBS[name]
    assert knob.name == name and knob.title and knob.help and "\n" not in knob.help
    assert all(knob.parse(setting_text(value)) == value for value in knob.options)
    for value in knob.options:
        assert all(
            parse_settings([f"{name}={text}"], none) == {name: value} for text in (str(value), setting_text(value))
        )
    assert set(knob.needs) <= set(KNOBS)
    assert set(knob.helps_against) <= {kind.key for kind in kinds()}, "findings that it helps against have other keys"
    assert not (knob.same_training and (knob.changes_training or knob.changes_steps))
    assert bool(knob.changes_training) or not knob.changes_steps, "nothing says why it is another training"
    assert decide(name, NOTHING, anything) is None, "where nothing of its kind is seen, it is the variable"


def test_an_alias_is_no_other_knobs_name() -> None:
    aliases = [alias for knob in KNOBS.values() for alias in knob.aliases]
    assert len(set(aliases)) == len(aliases) and not set(aliases) & set(KNOBS)


def test_knobs_against_a_finding_come_likeliest_first() -> None:
    assert [knob.name for knob in knobs_against("data_starved")] == ["workers", "prefetch", "cache"]
    assert [knob.name for knob in knobs_against("launch_bound")] == ["compile", "fused_optimizer", "batch_size"]
    assert knobs_against("healthy") == []


# -- settings ----------------------------------------------------------------------------------------------------------


def test_settings_are_read_in_order() -> None:
    found = parse_settings(["workers=4", " amp = bf16, hidden=512", "batch_size=64"], CELL.has)
    assert list(found.items()) == [("workers", 4), ("amp", "bf16"), ("hidden", 512), ("batch_size", 64)]


def test_commas_in_a_value_part_no_settings() -> None:
    found = parse_settings(["a=64,64, b='x, c=1', d=(1, 2)", "e=f(g=1, h=2)"], lambda name: True)
    assert found == {"a": (64, 64), "b": "x, c=1", "d": (1, 2), "e": "f(g=1, h=2)"}


@pytest.mark.parametrize(
    ("pairs", "words"),
    [
        (["worker=4"], r"^worker is neither a setting nor a variable of the code. Did you mean workers\?$"),
        (["hiden=4"], r"Did you mean hidden\?"),
        (["zzz=4"], r"Settings: batch_size, workers"),
        (["workers=4", "amp=off", "workers=2"], r"^workers is set twice: workers=4 and workers=2"),
        (["fused=on"], r"Did you mean fused_optimizer\?"),
        (["bs=3"], r"Did you mean batch_size\?"),
        (["workers"], r"^Expected NAME=VALUE, e\.g\. workers=8, got 'workers'\.$"),
        (["workers="], r"^workers= needs a value"),
        (["=4"], r"NAME=VALUE"),
        ([""], r"NAME=VALUE"),
        (["4x=4"], r"NAME=VALUE"),
        (["amp=bf61"], r"^amp must be one of off, .*, got 'bf61'\. Did you mean amp=bf16\?$"),
        (["workers=two"], r"^workers must be an integer ≥ 0, got 'two'\.$"),
        (["batch_size=0"], r"^batch_size must be an integer ≥ 1, got '0'\.$"),
        (["net=4"], r"^net has type object"),
    ],
)
def test_what_cannot_be_set_is_said_in_one_line(pairs: list[str], words: str) -> None:
    with pytest.raises(UsageError, match=words) as caught:
        parse_settings(pairs, lambda name: name != "batch_size" and CELL.has(name), ["hidden"])
    assert "\n" not in str(caught.value)


def test_a_value_that_only_the_variable_takes_is_kept_for_it() -> None:
    assert parse_settings(["amp=0.5"], lambda name: True) == {"amp": 0.5}
    with pytest.raises(UsageError):
        parse_settings(["amp=0.5"], none)


# -- sweeps ------------------------------------------------------------------------------------------------------------


def test_a_sweep_has_its_values_in_order() -> None:
    sweeps = parse_sweeps(["batch_size=8,16, 32", "amp=off,bf16", "sizes=(1,2),[3],'a,b'"], anything)
    assert sweeps == {"batch_size": (8, 16, 32), "amp": ("off", "bf16"), "sizes": ((1, 2), [3], "a,b")}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("batch_size=", "needs a value"),
        ("batch_size=,", "a value is missing"),
        ("batch_size=8,,16", "a value is missing"),
        ("batch_size=8,16,8", "8 appears twice"),
        ("batch_size=8,0", "batch_size must be an integer ≥ 1, got '0'"),
        ("batchsize=8", "Did you mean batch_size"),
        ("8,16", "NAME=VALUE"),
    ],
)
def test_a_sweep_that_cannot_be_is_said(text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        parse_sweeps([text], none)


def test_true_is_not_one() -> None:
    assert repr(parse_sweeps(["x=1,True,1.0"], anything)) == "{'x': (1, True, 1.0)}"


def test_several_sweeps_make_a_grid() -> None:
    sweeps = parse_sweeps(["workers=0,2", "amp=off,bf16"], none)
    assert [tuple(c.values()) for c in grid(sweeps, {"hidden": 3})] == [
        (3, 0, "off"),
        (3, 0, "bf16"),
        (3, 2, "off"),
        (3, 2, "bf16"),
    ]
    with pytest.raises(UsageError, match="workers is swept twice"):
        parse_sweeps(["workers=0", "workers=2"], none)
    with pytest.raises(UsageError, match="workers is both set and swept"):
        grid(sweeps, {"workers": 1})


def test_values_from_code() -> None:
    assert [parsed_value(name, value) for name, value in (("workers", 4), ("hidden", None))] == [4, None]
    assert parsed_value("pin_memory", True) is True
    for name, value in (("hidden", {1}), ("workers", None)):
        with pytest.raises(UsageError, match=f"^{name}"):
            parsed_value(name, value)


# -- knob or variable --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "observation", "kind"),
    [
        ("batch_size", SCENE, "DataLoader option"),
        ("batch_size", NOTHING, "variable"),
        ("hidden", SCENE, "variable"),
        ("workers", NOTHING, "DataLoader option"),  # no such variable: the knob, which says why it cannot be set
        ("amp", SCENE, "module call"),
        ("fused_optimizer", SCENE, "optimizer option"),
        ("channels_last", NOTHING, "module call"),
    ],
)
def test_the_rule(name: str, observation: Observation, kind: str) -> None:
    knob = decide(name, observation, CELL.has)
    assert ("variable" if knob is None else knob.kind) == kind


def test_a_knob_without_a_fitting_value_means_the_variable() -> None:
    custom = replace(LOADER, custom_batch_sampler=True)
    assert decide("batch_size", replace(SCENE, loaders=(custom,)), CELL.has) is None
    small = replace(LOADER, record=replace(LOADER.record, dataset_length=3, batch_size=2))
    assert decide("batch_size", replace(SCENE, loaders=(small,)), CELL.has) is KNOBS["batch_size"]


def test_a_name_that_is_neither_is_an_error() -> None:
    with pytest.raises(UsageError, match="neither a setting nor a variable"):
        decide("other", SCENE, CELL.has)


def test_a_name_that_is_a_knobs_and_an_objects_is_the_knob() -> None:
    names: Any = Variables.of(ast.parse("cache[0]"), {"cache": {}}).has
    assert decide("cache", NOTHING, names) is KNOBS["cache"]
    assert parse_settings(["cache=on"], names) == {"cache": True}
