"""Traces whose steps wait for data in bursts: the share of the whole window decides, against a sum by hand."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpulab.analysis.facts import Facts
from gpulab.diagnosis.diagnose import diagnose
from gpulab.formatting import percent
from gpulab.views.report.sections import sections
from tests.support.loops import Machine

KERNEL = "turing_fp16_s1688gemm_fp16_128x128_ldg8_f2f_nn"
BURSTS_US = [700_000, 0, 0, 0, 650_000, 0, 0, 0]


def steps_that_wait(waits_us: list[int], upload_us: float = 0) -> Facts:
    """Each step waits so long for its batch, and then computes for 80 ms."""
    machine = Machine()
    for wait_us in waits_us:
        machine.load(wait_us)
        if upload_us:
            machine.upload(upload_us, pinned=False)
        machine.operator("aten::mm", KERNEL, 80_000)
        machine.host = max(machine.host, machine.free)
        machine.end_step()
    return machine.facts()


def waited_by_hand(facts: Facts) -> float:
    """The time inside the loader's spans over the time from the first step's begin to the last one's end."""
    timeline, steps = facts.run.timeline, facts.run.steps
    assert timeline is not None
    waited_ns = 0
    for name_id, duration_ns in zip(timeline.name_id.tolist(), timeline.duration_ns.tolist(), strict=True):
        if timeline.names[name_id].startswith("enumerate(DataLoader)"):
            waited_ns += duration_ns
    return waited_ns / int(steps.end_ns[-1] - steps.start_ns[0])


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from([0, 0, 0, 5_000, 40_000, 700_000]), min_size=1, max_size=9))
def test_the_headline_has_the_share_of_the_window(waits_us: list[int]) -> None:
    facts = steps_that_wait(waits_us)
    share, first = waited_by_hand(facts), diagnose(facts, predict_cures=False).first
    assert facts.data_wait_fraction == pytest.approx(share, rel=1e-6)
    assert (first.key == "data_starved") == (share >= 0.1)
    if first.key == "data_starved":
        assert f"{percent(share)} of each step waits" in first.summary
        assert facts.typical_step_us is not None
        assert first.recoverable_us_per_step == pytest.approx(share * facts.typical_step_us.median, rel=1e-3)


def test_a_burst_comes_before_a_smaller_copy() -> None:
    """Medians hide it: three of four steps do not wait at all."""
    facts = steps_that_wait(BURSTS_US, upload_us=15_000)
    found = diagnose(facts, predict_cures=False)
    assert [f.key for f in found.findings][:2] == ["data_starved", "blocking_copy"]
    assert "from 0 µs to 700 ms" in " ".join(e.words for e in found.first.evidence)
    copy = found.findings[1].recoverable_us_per_step
    assert copy is not None and copy == pytest.approx(15_000, rel=0.05)


@pytest.mark.parametrize(
    ("waits_us", "rounds", "average", "wait_us"),
    [
        (BURSTS_US, None, "mean", sum(BURSTS_US) / len(BURSTS_US)),
        ([40_000, 41_000, 39_000, 44_000], 1, "median", 40_500),
    ],
)
def test_bursts_are_told_by_means_and_steps_alike_by_medians(
    waits_us: list[int], rounds: int | None, average: str, wait_us: float
) -> None:
    facts = steps_that_wait(waits_us)
    assert facts.data_wait_us is not None and facts.data_wait_us.median == pytest.approx(wait_us)
    assert rounds is None or facts.round_steps == rounds
    assert facts.data_wait_us.p10 <= min(waits_us) + 1_000 and facts.data_wait_us.p90 >= 0.9 * max(waits_us)
    table = next(section for section in sections(facts) if section.title == "Step time")
    assert table.columns[1].title == average
