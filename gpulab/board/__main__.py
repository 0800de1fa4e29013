"""`python -m gpulab.board FOLDER [--group instructors]`: the board as a service of JupyterHub."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path


def main() -> int:
    """Serve until ended. Exit status 2 if it cannot."""
    parser = argparse.ArgumentParser(
        prog="python -m gpulab.board",
        description="The board of a class as a service that JupyterHub starts; docs/class.md has its configuration.",
    )
    parser.add_argument("folder", type=Path, help="where the learners' lines are kept; made if it is not there")
    parser.add_argument("--group", default="instructors", help="the hub's group that may see it (default: instructors)")
    options = parser.parse_args()
    if "JUPYTERHUB_API_TOKEN" not in os.environ:
        print("gpulab: this is a service of JupyterHub, which starts it: see docs/class.md.", file=sys.stderr)
        print("In a notebook: %gpulab board FOLDER.", file=sys.stderr)
        return 2
    try:
        from gpulab.board.hub_service import serve
    except ImportError as e:
        print(f"gpulab: the service needs JupyterHub ({e}): pip install jupyterhub.", file=sys.stderr)
        return 2
    try:
        options.folder.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        print(f"gpulab: {str(options.folder)!r} cannot be made: {e.strerror or e}.", file=sys.stderr)
        return 2
    serve(options.folder.absolute(), options.group)
    return 0


if __name__ == "__main__":
    sys.exit(main())
