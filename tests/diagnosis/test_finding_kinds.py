"""Each kind of finding is declared once, beside its rule, and what it names exists."""

from __future__ import annotations

import inspect

from gpulab.diagnosis.rules.catalogue import kind_of, kinds, title_of
from tests.support.paths import ROOT


def test_each_kind_is_declared_once_in_its_rules_module() -> None:
    keys = [kind.key for kind in kinds()]
    assert len(set(keys)) == len(keys)
    for kind in kinds():
        if kind.rule is not None:
            module = inspect.getmodule(kind.rule)
            assert module is not None and kind in module.FINDINGS and kind.rule.__name__ == kind.key
        assert kind.title, kind.key
        assert set(kind.explains) <= {*keys} - {kind.key}, kind.key
        assert not kind.lesson or (ROOT / "notebooks" / f"{kind.lesson}.ipynb").is_file(), kind.key


def test_an_unknown_key_is_spelled_out() -> None:
    assert title_of("too_many_cooks") == "too many cooks"
    assert not kind_of("too_many_cooks").is_verdict
