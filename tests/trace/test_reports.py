"""A trace from elsewhere, from the command line to its report: figures, words, ranks, and what cannot be read."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

import gpulab
from gpulab.analysis.breakdown import PARTS
from gpulab.analysis.facts import facts
from gpulab.cli import main
from gpulab.errors import TraceError
from gpulab.run import Ranks, Run
from gpulab.trace import files as rank_loading
from tests.support import real_traces
from tests.support import trace_files as made
from tests.support.paths import TESTS
from tests.support.strategies import assert_same


def loaded(path: Path) -> Run:
    run = gpulab.load(path)
    assert isinstance(run, Run)
    return run


def as_json(path: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert main(["report", str(path), "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


# Figures


def test_the_step_drawn_in_made_traces(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # host  DataLoader |0 ── 200|   mm |210 ─ 260|, launch |220 230|          optimizer |900 ── 990|
    # GPU                                  kernel |300 ── 500|  copy |510 530| (its call is not in the trace)
    found = as_json(made.write(tmp_path, made.text(made.step())), capsys)
    (step,) = found["steps"]
    assert (step["number"], step["wall_us"], step["flags"]) == (3, 1000, ["first", "last"])
    assert {part: us for part, us in step["parts_us"].items() if us} == {
        "compute": 200,  # the kernel
        "memcpy": 20,
        "data_wait": 200,
        "launch": 20,  # 210–230: operators run, nothing is queued
        "queued": 70,  # 230–300: launched, not begun
        "optimizer": 90,
        "unknown": 10 + 10 + 370 + 10,  # 200–210, 500–510 (launch outside the window), 530–900, 990–1000
    }
    assert tuple(step["parts_us"]) == PARTS
    assert found["data_wait_us"] == {"waited": 200, "exposed": 200}
    assert found["busy_fraction"] == pytest.approx(0.22)
    assert found["kernel_busy_fraction"] == pytest.approx(0.20)
    assert found["integrity"]["state"] == "ok"
    assert found["kernel_statistics"]["est_sm_efficiency"] == pytest.approx(0.10)
    assert found["kernel_statistics"]["est_achieved_occupancy_pct"] == pytest.approx(6)
    assert found["tensor_core_fraction"] == 0
    assert [k["name"] for k in found["kernels"]] == ["volta_sgemm_64x64_nt", "Memcpy HtoD (Pinned -> Device)"]
    mm = next(row for row in found["operators"] if row["name"] == "aten::mm")
    assert (mm["self_us"], mm["device_us"]) == (50, 200)
    assert found["copies"] == [
        {
            "kind": "HtoD",
            "host_memory": "pinned",
            "count": 1,
            "time_us": 20,
            "bytes": 2048,
            "gb_per_s": pytest.approx(0.1024),
        }
    ]
    assert found["device"]["name"] == "NVIDIA H100 80GB HBM3"
    assert found["samples_per_s"] is None and found["step_us"] is None


def test_the_text_reads_as_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    events = [e for n in (3, 4, 5) for e in made.step(n, 1000.0 * (n - 3))]
    assert main(["report", str(made.write(tmp_path, made.text(events), "job.pt.trace.json.gz")), "--all"]) == 0
    text = capsys.readouterr().out
    assert "job · device: NVIDIA H100 80GB HBM3 (GPU 0) · 3 steps · 3.00 ms · a trace from elsewhere" in text
    assert "20 % of each step waits on the DataLoader" in text
    assert "over all 3 traced steps" in text
    for title in ("STEP TIME", "HOW THE GPU WAS USED", "COPIES", "CAN THIS TRACE BE TRUSTED?"):
        assert title in text
    for absent in ("without the profiler", "--no-save", "DataLoader settings", "Left out", "gpulab's own code"):
        assert absent not in text


# Integrity


def integrity_of(tmp_path: Path, events: list[made.Event], **head: Any) -> dict[str, int]:
    trust = facts(loaded(made.write(tmp_path, made.text(events, **head)))).integrity
    assert trust is not None
    return {check.name: check.count for check in trust.checks if check.count}


def test_each_damage_is_counted(tmp_path: Path) -> None:
    two = [*made.step(3), *made.step(5, 2000.0)]
    assert integrity_of(tmp_path, two) == {"missing_steps": 1}
    twice = [*made.step(3), made.step(3)[0]]
    assert integrity_of(tmp_path, twice) == {"duplicated_steps": 1}
    assert integrity_of(tmp_path, made.step(), deviceProperties=[]) == {"missing_device_properties": 1}
    unkernelled = [e for e in made.step() if e.get("cat") != "kernel"]
    assert integrity_of(tmp_path, unkernelled) == {"launches_without_kernels": 1}


# Ranks


def rank_file(folder: Path, rank: int, world: int = 3, name: str = "", shift: float = 0.0) -> Path:
    """A rank whose all-reduce begins `shift` µs later than that of rank 0 and ends at the same time."""
    nccl = made.on_gpu("kernel", "ncclDevKernel_AllReduce_Sum_f32(args)", 500 + shift, 300 - shift, 0, stream=20)
    head = {"distributedInfo": {"backend": "nccl", "rank": rank, "world_size": world}}
    return made.write(folder, made.text([*made.step(), nccl], **head), name or f"rank{rank}.json")


def test_a_folder_of_ranks_is_one_object(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for rank, shift in enumerate((0, 250, 0)):
        rank_file(tmp_path, rank, shift=shift)
    found = gpulab.load(tmp_path)
    assert isinstance(found, Ranks)
    assert (list(found.runs), found.world_size, found.problems) == ([0, 1, 2], 3, ())
    data = as_json(tmp_path, capsys)
    assert data["straggler"] == 1
    assert data["communication_us"]["0"]["waiting"] == pytest.approx(250)
    assert data["communication_us"]["1"] == {
        "total": 50,
        "exposed": 50,
        "overlapped": 0,
        "waiting": 0,
        "transfer": 50,
    }
    assert [data["per_rank"][r]["ranks"]["rank"] for r in "012"] == [0, 1, 2]
    assert main(["report", str(tmp_path)]) == 0
    assert "Rank 1 arrives last" in capsys.readouterr().out


def test_what_is_wrong_with_a_folder_is_said(tmp_path: Path) -> None:
    rank_file(tmp_path, 0, world=4)
    rank_file(tmp_path, 0, world=4, name="rank0-again.json")
    rank_file(tmp_path, 3, world=4)
    (tmp_path / "broken.json").write_text("<html>404</html>")
    (tmp_path / "notes.txt").write_text("not looked at")
    found = gpulab.load(tmp_path)
    assert isinstance(found, Ranks)
    assert list(found.runs) == [0, 3]
    said = {p.what: p.reason for p in found.problems}
    assert "rank 0 again: rank0-again.json has it already" in said.values() or (
        said["rank0.json"].startswith("rank 0 again") or said["rank0-again.json"].startswith("rank 0 again")
    )
    assert "broken.json" in said and "web page" in said["broken.json"]
    assert "ranks 1, 2" in said
    assert "notes.txt" not in said


def test_runs_of_two_jobs_are_not_taken_for_one(tmp_path: Path) -> None:
    rank_file(tmp_path, 0, world=2)
    rank_file(tmp_path, 1, world=8)
    found = gpulab.load(tmp_path)
    assert isinstance(found, Ranks)
    assert any("not of the same job" in p.reason for p in found.problems)
    shown = gpulab.report(found)
    assert "not of one job" in shown.headline.sentence and shown.comparison.straggler is None
    assert shown.json()["integrity"]["state"] == "unusable"  # type: ignore[index]


def test_ranks_without_a_rank_in_the_file_go_by_name(tmp_path: Path) -> None:
    for name in ("trainer_rank-5.json", "trainer_rank-2.json", "other.json"):
        made.write(tmp_path, made.text(made.step()), name)
    found = gpulab.load(tmp_path)
    assert isinstance(found, Ranks) and list(found.runs) == [0, 2, 5]


def test_reading_apart_gives_the_same_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for rank in range(2):
        rank_file(tmp_path, rank, world=2)
    (tmp_path / "broken.json").write_text("[")
    here = gpulab.load(tmp_path)
    monkeypatch.setattr(rank_loading, "PARALLEL_FROM_BYTES", 0)
    monkeypatch.setattr(rank_loading, "usable_cores", lambda: 2.0)
    apart = gpulab.load(tmp_path)
    assert isinstance(here, Ranks) and isinstance(apart, Ranks)
    assert here.problems == apart.problems
    assert_same(here.runs, apart.runs)


def test_an_empty_folder_says_what_it_looked_for(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"\.json"):
        gpulab.load(tmp_path)


def test_times_that_nobody_knows_are_no_zeros(tmp_path: Path) -> None:
    kernels = [{**e, "dur": -5} if e.get("cat") == "kernel" else e for e in made.step()]
    known = facts(loaded(made.write(tmp_path, made.text(kernels))))
    assert known.integrity is not None and known.integrity.state == "unusable"
    assert known.breakdown is None and known.trace is not None and known.trace.est_sm_efficiency is None
    silent = [{k: v for k, v in e.items() if k != "dur"} for e in made.step()]
    untimed = loaded(made.write(tmp_path, made.text(silent)))
    assert gpulab.report(untimed).json()["busy_fraction"] is None
    trace = facts(untimed).trace
    assert trace is not None and trace.est_sm_efficiency is None
    host = [{**e, "dur": -1} if e["name"] == "aten::mm" else e for e in made.step()]
    trust = facts(loaded(made.write(tmp_path, made.text(host)))).integrity
    assert trust is not None and trust.state == "degraded" and "busy_fraction" not in trust.withheld


def test_a_window_without_length_has_a_page(tmp_path: Path) -> None:
    instant = [{**e, "ts": 100, "dur": 0} for e in made.step()]
    shown = gpulab.report(loaded(made.write(tmp_path, made.text(instant))))
    assert "has a duration" in shown.text(full=True)
    assert "</html>" in shown.html()


def test_damage_of_the_compression_alone_withholds_nothing(tmp_path: Path) -> None:
    path = tmp_path / "t.json.gz"
    path.write_bytes(gzip.compress(made.text(made.step()).encode(), mtime=0) + b"more")
    trust = facts(loaded(path)).integrity
    assert trust is not None
    assert {c.name: c.count for c in trust.checks if c.count} == {"broken_gzip": 1} and not trust.withheld


def test_a_folder_of_traces_without_a_gpu(tmp_path: Path) -> None:
    for name in ("cpu_no_steps", "cpu_steps_memory"):
        source = TESTS / "recorded" / f"{name}.pt.trace.json.gz"
        (tmp_path / source.name).write_bytes(source.read_bytes())
    found = gpulab.load(tmp_path)
    assert isinstance(found, Ranks)
    assert "No communication between these ranks" in gpulab.report(found).text(full=True)


def test_a_missing_rank_may_be_the_last(tmp_path: Path) -> None:
    for number in (0, 1, 2, 4, 5, 6):
        source = real_traces.path(f"v100_dlrm_8ranks/rank{number}")
        (tmp_path / source.name).write_bytes(source.read_bytes())
    shown = gpulab.report(gpulab.load(tmp_path))
    assert "Of the 6 ranks that are here" in shown.headline.sentence and "may arrive later" in shown.headline.evidence


def test_backward_of_old_traces_is_on_the_operators_account() -> None:
    known = facts(loaded(real_traces.path("v100_resnet50_workers0")))
    started = {row.name: row.device_us or 0 for row in known.operators}
    assert started["aten::cudnn_convolution_backward_weight"] > 20_000
    assert known.breakdown is not None
    assert sum(started.values()) > 0.9 * known.breakdown.median_us["compute"]
