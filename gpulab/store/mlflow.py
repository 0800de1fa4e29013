"""Runs as MLflow runs in a database of their own under one folder: no server, no network, the user's session untouched.

The database is SQLite: MLflow 3.13 and newer refuse its former plain folders. Only `MlflowClient` is used, so that an
active run or tracking URI of the user's stays as it is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import TypeGuard

from gpulab.errors import GpulabError, StoreError, UsageError
from gpulab.run import Run
from gpulab.store.atomic_write import make_folder
from gpulab.store.optional_packages import environment, first_line, installed, only_warnings
from gpulab.store.scalars import scalars, started_s
from gpulab.store.tables import Cell

EXPERIMENT = "gpulab"
DATABASE = "mlflow.db"
ID_TAG = "gpulab.id"

_MOST_METRICS = 1000  # of one request, as MLflow's REST interface documents; parameters and tags: 100
_LONGEST_VALUE = 500  # of a parameter in releases before 2.9; later ones take 6000
_STATUS = {"completed": "FINISHED", "stopped": "FINISHED", "interrupted": "KILLED", "failed": "FAILED"}
_SILENT = {"MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "true"}


def require() -> None:
    """Raises UsageError naming the package where MLflow is not there."""
    if not installed("mlflow"):
        raise UsageError("An MLflow export needs MLflow: pip install mlflow.")


@contextlib.contextmanager
def opened(folder: Path) -> Iterator[Exporter]:
    """The database of a folder. Raises UsageError without MLflow, StoreError where it cannot be made."""
    require()
    make_folder(folder)
    try:
        with _quiet():
            exporter = Exporter(folder)
            try:
                yield exporter
            finally:
                exporter.close()
    except GpulabError:
        raise
    except Exception as e:  # MlflowException, or SQLAlchemy's
        raise StoreError(f"MLflow could not write in {str(folder)!r}: {first_line(e)}") from e


class Exporter:
    """Writes runs into the experiment "gpulab"; one that is there already is left as it is."""

    def __init__(self, folder: Path) -> None:
        home = folder.absolute()
        self._client = import_module("mlflow").MlflowClient(tracking_uri=f"sqlite:///{(home / DATABASE).as_posix()}")
        known = self._client.get_experiment_by_name(EXPERIMENT)
        self._experiment: str = (
            known.experiment_id
            if known is not None
            else self._client.create_experiment(EXPERIMENT, artifact_location=(home / "artifacts").as_uri())
        )

    def add(self, run: Run, row: Mapping[str, Cell]) -> bool:
        """Write a run: figures and curves as metrics, settings as parameters. False where it was there already."""
        if self._client.search_runs([self._experiment], f"tags.`{ID_TAG}` = '{run.id}'", max_results=1):
            return False
        start_ms = round(started_s(run) * 1000)
        tags = {"gpulab.outcome": run.outcome}
        made = self._client.create_run(self._experiment, start_time=start_ms, tags=tags, run_name=run.name[:250])
        key = made.info.run_id
        self._client.log_batch(key, params=_params(row))
        metrics = _metrics(run, row, start_ms)
        for at in range(0, len(metrics), _MOST_METRICS):
            self._client.log_batch(key, metrics=metrics[at : at + _MOST_METRICS])
        self._client.set_terminated(key, _STATUS[run.outcome], start_ms + run.code_wall_ns // 1_000_000)
        self._client.set_tag(key, ID_TAG, run.id)  # last: what was interrupted is written anew the next time
        return True

    def close(self) -> None:
        """Close the database: MLflow keeps its connections as long as the process lives."""
        with contextlib.suppress(AttributeError):  # a part of MLflow that it does not promise to keep
            self._client._tracking_client.store.engine.dispose()


def _params(row: Mapping[str, Cell]) -> list[object]:
    """Settings, texts and switches."""
    param = import_module("mlflow.entities").Param
    said = {name: cell for name, cell in row.items() if cell not in (None, "") and not _is_number(cell)}
    return [param(name, str(cell)[:_LONGEST_VALUE]) for name, cell in said.items()]


def _metrics(run: Run, row: Mapping[str, Cell], start_ms: int) -> list[object]:
    """The figures at step 0, and the curves; times in milliseconds."""
    metric = import_module("mlflow.entities").Metric
    figures = [metric(name, float(cell), start_ms, 0) for name, cell in row.items() if _is_number(cell)]
    return figures + [
        metric(curve.name, float(value), start_ms + int(t_ns) // 1_000_000, int(number))
        for curve in scalars(run)
        for number, t_ns, value in zip(curve.number, curve.t_ns, curve.value, strict=True)
    ]


def _is_number(cell: Cell) -> TypeGuard[int | float]:
    return isinstance(cell, int | float) and not isinstance(cell, bool)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with environment(_SILENT):
        import_module("mlflow")  # which sets its loggers' levels
        with only_warnings("mlflow", "alembic"):
            yield
