"""Every kind of result that can be shown, made up with known figures, also of hostile words and of nothing."""

from __future__ import annotations

import math
from typing import Any

from msgspec.structs import replace

import gpulab
from gpulab.analysis.facts import facts
from gpulab.diagnosis.catalogue import kinds
from gpulab.diagnosis.diagnose import diagnose
from gpulab.diagnosis.finding import Diagnosis, Evidence
from gpulab.memory_record import Growth, Holding, Ledger, MemoryAccount, OutOfMemory, Pool, Room, Survey
from gpulab.prediction.prediction import Prediction
from gpulab.run import Change, Steps
from gpulab.tuning.climb_record import Attempt, Climb
from gpulab.tuning.fit import Cure, Fit, MemoryLine, Probe, Proof
from gpulab.tuning.headspace import Headspace
from gpulab.tuning.record import Comparison, Experiment, Side
from gpulab.views.climb import Climbed
from gpulab.views.comparison import Compared
from gpulab.views.headspace import HeadspaceReport
from gpulab.views.memory import Cured, Fitted, Owners
from gpulab.views.predictions import Predicted
from gpulab.views.report.report import Diagnosed, Report
from gpulab.views.view import View
from tests.support import comparisons as made
from tests.support import rule_cases, synthetic
from tests.support.scripted_climb import finding
from tests.support.synthetic import HOSTILE

CASES = synthetic.cases()
REFUSED = "the dataset has 512 items; the largest is batch_size=512"
PREDICTIONS = (
    Prediction({"workers": "2"}, 0.4, (0.3, 0.5), "because"),
    Prediction({"batch_size": "64"}, 0.8, (0.5, 1.1), "because", only_sign=True),
    Prediction({"amp": "bf16"}, None, None, "", refused="the CPU has no unit for it"),
)


def report(case: synthetic.Case, unsaved: str = "") -> Report:
    return Report(case.facts, case.diagnosis, unsaved)


def whole_window() -> Report:
    """A profiled window in which no step was found."""
    case = CASES["cpu"]
    run = replace(case.run, steps=Steps.empty(), traced_numbers=(), step_source="whole cell")
    return Report(facts(run), case.diagnosis)


def hostile_comparison() -> Comparison:
    """Every text that a user or a knob can choose holds markup, escapes and mathtext."""
    check = Change(HOSTILE, HOSTILE, HOSTILE, HOSTILE, "took effect", HOSTILE)
    edit = f" {HOSTILE}\n-{HOSTILE}\n+{HOSTILE}"
    b = made.faster(label=HOSTILE, settings={HOSTILE: HOSTILE}, checks=(check,), edit=edit)
    shown = made.a_comparison(b)
    assert shown.loss is not None
    loss = replace(shown.loss, words=HOSTILE)
    return replace(shown, differences=(HOSTILE,), notes=(HOSTILE,), restored=HOSTILE, loss=loss)


def nothing() -> Comparison:
    """A comparison in which nothing could be measured."""
    return made.a_comparison(made.out_of_memory(), made.as_written(facts=None, blocks=(), losses=()))


def refused(**changes: Any) -> Side:
    """A setting that the cell cannot have."""
    side = made.batch(100_000, 20.0, seed=4)
    return replace(side, facts=None, blocks=(), losses=(), failure=REFUSED, **changes)


def noisy(**changes: Any) -> Comparison:
    """Blocks of a busy machine, which decide nothing, and profiled runs that differ otherwise."""
    a = made.as_written(blocks=made.blocks(0, 38.0, per_turn=2, noise=0.8))
    return made.a_comparison(made.faster(blocks=made.blocks(1, 30.0, noise=0.8), **changes), a)


def attempt(number: int, comparison: Comparison, *, kept: bool, words: str = "") -> Attempt:
    settings = {words or f"knob_{number}": "on"}
    words = words or ("faster, and the loss is the same" if kept else "undecided")
    outcome = "kept" if kept else "unsure"
    return Attempt(number, settings, finding("data_wait"), None, outcome, words, comparison)  # type: ignore[arg-type]


