"""What a trace says its ranks exchange: kinds, sizes, groups, and nothing where it does not say."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict

import numpy as np
import pytest

from gpulab.analysis.facts import facts
from gpulab.api.reading import report
from gpulab.run import Collective
from gpulab.trace.columns import collective_columns
from gpulab.trace.event_decoder import Args
from gpulab.trace.load import load_run
from tests.support.real_traces import path

SPELLINGS = {
    "allreduce": Collective.ALL_REDUCE,
    "allreduce_coalesced": Collective.ALL_REDUCE,
    "_allgather_base": Collective.ALL_GATHER,
    "all_gather": Collective.ALL_GATHER,
    "_reduce_scatter_base": Collective.REDUCE_SCATTER,
    "reduce": Collective.REDUCE,
    "broadcast": Collective.BROADCAST,
    "all_to_all": Collective.ALL_TO_ALL,
    "all_to_allv": Collective.ALL_TO_ALL,
    "gather": Collective.GATHER,
    "scatter": Collective.SCATTER,
    "send": Collective.SEND,
    "recv": Collective.RECEIVE,
    "barrier": None,
    "wait": None,
    7: None,
}


@pytest.mark.parametrize(("name", "kind"), SPELLINGS.items())
def test_kinds_in_pytorchs_spellings(name: str | int, kind: Collective | None) -> None:
    (written,) = collective_columns([Args(collective=name)])["collective"]
    assert written == (None if kind is None else int(kind))


@pytest.mark.parametrize(
    ("args", "message_bytes"),
    [
        (Args(collective="_allgather_base", elements_in=10, elements_out=80, element_type="BFloat16"), 160),
        (Args(collective="_reduce_scatter_base", elements_in=80, elements_out=10, element_type="Float"), 320),
        (Args(collective="allreduce", elements_in=10, elements_out=10, element_type="of another world"), None),
        (Args(collective="allreduce", elements_in=0, elements_out=0, element_type="Float"), None),
        (Args(collective="allreduce", element_type="Float"), None),
        (Args(collective="allreduce", elements_in="ten", elements_out=float("nan"), element_type="Float"), None),
        (Args(collective="barrier", elements_in=10, elements_out=10, element_type="Float"), None),
    ],
)
def test_the_size_is_of_the_larger_end(args: Args, message_bytes: int | None) -> None:
    assert collective_columns([args])["message_bytes"] == [message_bytes]


def test_other_kernels_have_no_columns() -> None:
    assert collective_columns([Args(), Args()]) == {}
    columns = collective_columns([Args(), Args(collective="send", process_group="12", group_size=2, sequence=5)])
    assert columns["process_group"] == [None, 12] and columns["collective_sequence"] == [None, 5]
    assert collective_columns([Args(collective="send", process_group="mesh_tp")])["process_group"] == [None]


@pytest.mark.parametrize("name", ["mi300_resnet_healthy", "b200_moe_launch_bound"])
def test_a_real_trace_against_its_text(name: str) -> None:
    file = path(name)
    width = {"BFloat16": 2, "Float": 4, "Long": 8}
    by_kind: dict[str, list[tuple[int, float]]] = defaultdict(list)
    for event in json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]:
        args = event.get("args", {})
        if event.get("cat") == "kernel" and "Collective name" in args:
            most = max(args["In msg nelems"], args["Out msg nelems"])
            by_kind[args["Collective name"]].append((most * width[args["dtype"]], event["dur"]))
    timeline = load_run(file).timeline
    assert timeline is not None and by_kind
    for kind, written in by_kind.items():
        rows = np.flatnonzero(timeline.extra["collective"] == SPELLINGS[kind])
        assert sorted(timeline.extra["message_bytes"][rows]) == sorted(size for size, _ in written)
        assert timeline.duration_ns[rows].sum() / 1e3 == pytest.approx(sum(us for _, us in written), abs=len(written))
        assert set(timeline.extra["group_size"][rows]) == {8}


def test_the_bus_bandwidth_of_a_real_trace() -> None:
    run = load_run(path("b200_moe_launch_bound"))
    trace = facts(run).trace
    assert trace is not None
    (exchange,) = trace.exchanges
    assert (exchange.kind, exchange.process_group, exchange.group_size) == ("all-gather", 3, 8)
    assert exchange.message_bytes == 201_088 * 2
    assert exchange.bus_bytes_per_s == pytest.approx(201_088 * 2 * 7 / 8 / 21.953e-6, rel=1e-3)
    text = report(run).text(full=True)
    assert "all-gather" in text and "3, 8 ranks" in text and "16.0 GB/s" in text and "may be higher" in text
