"""The cells that the README prints: they are run as they stand there, and its pictures show them."""

from __future__ import annotations

import re

from tests.support.paths import ROOT


def cells_of_the_readme() -> tuple[str, str, str]:
    """The setup, the profiled cell, and the same code under the magic of the comparison."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    setup, training, comparison = re.findall(r"^```python\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
    code = training.partition("\n")[2].rstrip()
    return setup.rstrip(), training.rstrip(), comparison + code
