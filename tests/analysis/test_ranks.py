"""Ranks side by side: who waits for whom, from durations alone."""

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
from gpulab.run import Category, Collective, Device, Float64, Lane, Ranks, Run, Steps, Timeline
from gpulab.thresholds import DEFAULT
from gpulab.trace.load import load_run
from gpulab.views.report.ranks import RankedReport
from tests.support import synthetic
from tests.support.real_traces import path

US = 1_000
GPU = Device("cuda", "NVIDIA V100", 0)
Kernel = tuple[str, int, int, int]  # name, stream, start µs, duration µs

ALL_REDUCE = "ncclKernel_AllReduce_RING_LL_Sum_float(ncclDevComm)"


def compare_ranks(runs: dict[int, Run]) -> RankComparison:
    return ranks.compare_ranks({rank: facts(run) for rank, run in runs.items()}, skew_notice=DEFAULT.skew_notice)


def rank_run(kernels: list[Kernel], step_us: int = 1_000) -> Run:
    """One step from 0 to `step_us`."""
    ordered = sorted(kernels, key=lambda k: (k[2], -k[3]))
    names = sorted({k[0] for k in ordered} | {"nothing"})
    streams = sorted({k[1] for k in ordered} | {7})
    zero = np.zeros(1, np.int64)
    return replace(
        synthetic.gpu_case().run,
        device=GPU,
        steps=Steps(
            number=np.array([1]),
            start_ns=zero,
            end_ns=np.array([step_us * US]),
            data_wait_ns=zero,
            optimizer_ns=zero,
            batch_count=zero,
            sample_count=zero,
            phase=np.array([2], np.uint8),
            flags=np.array([0], np.uint8),
        ),
        traced_numbers=(1,),
        timeline=Timeline(
            start_ns=np.array([k[2] * US for k in ordered], np.int64),
            duration_ns=np.array([k[3] * US for k in ordered], np.int64),
            name_id=np.array([names.index(k[0]) for k in ordered], np.int32),
            category=np.full(len(ordered), Category.KERNEL, np.uint8),
            lane_id=np.array([streams.index(k[1]) for k in ordered], np.int32),
            correlation=np.zeros(len(ordered), np.int64),
            names=tuple(names),
            lanes=tuple(Lane("stream", 0, s) for s in streams),
            window_ns=(0, step_us * US),
            training_lane=None,
        ),
    )


def test_the_rank_that_arrives_last_is_the_straggler() -> None:
    # rank 0  [gemm---](all reduce---------------)      waits 500 of 600
    # rank 1  [gemm------------------](all reduce)      arrives last: 100, the transfer
    # rank 2  [gemm-----](all reduce-------------)      waits 400 of 500
    found = compare_ranks(
        {
            0: rank_run([("gemm", 7, 0, 200), (ALL_REDUCE, 9, 200, 600)]),
            1: rank_run([("gemm", 7, 0, 700), (ALL_REDUCE, 9, 700, 100)]),
            2: rank_run([("gemm", 7, 0, 300), (ALL_REDUCE, 9, 300, 500)]),
        }
    )
    assert found.straggler == 1
    assert found.collectives == 1
    assert [(r.waiting_us, r.transfer_us) for r in found.ranks] == [(500, 100), (0, 100), (400, 100)]