def a_climb(words: str = "") -> Climb:
    """The first try was kept by whole runs, the second has one pair, the third is a fifth faster than the first."""
    names = [words or f"knob_{number}" for number in (1, 2, 3)]
    first, both = {names[0]: "on"}, {names[0]: "on", names[2]: "on"}
    whole = _with_settings(made.a_comparison(), {}, both)
    by_runs = replace(
        _with_settings(whole, {}, first), evidence="sequential", pairs=0, ratio=0.5, interval=(0.48, 0.52)
    )
    one_pair = replace(_with_settings(whole, first, {**first, names[1]: "on"}), ratio=1.3, interval=None, pairs=1)
    in_blocks = replace(_with_settings(whole, first, both), ratio=0.8, interval=(0.75, 0.85))
    rungs = (
        attempt(1, by_runs, kept=True, words=words),
        attempt(2, one_pair, kept=False, words=words),
        attempt(3, in_blocks, kept=True, words=words),
    )
    return Climb(made.as_written(), rungs, "budget", 30.0, whole=whole)


def _with_settings(comparison: Comparison, a: dict[str, str], b: dict[str, str]) -> Comparison:
    return replace(comparison, a=replace(comparison.a, settings=a), b=replace(comparison.b, settings=b))


def headspace(words: str = "the system does not tell which files it holds") -> Headspace:
    run = made.run_of(made.as_written())
    compared = made.a_comparison(made.faster(label="batches=kept on the device", settings={}))
    return Headspace(
        run, Experiment((compared.a, compared.b), (compared,), 20.0), 38_000.0, 13_000.0, None, 2.9, (2.8, 3.0),
        25_000.0, None, {"ideal": "faster"}, {"cold": words}, (),
    )  # fmt: skip


def full_finding(**more: Any) -> Diagnosis:
    """One with all that a finding can have."""
    prediction = Prediction({"compile": "default"}, 0.8, (0.7, 0.9), "Replayed without launches.", memory_ratio=1.1)
    found = rule_cases.finding(
        "launch_bound", 4_000.0, "launch", settings=(("compile", "default"),), cure="Compile it.",
        lesson="03_starving_gpu", source_line="line 3 of the cell: model(x)", prediction=prediction,
        after="Next comes nothing.",
    )  # fmt: skip
    found = replace(found, evidence=(Evidence("one figure"), Evidence("another", (10**9, 2 * 10**9))), **more)
    return Diagnosis((found,), (), 20_000.0, 20_000.0)


def diagnosed() -> dict[str, Diagnosed]:
    many = tuple(rule_cases.finding(kind.key, 1e3) for kind in [k for k in kinds() if not k.is_verdict][:8])
    shown = {
        "full": full_finding(),
        "removal": full_finding(
            settings=(), prediction=Prediction({}, 0.4, (0.3, 0.5), "60 ms of 100 ms, in 4 places")
        ),
        "range": full_finding(prediction=Prediction({}, 0.9, (0.7, 1.1), "So.", only_sign=True)),
        "refused": full_finding(prediction=Prediction({}, None, None, "", refused="nothing is known")),
        "unpredicted": full_finding(prediction=None),
        "many": Diagnosis(many, (), 20_000.0, 20_000.0),
        "hostile": CASES["hostile"].diagnosis,
    }
    return {f"diagnosis_{name}": Diagnosed(one, "a run") for name, one in shown.items()}


