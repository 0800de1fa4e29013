"""A real ipykernel to run cells in, so that the live view sends as it does for a user."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

MARK = "RESULT:"


class Kernel:
    """Runs cells; drains every message, as a front end would."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def run(self, code: str) -> None:
        """Run a cell. Raises RuntimeError with its traceback where it fails."""
        self._run(code)

    def display_s(self, code: str) -> float:
        """Run a cell; when, in seconds since 1970 by the kernel's clock, its last picture was sent."""
        sent: list[float] = []

        def hear(message: dict[str, Any]) -> None:
            if message["header"]["msg_type"] in ("display_data", "update_display_data"):
                sent.append(message["header"]["date"].timestamp())

        self._client.execute_interactive(code, output_hook=hear, timeout=1200)
        return sent[-1]

    def value(self, expression: str) -> Any:
        """The JSON value of an expression."""
        out = self._run(f"import json as _json; print({MARK!r} + _json.dumps({expression}))")
        line = next(line for line in out.splitlines() if line.startswith(MARK))
        return json.loads(line.removeprefix(MARK))

    def _run(self, code: str) -> str:
        out: list[str] = []

        def hear(message: dict[str, Any]) -> None:
            content = message["content"]
            if message["header"]["msg_type"] == "stream" and content["name"] == "stdout":
                out.append(content["text"])

        reply = self._client.execute_interactive(code, output_hook=hear, timeout=1200)
        if reply["content"]["status"] != "ok":
            raise RuntimeError("\n".join(reply["content"]["traceback"]))
        return "".join(out)


@contextmanager
def kernel() -> Iterator[Kernel]:
    """A fresh kernel whose runs go to a temporary store."""
    from jupyter_client.manager import start_new_kernel

    with tempfile.TemporaryDirectory() as folder:
        env = {**os.environ, "GPULAB_DIR": folder, "OMP_NUM_THREADS": "1"}
        manager, client = start_new_kernel(kernel_name="python3", env=env, cwd=folder)
        try:
            yield Kernel(client)
        finally:
            client.stop_channels()
            manager.shutdown_kernel(now=True)