def in_sequence(run: Run, numbers: dict[int, int], *, size: int = 2) -> Run:
    """The same, with what NCCL says: of the all-reduce that starts at a µs its number; each carries 8 MB."""
    timeline = run.timeline
    assert timeline is not None
    starts = (timeline.start_ns // US).tolist()

    def column(value: float) -> Float64:
        return np.array([value if start in numbers else np.nan for start in starts])

    extra = {
        "collective": column(Collective.ALL_REDUCE),
        "process_group": column(0),
        "group_size": column(size),
        "message_bytes": column(8e6),
        "collective_sequence": np.array([numbers.get(start, np.nan) for start in starts]),
    }
    return replace(run, timeline=replace(timeline, extra=extra))


def test_collectives_are_matched_by_their_number() -> None:
    # rank 0 was profiled from number 7 on, rank 1 from number 8 on: 7 has no partner, and rank 1 is late at 8 and 9
    first = rank_run([(ALL_REDUCE, 9, 10, 50), (ALL_REDUCE, 9, 200, 300), (ALL_REDUCE, 9, 600, 300)])
    second = rank_run([(ALL_REDUCE, 9, 400, 100), (ALL_REDUCE, 9, 800, 100)])
    assert compare_ranks({0: first, 1: second}).mismatch is not None
    compared = compare_ranks({0: in_sequence(first, {10: 7, 200: 8, 600: 9}), 1: in_sequence(second, {400: 8, 800: 9})})
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


def test_numbers_that_do_not_fit_are_not_used() -> None:
    kernels: list[Kernel] = [(ALL_REDUCE, 9, 200, 300), (ALL_REDUCE, 9, 600, 300)]
    twice = in_sequence(rank_run(kernels), {200: 8, 600: 8})
    assert compare_ranks({0: twice, 1: twice}).collectives == 2, "in the order of their start"
    other = {0: in_sequence(rank_run(kernels), {200: 1, 600: 2}), 1: in_sequence(rank_run(kernels), {200: 8, 600: 9})}
    assert compare_ranks(other).collectives == 2


def test_one_rank_alone_has_no_bus() -> None:
    run = in_sequence(rank_run([(ALL_REDUCE, 9, 200, 300)]), {200: 1}, size=1)
    (exchange,) = compare_ranks({0: run}).exchanges
    assert exchange.bus_bytes_per_s is None and exchange.message_bytes == 8e6


def test_the_users_threshold_for_a_straggler_counts() -> None:
    runs = {0: rank_run([(ALL_REDUCE, 9, 200, 300)]), 1: rank_run([(ALL_REDUCE, 9, 400, 100)])}
    known = {rank: facts(run) for rank, run in runs.items()}
    share = 200 / 1_000
    assert ranks.compare_ranks(known, skew_notice=share).straggler == 1
    assert ranks.compare_ranks(known, skew_notice=share + 0.01).straggler is None
    job, patient = Ranks("made", runs, 2), DEFAULT.changed({"skew_notice": share + 0.01})
    assert diagnose_job(job, patient).diagnosis.first.key != "straggler"
    assert diagnose_job(job, DEFAULT).diagnosis.first.key == "straggler"


def test_ranks_in_step_have_no_straggler() -> None:
    found = compare_ranks({r: rank_run([(ALL_REDUCE, 9, 200 + r, 300 - r)]) for r in range(4)})
    assert found.straggler is None
    assert found.collectives == 1


def test_communication_beside_compute_is_hidden() -> None:
    #  0      100     200     300
    #  [gemm----------)            stream 7
    #          [all reduce----)    stream 9: 100 hidden, 100 exposed
    (rank,) = compare_ranks({5: rank_run([("gemm", 7, 0, 200), (ALL_REDUCE, 9, 100, 200)])}).ranks
    assert (rank.communication_us, rank.overlapped_us, rank.exposed_us) == (200, 100, 100)
    assert rank.breakdown.steps[0].parts_ns["communication"] == 100 * US
    assert rank.waiting_us is None and rank.transfer_us is None


def test_different_collectives_are_not_put_side_by_side() -> None:
    found = compare_ranks(
        {
            0: rank_run([(ALL_REDUCE, 9, 0, 10)]),
            3: rank_run([(ALL_REDUCE, 9, 0, 10), (ALL_REDUCE, 9, 20, 10)]),
        }
    )
    assert found.collectives is None and found.straggler is None
    assert found.mismatch is not None and "ranks 0 and 3" in found.mismatch and "1 and 2" in found.mismatch


@given(st.lists(st.lists(st.integers(1, 200), min_size=4, max_size=4), min_size=2, max_size=6))
def test_waiting_and_transfer_are_the_kernels_time(durations: list[list[int]]) -> None:
    runs = {r: rank_run([(ALL_REDUCE, 9, 250 * i, d) for i, d in enumerate(ds)]) for r, ds in enumerate(durations)}
    for rank, spent in zip(compare_ranks(runs).ranks, durations, strict=True):
        assert rank.waiting_us is not None and rank.transfer_us is not None
        assert rank.waiting_us + rank.transfer_us == pytest.approx(sum(spent))
        assert rank.transfer_us == pytest.approx(sum(min(d[i] for d in durations) for i in range(4)))
        assert rank.exposed_us == pytest.approx(rank.communication_us)


# -- what is found about the job -------------------------------------------------------------------------------------


def said(key: str, us: float | None, summary: str = "Something is slow.") -> Diagnosis:
    found = Finding(key, summary, (Evidence("so it is"),), us, "measured", parts=("launch",), only_after=("x",))
    return Diagnosis((found,))


def job(count: int, exposed_fraction: float = 0.0) -> RankComparison:
    """Ranks in step, whose communication is hidden but for that share of the step."""
    exposed = int(1_000 * exposed_fraction)
    kernels: list[Kernel] = [("gemm", 7, 0, 1_000 - exposed), (ALL_REDUCE, 20, 900 - exposed, 100 + exposed)]
    return compare_ranks(dict.fromkeys(range(count), rank_run(kernels)))


def test_what_most_ranks_have_in_common_is_found_about_the_job() -> None:
    each = {0: said("launch_bound", 300.0), 1: said("launch_bound", 100.0), 2: said("launch_bound", 200.0)}
    found = diagnose_ranks(job(4), {**each, 3: said("healthy", None)})
    assert [f.key for f in found.findings] == ["launch_bound"]
    assert found.first.summary == "Something is slow. It is so on 3 of the 4 ranks."
    assert found.first.recoverable_us_per_step == 200.0 and found.first.only_after == ()
    assert "rank 2" in found.first.evidence[0].words
    assert "It is so on all ranks." in diagnose_ranks(job(3), each).first.summary


def test_ranks_with_own_troubles_keep_in_step() -> None:
    each = {0: said("launch_bound", 300.0), 1: said("data_starved", 100.0), 2: said("healthy", None)}
    found = diagnose_ranks(job(3), each)
    assert found.first.key == "healthy"
    assert [e.words for e in found.first.evidence[1:]] == [
        "Rank 0 by itself: Something is slow",
        "Rank 1 by itself: Something is slow",
    ]


@pytest.mark.parametrize(("us", "first"), [(300.0, "launch_bound"), (100.0, "exposed_communication")])
def test_the_costliest_of_a_job_comes_first_and_names_the_next(us: float, first: str) -> None:
    found = diagnose_ranks(job(2, 0.2), {0: said("launch_bound", us), 1: said("launch_bound", us)})
    assert found.first.key == first and len(found.findings) == 2
    assert found.first.after.startswith("The next cause is ") and found.findings[1].after == ""


def test_a_real_job_with_a_late_rank() -> None:
    found = compare_ranks({i: load_run(path(f"v100_dlrm_8ranks/rank{i}")) for i in range(8)})
    [straggler] = diagnose_ranks(found).findings  # moving the data is 1 % of the step: all else is the wait
    assert straggler.key == "straggler" and "Rank 7 arrives last" in straggler.summary
    assert straggler.recoverable_us_per_step == pytest.approx(6_034, rel=0.01)
    even = replace(found, straggler=None)
    [exposed] = diagnose_ranks(even).findings
    assert exposed.key == "exposed_communication"
    quiet = tuple(replace(r, exposed_us=0.01 * r.step_us) for r in found.ranks)
    assert diagnose_ranks(replace(even, ranks=quiet)).first.key == "healthy"


def test_the_thresholds_of_a_job_are_those_of_its_ranks() -> None:
    runs = {rank: synthetic.gpu_case().run for rank in range(2)}
    given = Ranks("somewhere", runs, None)
    usual, silent = (diagnose_job(given, t) for t in (DEFAULT, DEFAULT.changed({"silence": 1.0})))
    assert usual.each[0].findings != silent.each[0].findings
    assert RankedReport(given, silent.facts, silent.comparison, silent.each, silent.diagnosis).json()["per_rank"]


# -- on CPUs -----------------------------------------------------------------------------------------------------------


def cpu_rank(operators: list[tuple[int, int]], collectives: list[tuple[int, int]]) -> Run:
    """One step of 1,000 µs: operators on the training thread, collectives on one of gloo; start and length in µs."""
    rows = sorted(
        [*((s, d, 0) for s, d in operators), *((s, d, 1) for s, d in collectives)], key=lambda row: (row[0], -row[1])
    )
    base = rank_run([("gemm", 7, 0, 1)])
    assert base.timeline is not None
    kinds = np.array([row[2] for row in rows], np.int32)
    timeline = replace(
        base.timeline,
        start_ns=np.array([row[0] * US for row in rows], np.int64),
        duration_ns=np.array([row[1] * US for row in rows], np.int64),
        name_id=kinds,
        category=np.where(kinds == 0, Category.CPU_OP, Category.USER_ANNOTATION).astype(np.uint8),
        lane_id=kinds,
        correlation=np.zeros(len(rows), np.int64),
        names=("aten::mm", "gloo:all_reduce"),
        lanes=(Lane("thread", 1, 1), Lane("thread", 1, 2)),
        training_lane=0,
    )
    return replace(base, device=Device("cpu", "CPU"), timeline=timeline)


def test_the_straggler_of_gloo_ranks() -> None:
    found = compare_ranks(
        {
            0: cpu_rank([(0, 200), (850, 50)], [(200, 600)]),
            1: cpu_rank([(0, 100), (600, 100), (850, 50)], [(700, 100)]),
        }
    )
    assert found.straggler == 1 and found.mismatch is None and found.collectives == 1
    waits = {rank.rank: rank.waiting_us for rank in found.ranks}
    assert waits == {0: 500, 1: 0} and all(rank.transfer_us == 100 for rank in found.ranks)
    account = found.ranks[0].breakdown
    assert account.steps[0].parts_ns["communication"] == 600 * US and account.device_index is None
    assert account.steps[0].parts_ns["unknown"] == 150 * US


def test_waiting_inside_a_call_is_no_computing() -> None:
    def rank(call: str) -> RankFacts:
        run = cpu_rank([(0, 200), (250, 500), (300, 10)], [(250, 480)])
        assert run.timeline is not None
        (row,) = np.flatnonzero((run.timeline.start_ns == 250 * US) & (run.timeline.duration_ns == 500 * US))
        kinds = run.timeline.name_id.copy()
        kinds[row] = 2
        timeline = replace(run.timeline, name_id=kinds, names=("aten::mm", "gloo:all_reduce", call))
        waits = replace(run, timeline=timeline)
        return compare_ranks({0: waits, 1: waits}).ranks[0]

    waits = rank("_c10d_functional::wait_tensor")
    parts = waits.breakdown.steps[0].parts_ns
    assert (parts["compute"], parts["communication"], parts["unknown"]) == (200 * US, 500 * US, 300 * US)
    assert (waits.exposed_us, waits.overlapped_us) == (500, 0)
    assert rank("aten::addmm").breakdown.steps[0].parts_ns["compute"] == 700 * US


@pytest.mark.parametrize("hands_over", [True, False])
def test_a_hook_that_hands_gradients_over_is_exchange(hands_over: bool) -> None:
    # backward  [node of a parameter--------------------------------]   200 to 800
    #             [adds]  (the hook: Python)  [copies]  (Python) [call]
    node, adds = (
        "autograd::engine::evaluate_function: torch::autograd::AccumulateGrad",
        "torch::autograd::AccumulateGrad",
    )
    spans = {node: (200, 600), adds: (210, 40), "aten::copy_": (500, 100), "c10d::allreduce_": (750, 40)}
    base = cpu_rank([*spans.values(), (0, 200)], [(760, 30)])
    assert base.timeline is not None
    names = ["aten::mm", "gloo:all_reduce", *(spans if hands_over else list(spans)[:3])]
    kinds = base.timeline.name_id.copy()
    for name, (start, duration) in spans.items():
        (row,) = np.flatnonzero((base.timeline.start_ns == start * US) & (base.timeline.duration_ns == duration * US))
        kinds[row] = names.index(name) if name in names else names.index("aten::mm")
    run = replace(base, timeline=replace(base.timeline, name_id=kinds, names=tuple(names)))
    (rank, _) = compare_ranks({0: run, 1: run}).ranks
    parts = rank.breakdown.steps[0].parts_ns
    if hands_over:  # from 250 to 800 without the copy
        assert (parts["compute"], parts["communication"]) == ((200 + 50 + 100) * US, 450 * US)
        assert rank.exposed_us == 450
    else:
        assert parts["compute"] == 800 * US and rank.exposed_us == 0


def test_an_operator_that_waits_for_its_own_exchange() -> None:
    # a Function of the user's  [calls for an all-reduce at 400, which takes until 750, and computes beside it at 500]
    base = cpu_rank([(200, 600), (250, 100), (400, 10), (500, 50)], [(400, 350)])
    assert base.timeline is not None
    kinds = base.timeline.name_id.copy()
    for start, name in ((200, 2), (400, 3)):
        kinds[(base.timeline.start_ns == start * US) & (base.timeline.lane_id == base.timeline.training_lane)] = name
    names = ("aten::mm", "gloo:all_reduce", "SyncedNorm", "c10d::allreduce_")
    run = replace(base, timeline=replace(base.timeline, name_id=kinds, names=names))
    (rank, _) = compare_ranks({0: run, 1: run}).ranks
    parts = rank.breakdown.steps[0].parts_ns
    assert (parts["compute"], parts["communication"]) == ((200 + 50 + 50) * US, 300 * US)
    assert (rank.communication_us, rank.overlapped_us, rank.exposed_us) == (350, 50, 300)


def test_messages_between_stages_make_no_straggler() -> None:
    def stage(sends: tuple[int, int], receives: tuple[int, int], computes: tuple[int, int]) -> Run:
        run = cpu_rank([computes], [sends, receives])
        assert run.timeline is not None
        names = ("aten::mm", "gloo:send", "gloo:recv")
        (first,) = np.flatnonzero(run.timeline.start_ns == receives[0] * US)
        kinds = run.timeline.name_id.copy()
        kinds[first] = 2
        return replace(run, timeline=replace(run.timeline, name_id=kinds, names=names))

    pipeline = compare_ranks({0: stage((300, 10), (310, 600), (0, 300)), 1: stage((900, 10), (1, 309), (320, 550))})
    assert pipeline.straggler is None and pipeline.only_messages
    assert all(rank.waiting_us is None and rank.transfer_us is None for rank in pipeline.ranks)
    assert [rank.exposed_us for rank in pipeline.ranks] == [610, 319]
    assert pipeline.mismatch is not None and "messages" in pipeline.mismatch
    first = diagnose_ranks(pipeline).first
    assert first.key == "exposed_communication" and "micro-batches" in first.cure
    assert "wait for some" in first.summary


def test_one_rank_alone_speaks_for_itself() -> None:
    first = diagnose_ranks(compare_ranks({3: cpu_rank([(0, 300)], [(300, 600)])})).first
    assert first.summary == "Rank 3 exchanges data for 60 % of each step and computes nothing meanwhile."
    assert "one rank alone cannot show" in first.evidence[0].words


def test_what_is_computed_beside_a_collective_is_computing() -> None:
    (rank, _) = compare_ranks({n: cpu_rank([(0, 300), (400, 200)], [(100, 600)]) for n in range(2)}).ranks
    assert rank.breakdown.steps[0].parts_ns["communication"] == 200 * US
    assert (rank.communication_us, rank.overlapped_us, rank.exposed_us) == (600, 400, 200)


def test_ranks_without_a_gpu_are_left_out_where_others_have_one() -> None:
    mixed = {0: rank_run([(ALL_REDUCE, 9, 0, 100)]), 1: cpu_rank([(0, 100)], [(100, 100)])}
    assert [rank.rank for rank in compare_ranks(mixed).ranks] == [0]


def with_samples(run: Run, samples: int) -> Run:
    return replace(run, steps=replace(run.steps, sample_count=np.array([samples])))


@pytest.mark.parametrize(("samples", "key"), [(64, "uneven_data"), (33, "straggler"), (0, "straggler")])
def test_the_late_rank_with_more_samples_has_uneven_data(samples: int, key: str) -> None:
    late = with_samples(cpu_rank([(0, 700)], [(700, 100)]), samples)
    prompt = with_samples(cpu_rank([(0, 100)], [(100, 700)]), 32)
    first = diagnose_ranks(compare_ranks({0: prompt, 1: late})).first
    assert first.key == key and first.summary.startswith("Rank 1 arrives last")
    assert ("2 times as many samples" in first.summary) == (key == "uneven_data")


def test_what_the_model_is_given_counts_before_what_was_loaded() -> None:
    def given(run: Run, rows: int) -> Run:
        return replace(run, steps=replace(with_samples(run, 32).steps, input_rows=np.array([rows])))

    late, prompt = given(cpu_rank([(0, 700)], [(700, 100)]), 30), given(cpu_rank([(0, 100)], [(100, 700)]), 10)
    compared = compare_ranks({0: prompt, 1: late})
    assert [rank.samples_per_step for rank in compared.ranks] == [10, 30]
    assert diagnose_ranks(compared).first.key == "uneven_data"
    assert "Its model is given 3 times as many rows in a step as theirs." in diagnose_ranks(compared).first.summary
    unheard = given(cpu_rank([(0, 100)], [(100, 700)]), -1)
    mixed = compare_ranks({0: unheard, 1: late})
    assert [rank.samples_per_step for rank in mixed.ranks] == [32, 32], "of all ranks the same is compared"
    assert diagnose_ranks(mixed).first.key == "straggler"


@pytest.mark.parametrize(("core_wait", "late"), [(0.0, 1), (0.1, 1), (0.15, 1), (0.26, None)])
def test_a_rank_that_waited_for_a_core_is_no_straggler(core_wait: float, late: int | None) -> None:
    compared = compare_ranks(
        {0: cpu_rank([(0, 300)], [(300, 500)]), 1: cpu_rank([(0, 700)], [(700, 100)])}  # rank 0 waits 0.4 of its step
    )

    def crowded(rank: RankFacts) -> RankFacts:
        share = dict(rank.breakdown.share) | {"core_wait": core_wait}
        return replace(rank, breakdown=replace(rank.breakdown, share=share))

    prompt, slow = compared.ranks
    assert ranks._straggler((crowded(prompt), crowded(slow)), DEFAULT.skew_notice) == late
    assert ranks._straggler((prompt, crowded(slow)), DEFAULT.skew_notice) == 1, "only that one has no core"


@pytest.mark.parametrize("core_wait", [0.0, 0.05, 0.2])
def test_exchange_on_crowded_cores_counts_from_more_on(core_wait: float) -> None:
    same = cpu_rank([(0, 850)], [(850, 100)])  # a tenth of the step
    compared = compare_ranks({0: same, 1: same})
    crowded = tuple(
        replace(r, breakdown=replace(r.breakdown, share=dict(r.breakdown.share) | {"core_wait": core_wait}))
        for r in compared.ranks
    )
    first = diagnose_ranks(replace(compared, ranks=crowded)).first
    assert (first.key == "exposed_communication") == (core_wait < 0.1)
    said = " ".join(evidence.words for evidence in first.evidence)
    assert ("cannot be told from that" in said) == (core_wait >= 0.1)


@pytest.mark.parametrize(
    ("count", "each_us", "key"), [(25, 20, "small_collectives"), (5, 100, "exposed_communication")]
)
def test_many_short_collectives_are_told_apart_from_long_ones(count: int, each_us: int, key: str) -> None:
    exchanges = [(400 + i * each_us, each_us) for i in range(count)]
    same = cpu_rank([(0, 400)], exchanges)
    found = compare_ranks({0: same, 1: same})
    assert found.straggler is None
    assert {rank.collectives_per_step for rank in found.ranks} == {float(count)}
    first = diagnose_ranks(found).first
    assert first.key == key
    assert first.settings == ((("bucket_cap_mb", "25"),) if key == "small_collectives" else ())


def test_collectives_beside_each_other_wait_once() -> None:
    # rank 0  two all-reduces from 200 to 800, both waiting for rank 1, which begins them at 700
    found = compare_ranks(
        {
            0: cpu_rank([(0, 200)], [(200, 600), (200, 600)]),
            1: cpu_rank([(0, 700)], [(700, 100), (700, 100)]),
        }
    )
    waits = {rank.rank: rank.waiting_us for rank in found.ranks}
    assert found.straggler == 1 and waits == {0: 500, 1: 0}
    assert all((r.waiting_us or 0) + (r.transfer_us or 0) == pytest.approx(r.communication_us) for r in found.ranks)
