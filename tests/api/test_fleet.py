"""Which jobs waste GPUs: two hundred stored runs ranked as a dumb sum ranks them, filtered, exported, alerted on."""

from __future__ import annotations

import csv
import json
import random
from collections import defaultdict
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from gpulab.analysis.facts import facts
from gpulab.api import fleet as command
from gpulab.api.fleet import fleet
from gpulab.api.runs import Runs
from gpulab.cli import main
from gpulab.errors import StoreError, UsageError
from gpulab.run import Category, Device, Job, Run, Samples, Series
from gpulab.run_summary import VERSION
from gpulab.store.folders import COLUMNS, DOCUMENT, Store
from gpulab.store.summaries import FILE, stores_in
from tests.support.commands import answered
from tests.support.strategies import tiny_run
from tests.support.timelines import MAIN, STREAM, Span, timeline

HOUR_NS = 3_600_000_000_000


def id_of(number: int) -> str:
    return f"20250101-000000-{number:06x}"


def gpu_run(number: int, busy: float, hours: float = 1.0, *, job: Job | None = None, created: str = "") -> Run:
    """A run on a GPU whose profiled step has one kernel, as long as that share of it."""
    run = tiny_run(id_of(number))
    assert run.timeline is not None
    start, end = run.timeline.window_ns
    spans = [
        Span("aten::mm", Category.CPU_OP, MAIN, start, end - start),
        Span("gemm", Category.KERNEL, STREAM, start, int((end - start) * busy)),
    ]
    recorded = replace(timeline(spans), window_ns=(start, end))
    device, wall_ns = Device("cuda", "a GPU", 0), int(hours * HOUR_NS)
    return replace(run, device=device, timeline=recorded, wall_ns=wall_ns, job=job, created=created or run.created)


def curve_run(number: int, percent: float, hours: float) -> Run:
    """A run on a GPU without a trace: only the utilization curve."""
    run = gpu_run(number, 0.5, hours)
    t_ns = np.arange(5, dtype=np.int64)
    curve = Series("gpu_utilization_pct", "%", "GPU utilization", "NVML", t_ns, np.full(5, percent))
    return replace(run, timeline=None, traced_numbers=(), samples=Samples((curve,)))


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "ann" / ".gpulab" / "runs")


def test_two_hundred_runs_are_ranked_as_a_dumb_sum_ranks_them(store: Store, tmp_path: Path) -> None:
    rng = random.Random(0)
    wasted: dict[str, float] = defaultdict(float)
    number = 0
    while number < 200:
        ranks = rng.choice((1, 1, 1, 2, 4))
        name, busy, hours = f"job-{number}", rng.uniform(0.05, 0.95), rng.uniform(0.1, 9.0)
        for rank in range(min(ranks, 200 - number)):
            job = Job(name, rank, "torchrun", ranks) if ranks > 1 else None
            own_busy = busy * rng.uniform(0.9, 1.0)
            store.save(gpu_run(number, own_busy, hours, job=job))
            wasted[name if ranks > 1 else id_of(number)] += hours * (1 - own_busy)
            number += 1
    view = fleet(tmp_path)
    assert [job.id for job in view.jobs] == sorted(wasted, key=lambda name: -wasted[name])
    for found in view.jobs:
        assert found.wasted_gpu_hours == pytest.approx(wasted[found.id], rel=1e-3) and not found.at_least
    assert view.fleet.wasted_gpu_hours == pytest.approx(sum(wasted.values()), rel=1e-3)
    again = fleet(tmp_path / "ann")
    assert again.json() | {"places": []} == view.json() | {"places": []}, "from the summaries that the first one kept"


