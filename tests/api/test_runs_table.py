"""`%gpulab runs`: what is listed, filtered, named and deleted, and that two notebooks may do it at once."""

from __future__ import annotations

import gzip
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
from msgspec.structs import replace

from gpulab.api import runs_command as commands
from gpulab.api import tensorboard
from gpulab.api.runs import Runs
from gpulab.errors import GpulabError, StoreError, UsageError
from gpulab.run import Device, Loader, Run, Settings
from gpulab.store.folders import DOCUMENT, Store, read
from tests.support.commands import answered
from tests.support.paths import ROOT
from tests.support.strategies import assert_same, tiny_run

OLD, MIDDLE, NEW = "20250101-000000-aaaaaa", "20250102-000000-bbbbbb", "20250103-000000-cccccc"
HOSTILE = "<script>alert(1)</script> 'a' \"b\"\n\x1b[31m\u202e"


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "runs")


@pytest.fixture
def runs(store: Store) -> Runs:
    """Three stored runs: a failed one on a GPU, one without a name, one with a loader."""
    gpu = {"device": Device("cuda", "A100"), "outcome": "failed", "outcome_detail": "RuntimeError: CUDA error"}
    store.save(make(OLD, "resnet", **gpu))
    store.save(make(MIDDLE, code="train(AdamW)"))
    loader = Loader("Shakespeare", 9, 3, 0, None, False, False, 3, False)
    store.save(make(NEW, "gpt 2", loader=loader, settings=Settings("gpt 2", knobs={"workers": "4"})))
    return Runs(store)


def make(id: str, name: str = "", **changes: Any) -> Run:
    created = f"{id[:4]}-{id[4:6]}-{id[6:8]}T12:00:00+00:00"
    return replace(tiny_run(id, name=name), created=created, **changes)


def write_trace(path: Path) -> None:
    path.write_bytes(gzip.compress(b'{"traceEvents": []}'))


def do(runs: Runs, line: str) -> str:
    return command("runs", runs, line)


