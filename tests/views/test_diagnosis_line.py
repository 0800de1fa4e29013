"""The sentence of a running cell is that of its report, by the same rules, and finding it changes nothing."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import gpulab
from gpulab.analysis.facts import facts
from gpulab.api.diagnose import diagnosis_for_report
from gpulab.diagnosis.catalogue import kind_of
from gpulab.formatting import decapitalized, plural
from gpulab.live_feed import SoFar
from gpulab.run import Run, StepFlag
from gpulab.thresholds import DEFAULT
from gpulab.views.live_view import EVERY_S, Sentence
from tests.support import synthetic
from tests.support.scripted_feed import ScriptedFeed


class Feed(ScriptedFeed):
    def __init__(self, run: Run | None) -> None:
        super().__init__()
        self.run, self.asked = run, 0

    def so_far(self) -> SoFar | None:
        self.asked += 1
        return None if self.run is None else SoFar(self.run, DEFAULT)


@pytest.mark.parametrize("name", ["cpu", "gpu", "tiny"])
def test_it_is_the_reports(name: str) -> None:
    run = synthetic.cases()[name].facts.run
    first = diagnosis_for_report(facts(run)).first
    words = Sentence().words(Feed(run), 10.0)
    said = f"So far ({plural(len(run.steps), 'step')}), {decapitalized(first.summary)}"
    assert words == ("" if kind_of(first.key).role == "open question" else said)


def test_it_is_looked_for_every_few_seconds() -> None:
    feed, sentence = Feed(None), Sentence()
    for elapsed_s in (0.0, 0.1, EVERY_S - 0.1, EVERY_S, EVERY_S + 0.1):
        assert sentence.words(feed, elapsed_s) == ""
    assert feed.asked == 2


def test_a_running_capture_gives_its_steps_and_keeps_them() -> None:
    layer = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    seen: list[SoFar | None] = []
    with gpulab.profile("live", save=False, show=False, trace=False) as p:
        for (batch,) in DataLoader(TensorDataset(torch.ones(40, 4)), batch_size=1):
            layer(batch).sum().backward()
            optimizer.step()
            assert p._capture is not None
            seen.append(p._capture.so_far())
    early, late = seen[5], seen[-1]
    assert early is None and late is not None
    steps, after = late.run.steps, p.run.steps
    assert len(steps) >= 38 and np.array_equal(steps.end_ns, after.end_ns[: len(steps)])
    assert [i for i, flags in enumerate(after.flags) if flags & StepFlag.LAST] == [len(after) - 1]
