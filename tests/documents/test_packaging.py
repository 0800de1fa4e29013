"""What a fresh machine gets: light imports, pins that fit the ranges, a whole wheel, true documents."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import nbformat
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.support.paths import ROOT

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def _project() -> dict[str, Any]:
    project: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return project


def _requirements() -> list[Requirement]:
    project = _project()
    groups = [project["dependencies"], *project["optional-dependencies"].values()]
    return [Requirement(text) for group in groups for text in group]


def _pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pairs = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(name): version for name, version in pairs}


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
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
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
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_without_msgspec_one_sentence_says_what_to_install() -> None:
    code = WITHOUT.format(blocked={"msgspec"}) + "gpulab.profile"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    last = done.stderr.strip().splitlines()[-1]
    assert last == "ImportError: gpulab needs the package msgspec, which is not installed: pip install msgspec"
    assert "No module named" not in done.stderr, "no traceback through the modules of gpulab"


def test_every_direct_dependency_is_pinned_within_its_range() -> None:
    pins = _pins()
    for requirement in _requirements():
        name = canonicalize_name(requirement.name)
        if name == "gpulab":
            continue
        assert name in pins, f"{requirement.name} has no pin in constraints.txt"
        assert requirement.specifier.contains(pins[name]), f"{requirement} does not admit the pin {pins[name]}"


def test_what_is_installed_is_pinned_with_everything_it_needs() -> None:
    pins = _pins()
    todo = [canonicalize_name(requirement.name) for requirement in _requirements()]
    seen: set[str] = set()
    while todo:
        name = todo.pop()
        if name in seen or name == "gpulab":
            continue
        seen.add(name)
        assert name in pins, f"{name} has no pin in constraints.txt"
        try:
            needs = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        for text in needs:
            requirement = Requirement(text)
            if name == "torch" and requirement.name.startswith(("nvidia-", "cuda-", "triton")):
                continue  # torch's own CUDA build pins them exactly
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                todo.append(canonicalize_name(requirement.name))
    assert "torch" in seen


def test_the_pins_are_versions_and_nothing_else() -> None:
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        assert line.startswith("#") or re.fullmatch(r"[A-Za-z0-9._-]+==[0-9][A-Za-z0-9.]*", line), line
    assert _pins()["torch"] == "2.13.0"


def test_the_version_is_the_same_everywhere() -> None:
    import gpulab

    assert gpulab.__version__ == _project()["version"]


def test_the_deprecated_distribution_is_not_asked_for() -> None:
    assert "pynvml" not in {canonicalize_name(requirement.name) for requirement in _requirements()}


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
    done = subprocess.run([sys.executable, "-c", build, str(tmp_path)], cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())

    wanted = {path.relative_to(source).as_posix() for path in (source / "gpulab").rglob("*.py")}
    wanted |= {path.relative_to(source).as_posix() for path in (source / "gpulab" / "views" / "static").glob("*.js")}
    wanted.add("gpulab/py.typed")
    assert wanted <= names, wanted - names
    assert any(name.endswith("/licenses/LICENSE") for name in names)
    stem = wheel.name.split("-py3")[0]
    assert {name.split("/")[0] for name in names} == {"gpulab", f"{stem}.dist-info", f"{stem}.data"}
    lessons = f"{stem}.data/data/share/gpulab/notebooks/"
    data = {name for name in names if name.startswith(f"{stem}.data/")}
    assert data == {lessons + path.name for path in [*NOTEBOOKS, ROOT / "notebooks" / "README.md"]}
    assert {Path(name).suffix for name in names if name.startswith("gpulab/")} == {
        ".py", ".js", ".typed", ".json", ".npz",
    }  # fmt: skip


def test_the_command_leads_to_a_function() -> None:
    module, _, function = _project()["scripts"]["gpulab"].partition(":")
    done = subprocess.run(
        [sys.executable, "-c", f"import {module} as m; assert callable(m.{function})"], cwd=ROOT, capture_output=True
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("target", ["demo", "lab", "test"])
@pytest.mark.parametrize(("terminal", "quiet"), [("MAKE_TERMOUT=/dev/pts/0", False), ("MAKE_TERMOUT=", True)])
def test_a_first_install_shows_pips_progress_in_a_terminal(
    tmp_path: Path, target: str, terminal: str, quiet: bool
) -> None:
    venv = tmp_path / "venv"
    command = ["make", "-n", f"{venv}/.stamp-{target}", f"VENV={venv}", terminal]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    installs = [line for line in printed.splitlines() if "pip install" in line]
    assert installs and all(("-qq" in line) is quiet for line in installs)


def test_make_help_lists_every_target() -> None:
    targets = set(re.findall(r"^\.PHONY: ([\w-]+)$", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    shown = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert {"demo", "lab", "test", "bench", "gpu", "gpu-first", "record", "clean"} <= targets
    assert set(re.findall(r"^  make ([\w-]+) +\S", shown, flags=re.MULTILINE)) == targets


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md"])
def test_documents_name_only_what_exists(document: str) -> None:
    text = (ROOT / document).read_text(encoding="utf-8")
    targets = set(re.findall(r"^\.PHONY: ([\w-]+)$", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    named = set(re.findall(r"(?:^|`)make ([\w-]*\w)", text, flags=re.MULTILINE))
    assert named
    assert named <= targets, named - targets
    links = [link for link in re.findall(r"\]\(([^)]+)\)", text) if "://" not in link]
    missing = [link for link in links if not (ROOT / link).exists()]
    assert not missing, missing


def test_the_guide_explains_every_option_of_the_magic() -> None:
    from gpulab.magics import OPTIONS

    text = (ROOT / "docs" / "using.md").read_text(encoding="utf-8")
    cells = re.findall(r"^\| (`-[^|]+) \|", text, flags=re.MULTILINE)
    assert {option for cell in cells for option in re.findall(r"`(-[\w-]+)", cell)} == set(OPTIONS)


def test_there_are_notebooks() -> None:
    assert [path.name for path in NOTEBOOKS][:1] == ["00_quick_start.ipynb"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_valid_and_opens_without_a_dialog(path: Path) -> None:
    notebook = nbformat.read(path, as_version=nbformat.NO_CONVERT)
    nbformat.validate(notebook)
    assert (notebook.nbformat, notebook.nbformat_minor) >= (4, 5)
    assert notebook.metadata.kernelspec.name == "python3"
    assert len({cell.id for cell in notebook.cells}) == len(notebook.cells)
    for cell in notebook.cells:
        assert cell.cell_type != "code" or cell.metadata.keys() <= {"name"}


def test_the_checkout_holds_nothing_that_a_run_has_left() -> None:
    known = {
        ".ci", ".gitignore", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "Makefile", "README.md", "benchmarks",
        "binder", "constraints.txt", "docs", "frontend", "gpulab", "notebooks", "planted", "pyproject.toml",
        "recordings", "tests",
    }  # fmt: skip
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    assert {name.split("/")[0] for name in listed.stdout.split("\0") if name} <= known
