"""Runs a lesson's notebook as Binder would: in an environment made from binder/'s files, on one core, within 2 GB."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import nbclient
import nbformat
import psutil
from filelock import FileLock
from msgspec import Struct, field
from nbformat import NotebookNode

from gpulab.lessons.editions import cell_name
from tests.support import leftovers
from tests.support.paths import ROOT

NOTEBOOKS = ROOT / "notebooks"
LONG_S = 900  # for a notebook on a busy machine
MOST_BYTES = 2_000_000_000  # of Binder
BEGIN = """
%%reset -f
import os
os.chdir(%r)
os.environ["GPULAB_DIR"] = os.path.abspath("runs")
"""
LEFT_BEHIND = """
scope = {"__name__": "leftovers"}
exec(%r, scope)
lesson.close()
print(scope["leftovers"]())
""" % Path(leftovers.__file__).read_text(encoding="utf-8")  # noqa: UP031


def binder_environment(above: Path) -> Path:
    """The folder of an environment made as Binder makes it: PyTorch's CPU build first, then binder/postBuild.

    It is kept below `above` for as long as no file that it is made from changes. The tests' own torch stands in for the
    one of conda.
    """
    made_from = [*sorted((ROOT / "binder").iterdir()), ROOT / "constraints.txt", ROOT / "pyproject.toml"]
    digest = hashlib.sha256(b"".join([bytes(ROOT), *(path.read_bytes() for path in made_from)])).hexdigest()[:12]
    folder = above / f"binder-{digest}"
    above.mkdir(parents=True, exist_ok=True)
    with FileLock(above / "binder.lock"):
        if not (folder / "made").exists():
            shutil.rmtree(folder, ignore_errors=True)
            subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
            _use_the_same_torch(folder)
            path = f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
            done = subprocess.run(
                ["bash", "binder/postBuild"],
                cwd=ROOT,
                env={**os.environ, "PATH": path, "VIRTUAL_ENV": str(folder)},
                capture_output=True,
                text=True,
            )
            assert done.returncode == 0, done.stderr[-4000:]
            (folder / "made").touch()
    return folder


def _use_the_same_torch(folder: Path) -> None:
    version = subprocess.run(
        [sys.executable, "-c", "import torch; print(torch.__version__.partition('+')[0])"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    command = [str(folder / "bin" / "python"), "-m", "pip", "install", "-qq", "--disable-pip-version-check"]
    subprocess.run([*command, "-c", str(ROOT / "constraints.txt"), f"torch=={version}"], check=True)


def install_kernel(name: str, python: str, share: Path, variables: Mapping[str, str] | None = None) -> None:
    """A kernelspec below `share` that runs on one core with that Python: each process of the tests has its own."""
    folder = share / "kernels" / name
    folder.mkdir(parents=True)
    one_core = ["taskset", "-c", str(_own_core())] if shutil.which("taskset") else []
    argv = [*one_core, python, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    spec = {"argv": argv, "display_name": name, "language": "python", "env": dict(variables or {})}
    (folder / "kernel.json").write_text(json.dumps(spec))


def _own_core() -> int:
    """One of the cores that this process may use, another one for each worker of pytest-xdist."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [0]
    worker = os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")
    return cores[int(worker) % len(cores)]


def shipped(name: str) -> NotebookNode:
    """The notebook as it is shipped, with its outputs."""
    notebook: NotebookNode = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)
    return notebook


class Shown(Struct):
    """What each code cell showed, by its name, and the most memory that the kernel and its workers had meanwhile."""

    texts: dict[str, list[str]] = field(default_factory=dict)
    peak_bytes: int = 0


class Kernel:
    """Runs notebooks one after the other in one process, from which the names of the one before are gone."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._client: nbclient.NotebookClient | None = None

    def execute(self, notebook: NotebookNode, folder: Path, further: Sequence[tuple[str, str, str]] = ()) -> Shown:
        """Run it in `folder`; each of `further` runs after the cell it names first. Raises where a cell raises."""
        for after, name, code in further:
            place = next(i for i, cell in enumerate(notebook.cells) if cell_name(cell) == after) + 1
            notebook.cells.insert(place, nbformat.v4.new_code_cell(code, metadata={"name": name}))
        notebook.cells.insert(0, nbformat.v4.new_code_cell(BEGIN % str(folder), metadata={"name": "begin"}))
        before = self._client
        client = nbclient.NotebookClient(
            notebook,
            before.km if before is not None else None,
            timeout=LONG_S,
            kernel_name=self._name,
            resources={"metadata": {"path": str(folder)}},
        )
        if before is not None:
            client.kc = before.kc
        self._client = client
        shown = Shown()
        try:
            with memory_watched(shown):
                client.execute(cleanup_kc=False)
        except BaseException:
            self.close()
            raise
        shown.texts = {cell_name(cell): [*texts(cell)] for cell in notebook.cells if cell.cell_type == "code"}
        return shown

    def close(self) -> None:
        """End the process; the next notebook has a new one."""
        client, self._client = self._client, None
        if client is not None:
            client._cleanup_kernel()


@contextmanager
def memory_watched(shown: Shown, every_s: float = 0.3) -> Iterator[None]:
    """Inside, the memory of what this process starts meanwhile is read, shared pages counted once."""
    over = threading.Event()
    earlier = set(psutil.Process().children(recursive=True))

    def look() -> None:
        while not over.wait(every_s):
            now = set(psutil.Process().children(recursive=True)) - earlier
            shown.peak_bytes = max(shown.peak_bytes, sum(map(_own_bytes, now)))

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _own_bytes(process: psutil.Process) -> int:
    with suppress(psutil.Error):
        memory = process.memory_full_info()
        return int(getattr(memory, "pss", memory.rss))
    return 0


def texts(cell: NotebookNode) -> Iterator[str]:
    """The text of each output; the place of a progress line or a button stays, and is empty."""
    for output in cell.outputs:
        assert output.output_type != "error"
        text = output.get("text") or output.get("data", {}).get("text/plain", "")
        if text:
            yield text
