"""A reader can run the README's cells as they are printed."""

from __future__ import annotations

from pathlib import Path

from gpulab.options import QUICK_VARIABLE
from tests.support.kernel_session import kernel
from tests.support.readme import cells_of_the_readme


def test_the_cells_of_the_readme_run_as_printed(tmp_path: Path) -> None:
    setup, training, comparison = cells_of_the_readme()
    with kernel(tmp_path, env={QUICK_VARIABLE: "1"}) as session:
        for cell in (setup, "%config GPUProfile.steps = 12", training, comparison):
            assert session.run(cell).error is None
        assert session.value("[c.b.label for c in __import__('gpulab').experiments[-1].comparisons]") == ["workers=2"]
