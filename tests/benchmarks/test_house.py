"""No modules of the package import one another in a circle, and the measure of that sees a circle."""

from __future__ import annotations

from pathlib import Path

from benchmarks.house import ROOT, circles, imports


def test_no_modules_import_one_another() -> None:
    assert circles(imports(ROOT / "gpulab")) == []


def test_a_circle_is_found_and_one_for_types_only_is_none(tmp_path: Path) -> None:
    package = tmp_path / "house"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "attic.py").write_text("def climb():\n    from house import cellar\n")
    (package / "cellar.py").write_text("from house.attic import climb\n")
    (package / "garden.py").write_text("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import house.gate\n")
    (package / "gate.py").write_text("import house.garden\n")
    assert circles(imports(package)) == [{"house.attic", "house.cellar"}]
