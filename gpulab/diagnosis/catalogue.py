"""All rules, as a literal list of modules: each module declares in `FINDINGS` the kinds of finding that it returns."""

from __future__ import annotations

from typing import Protocol

from gpulab.diagnosis import (
    cores,
    device,
    distributed,
    idle_gpu,
    loading,
    memory,
    needless,
    no_cause,
    operations,
    optimizer,
    own_code,
)
from gpulab.diagnosis.finding import Finding, FindingKind


class RuleModule(Protocol):
    """The interface that a module of rules must have to be in the catalogue."""

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
    memory,
    distributed,
    needless,
    no_cause,  # if no rule above has a finding
)


def kinds() -> tuple[FindingKind, ...]:
    """All kinds of finding, in the order in which their rules run."""
    return tuple(kind for module in RULE_MODULES for kind in module.FINDINGS)


def kind_of(key: str) -> FindingKind:
    """The declared kind of a key. An undeclared key gets only a title: the key itself, spelled out."""
    return next((kind for kind in kinds() if kind.key == key), FindingKind(key, key.replace("_", " ")))


def title_of(key: str) -> str:
    """The title of a finding with that key, as on screen."""
    return kind_of(key).title


def title_for(finding: Finding) -> str:
    """The title of the finding itself, else that of its kind."""
    return finding.title or title_of(finding.key)


__all__ = ["RULE_MODULES", "RuleModule", "kind_of", "kinds", "title_for", "title_of"]
