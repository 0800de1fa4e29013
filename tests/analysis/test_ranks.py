"""Ranks side by side: who waits for whom, from durations alone, and what is found about their job."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gpulab.analysis import ranks
from gpulab.analysis.facts import facts
from gpulab.analysis.ranks import RankComparison, RankFacts
from gpulab.api.diagnose import diagnose_job
from gpulab.diagnosis.finding import Diagnosis, Evidence, Finding
from gpulab.diagnosis.ranks import diagnose_ranks
from gpulab.run import Category, Collective, Device, Float64, Ranks, Run
from gpulab.thresholds import DEFAULT
from gpulab.trace.load import load_run
from gpulab.views.report.ranks import RankedReport
from tests.support import synthetic
from tests.support.real_traces import path
from tests.support.timelines import BACKWARD as GLOO
from tests.support.timelines import MAIN, STREAM, STREAM_2, Span, ran, timeline

US = 1_000
GPU, CPU = Device("cuda", "NVIDIA V100", 0), Device("cpu", "CPU")
ALL_REDUCE = "ncclKernel_AllReduce_RING_LL_Sum_float(ncclDevComm)"
MM, REDUCE = "aten::mm", "gloo:all_reduce"
Row = tuple[str, int, int]  # name, start and length in µs


def compare_ranks(runs: dict[int, Run]) -> RankComparison:
    return ranks.compare_ranks({rank: facts(run) for rank, run in runs.items()}, skew_notice=DEFAULT.skew_notice)


def both(*runs: Run) -> RankComparison:
    """As ranks 0, 1, …"""
    return compare_ranks(dict(enumerate(runs)))


def _ran(device: Device, spans: list[Span]) -> Run:
    """One step of 1,000 µs."""
    recorded = replace(timeline(spans), window_ns=(0, 1_000 * US))
    return replace(ran(synthetic.gpu_case().run, recorded, [(0, 1_000 * US)]), device=device)


def on_gpu(*kernels: Row) -> Run:
    """Collectives have a stream of their own."""
    lanes = [STREAM_2 if name == ALL_REDUCE else STREAM for name, _, _ in kernels]
    return _ran(
        GPU, [Span(n, Category.KERNEL, lane, s * US, d * US) for (n, s, d), lane in zip(kernels, lanes, strict=True)]
    )


def on_cpu(*spans: Row) -> Run:
    """Operators on the training thread, collectives on one of gloo."""
    annotation, operator = (Category.USER_ANNOTATION, GLOO), (Category.CPU_OP, MAIN)
    kinds = [annotation if name.startswith("gloo:") else operator for name, _, _ in spans]
    return _ran(CPU, [Span(n, *kind, s * US, d * US) for (n, s, d), kind in zip(spans, kinds, strict=True)])


def parts(rank: RankFacts) -> dict[str, int]:
    return {part: ns // US for part, ns in rank.breakdown.steps[0].parts_ns.items() if ns}


# Who waits for whom


@pytest.mark.parametrize(
    ("runs", "straggler", "waits"),
    [
        (  # rank 1 arrives last, and needs 100 for the transfer
            (
                on_gpu(("gemm", 0, 200), (ALL_REDUCE, 200, 600)),
                on_gpu(("gemm", 0, 700), (ALL_REDUCE, 700, 100)),
                on_gpu(("gemm", 0, 300), (ALL_REDUCE, 300, 500)),
            ),
            1,
            [(500, 100), (0, 100), (400, 100)],
        ),
        (
            (
                on_cpu((MM, 0, 200), (MM, 850, 50), (REDUCE, 200, 600)),
                on_cpu((MM, 0, 100), (MM, 600, 100), (MM, 850, 50), (REDUCE, 700, 100)),
            ),
            1,
            [(500, 100), (0, 100)],
        ),
        (  # two beside each other wait once
            (
                on_cpu((MM, 0, 200), (REDUCE, 200, 600), (REDUCE, 200, 600)),
                on_cpu((MM, 0, 700), (REDUCE, 700, 100), (REDUCE, 700, 100)),
            ),
            1,
            [(500, 100), (0, 100)],
        ),
        (tuple(on_gpu((ALL_REDUCE, 200 + r, 300 - r)) for r in range(4)), None, [(3 - r, 297) for r in range(4)]),
    ],
    ids=["GPUs", "CPUs", "beside each other", "in step"],
)
def test_the_rank_that_arrives_last_is_the_straggler(
    runs: tuple[Run, ...], straggler: int | None, waits: list[tuple[int, int]]
) -> None:
    compared = both(*runs)
    assert compared.straggler == straggler and compared.mismatch is None
    assert [(r.waiting_us, r.transfer_us) for r in compared.ranks] == waits


@given(st.lists(st.lists(st.integers(1, 200), min_size=4, max_size=4), min_size=2, max_size=6))
def test_waiting_and_transfer_are_the_kernels_time(durations: list[list[int]]) -> None:
    runs = [on_gpu(*((ALL_REDUCE, 250 * i, d) for i, d in enumerate(ds))) for ds in durations]
    for rank, spent in zip(both(*runs).ranks, durations, strict=True):
        assert rank.waiting_us is not None and rank.transfer_us is not None
        assert rank.waiting_us + rank.transfer_us == pytest.approx(sum(spent))
        assert rank.transfer_us == pytest.approx(sum(min(d[i] for d in durations) for i in range(4)))
        assert rank.exposed_us == pytest.approx(rank.communication_us)


def in_sequence(run: Run, numbers: dict[int, int], *, size: int = 2) -> Run:
    """The same, with what NCCL says: of the all-reduce that starts at a µs its number; each carries 8 MB."""
    recorded = run.timeline
    assert recorded is not None
    starts = (recorded.start_ns // US).tolist()

    def column(value: float) -> Float64:
        return np.array([value if start in numbers else np.nan for start in starts])

    extra = {
        "collective": column(Collective.ALL_REDUCE),
        "process_group": column(0),
        "group_size": column(size),
        "message_bytes": column(8e6),
        "collective_sequence": np.array([numbers.get(start, np.nan) for start in starts]),
    }
    return replace(run, timeline=replace(recorded, extra=extra))


def test_collectives_are_matched_by_their_number() -> None:
    # rank 0 was profiled from number 7 on, rank 1 from number 8 on: 7 has no partner, and rank 1 is late at 8 and 9
    first = on_gpu((ALL_REDUCE, 10, 50), (ALL_REDUCE, 200, 300), (ALL_REDUCE, 600, 300))
    second = on_gpu((ALL_REDUCE, 400, 100), (ALL_REDUCE, 800, 100))
    unnumbered = both(first, second)
    assert unnumbered.collectives is None and unnumbered.straggler is None
    assert unnumbered.mismatch is not None and "ranks 0 and 1" in unnumbered.mismatch
    compared = both(in_sequence(first, {10: 7, 200: 8, 600: 9}), in_sequence(second, {400: 8, 800: 9}))
    assert compared.mismatch is None and compared.collectives == 2 and compared.straggler == 1
    assert [(r.waiting_us, r.transfer_us) for r in compared.ranks] == [
        (pytest.approx(400 * 650 / 600), pytest.approx(200 * 650 / 600)),
        (0, 200),
    ]
    assert [r.collectives_per_step for r in compared.ranks] == [3, 2]
    (exchange,) = compared.exchanges
    assert exchange.count_per_step == 3, "the one without a partner, too"
    assert exchange.time_us == pytest.approx((100 + 100 + 50 * 200 / 600) / 3, abs=1e-3), "without the waiting"
    assert exchange.bus_bytes_per_s == pytest.approx(3 * 8e6 / (3e-6 * exchange.time_us), rel=1e-4)


@pytest.mark.parametrize("numbers", [[{200: 8, 600: 8}] * 2, [{200: 1, 600: 2}, {200: 8, 600: 9}]])
def test_numbers_that_do_not_fit_are_not_used(numbers: list[dict[int, int]]) -> None:
    run = on_gpu((ALL_REDUCE, 200, 300), (ALL_REDUCE, 600, 300))
    assert both(*(in_sequence(run, of_rank) for of_rank in numbers)).collectives == 2, "in the order of their start"


def test_one_rank_alone_has_no_bus() -> None:
    (exchange,) = both(in_sequence(on_gpu((ALL_REDUCE, 200, 300)), {200: 1}, size=1)).exchanges
    assert exchange.bus_bytes_per_s is None and exchange.message_bytes == 8e6


def test_the_users_threshold_for_a_straggler_counts() -> None:
    runs = {0: on_gpu((ALL_REDUCE, 200, 300)), 1: on_gpu((ALL_REDUCE, 400, 100))}  # rank 0 waits 0.2 of its step
    for limit, late in ((0.2, 1), (0.21, None)):
        assert ranks.compare_ranks({r: facts(run) for r, run in runs.items()}, skew_notice=limit).straggler == late
        diagnosed = diagnose_job(Ranks("made", runs, 2), DEFAULT.changed({"skew_notice": limit})).diagnosis
        assert (diagnosed.first.key == "straggler") is (late is not None)


def test_ranks_without_a_gpu_are_left_out_where_others_have_one() -> None:
    assert [r.rank for r in both(on_gpu((ALL_REDUCE, 0, 100)), on_cpu((MM, 0, 100), (REDUCE, 100, 100))).ranks] == [0]


NODE = "autograd::engine::evaluate_function: torch::autograd::AccumulateGrad"
HOOK = [(MM, 0, 200), (NODE, 200, 600), ("torch::autograd::AccumulateGrad", 210, 40), ("aten::copy_", 500, 100)]
GPU_PARTS = {"compute": 200, "communication": 100, "unknown": 700}
WAITS = [(MM, 0, 200), (MM, 300, 10), (REDUCE, 250, 480)]


@pytest.mark.parametrize(
    ("run", "of_step", "of_communication"),
    [
        (on_gpu(("gemm", 0, 200), (ALL_REDUCE, 100, 200)), GPU_PARTS, (200, 100, 100)),
        (
            on_cpu((MM, 0, 300), (MM, 400, 200), (REDUCE, 100, 600)),
            {"compute": 500, "communication": 200, "unknown": 300},
            (600, 400, 200),
        ),
        (  # waiting inside a call is no computing
            on_cpu(*WAITS, ("_c10d_functional::wait_tensor", 250, 500)),
            {"compute": 200, "communication": 500, "unknown": 300},
            (500, 0, 500),
        ),
        (on_cpu(*WAITS, ("aten::addmm", 250, 500)), {"compute": 700, "unknown": 300}, (480, 480, 0)),
        (  # a hook that hands gradients over: from 250 to 800 without the copy, 450 are exchange
            on_cpu(*HOOK, ("c10d::allreduce_", 750, 40), (REDUCE, 760, 30)),
            {"compute": 350, "communication": 450, "unknown": 200},
            (450, 0, 450),
        ),
        (on_cpu(*HOOK, (MM, 750, 40), (REDUCE, 760, 30)), {"compute": 800, "unknown": 200}, (30, 30, 0)),
        (  # a Function of the user's calls for an all-reduce at 400, which takes until 750, and computes at 500
            on_cpu(
                ("SyncedNorm", 200, 600),
                (MM, 250, 100),
                ("c10d::allreduce_", 400, 10),
                (MM, 500, 50),
                (REDUCE, 400, 350),
            ),
            {"compute": 300, "communication": 300, "unknown": 400},
            (350, 50, 300),
        ),
    ],
    ids=["GPU", "CPU", "wait_tensor", "a product", "hook", "no hook", "own function"],
)
def test_what_is_computed_beside_an_exchange_is_computing(
    run: Run, of_step: dict[str, int], of_communication: tuple[int, int, int]
) -> None:
    rank = both(run, run).ranks[0]
    assert parts(rank) == of_step
    assert (rank.communication_us, rank.overlapped_us, rank.exposed_us) == of_communication


# What is found about the job


def said(key: str, us: float | None) -> Diagnosis:
    answer = Finding(key, "Something is slow.", (Evidence("so it is"),), us, "measured", ("launch",), only_after=("x",))
    return Diagnosis((answer,))


def job(count: int, exposed_us: int = 0) -> RankComparison:
    """Ranks in step, whose communication is hidden but for that time."""
    run = on_gpu(("gemm", 0, 1_000 - exposed_us), (ALL_REDUCE, 900 - exposed_us, 100 + exposed_us))
    return both(*[run] * count)


@pytest.mark.parametrize(
    ("of_ranks", "late"),
    [
        ([("logging_or_eval", 200.0), ("healthy", None)], True),
        ([("checkpoint_save", 160.0), ("launch_bound", 200.0)], True),
        ([("logging_or_eval", 95.0), ("healthy", None)], False),  # others' pauses below their notice are not told
        ([("logging_or_eval", 200.0), ("checkpoint_save", 150.0)], False),
        ([("launch_bound", 200.0), ("healthy", None)], False),
    ],
)
def test_the_others_wait_for_the_rank_that_alone_pauses(of_ranks: list[tuple[str, float | None]], late: bool) -> None:
    """Its traced steps may hold none of it."""
    first = diagnose_ranks(job(2), {rank: said(*own) for rank, own in enumerate(of_ranks)}).first
    assert (first.key == "straggler") is late
    assert not late or first.summary.startswith("The others wait for rank 0, which pauses. Something is")


def test_what_most_ranks_have_in_common_is_found_about_the_job() -> None:
    each = {0: said("launch_bound", 300.0), 1: said("launch_bound", 100.0), 2: said("launch_bound", 200.0)}
    [common] = diagnose_ranks(job(4), {**each, 3: said("healthy", None)}).findings
    assert common.key == "launch_bound"
    assert common.summary == "Something is slow. It is so on 3 of the 4 ranks."
    assert common.recoverable_us_per_step == 200.0 and common.only_after == ()
    assert "rank 2" in common.evidence[0].words
    assert "It is so on all ranks." in diagnose_ranks(job(3), each).first.summary


def test_ranks_with_own_troubles_keep_in_step() -> None:
    each = {0: said("launch_bound", 300.0), 1: said("data_starved", 100.0), 2: said("healthy", None)}
    first = diagnose_ranks(job(3), each).first
    assert first.key == "healthy"
    assert [e.words for e in first.evidence[1:]] == [f"Rank {r} by itself: Something is slow" for r in (0, 1)]


@pytest.mark.parametrize(
    ("own", "core_wait", "late"),
    [
        ((0.2, 0.5), 0.3, 1),
        ((0.5, 0.2), 0.3, 0),
        ((0.34, 0.345), 0.6, None),  # equal
        ((0.414, 0.332), 0.3, None),  # as much as noise makes of equal ones
        ((0.05, 0.11), 0.3, None),  # twice as much of next to nothing
        ((0.2, 0.5), 0.01, None),  # there are cores: waits tell
    ],
)
def test_on_crowded_cores_the_own_work_of_a_rank_tells(
    own: tuple[float, float], core_wait: float, late: int | None
) -> None:
    even = both(*[on_cpu((MM, 0, 880), (REDUCE, 880, 120))] * 2)

    def crowded(rank: RankFacts, works: float) -> RankFacts:
        shares = {"core_wait": core_wait, "communication": 1 - core_wait - works}
        return replace(rank, breakdown=replace(rank.breakdown, share=shares))

    crowd = tuple(crowded(rank, works) for rank, works in zip(even.ranks, own, strict=True))
    found, more_us = ranks._straggler(crowd, DEFAULT.skew_notice)
    assert found == late
    if found is not None:
        assert more_us == pytest.approx(300.0)
        first = diagnose_ranks(replace(even, ranks=crowd, straggler=found, more_work_us=more_us)).first
        assert first.key == "straggler" and "wait for it for 30 % of their step" in first.summary
        assert first.evidence[0].words.startswith("It works 300 µs per step longer than they do")


@pytest.mark.parametrize(
    ("exchange", "said"),
    [
        ((860, 120), "takes 12 % of each step; hardly any of it is hidden."),
        ((780, 120), "takes 12 % of each step; 33 % of it is hidden."),
        ((700, 120), "is hidden behind compute."),
    ],
)
def test_only_what_was_hidden_is_called_so(exchange: tuple[int, int], said: str) -> None:
    run = on_cpu((MM, 0, 820), (REDUCE, *exchange), (MM, 980, 20))
    few = both(*[run] * 2)
    few = replace(few, ranks=tuple(replace(r, exposed_us=0.04 * r.step_us) for r in few.ranks))
    first = diagnose_ranks(few).first
    assert first.key == "healthy" and first.summary.endswith(f"in step, and communication {said}")
    waiting = {"core_wait": 0.2}
    crowded = tuple(
        replace(r, exposed_us=0.12 * r.step_us, breakdown=replace(r.breakdown, share=waiting)) for r in few.ranks
    )
    first = diagnose_ranks(replace(few, ranks=crowded)).first
    assert first.key == "cannot_tell" and "as long for CPU cores" in first.summary


@pytest.mark.parametrize(("us", "first"), [(300.0, "launch_bound"), (100.0, "exposed_communication")])
def test_the_costliest_of_a_job_comes_first_and_names_the_next(us: float, first: str) -> None:
    result = diagnose_ranks(job(2, 200), {0: said("launch_bound", us), 1: said("launch_bound", us)})
    assert result.first.key == first and len(result.findings) == 2
    assert result.first.after.startswith("Then ") and result.findings[1].after == ""


def test_a_real_job_with_a_late_rank() -> None:
    compared = compare_ranks({i: load_run(path(f"v100_dlrm_8ranks/rank{i}")) for i in range(8)})
    [straggler] = diagnose_ranks(compared).findings  # moving the data is 1 % of the step: all else is the wait
    assert straggler.key == "straggler" and "Rank 7 arrives last" in straggler.summary
    assert straggler.recoverable_us_per_step == pytest.approx(6_034, rel=0.01)
    even = replace(compared, straggler=None)
    assert [f.key for f in diagnose_ranks(even).findings] == ["exposed_communication"]
    quiet = tuple(replace(r, exposed_us=0.01 * r.step_us) for r in compared.ranks)
    assert diagnose_ranks(replace(even, ranks=quiet)).first.key == "healthy"


def test_the_thresholds_of_a_job_are_those_of_its_ranks() -> None:
    given = Ranks("somewhere", {rank: synthetic.gpu_case().run for rank in range(2)}, None)
    usual, silent = (diagnose_job(given, t) for t in (DEFAULT, DEFAULT.changed({"silence": 1.0})))
    assert usual.each[0].findings != silent.each[0].findings
    assert RankedReport(given, silent.facts, silent.comparison, silent.each, silent.diagnosis).json()["per_rank"]


def test_messages_between_stages_make_no_straggler() -> None:
    pipeline = both(
        on_cpu((MM, 0, 300), ("gloo:send", 300, 10), ("gloo:recv", 310, 600)),
        on_cpu((MM, 320, 550), ("gloo:send", 900, 10), ("gloo:recv", 1, 309)),
    )
    assert pipeline.straggler is None and pipeline.only_messages
    assert [(r.waiting_us, r.transfer_us, r.exposed_us) for r in pipeline.ranks] == [
        (None, None, 610),
        (None, None, 319),
    ]
    assert pipeline.mismatch is not None and "messages" in pipeline.mismatch
    first = diagnose_ranks(pipeline).first
    assert first.key == "exposed_communication" and "micro-batches" in first.cure
    assert "wait for some" in first.summary


def test_one_rank_alone_speaks_for_itself() -> None:
    first = diagnose_ranks(compare_ranks({3: on_cpu((MM, 0, 300), (REDUCE, 300, 600))})).first
    assert first.summary == "Rank 3 exchanges data for 60 % of each step and computes nothing meanwhile."
    assert "one rank alone cannot show" in first.evidence[0].words


def given_to(run: Run, samples: int, rows: int | None = None) -> Run:
    steps = replace(run.steps, sample_count=np.array([samples]))
    return replace(run, steps=steps if rows is None else replace(steps, input_values=np.array([rows])))


@pytest.mark.parametrize(
    ("late", "prompt", "key", "words"),
    [
        ((64, None), (32, None), "uneven_data", "2× their samples"),
        ((36, None), (32, None), "uneven_data", "1.12× their samples"),
        ((35, None), (32, None), "straggler", "Rank 1 arrives last"),
        ((0, None), (32, None), "straggler", "Rank 1 arrives last"),
        ((32, 30), (32, 10), "uneven_data", "Its model gets 3× as many input values per step as theirs."),
        ((32, 30), (32, -1), "straggler", "Rank 1 arrives last"),  # of all ranks the same is compared
    ],
)
def test_the_late_rank_with_more_samples_has_uneven_data(
    late: tuple[int, int | None], prompt: tuple[int, int | None], key: str, words: str
) -> None:
    slow, fast = on_cpu((MM, 0, 700), (REDUCE, 700, 100)), on_cpu((MM, 0, 100), (REDUCE, 100, 700))
    first = diagnose_ranks(both(given_to(fast, *prompt), given_to(slow, *late))).first
    assert first.key == key and words in first.summary


def crowded(rank: RankFacts, core_wait: float) -> RankFacts:
    share = dict(rank.breakdown.share) | {"core_wait": core_wait}
    return replace(rank, breakdown=replace(rank.breakdown, share=share))


@pytest.mark.parametrize(("core_wait", "late"), [(0.0, 1), (0.1, 1), (0.15, 1), (0.26, None)])
def test_a_rank_that_waited_for_a_core_is_no_straggler(core_wait: float, late: int | None) -> None:
    """Rank 0 waits 0.4 of its step; in the last case for a rank that works no longer, but has no core."""
    prompt, slow = both(on_cpu((MM, 0, 300), (REDUCE, 300, 500)), on_cpu((MM, 0, 700), (REDUCE, 700, 100))).ranks
    waiting = crowded(slow, core_wait + (0.4 if late is None else 0.0))
    assert ranks._straggler((crowded(prompt, core_wait), waiting), DEFAULT.skew_notice) == (late, None)
    assert ranks._straggler((prompt, waiting), DEFAULT.skew_notice)[0] == 1, "only that one has no core"


@pytest.mark.parametrize("core_wait", [0.0, 0.09, 0.11])
def test_exchange_on_crowded_cores_counts_from_more_on(core_wait: float) -> None:
    compared = both(*[on_cpu((MM, 0, 850), (REDUCE, 850, 100))] * 2)  # a tenth of the step
    first = diagnose_ranks(replace(compared, ranks=tuple(crowded(r, core_wait) for r in compared.ranks))).first
    assert (first.key == "exposed_communication") == (core_wait < 0.1)
    assert ("lost in that noise" in " ".join(e.words for e in first.evidence)) == (core_wait >= 0.1)


@pytest.mark.parametrize(
    ("count", "each_us", "key"),
    [
        (20, 20, "small_collectives"),
        (19, 20, "exposed_communication"),
        (5, 100, "exposed_communication"),
    ],
)
def test_many_short_collectives_are_told_apart_from_long_ones(count: int, each_us: int, key: str) -> None:
    same = on_cpu((MM, 0, 400), *((REDUCE, 400 + i * each_us, each_us) for i in range(count)))
    compared = both(same, same)
    assert compared.straggler is None and {r.collectives_per_step for r in compared.ranks} == {float(count)}
    first = diagnose_ranks(compared).first
    assert first.key == key and (first.settings == (("bucket_cap_mb", "25"),)) is (key == "small_collectives")