def command(name: str, runs: Runs, line: str) -> str:
    """What a command on these runs answers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(commands, "runs", runs)
        return answered(f"{name} {line}").removesuffix("\n")


def complaint(runs: Runs, line: str) -> str:
    with pytest.raises(GpulabError) as caught:
        do(runs, line)
    return str(caught.value)


# listing and filtering


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("", [NEW, MIDDLE, OLD]),
        ("--name resnet", [OLD]),
        ("--name 'RESNET'", []),
        ("--name '20250102*'", [MIDDLE]),
        ("--device cuda", [OLD]),
        ("--outcome failed", [OLD]),
        ("--since 2025-01-02T12:00:00+00:00", [NEW, MIDDLE]),
        ("--since 2025-01-02T12:00:01Z", [NEW]),
        ("--since ''", [NEW, MIDDLE, OLD]),
        ("adamw", [MIDDLE]),
        ("SHAKE speare", [NEW]),
        ("adamw speare", []),
        ("workers=4", [NEW]),
        ("cuda error", [OLD]),
        ("--text A100", [OLD]),
        ("--device cpu", [NEW, MIDDLE]),
        ("--device cpu adamw", [MIDDLE]),
    ],
)
def test_conditions_choose_the_runs_for_which_all_hold(runs: Runs, line: str, found: list[str]) -> None:
    shown = do(runs, line)
    assert [id for id in (NEW, MIDDLE, OLD) if id in shown] == found
    if not found:
        assert shown.startswith("No run matches: ")


def test_an_age_counts_back_from_now(store: Store) -> None:
    for hours, id in ((1, NEW), (5, OLD)):
        created = datetime.now(UTC) - timedelta(hours=hours)
        store.save(replace(tiny_run(id), created=created.isoformat()))
    runs = Runs(store)
    assert [r.id for r in runs.where(since="2h")] == [NEW]
    assert [r.id for r in runs.where(since="300m")] == [NEW]
    assert {r.id for r in runs.where(since="1d")} == {r.id for r in runs.where(since="1w")} == {OLD, NEW}
    assert [r.id for r in runs.where(since=timedelta(hours=2))] == [NEW]


def test_a_date_is_this_machines_day(store: Store) -> None:
    midnight = datetime(2025, 1, 2).astimezone()
    for id, moment in ((OLD, midnight - timedelta(seconds=1)), (NEW, midnight)):
        store.save(replace(tiny_run(id), created=moment.astimezone(UTC).isoformat()))
    assert [r.id for r in Runs(store).where(since="2025-01-02")] == [NEW]


def test_a_part_keeps_the_positions_of_the_whole(runs: Runs) -> None:
    fresh, part = runs.where(name="fresh"), runs.where(device="cpu").where(name="2025*")
    assert [row.position for row in part.rows()] == [-2] and runs[-2].id == MIDDLE
    assert len(part) == 1 and part[-1].id == part[0].id == MIDDLE
    with pytest.raises(StoreError, match="no run 'resnet'"):
        part["resnet"]
    assert len(runs) == 3
    runs.add(make("20250104-000000-dddddd", "fresh"))
    assert [r.name for r in fresh] == ["fresh"], "runs of this process are filtered as the stored ones"


def test_the_newest_twenty_are_listed_unless_all_are_asked_for(store: Store) -> None:
    for index in range(23):
        store.save(tiny_run(f"20250101-0000{index:02}-aaaaaa"))
    last = f"\n\n… and 3 older runs\nSaved in {store.root}."
    assert do(Runs(store), "").endswith(last)
    assert len(do(Runs(store), "--all").splitlines()) == 26
    assert do(Runs(store), "--device cpu").endswith(last)
    page = Runs(store).where(name="<b>\x1b")._repr_html_()
    assert "&lt;b&gt;" in page and "<b>" not in page and "\x1b" not in page


def test_runs_of_two_notebooks_are_listed_in_time_order(store: Store) -> None:
    """This kernel's own runs are the last of the sequence; another notebook may have measured after them."""
    runs = Runs(store)
    for id, own in ((OLD, True), (MIDDLE, False), (NEW, True)):
        run = make(id)
        path = store.save(run)
        if own:
            runs.add(run, path)
    later = "20250104-000000-dddddd"
    store.save(make(later))
    shown = do(runs, "")
    assert sorted((later, NEW, MIDDLE, OLD), key=shown.index) == [later, NEW, MIDDLE, OLD]
    assert runs[-1].id == NEW and shown.splitlines()[2].split()[0] == "-1"


@pytest.mark.parametrize(
    ("named", "shown"),
    [
        ({"settings": Settings(knobs={"workers": "2"})}, "workers=2"),
        ({"settings": Settings("train.py", knobs={"workers": "2"})}, "train.py · workers=2"),
        ({"settings": Settings("workers=2", knobs={"workers": "2"})}, "workers=2"),
        ({"name": "batch_size=32, amp=bf16, fused_optimizer=on: baseline"}, "batch_size=32, a…er=on: baseline"),
        ({"name": "batch_size=32, amp=bf16, fused_optimizer=on"}, "batch_size=32, a…ed_optimizer=on"),
    ],
)
def test_a_run_is_listed_with_what_tells_it_from_others(store: Store, named: dict[str, Any], shown: str) -> None:
    store.save(make(OLD, **named))
    line = do(Runs(store), "").splitlines()[1]
    assert re.split(r"  +", line)[1] == shown


def test_the_time_of_a_run_is_this_machines(store: Store) -> None:
    moment = datetime(2025, 1, 2, 3, 4, 5).astimezone()
    store.save(replace(tiny_run(NEW), created=moment.astimezone(UTC).isoformat()))
    assert "02 Jan 03:04:05" in do(Runs(store), "")


# naming


