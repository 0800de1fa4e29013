"""How long a person waits at the bench: from a toggle to the first figure, for one row, and for a bench that opens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from playwright.sync_api import sync_playwright

from benchmarks.harness import Figure
from benchmarks.kernel import Kernel, kernel
from gpulab.demo import cell
from tests.browser.jupyterlab_page import open_chromium

REPEATS = 5
ROWS = 50

# In the kernel, as a click does it: messages of the front end in, the widget's state out.
CLICK = """
import json, time
from msgspec.structs import replace
from gpulab.bench import opening
from gpulab.bench.output import BenchOutput

def opened():
    began = time.perf_counter()
    opening.open_bench()
    session = opening._opened[-1]
    session._predict()
    return session, time.perf_counter() - began

def clicked(session, settings):
    first = []
    def heard(change):
        if "so far, 1 pair" in change["new"] and not first:
            first.append(time.perf_counter() - began)
    session._widget.root.observe(heard, "table")
    began = time.perf_counter()
    session._hear("run", {"settings": settings})
    return first[0], time.perf_counter() - began

def grow(session, count):
    rows = session.rows
    more = tuple(replace(rows[-1], id=f"{i}", settings={"workers": f"{i}"}) for i in range(2, 2 + count - len(rows)))
    session.bench = replace(session.bench, rows=(*rows, *more))
    session._keep_rows()
"""


DRAWN_MS = """
table => {
  const began = performance.now(), bench = document.querySelector(".gp-bench");
  bench.innerHTML = table;
  bench.getBoundingClientRect();
  return performance.now() - began;
}
"""


def measure() -> dict[str, object]:
    """Seconds: medians of fresh kernels."""
    rounds = [_round() for _ in range(REPEATS)]
    medians = {name: float(np.median([r[name] for r in rounds])) for name in rounds[0]}
    return {**medians, "rounds": rounds, "rows": ROWS}


def _round() -> dict[str, float]:
    with kernel() as demo:
        demo.run("%load_ext gpulab")
        demo.run(cell.SETUP)
        demo.run(f"%%gpuprofile --steps 30\n{cell.TRAINING}")
        demo.run(CLICK)
        demo.run("session, opening_s = opened()")
        demo.run("first_s, row_s = clicked(session, {'workers': 2})")
        demo.run(f"grow(session, {ROWS}); session.close()")
        return {**_value(demo, "first_s", "row_s", "opening_s"), **_many(demo)}


def _many(demo: Kernel) -> dict[str, float]:
    demo.run("session, many_s = opened()")
    assert demo.value("len(session.rows)") == ROWS
    root = "session._widget.root"
    return {**_value(demo, "many_s"), "drawn_s": _drawn_s(demo.value(f"{root}.css"), demo.value(f"{root}.table"))}


def _drawn_s(style: str, table: str) -> float:
    """Of a browser, to lay out what the front end puts into the page."""
    with sync_playwright() as playwright:
        browser = open_chromium(playwright)
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        page.set_content(f"<style>{style}</style><div class='gp-bench'></div>")
        drawn_ms = page.evaluate(DRAWN_MS, table)
        assert page.locator("tr[data-row]").count() == ROWS
        browser.close()
    return float(drawn_ms) / 1e3


def _value(demo: Kernel, *names: str) -> dict[str, float]:
    return {name: demo.value(name) for name in names}


def figures(results: Mapping[str, Any]) -> Iterator[Figure]:
    """Medians."""
    yield Figure("toggle, Run: the first figure (the demo's cell)", results["first_s"], "s", target="first")
    yield Figure("until the row is decided, with its full run", results["row_s"], "s")
    yield Figure("a bench of one row opens, with what is expected of each toggle", results["opening_s"], "s")
    yield Figure(f"a bench of {results['rows']} rows opens", results["many_s"], "s", target="many")
    yield Figure(f"a browser lays {results['rows']} rows out", results["drawn_s"], "s", target="many")
