"""What gpulab says of each planted cell and recorded trace, and what its cure really gains.

Each cell runs in a process of its own: once under `%%gpuprofile`, then in short runs in turn as written, cured, and
with the knobs that the finding advised. `python -m benchmarks.planted [NAME…]` runs some cells while building, with
`--no-cure` or `--no-diagnosis` half of it, and keeps no result; `--store FOLDER` keeps the runs, for `make ablate`.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import first_runs
from benchmarks.curing import measured
from benchmarks.harness import Figure, in_own_process
from planted import judge
from planted.catalogue import CELLS, TRACES, Planted, PlantedTrace, cells_of, named

VARIABLE = "GPULAB_TRACES"


def tuned() -> dict[str, object]:
    """The cells that the rules were built or mended with, and the traces."""
    return {**_measured(cells_of("tuned")), "traces": in_own_process(__name__, "rows_of_traces")["rows"]}


def aside() -> dict[str, object]:
    """The cells kept aside."""
    return _measured(cells_of("aside"))


def _measured(cells: Sequence[Planted]) -> dict[str, Any]:
    from gpulab.devices.machine import environment

    rows = [row_of(planted) for planted in cells]
    first_runs.record(rows, CELLS, environment().cpu)
    return {"totals": judge.totals(rows), "rows": rows}


def row_of(planted: Planted, *, diagnose: bool = True, cures: bool = True, store: str = "") -> dict[str, Any]:
    """All about one cell, in a process of its own. A cell that fails is told, and does not end the others.

    `store`: an absolute path of a folder in which the run is kept; empty for none.
    """
    began = time.monotonic()
    row = first_runs.unmeasured(planted, skipped(planted))
    if not row["skipped"]:
        try:
            how = {"diagnose": diagnose, "cures": cures, "store": store}
            row |= in_own_process("benchmarks.planted", "columns_of", name=planted.name, **how)
        except Exception as e:
            row["failed"] = f"{type(e).__name__}: {e}"
    row["seconds"] = time.monotonic() - began
    _tell(row)
    return row


def skipped(planted: Planted) -> str:
    """Why it cannot run here; empty where it can."""
    from importlib.util import find_spec

    import torch

    if planted.gpu and not torch.cuda.is_available():
        return "needs a GPU"
    missing = [name for name in planted.needs if find_spec(name) is None]
    return f"needs {', '.join(missing)}" if missing else ""


def _tell(row: dict[str, Any]) -> None:
    """One line on stderr."""
    if row["skipped"] or row["failed"]:
        words = f"skipped: {row['skipped']}" if row["skipped"] else f"FAILED: {row['failed']}"
        print(f"  {row['name']:34} {words}", file=sys.stderr, flush=True)
        return
    mark = "" if "right" not in row else "ok   " if row["right"] else "WRONG"
    arms = (row["measured"] or {}).get("arms", {})
    gains = "  ".join(f"{label} {a['ratio']:.2f} [{a['interval'][0]:.2f}, {a['interval'][1]:.2f}]"
                      for label, a in arms.items())  # fmt: skip
    predicted = (row.get("predicted") or {}).get("ratio")
    said = f" predicted {predicted:.2f}" if predicted is not None else ""
    print(
        f"  {mark} {row['name']:34} {'+'.join(row['causes']) or 'healthy':24} -> {row.get('headline', ''):20}"
        f"{said} {gains} {'UNTRUE: ' + row['untrue'] if row['untrue'] else ''} {row['seconds']:.0f} s",
        file=sys.stderr,
        flush=True,
    )


# -- one cell, in this process -----------------------------------------------------------------------------------------


def columns_of(name: str, diagnose: bool = True, cures: bool = True, store: str = "") -> dict[str, Any]:
    """The columns of the cell's row that need it to run. `store` keeps the diagnosed run under the cell's name."""
    planted = named(name)
    with folder_of_its_own(gpu=planted.gpu):
        return _diagnosed(planted, cures, store) if diagnose else _cured(planted, None)


@contextlib.contextmanager
def folder_of_its_own(*, gpu: bool) -> Iterator[None]:
    """Files that a cell writes are gone afterwards; runs and earlier predictions of this machine have no say."""
    if not gpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ["HF_HUB_OFFLINE"] = "1"
    home = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        os.environ["GPULAB_DIR"] = folder
        try:
            yield
        finally:
            os.chdir(home)


def _diagnosed(planted: Planted, cures: bool, store: str) -> dict[str, Any]:
    from msgspec.structs import replace

    import gpulab
    from gpulab.store.folders import Store

    run = profiled(planted)
    if store:
        Store(Path(store)).save(replace(run, settings=replace(run.settings, name=planted.name)))
    said = judge.said(gpulab.diagnose(run))
    finding = judge.true_finding(planted, said)
    truth: dict[str, Any] = _cured(planted, finding) if cures else {"measured": None, "untrue": ""}
    return {**said, **judge.judgement(planted, said), **truth, **judge.prediction_of(finding, truth["measured"])}


def _cured(planted: Planted, finding: dict[str, Any] | None) -> dict[str, Any]:
    gains = measured(planted, finding["settings"] if finding else {})
    return {"measured": gains, "untrue": judge.truth_of(planted, gains)}


def profiled(planted: Planted) -> Any:
    """The `Run` of the cell as its user meets it."""
    device = "" if planted.gpu else " --device cpu"
    return in_notebook(*planted.text, f" --steps {planted.profiled}{device}")


def in_notebook(before: str, cell: str, options: str = "") -> Any:
    """The `Run` of a cell in IPython, after the earlier ones. Raises RuntimeError with what the cell raised."""
    from IPython.core.interactiveshell import InteractiveShell

    shell = InteractiveShell.instance()
    for text in (before, "%load_ext gpulab", f"%%gpuprofile --no-live --no-save{options}\n{cell}"):
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as errors:
            result = shell.run_cell(text)
        error = result.error_before_exec or result.error_in_exec
        if error is not None:
            raise RuntimeError(f"{type(error).__name__}: {error}\n{errors.getvalue()[-2000:]}")
    import gpulab

    return gpulab.runs[-1]


# -- traces recorded elsewhere -----------------------------------------------------------------------------------------


def rows_of_traces() -> dict[str, Any]:
    """Each trace read, diagnosed and held against what must be said of it."""
    return {"rows": [_trace_row(case) for case in TRACES]}


def file_of(case: PlantedTrace) -> Path | None:
    """The trace or the folder of ranks; None where it is not there."""
    folder = os.environ.get(VARIABLE)
    path = Path(folder, case.path) if folder else None
    return path if path is not None and path.exists() else None


def _trace_row(case: PlantedTrace) -> dict[str, Any]:
    row: dict[str, Any] = {"name": case.name, "because": case.because, "skipped": "", "failed": ""}
    path = file_of(case)
    if path is None:
        return row | {"skipped": f"needs the trace {case.path} in the folder that {VARIABLE} names"}
    import gpulab

    try:
        said = judge.said(gpulab.diagnose(path))
    except Exception as e:
        return row | {"failed": f"{type(e).__name__}: {e}"}
    return row | said | judge.trace_judgement(case, said)


# -- for people --------------------------------------------------------------------------------------------------------


def figures(results: Mapping[str, Any]) -> Iterator[Figure]:
    """The totals of one part."""
    t = results["totals"]
    held, of = t["interval_holds"]
    yield Figure.share("headline right, of the cells with a cause", t["headline_right"], t["sick"], "headline")
    yield Figure.share("… by the planted name", t["headline_exact"], t["sick"])
    yield Figure.share("true cause among the first three findings", t["among_the_first_three"], t["sick"])
    yield Figure.count("false alarms", t["false_alarms"], t["healthy"], "false_alarms")
    yield Figure(f"median error of {t['predictions']} predictions", t["median_error"], "%", target="error")
    yield Figure.share("interval of a prediction holds", held, of, "interval")
    if t.get("second_told", (0, 0))[1]:
        yield Figure.share("second cause told", *t["second_told"])
    if results.get("traces"):
        traces = [row for row in results["traces"] if not row["skipped"]]
        yield Figure.share("real traces right", sum(bool(row.get("right")) for row in traces), len(traces))


def notes(results: Mapping[str, Any]) -> Iterator[str]:
    """Each cell that is not right, and how many did not run."""
    rows, t = results["rows"], results["totals"]
    for row in rows:
        if not (row["skipped"] or row["failed"] or row["right"]):
            planted = " + ".join(row["causes"]) or "healthy"
            yield f"- {row['name']}: {row['because']}. Planted {planted}, said {row['headline']}"
    if t["skipped"]:
        yield f"- {t['skipped']} cells did not run here: they need a GPU or a package, or are new"
    if t["failed"]:
        yield f"- failed: {', '.join(t['failed'])}"
    if t["untrue"]:
        yield f"- the measurement does not bear out what was planted in {', '.join(t['untrue'])}"


def main() -> None:
    """Without a name all cells that are not kept aside."""
    parser = argparse.ArgumentParser(prog="benchmarks.planted", description=main.__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--no-cure", action="store_true", help="diagnose only; the cure is not measured")
    parser.add_argument("--no-diagnosis", action="store_true", help="measure the cure only: is the truth true?")
    parser.add_argument("--store", type=Path, metavar="FOLDER", help="keep the run of each cell there, by its name")
    asked = parser.parse_args()
    store = str(asked.store.absolute()) if asked.store else ""
    cells = [named(n) for n in asked.names] or cells_of("tuned")
    for planted in cells:
        row = row_of(planted, diagnose=not asked.no_diagnosis, cures=not asked.no_cure, store=store)
        for finding in row.get("findings", ()):
            print("       ", *(finding[k] for k in ("key", "recoverable_us_per_step", "settings", "prediction")))


if __name__ == "__main__":
    main()