@pytest.mark.parametrize("name", ["two words", HOSTILE, "n" * 10_000, "", "ü 数", "a/b"])
def test_a_run_takes_any_name_and_nothing_else_changes(store: Store, name: str) -> None:
    folder = store.save(make(OLD, "before"), write_trace)
    before = {f.name: (f.read_bytes(), f.stat().st_mtime_ns) for f in folder.iterdir()}
    run = read(folder)
    runs = Runs(store)
    assert runs.name("before", name) == OLD
    assert_same(read(folder), replace(run, settings=replace(run.settings, name=name)))
    after = {f.name: (f.read_bytes(), f.stat().st_mtime_ns) for f in folder.iterdir()}
    assert after.keys() == before.keys()
    assert {n for n in after if after[n] != before[n]} == {DOCUMENT}
    assert after[DOCUMENT][1] == before[DOCUMENT][1], "the order of runs made in one second goes by it"
    assert runs[name or OLD].id == OLD
    if name:
        assert do(runs, "").count("\n") == 3


def test_a_name_keeps_what_a_newer_gpulab_has_written(store: Store) -> None:
    folder = store.save(make(OLD))
    document = (folder / DOCUMENT).read_text()
    marked = document[:-1] + ',"later":{"x":12345678901234567890123,"y":1.10}}'
    (folder / DOCUMENT).write_text(marked)
    Runs(store).name(OLD, "cnn")
    assert '"later":{"x":12345678901234567890123,"y":1.10}' in (folder / DOCUMENT).read_text()


def test_naming_by_line(runs: Runs) -> None:
    assert do(runs, "name -1 'it''s new'") == f"{NEW} has the name 'its new'."
    assert do(runs, f'name {OLD} "a b"') == f"{OLD} has the name 'a b'."
    assert do(runs, "name 'a b' ''") == f"{OLD} has no name now." and runs[OLD].settings.name == ""
    runs.name(OLD, "bad \udc80")
    assert runs[OLD].name == r"bad \udc80"


@pytest.mark.parametrize("name", ["latest", "-1", "-999", MIDDLE])
def test_a_name_that_means_another_run_is_refused(runs: Runs, name: str) -> None:
    with pytest.raises(UsageError, match="already taken by a run"):
        runs.name(OLD, name)
    assert runs[OLD].name == "resnet"


def test_a_run_in_memory_has_its_new_name(store: Store) -> None:
    runs = Runs(store)
    saved, unsaved = make(OLD, "a"), make(NEW, "b")
    runs.add(saved, store.save(saved))
    runs.add(unsaved)
    runs.name(saved, "c")
    runs.name("b", "d")
    assert [r.name for r in runs] == ["c", "d"] and read(store.root / OLD).name == "c"
    assert runs[0] is runs["c"]


def test_what_another_notebook_names_or_deletes_is_so_here(store: Store) -> None:
    here, there = Runs(store), Runs(store)
    one, two = make(OLD, "one"), make(NEW, "two")
    here.add(one, store.save(one))
    here.add(two, store.save(two))
    there.name("one", "uno")
    assert here["uno"].id == OLD and here[0].name == "uno"
    there.delete("two")
    assert here[-1] is two, "what this process measured is never lost"
    assert here.rows()[0].path is None and "(not saved)" in do(here, "")
    here.delete("two")
    assert [r.id for r in here] == [OLD]


def test_an_old_run_that_another_notebook_deletes_is_gone_here(store: Store) -> None:
    here = Runs(store)
    for index in range(22):
        run = make(f"20250103-{index:06}-eeeeee")
        here.add(run, store.save(run))
    Runs(store).delete("20250103-000000-eeeeee")
    assert len(here) == 21 and here[0].id == "20250103-000001-eeeeee"


