"""Each kind of finding is declared once, beside its rule, and nobody else knows it by name."""

from __future__ import annotations

import ast
import inspect
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest

import gpulab
from gpulab.diagnosis.context import FindingKind, RuleContext
from gpulab.diagnosis.rules.catalogue import RULE_MODULES, kind_of, kinds, title_of
from gpulab.thresholds import DEFAULT
from tests.support import synthetic
from tests.support.rule_cases import case_of, inside, pauses, run_of

PACKAGE = Path(gpulab.__file__).parent
KEYS = {kind.key for kind in kinds()}
ANSWERS = ("Finding", "Undetermined")
READERS = (
    "diagnosis/ranking.py",
    "diagnosis/diagnose.py",
    "diagnosis/ranks.py",
    "diagnosis/cure_predictions.py",
    "prediction/removal.py",
    "tuning/climb/policy.py",
    "views/report/findings.py",
    "views/climb/sections.py",
)
OTHER_MEANINGS = {"logging", "layout"}  # a kind of pause, and a class of kernels


def _text_of(node: ast.AST) -> str | None:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def _keys_answered(path: Path) -> set[str]:
    """Keys that the code of a file gives to an answer."""
    calls = [n for n in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(n, ast.Call) and n.args]
    named = [c for c in calls if isinstance(c.func, ast.Name) and c.func.id in ANSWERS]
    return {text for c in named if (text := _text_of(c.args[0])) is not None}


def _contexts() -> list[RuleContext]:
    """Runs in which rules of all subjects have something to say."""
    starving = run_of(wait=0.6, workers=2)
    saving = run_of()
    saves = pauses(saving, "checkpoint_save", range(10, 40, 3), 30.0)
    saving = run_of(pauses=(*saves, *pauses(saving, "gc", range(10, 40, 2), 9.0)))
    return [
        *(RuleContext(case.facts, DEFAULT) for case in synthetic.cases().values()),
        case_of(starving, {"data_wait": 0.6}, inside(read_ms=30.0, read_waited=0.9)),
        case_of(starving, {"data_wait": 0.6}, inside(transform_ms=30.0)),
        case_of(starving, {"data_wait": 0.6}, inside(collate_ms=30.0)),
        case_of(saving),
        case_of(run_of(source="trace"), {"unknown": 0.3, "compute": 0.7}),
        case_of(run_of(gpu=True), {"communication": 0.4, "compute": 0.6}),
        case_of(run_of(workers=2, epoch_starts={20: 90.0, 40: 90.0})),
    ]


def test_each_key_is_declared_once() -> None:
    assert [key for key, count in Counter(kind.key for kind in kinds()).items() if count > 1] == []


def _module(kind: FindingKind) -> ModuleType:
    assert kind.rule is not None
    module = inspect.getmodule(kind.rule)
    assert module is not None
    return module


@pytest.mark.parametrize("kind", [k for k in kinds() if k.rule is not None], ids=lambda kind: kind.key)
def test_a_kind_of_finding_stands_in_its_rules_module(kind: FindingKind) -> None:
    assert kind.rule is not None
    assert kind.rule.__name__ == kind.key and kind in _module(kind).FINDINGS


def test_a_module_answers_with_the_keys_that_it_declares() -> None:
    answered: dict[str, set[str]] = {}
    for path in sorted((PACKAGE / "diagnosis").rglob("*.py")):
        answered[path.stem] = _keys_answered(path)
    declared = {_name(module): {kind.key for kind in module.FINDINGS} for module in RULE_MODULES}
    assert sum(map(len, answered.values())) > len(declared)
    for name, keys in answered.items():
        assert keys <= declared.get(name, set()), name


def _name(module: object) -> str:
    assert isinstance(module, ModuleType)
    return module.__name__.rpartition(".")[2]


def test_a_rule_answers_with_its_own_key() -> None:
    answered: set[str] = set()
    for context in _contexts():
        for kind in kinds():
            answer = kind.rule(context) if kind.rule is not None else None
            if answer is not None:
                assert answer.key == kind.key
                answered.add(kind.key)
    assert len(answered) >= 12, sorted(answered)


@pytest.mark.parametrize("path", READERS)
def test_who_reads_findings_knows_none_by_name(path: str) -> None:
    tree = ast.parse((PACKAGE / path).read_text(encoding="utf-8"))
    texts = {text for node in ast.walk(tree) if (text := _text_of(node)) is not None}
    assert (texts & KEYS) - OTHER_MEANINGS == set()


def test_what_a_kind_names_exists() -> None:
    notebooks = PACKAGE.parent / "notebooks"
    for kind in kinds():
        assert kind.title, kind.key
        assert set(kind.explains) <= KEYS - {kind.key}, kind.key
        assert not kind.lesson or (notebooks / f"{kind.lesson}.ipynb").is_file(), kind.key


def test_an_unknown_key_is_spelled_out() -> None:
    assert title_of("too_many_cooks") == "too many cooks"
    assert not kind_of("too_many_cooks").is_verdict