def compared() -> dict[str, Compared]:
    seeds = made.as_written(seed_losses=tuple(made.loss_curve(seed=s) for s in (1, 2, 3)))
    other = refused(label="batch_size=200000")
    of_two: dict[str, Comparison | Experiment] = {
        "faster": made.a_comparison(),
        "slower": made.a_comparison(made.faster(blocks=made.blocks(1, 76.0))),
        "alike": made.a_comparison(made.alike()),
        "undecided": noisy(),
        "predicted": made.a_comparison(made.faster(prediction=PREDICTIONS[0])),
        "unpredicted": made.a_comparison(made.faster(prediction=PREDICTIONS[2])),
        "per_sample": made.a_comparison(made.batch(64, 40.0, 3)),
        "seeds": made.a_comparison(made.faster(losses=made.loss_curve(seed=9)), seeds),
        "nan": made.a_comparison(made.faster(losses=(2.0, math.nan, math.inf, 1.0))),
        "refused": made.a_comparison(refused()),
        "sweep": made.a_sweep(),
        "refused_sweep": Experiment(
            (made.as_written(), refused(), other), tuple(made.a_comparison(b) for b in (refused(), other)), 1.0
        ),
        "one": Experiment((made.as_written(), made.faster()), (made.a_comparison(),), 3.0, notes=("Said of all.",)),
        "none": Experiment((made.as_written(),), (), 0.1, stopped=True),
        "hostile": hostile_comparison(),
        "nothing": nothing(),
    }
    shown = {f"comparison_{name}": Compared(one) for name, one in of_two.items()}
    shown["comparison_priced"] = Compared(made.a_comparison(), 2.5)
    shown["comparison_sequential"] = gpulab.compare(made.run_of(made.as_written()), made.run_of(made.faster()))
    return shown


GB, MB = 10**9, 10**6
FREE = Room(2 * GB, 8 * GB, "RLIMIT_AS")
LINE = "line 4 of the cell: h = torch.relu(self.wide(x))"


def ledger(step: int, name: str = "trunk") -> Ledger:
    holdings = (
        *(Holding("saved activations", f"{name}.{i} (Block)", (9 - i) * 40 * MB, LINE) for i in range(9)),
        Holding("optimizer state", "AdamW", 400 * MB),
        Holding("parameters", "Net", 200 * MB),
        Holding("gradients", "Net", 200 * MB),
        Holding("variables", "history", step * 10 * MB, "", ("trainer", "loss", "Out[3]", "_")),
        Holding("batches", "the batch in flight", 20 * MB),
        Holding("unnamed", "no name of the notebook", 5 * MB),
    )
    return Ledger("cuda:0", step, "backward", holdings)


def memory_report(account: MemoryAccount, *, failed: bool = False) -> Report:
    """A run on a GPU with this account of its memory."""
    run = replace(CASES["gpu"].run, memory_account=account, outcome="failed" if failed else "completed")
    run = replace(run, memory=replace(run.memory, peak_allocated_bytes=4 * GB, peak_reserved_bytes=5 * GB))
    found = facts(run)
    return Report(found, diagnose(found, predict_cures=False))


def failure(name: str = "trunk", line: str = LINE) -> MemoryAccount:
    pool = Pool(5 * GB, 7 * GB, 300 * MB, 2)
    held = (*ledger(7, name).holdings, Holding("variables", f"traceback: {name} in step()", GB, "", ("Out[3]",)))
    room = Room(300 * MB, 8 * GB, "GPU")
    return MemoryAccount((ledger(2, name),), failure=OutOfMemory("cuda:0", GB, line, 60, held, room, pool), pool=pool)


def owners(name: str = "history") -> Survey:
    rows = (
        Holding("parameters", "model", 2 * GB),
        Holding("saved activations", name, GB, "", ("trainer", "Out[3]", "_")),
        Holding("variables", "sys.last_traceback: h in step()", 300 * MB),
        Holding("variables", "module helpers.cache['a']", 250 * MB),
        Holding("variables", "thread prefetch: batch in work()", 200 * MB),
        Holding("unnamed", "no name of the notebook", 100 * MB),
    )
    on_cpu = (Holding("variables", f"{name}['a']", 50 * MB),)
    return Survey({"cuda:0": rows, "cpu": on_cpu}, {"cuda:0": 80 * MB}, is_whole=False)