def test_a_name_that_cannot_be_written_leaves_the_old_one(
    runs: Runs, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(StoreError, match=f"Run '{OLD}' not renamed: no space left on device"):
            runs.name(OLD, "new")
    assert runs[OLD].name == "resnet" and len(list((store.root / OLD).iterdir())) == 2


# deleting


def test_nothing_is_deleted_before_it_is_said(runs: Runs) -> None:
    size = sum(f.stat().st_size for f in (runs.store.root / OLD).iterdir())
    assert runs.deletions("resnet")[0].size_bytes == size > 1000
    shown = do(runs, "delete resnet -1")
    assert shown.splitlines()[0].startswith("Would delete 2 runs, ") and shown.splitlines()[0].endswith("add --yes.")
    assert f"  {OLD}  resnet  {size / 1024:.2f} KiB" in shown and NEW in shown and MIDDLE not in shown
    assert len(runs) == 3
    assert do(runs, "delete --yes resnet -1").startswith("Deleted 2 runs, ")
    assert [r.id for r in runs] == [MIDDLE]
    assert [f.name for f in runs.store.root.iterdir()] == [MIDDLE]


def test_conditions_delete_what_they_choose(runs: Runs) -> None:
    assert "Would delete 2 runs" in do(runs, "delete --device cpu")
    assert do(runs, "delete --device cpu --yes").startswith("Deleted 2 runs")
    assert [r.id for r in runs] == [OLD]
    assert do(runs, "delete --device cpu --yes") == "No run matches: device cpu. Nothing to delete."
    runs.where(outcome="failed").delete()
    assert len(runs) == 0


def test_all_keys_are_looked_up_before_the_first_run_goes(runs: Runs) -> None:
    with pytest.raises(StoreError, match="no run 'nonsense'"):
        runs.delete("resnet", "nonsense")
    with pytest.raises(UsageError, match="Name the runs"):
        runs.delete()
    assert len(runs) == 3
    assert [d.id for d in runs.delete("-1", NEW, "gpt 2")] == [NEW], "one run, named three times"


def test_a_long_list_is_cut(store: Store) -> None:
    for index in range(23):
        store.save(tiny_run(f"20250101-0000{index:02}-aaaaaa", name="n" * 10_000))
    shown = do(Runs(store), "delete --device cpu")
    assert shown.endswith("  … and 3 more") and len(shown) < 3000


def test_a_folder_that_is_no_run_any_more_can_be_deleted(runs: Runs, store: Store) -> None:
    (store.root / "torn").mkdir()
    (store.root / "torn" / DOCUMENT).write_text("{")
    assert "torn: unreadable" in do(runs, "")
    do(runs, "delete torn --yes")
    assert "torn" not in do(runs, "")


def test_a_folder_outside_the_store_is_not_deleted(runs: Runs, tmp_path: Path) -> None:
    elsewhere = Store(tmp_path / "elsewhere").save(make("20250104-000000-dddddd"))
    assert "is not in the run store" in complaint(runs, f"delete {elsewhere} --yes")
    assert read(elsewhere).id == "20250104-000000-dddddd"


@pytest.mark.skipif(os.name == "nt", reason="links need a right there")
def test_of_a_linked_run_the_link_is_deleted(runs: Runs, store: Store, tmp_path: Path) -> None:
    elsewhere = Store(tmp_path / "elsewhere").save(make("20250104-000000-dddddd"))
    (store.root / elsewhere.name).symlink_to(elsewhere)
    runs.delete(elsewhere.name)
    assert not (store.root / elsewhere.name).exists() and read(elsewhere).id == elsewhere.name
    assert [f for f in store.root.iterdir() if f.name.startswith(".")] == []


def test_a_deletion_that_was_cut_short_is_finished_by_the_next(
    runs: Runs, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(path: Path, **options: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            store.delete(OLD)
    assert OLD not in [e.id for e in store.list()]
    assert len([f for f in store.root.iterdir() if f.name.startswith(".")]) == 1
    store.save(make("20250104-000000-dddddd"))
    assert [f for f in store.root.iterdir() if f.name.startswith(".")] == []


def test_two_notebooks_delete_one_run(runs: Runs, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = store.root / OLD
    with monkeypatch.context() as both_have_found_it:
        both_have_found_it.setattr(Store, "find", lambda self, key: folder)
        assert [one.delete(folder) for one in (store, Store(store.root))] == [True, False]
    with pytest.raises(StoreError, match="not the folder of a run"):
        store.delete(folder)


# bad input


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--device gpu", "The device must be cpu or cuda, got 'gpu'."),
        ("--outcome faild", "Did you mean failed?"),
        ("--since yesterday", "'yesterday' is neither a date (2026-11-20) nor an age (30m, 2h, 3d, 1w)."),
        ("--since 2025-13-01", "is neither a date"),
        ("--since 999999999w", "is neither a date"),
        ("--since", "expected one argument"),
        ("--nam x", "%gpulab runs has no option --nam; did you mean --name?"),
        ("--all=3", "ignored explicit argument"),
        ("delet resnet", "Did you mean `%gpulab runs delete`?"),
        ('"resnet', "no closing quotation"),
        ("name resnet", "expects a run and its new name"),
        ("name resnet two words", "quote names with spaces"),
        ("name resnt x", "no run 'resnt' in"),
        ("name 2025 x", "matches 3 runs"),
        ("name -7 x", "There is no run -7"),
        ("name '' x", "`gpulab runs` lists them"),
        (f"name {'n' * 10_000} x", "`gpulab runs` lists them"),
        ("delete", "expects runs or a filter, at least one."),
        ("delete resnet --device cuda", "expects runs or a filter, not both."),
        ("delete --yes", "at least one."),
        ("delete resnet --all", "has no option --all; --help lists them."),
    ],
)
def test_bad_input_is_one_sentence_and_changes_nothing(runs: Runs, line: str, words: str) -> None:
    told = complaint(runs, line)
    assert words in told and "\n" not in told and len(told) < 600
    assert [r.name for r in runs] == ["resnet", MIDDLE, "gpt 2"]


def test_a_name_that_several_runs_have_changes_none(runs: Runs) -> None:
    runs.name(MIDDLE, "resnet")
    for line in ("name resnet x", "delete resnet --yes"):
        assert complaint(runs, line) == f"2 runs are named 'resnet': {OLD}, {MIDDLE}. Use an id."
    assert runs["resnet"].id == MIDDLE, "to look at, the newest is meant"
    assert do(runs, "delete --name resnet --yes").startswith("Deleted 2 runs")


def test_an_empty_store_is_no_error_to_list(store: Store) -> None:
    runs = Runs(store)
    assert do(runs, "") == f"No run yet in {store.root}."
    assert do(runs, "--name x") == "No run matches: name x."
    assert "There is no run in" in complaint(runs, "delete latest")
    assert all(word in do(runs, "--help") for word in ("name RUN NEW", "[--yes]", "--tensorboard", "--since"))
    assert all(word in do(runs, "delete -h") for word in ("RUN", "--yes", "--since"))


def test_a_terminal_names_its_store(runs: Runs, store: Store, tmp_path: Path) -> None:
    for words in (["--store", str(store.root), "--device", "cuda"], ["--device", "cuda", f"--store={store.root}"]):
        shown = answered(shlex.join(["runs", *words]), "terminal")
        assert OLD in shown and NEW not in shown and "  failed\n" in shown
    assert answered("runs", "terminal").startswith("No run yet in")
    with pytest.raises(UsageError, match="--store: expected one argument"):
        answered("runs --store", "terminal")


# tensorboard


def traced(store: Store, id: str = OLD) -> None:
    store.save(make(id), write_trace)


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("--port x", "--port must be an integer"),
        ("--port 99999", "from 1 to 65535"),
        ("--port 0", "from 1 to 65535"),
        ("--prt 1", "did you mean --port?"),
        ("more", "Unexpected argument 'more'."),
    ],
)
def test_tensorboard_answers_bad_input_in_a_sentence(store: Store, line: str, told: str) -> None:
    pytest.importorskip("tensorboard")
    pytest.importorskip("torch_tb_profiler")
    traced(store)
    with pytest.raises(UsageError) as caught:
        command("tensorboard", Runs(store), line)
    assert told in str(caught.value)
    assert command("tensorboard", Runs(store), "--stop") == "No TensorBoard of this process runs."


