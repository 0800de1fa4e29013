"""The figures that diagnosis and prediction share: one home, and None where nothing was recorded."""

from __future__ import annotations

import dataclasses

import pytest
import synthetic

from gpulab.analysis.facts import Facts, facts
from gpulab.diagnosis.case import Case
from gpulab.diagnosis.diagnose import diagnose
from gpulab.diagnosis.thresholds import DEFAULT
from gpulab.loading.trace import load_run
from gpulab.prediction.today import Today
from gpulab.run import Timeline
from tests import real_traces


def loaded_by(iterator: str, workers: int | None) -> Facts:
    """A run whose trace shows that iterator; `workers`: what the loader says, None for a trace from elsewhere."""
    run = synthetic.gpu_case().run
    assert isinstance(run.timeline, Timeline) and run.loader is not None
    names = tuple(n.replace("_MultiProcessingDataLoaderIter", iterator) for n in run.timeline.names)
    loader = None if workers is None else dataclasses.replace(run.loader, num_workers=workers)
    return facts(dataclasses.replace(run, timeline=dataclasses.replace(run.timeline, names=names), loader=loader))


@pytest.mark.parametrize(
    ("iterator", "workers", "count", "some"),
    [
        ("_MultiProcessingDataLoaderIter", 4, 4, True),
        ("_SingleProcessDataLoaderIter", 0, 0, False),
        ("_SingleProcessDataLoaderIter", None, 0, False),
        ("_MultiProcessingDataLoaderIter", None, None, True),
        ("_IteratorOfALibrary", None, None, None),
    ],
)
def test_loader_workers_are_told_alike_to_findings_and_predictions(
    iterator: str, workers: int | None, count: int | None, some: bool | None
) -> None:
    known = loaded_by(iterator, workers)
    assert (known.worker_count, known.has_workers) == (count, some)
    assert Today.of(known).workers == count == Case(known, DEFAULT).facts.worker_count


@pytest.mark.parametrize(("name", "some"), [("v100_resnet50_workers0", False), ("v100_resnet50_workers4", True)])
def test_a_real_trace_tells_whether_there_are_workers_and_not_how_many(name: str, some: bool) -> None:
    known = facts(load_run(real_traces.path(name)))
    assert known.has_workers is some and known.worker_count == (None if some else 0)
    words = " ".join(e.words for f in diagnose(known).findings for e in f.evidence)
    assert ("worker processes load the data" in words, "(num_workers=0)" in words) == (False, not some)