def a_fit(words: str = "out of memory", **changes: Any) -> Fit:
    probes = (
        Probe({"batch_size": 16}, 16, 2 * GB, samples_per_s=1800.0),
        Probe({"batch_size": 512}, 512, None, words),
        Probe({"batch_size": 64}, 64, 3 * GB, samples_per_s=2100.0),
        Probe({"batch_size": 176}, 176, 5400 * MB, samples_per_s=2200.0),
    )
    line = MemoryLine(1666 * MB, 20.8 * MB, (16, 64), 30.0 * MB)
    cures = (Cure({"checkpointing": True}, 4.1 * GB), Cure({"batch_size": 128, "accumulate": 2}, 4.4 * GB))
    shown = Fit(
        "batch_size", 256, Room(5 * GB, 8 * GB, "GPU"), 5.5 * GB, 0.1, probes, line, (184, 181, 187), 176,
        ("10 % of the free memory stay free (for threads and libraries).",), (16, 64), cures,
    )  # fmt: skip
    return replace(shown, **changes)


def cured(words: str = "") -> Cured:
    probe = Probe({"checkpointing": True}, None, 4200 * MB, words, shortage="memory" if words else "")
    proof = Proof({"checkpointing": True}, probe, (words,) if words else ())
    return Cured(a_fit(words or "out of memory"), proof, None if words else Compared(made.a_comparison()))


def of_memory() -> dict[str, View]:
    growth = Growth("history", 10.0 * MB, 40, "line 5: history.append(loss)")
    rerun = Growth(HOSTILE, 50.0 * MB, 2, HOSTILE)
    many = tuple(map(ledger, (2, 5, 10, 40)))
    return {
        "report_memory": memory_report(MemoryAccount(many, (growth,), room=Room(3 * GB, 8 * GB, "GPU"))),
        "report_memory_hostile": memory_report(MemoryAccount((ledger(2, HOSTILE),), (), rerun)),
        "report_out_of_memory": memory_report(failure(), failed=True),
        "report_out_of_memory_hostile": memory_report(failure(HOSTILE, HOSTILE), failed=True),
        "owners": Owners(owners(), room=FREE),
        "owners_freed": Owners(owners(), {"cuda:0": GB, "cpu": 0}, ("traceback", "history"), FREE),
        "owners_none": Owners(Survey({}, {})),
        "owners_hostile": Owners(owners(HOSTILE)),
        "fit": Fitted(a_fit()),
        "fit_not_proven": Fitted(a_fit(proven=None, cures=())),
        "fit_not_predicted": Fitted(a_fit(proven=None, predicted=None, line=None, cures=(), notes=())),
        "fit_hostile": Fitted(a_fit(HOSTILE, name=HOSTILE)),
        "cured": cured(),
        "cured_hostile": cured(HOSTILE),
    }


def every_view() -> dict[str, View]:
    """By name; the hostile ones have it in theirs."""
    return {
        **{f"report_{name}": report(case) for name, case in CASES.items()},
        "report_unsaved": report(CASES["cpu"], "No space left on device: free some, then run again."),
        "report_whole_window": whole_window(),
        **diagnosed(),
        **compared(),
        "climb": Climbed(a_climb()),
        "climb_hostile": Climbed(a_climb(HOSTILE)),
        "headspace": HeadspaceReport(headspace()),
        "headspace_hostile": HeadspaceReport(headspace(HOSTILE)),
        "predictions": Predicted("mine", PREDICTIONS),
        "predictions_refused": Predicted("mine", PREDICTIONS[2:]),
        "predictions_hostile": Predicted(HOSTILE, (replace(PREDICTIONS[0], settings={HOSTILE: HOSTILE}),)),
        **of_memory(),
    }
