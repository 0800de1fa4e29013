"""What a fresh machine gets: light imports, a whole wheel, notebooks that open."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import nbformat
import pytest

from tests.support.paths import ROOT

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def python(code: str, *arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code, *arguments], cwd=cwd, capture_output=True, text=True)


def test_importing_gpulab_is_light_and_registers_nothing() -> None:
    code = """
import atexit, signal, sys, threading
def state():
    hooks = list(sys.meta_path), list(sys.path_hooks), sys.excepthook, signal.getsignal(signal.SIGINT)
    return hooks, threading.active_count(), atexit._ncallbacks()
before = state()
import gpulab
after = state()
assert before == after, (before, after)
heavy = {"torch", "IPython", "matplotlib", "pynvml", "ipywidgets", "anywidget", "pandas"} & set(sys.modules)
assert not heavy, heavy
"""
    done = python(code)
    assert done.returncode == 0, done.stderr


WITHOUT = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Blocker())
import gpulab
"""
USED = """
import torch
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters())
with gpulab.profile(show=False, save=False, live=False, device="cpu") as p:
    for _ in range(3):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
assert len(p.run.steps) == 3
"""


def test_without_jupyter_a_block_is_measured() -> None:
    blocked = {"IPython", "ipywidgets", "anywidget", "ipykernel", "jupyterlab", "traitlets"}
    code = WITHOUT.format(blocked=blocked) + USED
    done = python(code)
    assert done.returncode == 0, done.stderr


def test_without_msgspec_one_sentence_says_what_to_install() -> None:
    code = WITHOUT.format(blocked={"msgspec"}) + "gpulab.profile"
    done = python(code)
    last = done.stderr.strip().splitlines()[-1]
    assert last == "ImportError: gpulab needs the package msgspec, which is not installed: pip install msgspec"
    assert "No module named" not in done.stderr, "no traceback through the modules of gpulab"


def test_the_wheel_holds_the_package_its_assets_and_nothing_else(tmp_path: Path) -> None:
    source = tmp_path / "source"
    tracked = [
        *ROOT.glob("gpulab/**/*"),
        *ROOT.glob("notebooks/*"),
        *(ROOT / name for name in ("pyproject.toml", "README.md", "LICENSE")),
    ]
    for path in tracked:
        if path.is_file() and not {"node_modules", "__pycache__"} & set(path.parts):
            target = source / path.relative_to(ROOT)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes())
    build = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"
    done = python(build, str(tmp_path), cwd=source)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())

    wanted = {path.relative_to(source).as_posix() for path in (source / "gpulab").rglob("*.py")}
    wanted |= {path.relative_to(source).as_posix() for path in (source / "gpulab" / "views" / "static").iterdir()}
    wanted.add("gpulab/py.typed")
    assert wanted <= names, wanted - names
    assert any(name.endswith("/licenses/LICENSE") for name in names)
    stem = wheel.name.split("-py3")[0]
    assert {name.split("/")[0] for name in names} == {"gpulab", f"{stem}.dist-info", f"{stem}.data"}
    lessons = f"{stem}.data/data/share/gpulab/notebooks/"
    data = {name for name in names if name.startswith(f"{stem}.data/")}
    assert data == {lessons + path.name for path in [*NOTEBOOKS, ROOT / "notebooks" / "README.md"]}
    assert {Path(name).suffix for name in names if name.startswith("gpulab/")} == {
        ".py", ".js", ".css", ".html", ".typed", ".json", ".npz",
    }  # fmt: skip


def test_the_command_leads_to_a_function() -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    module, _, function = scripts["gpulab"].partition(":")
    assert callable(getattr(importlib.import_module(module), function))


def test_a_first_install_shows_how_far_it_is(tmp_path: Path) -> None:
    """A dot for each package and while pip says nothing; what is large by its name."""
    stamps = [f"{tmp_path}/venv/.stamp-{target}" for target in ("demo", "lab", "test")]
    command = ["make", "-n", *stamps, f"VENV={tmp_path}/venv"]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    filters = {line.partition("| ")[2] for line in printed.splitlines() if "pip install" in line}
    assert len(filters) == 1 and "" not in filters
    pip = (
        "Collecting torch\nRequirement already satisfied: x\n  Downloading torch.whl (190.2 MB)\n  Processing /numpy\n"
    )
    slow = f"printf '{pip}'; sleep 2.5; echo 'Installing collected packages: a, b'"
    filtered = ["bash", "-euo", "pipefail", "-c", f"{{ {slow}; }} | {filters.pop()}"]
    shown = subprocess.run(filtered, capture_output=True, text=True, check=True).stdout
    assert re.fullmatch(r"\. Downloading torch.whl \(190.2 MB\) \.\.+ Installing 2 packages \.*\n", shown), shown


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_valid_and_opens_without_a_dialog(path: Path) -> None:
    notebook = nbformat.read(path, as_version=nbformat.NO_CONVERT)
    nbformat.validate(notebook)
    assert (notebook.nbformat, notebook.nbformat_minor) >= (4, 5)
    assert notebook.metadata.kernelspec.name == "python3"
    assert len({cell.id for cell in notebook.cells}) == len(notebook.cells)
    for cell in notebook.cells:
        assert cell.cell_type != "code" or cell.metadata.keys() <= {"name"}