def test_tensorboard_needs_its_plugin_and_a_trace(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensorboard, "installed", lambda name: name != "torch_tb_profiler")
    with pytest.raises(UsageError, match=r"install it first: pip install torch-tb-profiler\.$"):
        command("tensorboard", runs, "")
    monkeypatch.setattr(tensorboard, "installed", lambda name: True)
    with pytest.raises(UsageError, match="has a trace to show"):
        command("tensorboard", runs, "")


@pytest.fixture
def more_children() -> Callable[[], list[psutil.Process]]:
    """Children that this process has since the test began; others may have left one, such as a resource tracker."""
    before = set(psutil.Process().children(recursive=True))
    return lambda: [child for child in psutil.Process().children(recursive=True) if child not in before]


def test_tensorboard_that_fails_says_why_and_is_gone(
    store: Store, more_children: Callable[[], list[psutil.Process]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensorboard, "installed", lambda name: True)
    monkeypatch.setattr(tensorboard, "_CHILD", "import sys; sys.exit('it is broken')")
    traced(store)
    with pytest.raises(GpulabError, match=r"TensorBoard did not start: it is broken"):
        command("tensorboard", Runs(store), "")
    assert more_children() == []


def test_an_interrupt_while_tensorboard_starts_leaves_no_process(
    store: Store, more_children: Callable[[], list[psutil.Process]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(process: subprocess.Popen[bytes], log: Path) -> str:
        assert more_children() != []
        raise KeyboardInterrupt

    monkeypatch.setattr(tensorboard, "installed", lambda name: True)
    monkeypatch.setattr(tensorboard, "_CHILD", "import sys; sys.stdin.read()")
    monkeypatch.setattr(tensorboard, "_await_url", interrupted)
    traced(store)
    with pytest.raises(KeyboardInterrupt):
        tensorboard.start(store.root)
    assert more_children() == [] and not tensorboard.stop()


@pytest.mark.tensorboard
def test_tensorboard_serves_the_runs_until_it_is_stopped(
    store: Store, more_children: Callable[[], list[psutil.Process]]
) -> None:
    pytest.importorskip("tensorboard")
    pytest.importorskip("torch_tb_profiler")
    traced(store)
    try:
        answer = command("tensorboard", Runs(store), "")
        assert command("tensorboard", Runs(store), "") == answer, "the one that runs is used again"
        assert "TensorBoard shows 1 run with a trace: http://127.0.0.1:" in answer
        assert "from the network" in answer and "gpulab's own report" in answer
        address = answer.split("trace: ")[1].split("#")[0]
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(address, timeout=60) as page:
            assert page.status == 200 and b"TensorBoard" in page.read()
        children = more_children()
        assert children
        assert command("tensorboard", Runs(store), "--stop") == "TensorBoard has ended."
    finally:
        tensorboard.stop()
    assert psutil.wait_procs(children, timeout=60)[1] == []
    assert command("tensorboard", Runs(store), "--stop") == "No TensorBoard of this process runs."


KERNEL = """
import sys, time
from pathlib import Path
import psutil
from gpulab.api import tensorboard
tensorboard.start(Path(sys.argv[1]))
print(psutil.Process().children()[0].pid, flush=True)
time.sleep(600)
"""


@pytest.mark.tensorboard
@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="processes are not killed so there")
def test_tensorboard_ends_with_the_kernel_that_is_killed(store: Store) -> None:
    pytest.importorskip("tensorboard")
    pytest.importorskip("torch_tb_profiler")
    traced(store)
    command = [sys.executable, "-c", KERNEL, str(store.root)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as kernel:
        assert kernel.stdout is not None
        server = psutil.Process(int(kernel.stdout.readline()))
        everyone = [server, *server.children(recursive=True)]
        kernel.send_signal(signal.SIGKILL)
        kernel.wait(120)
    deadline = time.monotonic() + 60
    while (left := [p for p in everyone if alive(p)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert left == []


def alive(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
