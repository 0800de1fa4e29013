"""The results as a table for people: each benchmark by one template, from its kept JSON file and targets.toml."""

from __future__ import annotations

import importlib
import json
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.harness import RESULTS, Figure

HERE = Path(__file__).parent
PAGE = HERE / "README.md"
SECTION = """\
## {title}

{about}

| | measured | target | |
|---|---|---|---|
{rows}
{notes}
{measured}[All that was measured](results/{name}.json).
"""
BENCHMARKS: Mapping[str, Mapping[str, Any]] = tomllib.loads((HERE / "targets.toml").read_text(encoding="utf-8"))


def function_of(name: str, which: str) -> Callable[..., Any] | None:
    """The `measure`, `figures` or `notes` of a benchmark; None where it has none."""
    module, _, function = BENCHMARKS[name].get(which, f"{name}:{which}").partition(":")
    if which == "notes":
        module, function = BENCHMARKS[name].get("figures", name).partition(":")[0], "notes"
    return getattr(importlib.import_module(f"benchmarks.{module}"), function, None) if module else None


def page() -> str:
    """benchmarks/README.md, from the results that are there."""
    sections = [section(name) for name in BENCHMARKS if (RESULTS / f"{name}.json").exists()]
    template = (HERE / "README.template.md").read_text(encoding="utf-8")
    return template.replace("{sections}\n", "\n".join(sections))


def section(name: str) -> str:
    """One benchmark."""
    results = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    figures, notes = function_of(name, "figures"), function_of(name, "notes")
    assert figures is not None
    targets = BENCHMARKS[name].get("targets", {})
    said = "".join(f"{note}\n" for note in notes(results)) if notes is not None else ""
    return SECTION.format(
        name=name,
        title=BENCHMARKS[name]["title"],
        about=BENCHMARKS[name]["about"],
        rows="\n".join(row_of(figure, targets) for figure in figures(results)),
        notes=f"\n{said}" if said else "",
        measured=_where(results) if "machine" in results else "",
    )


def row_of(figure: Figure, targets: Mapping[str, str]) -> str:
    """What, measured, target, and whether that is met. Raises KeyError for a target that is none."""
    words = figure.words or shown(figure)
    if not figure.target:
        return f"| {figure.what} | {words} | | |"
    sign, value = targets[figure.target].split()
    aim = float(value)
    met = "" if figure.value is None else "met" if _met(figure.value, sign, aim) else "**missed**"
    aimed = shown(Figure("", aim, figure.unit))
    return f"| {figure.what} | {words} | {'≤' if sign == '<=' else '≥'} {aimed} | {met} |"


def shown(figure: Figure) -> str:
    """A value in its unit, with its interval."""
    if figure.value is None:
        return "not measured"
    each = _FORMATS[figure.unit]
    between = f" [{each(figure.interval[0])}, {each(figure.interval[1])}]" if figure.interval else ""
    return f"{each(figure.value)}{_UNITS.get(figure.unit, '')}{between}"


def _met(value: float, sign: str, aim: float) -> bool:
    return value <= aim if sign == "<=" else value >= aim


_UNITS = {"s": " s", "ms": " ms", "µs": " µs", "MiB": " MiB", "+%": " %"}
_FORMATS: Mapping[str, Callable[[float], str]] = {
    "s": lambda v: f"{v:.2f}" if v < 10 else f"{v:.0f}",
    "ms": lambda v: f"{v:.0f}",
    "µs": lambda v: f"{v:+.1f}",
    "MiB": lambda v: f"{v:,.1f}" if abs(v) < 10 else f"{v:,.0f}",
    "%": lambda v: f"{v:.0%}",
    "+%": lambda v: f"{100 * (v - 1):+.2f}",
    "×": lambda v: f"{v:.2f}" if v < 10 else f"{v:.1f}",
    "": lambda v: f"{v:,.4g}" if isinstance(v, float) and not v.is_integer() else f"{v:,.0f}",
}


def _where(results: Mapping[str, Any]) -> str:
    machine, packages = results["machine"], results["machine"]["packages"]
    return (
        f"Measured {results['measured']}: {machine['cpu']}, {machine['usable_cores']:g} usable cores, "
        f"Python {machine['python']}, torch {packages.get('torch', '–')}. No GPU. "
    )