def test_nothing_is_opened_that_has_a_summary(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = store.save(gpu_run(1, 0.25))
    assert fleet(store.root).jobs[0].idle_fraction == pytest.approx(0.75, abs=1e-3)
    (folder / COLUMNS).unlink()
    monkeypatch.setattr(command, "read", lambda folder: pytest.fail("opened"))
    Runs(store).name(id_of(1), "resnet")
    (job,) = fleet(store.root).jobs
    assert job.idle_fraction == pytest.approx(0.75, abs=1e-3) and job.name == "resnet"


@pytest.mark.parametrize("torn", [b"", b'{"id": 3}', b"\xff", b"old"])
def test_a_summary_that_cannot_be_read_is_made_anew(store: Store, torn: bytes) -> None:
    folder = store.save(gpu_run(1, 0.25))
    fleet(store.root)
    whole = (folder / FILE).read_bytes()
    torn = whole.replace(f'"version":{VERSION}'.encode(), b'"version":0') if torn == b"old" else torn
    (folder / FILE).write_bytes(torn)
    assert fleet(store.root).jobs[0].idle_fraction == pytest.approx(0.75, abs=1e-3)
    assert (folder / FILE).read_bytes() == whole


def test_what_cannot_be_measured_is_its_own_group(store: Store) -> None:
    store.save(gpu_run(1, 0.25))
    store.save(tiny_run(id_of(2)))
    store.save(replace(curve_run(3, 50.0, 1.0), samples=Samples(())))
    broken = store.save(gpu_run(4, 0.5))
    (broken / DOCUMENT).write_text("{}")
    view = fleet(store.root)
    assert [job.id for job in view.jobs] == [id_of(1)]
    reasons = {job.id: job.reason for job in view.fleet.unmeasured}
    assert reasons[id_of(2)] == "ran on the CPU" and "without a trace" in reasons[id_of(3)]
    assert [run for run, _ in view.unreadable] == [id_of(4)]
    text = view.text(full=True)
    assert "NOT MEASURABLE" in text and "ran on the CPU" in text and "CANNOT BE READ" in text


def test_jobs_on_the_cpu_count_where_asked(store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Ranked among the others by the share of the steps in which nothing is computed; and no GPU is claimed."""
    run = tiny_run(id_of(1))
    hours = 2.0
    store.save(replace(run, wall_ns=int(hours * HOUR_NS)))
    store.save(gpu_run(2, 0.75))
    store.save(replace(tiny_run(id_of(3)), timeline=None, traced_numbers=()))
    shares = facts(run).shares
    assert shares is not None
    idle = 1 - shares.of("compute", "optimizer")
    assert 0.0 < idle < 1.0
    view = fleet(tmp_path, cpu=True)
    wasted = {job.id: job.wasted_gpu_hours for job in view.jobs}
    assert wasted == {id_of(1): pytest.approx(hours * idle), id_of(2): pytest.approx(0.25, abs=1e-3)}
    assert {job.id: job.reason for job in view.fleet.unmeasured} == {id_of(3): "without a trace"}
    text = view.text(full=True)
    assert "held devices for" in text and "the CPU as their one device" in text and "GPUs" not in text
    assert [job.id for job in fleet(tmp_path).jobs] == [id_of(2)], "not asked"
    assert main(["fleet", str(tmp_path), "--cpu", "--alert", f"{idle * 99:.4f}%"]) == 1
    assert "This job held devices for" in capsys.readouterr().out


def test_by_the_curve_it_is_at_least_so_much(store: Store) -> None:
    store.save(curve_run(1, 60.0, 2.0))
    (job,) = fleet(store.root).jobs
    assert job.wasted_gpu_hours == pytest.approx(0.8) and job.at_least
    assert "≥ 48 min" in fleet(store.root).text() and "for at least" in fleet(store.root).text()


def test_ranks_that_are_missing_are_said(store: Store) -> None:
    for rank in (0, 2):
        store.save(gpu_run(rank, 0.5 - rank / 10, job=Job("abc", rank, "Slurm", 4, cluster_id="77", queue="gpu")))
    (job,) = fleet(store.root).jobs
    assert (job.id, job.ranks, job.world_size, job.rank, job.queue) == ("77", 2, 4, 2, "gpu")
    text = fleet(store.root).text(full=True)
    assert "2 (2 of 4 ranks)" in text and "rank 2: " in text and "BY QUEUE" in text


def test_only_what_the_conditions_choose(store: Store) -> None:
    now = datetime.now(UTC)
    old = (now - timedelta(days=9)).isoformat()
    store.save(gpu_run(1, 0.5, created=now.isoformat()))
    store.save(gpu_run(2, 0.5, created=old, job=Job("abc", 0, "Slurm", 1, queue="long")))
    user = store.root.owner()
    assert [j.id for j in fleet(store.root, since="2d").jobs] == [id_of(1)]
    assert [j.runs for j in fleet(store.root, queue="long").jobs] == [(id_of(2),)]
    assert len(fleet(store.root, user=user).jobs) == 2 and not fleet(store.root, user="nobody-else").jobs
    day = (now - timedelta(days=9)).astimezone().date().isoformat()
    assert [j.runs for j in fleet(store.root, day=day).jobs] == [(id_of(2),)]
    assert "There is no such job (user nobody-else)" in fleet(store.root, user="nobody-else").text()


def test_what_cannot_be_asked(store: Store, tmp_path: Path) -> None:
    store.save(gpu_run(1, 0.5))
    with pytest.raises(StoreError, match="There is no folder"):
        fleet(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(StoreError, match="No runs in"):
        fleet(tmp_path / "empty")
    with pytest.raises(UsageError, match="cannot be combined"):
        fleet(store.root, since="2d", day="2026-11-20")
    with pytest.raises(UsageError, match="not a date"):
        fleet(store.root, day="yesterday")
    for wrong in ("x", "-1", "130%", "nan"):
        with pytest.raises(UsageError, match="must be a share"):
            answered(f"fleet {store.root} --alert={wrong}", "terminal")


def test_an_alert_is_for_cron(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    store.save(gpu_run(1, 0.6))
    store.save(gpu_run(2, 0.8))
    assert main(["fleet", str(store.root), "--alert", "0.5"]) == 0
    assert capsys.readouterr().out == "", "nothing to say, no mail"
    assert main(["fleet", str(store.root), "--alert", "30%"]) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert id_of(1) in said and id_of(2) not in said and "idle for 30 % or more" in said


def test_tables_pages_and_figures(store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    evil = replace(gpu_run(1, 0.5), settings=replace(gpu_run(1, 0.5).settings, name="<b>x</b>"))
    store.save(evil)
    store.save(tiny_run(id_of(2)))
    table, page = tmp_path / "fleet.csv", tmp_path / "fleet.html"
    assert main(["fleet", str(store.root), "--export", str(table), "--html", str(page)]) == 0
    rows = list(csv.DictReader(table.open(newline="")))
    assert [row["id"] for row in rows] == [id_of(1), id_of(2)] and rows[1]["wasted_gpu_hours"] == ""
    assert "<b>x" not in page.read_text() and "&lt;b&gt;x" in page.read_text()
    capsys.readouterr()
    assert main(["fleet", str(store.root), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["jobs"][0]["runs"] == [id_of(1)]


def test_where_stores_are_looked_for(store: Store, tmp_path: Path) -> None:
    store.save(gpu_run(1, 0.5))
    other = Store(tmp_path / "bob" / "work" / "x" / ".gpulab" / "runs")
    other.save(gpu_run(2, 0.5))
    for folder in (tmp_path / "ann", tmp_path / "ann" / ".gpulab", store.root):
        assert stores_in(folder) == [store.root]
    assert stores_in(tmp_path) == [store.root, other.root]
    assert len(fleet(tmp_path / "ann", tmp_path / "bob").jobs) == 2
