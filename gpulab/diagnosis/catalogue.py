"""The rules, in one literal list of their modules: each declares in `FINDINGS` the kinds of finding that it returns."""

from __future__ import annotations

from typing import Protocol

from gpulab.diagnosis import (
    cores,
    device,
    distributed,
    idle_gpu,
    loading,
    needless,
    no_cause,
    operations,
    optimizer,
    own_code,
)
from gpulab.diagnosis.finding import Finding, FindingKind


class RuleModule(Protocol):
    """What a module of rules must have to be in the catalogue."""

    @property
    def FINDINGS(self) -> tuple[FindingKind, ...]:
        """The kinds of finding that its rules return."""


RULE_MODULES: tuple[RuleModule, ...] = (
    loading,
    cores,
    own_code,
    idle_gpu,
    operations,
    optimizer,
    device,
    distributed,
    needless,
    no_cause,  # where none of these speaks
)


def kinds() -> tuple[FindingKind, ...]:
    """All kinds of finding, in the order in which their rules are asked."""
    return tuple(kind for module in RULE_MODULES for kind in module.FINDINGS)


def kind_of(key: str) -> FindingKind:
    """What is declared of a key. Of one that is not declared only the title is known: the key itself, spelled out."""
    return next((kind for kind in kinds() if kind.key == key), FindingKind(key, key.replace("_", " ")))


def title_of(key: str) -> str:
    """What a finding of that key is called on screen."""
    return kind_of(key).title


def title_for(finding: Finding) -> str:
    """What that finding is called: by itself, else as its kind."""
    return finding.title or title_of(finding.key)


__all__ = ["RULE_MODULES", "RuleModule", "kind_of", "kinds", "title_for", "title_of"]
