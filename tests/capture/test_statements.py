"""Which statement and which loops enclose a line, and which lines hold the steps within them."""

from __future__ import annotations

import pytest

from gpulab.capture.places import Naming, units_of

SOURCE = """\
for batch in loader:
    step(batch)

def item(i):
    total = sum(
        x * x
        for x in range(i)
    )
    while total:
        for j in range(3):
            total -= j
    return total
""".splitlines()


@pytest.mark.parametrize(
    ("line", "units"), [(2, ((1, 2),)), (6, ((5, 8),)), (11, ((10, 11), (9, 11))), (12, ()), (4, ())]
)
def test_a_line_is_within_its_loops(line: int, units: tuple[tuple[int, int], ...]) -> None:
    assert units_of(SOURCE, line) == units
    assert units_of(["%time x = (", "}"], 1) == (), "it is no Python"


def test_the_loop_over_steps_is_no_unit() -> None:
    naming = Naming("\n".join(SOURCE), 0, [("<cell>", 2, "")])
    naming.number(("<cell>", 2, "<module>"))
    naming.number(("<cell>", 11, "item"))
    assert [[unit.first for unit in place.units] for place in naming.places] == [[], [10, 9]]
    assert naming.places[1].units[0].text == "for j in range(3):"


def test_excerpts_that_touch_are_one() -> None:
    naming = Naming("\n".join(SOURCE), 0)
    for line in (2, 11):
        naming.excerpt(("<cell>", line, ""))
    (excerpt,) = naming.excerpts
    assert (excerpt.file, excerpt.first, len(excerpt.lines)) == ("cell", 1, 12)
    assert excerpt.lines[5] == "        x * x"
