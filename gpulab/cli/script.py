"""Runs a user's script or module in this process, as `python` would."""

from __future__ import annotations

import builtins
import importlib.machinery
import importlib.util
import linecache
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Literal

from gpulab.errors import UsageError
from gpulab.user_code import runs_users_code

if TYPE_CHECKING:
    from gpulab.tuning.code import Code
    from gpulab.tuning.execute import Execution

runs_users_code(__file__)

INTERRUPTED_STATUS = 130


class Script:
    """A Python file, run as `python file` would run it, or a module, as `python -m module` would.

    Nothing is restored afterwards: the script's threads and exit handlers still need their `__main__`. `raised` is
    the exception of the script, unless it is a clean `sys.exit`.
    """

    def __init__(self, path: str, args: Sequence[str], before: Path | None = None, *, is_module: bool = False) -> None:
        """`before`: a file that runs first, for a cell. Raises UsageError if there is no such script."""
        self._spec = _module_spec(path, args) if is_module else None
        self._path = path if self._spec is None else str(self._spec.origin)
        self._source = read(self._path)
        self._before = before
        self._args = args
        self._main = ModuleType("__main__")
        self._is_prepared = False
        self.raised: BaseException | None = None

    @property
    def text(self) -> str:
        """The script's text; empty if its encoding is invalid, which raises when it runs."""
        try:
            return importlib.util.decode_source(self._source)
        except (SyntaxError, UnicodeDecodeError):
            return ""

    @property
    def _file(self) -> str:
        """The file name for its lines; for a cell without the folder, which is temporary."""
        return os.path.abspath(self._path) if self._before is None else os.path.basename(self._path)

    def code(self) -> Code:
        """The script as code that can run again. Raises UsageError if it does not parse."""
        from gpulab.api.ranked_experiment import file_code

        source: Literal["cell", "script"] = "script" if self._before is None else "cell"
        try:
            return file_code(self.text, self._main.__dict__, self._file, source)
        except SyntaxError as e:
            raise UsageError(f"The script does not parse: {e}.") from None

    def prepared(self) -> bool:
        """Set up this process for the script, and run `before`. False if `before` raised."""
        if self._is_prepared:
            return True
        self._is_prepared = True
        absolute = os.path.abspath(self._path)
        self._main.__file__ = absolute  # spawned DataLoader workers find their __main__ by it
        self._main.__loader__ = importlib.machinery.SourceFileLoader("__main__", absolute)
        if self._spec is not None:
            self._main.__spec__, self._main.__package__ = self._spec, self._spec.parent
            self._main.__loader__, self._main.__dict__["__cached__"] = self._spec.loader, self._spec.cached
        self._main.__dict__["__builtins__"] = builtins
        sys.modules["__main__"] = self._main
        sys.argv = [self._path, *self._args]
        if self._before is not None:
            before, name = read(self._before), self._before.name
            _show_lines(self._source, self._file)
            _show_lines(before, name)
            try:
                self._keep(lambda: self._execute(before, name))
            except BaseException as e:
                if e is not self.raised:
                    raise
        elif self._spec is None and not sys.flags.safe_path:
            sys.path[0] = os.path.dirname(os.path.realpath(self._path))
        return self.raised is None

    def run(self, execution: Execution | None = None) -> None:
        """Run the script with the settings of an execution. Its exception is stored in `raised` and propagates."""
        if execution is None:
            self._keep(lambda: self._execute(self._source, self._file))
        else:
            with execution.applied() as code:
                self._keep(code.run)

    def _execute(self, source: bytes, file: str) -> None:
        exec(compile(source, file, "exec", dont_inherit=True), self._main.__dict__)

    def _keep(self, act: Callable[[], object]) -> None:
        try:
            act()
        except BaseException as e:
            if isinstance(e, SystemExit) and e.code in (None, 0):
                return
            self.raised = e
            raise

    def status(self) -> int:
        """The exit status as from Python; prints the traceback as Python does (`profile` removed gpulab's frames)."""
        raised = self.raised
        if raised is None:
            return 0
        if isinstance(raised, SystemExit):
            if isinstance(raised.code, int):
                return raised.code
            print(raised.code, file=sys.stderr)
            return 1
        sys.excepthook(type(raised), raised, raised.__traceback__)
        return INTERRUPTED_STATUS if isinstance(raised, KeyboardInterrupt) else 1


def _show_lines(source: bytes, file: str) -> None:
    text = source.decode()
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)


def _module_spec(name: str, args: Sequence[str]) -> importlib.machinery.ModuleSpec:
    """The spec of a module, or of a package's `__main__`; enclosing packages are imported, as by Python.

    Raises UsageError if there is none.
    """
    if name.endswith(".py"):
        raise UsageError(f"After -m stands the name of a module: leave out the .py of {name!r}, or the -m.")
    if not sys.flags.safe_path:
        sys.path[0] = os.getcwd()
    sys.argv = ["-m", *args]
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{name}.__main__")
    except (ImportError, ValueError) as e:
        raise UsageError(f"The module {name!r} cannot be found: {e}.") from e
    if spec is None or not spec.has_location or not str(spec.origin).endswith(".py"):
        raise UsageError(f"There is no module {name!r} that can be run.")
    return spec


def read(path: str | Path) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as e:
        raise UsageError(f"The script {str(path)!r} cannot be opened: {e.strerror or e}.") from e
