"""Rules about feeding the step: it waits for data, and what inside the DataLoader takes the time."""

from __future__ import annotations

import math
from dataclasses import dataclass

from gpulab.analysis.loading import LoadingFacts
from gpulab.diagnosis.case import Case, Untold
from gpulab.diagnosis.finding import Evidence, Finding
from gpulab.diagnosis.headline import ms, percent

LESSON = "03_starving_gpu"
_UNKNOWN_MACHINE = 8  # workers proposed at most where the usable cores are not known


def data_starved(case: Case) -> Finding | Untold | None:
    """The loop waits for its next batch, and the device has nothing to do meanwhile.

    Of the unprofiled steps where there are any; on a GPU only what its work does not hide, from the accounting.
    """
    wait = _waiting(case)
    if isinstance(wait, Untold):
        return wait
    if wait is None:
        return None
    inside = case.facts.loading
    if inside is None:
        return _finding(case, wait, "data_starved", f"{wait.sentence}.")
    handed_us, more = _handed_over_us(inside), [Evidence(_making(inside))]
    if not handed_us:
        return _finding(case, wait, "data_starved", f"{wait.sentence}.", *more)
    more.append(Evidence(f"{ms(handed_us)} of a step's wait are from a batch's being made to the loop's having it"))
    return _finding(
        case,
        wait,
        "data_starved",
        f"{wait.sentence}: it is made in time, but handing it over from a worker takes long.",
        *more,
    )


def cpu_preprocessing(case: Case) -> Finding | Untold | None:
    """Decoding and transforming the items takes processor time, and the step waits for it."""
    return _inside(case, "cpu_preprocessing")


def storage_bound(case: Case) -> Finding | Untold | None:
    """Reading the items waits for a disk, a network or a lock, and the step waits for it."""
    return _inside(case, "storage_bound")


def slow_collate(case: Case) -> Finding | Untold | None:
    """Putting the items of a batch together takes long, and the step waits for it."""
    return _inside(case, "slow_collate")


def waiting_for_cores(case: Case) -> Finding | None:
    """The step waits for data, and the workers, for most of the time, for a processor core; asked by `cores`."""
    found = _inside(case, "cpu_oversubscribed")
    return found if isinstance(found, Finding) else None


# -- the wait ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Wait:
    """How long a typical step waits for data (µs), as far as that holds the device up."""

    step_us: float
    waited_us: float
    exposed_us: float
    sure: bool
    basis: str  # "median of 20 unprofiled steps"
    bad: bool
    sentence: str = ""


def _waiting(case: Case) -> _Wait | Untold | None:
    """None where it does not wait long enough to be worth telling; Untold where that cannot be known."""
    step, waited = case.facts.step_us or case.facts.traced_step_us, case.facts.data_wait_us
    step_us, waited_us = case.step_us, waited.median if waited is not None else case.part_us("data_wait")
    if not step_us:
        return None
    exposed_us = _exposed_us(case, step_us, waited_us)
    if min(waited_us, exposed_us if exposed_us is not None else waited_us) < case.thresholds.data_wait_notice * step_us:
        return None
    if exposed_us is None:
        return _hidden_or_not(case)
    bad = waited_us >= case.thresholds.data_wait_bad * step_us
    who = "Each training step" if step is not None else "The profiled code"
    kind = "unprofiled" if case.facts.step_us is not None else "profiled"
    return _Wait(
        step_us,
        waited_us,
        min(waited_us, exposed_us),
        not case.on_gpu or case.facts.breakdown is not None,
        f"median of {step.count} {kind} step{'s' if step.count > 1 else ''}" if step is not None else "as one whole",
        bad,
        f"{who} {'spends' if bad else 'loses'} {percent(waited_us / step_us)} of its time waiting for the next batch "
        "of data",
    )


def _exposed_us(case: Case, step_us: float, waited_us: float) -> float | None:
    """What the device's own work does not hide; None where nothing tells what it did meanwhile."""
    if not case.on_gpu:
        return waited_us
    if case.facts.breakdown is not None:
        return case.part_us("data_wait")
    busy = next((c.mean / 100 for c in case.facts.curves if c.name == "gpu_utilization_pct"), None)
    return None if busy is None or case.withheld("breakdown") else (1 - busy) * step_us


def _hidden_or_not(case: Case) -> Untold:
    why = case.withheld("breakdown")
    return Untold(
        "data_starved",
        "Whether the GPU has nothing to do while the loop waits for data",
        f"{why}: record it again" if why else "Run it with the profiler, which gpulab uses unless told otherwise",
    )


def _finding(case: Case, wait: _Wait, key: str, summary: str, *more: Evidence) -> Finding:
    first = Evidence(
        f"{ms(wait.waited_us)} of every {ms(wait.step_us)} step go to the DataLoader ({wait.basis}){_loads(case)}",
        _longest_wait(case),
    )
    hidden_us = wait.waited_us - wait.exposed_us
    if hidden_us > case.thresholds.silence * wait.step_us:
        more = (*more, Evidence(f"for {ms(hidden_us)} of that the GPU still works on what it was given before"))
    settings, cure = _cure(case, wait)
    return Finding(
        key,
        summary,
        (first, *more),
        wait.exposed_us,
        "measured" if wait.sure else "likely",
        parts=("data_wait",),
        settings=settings,
        cure=cure,
        lesson=LESSON,
        level="bad" if wait.bad else "notice",
    )


def _loads(case: Case) -> str:
    """Who loads the data: as the loader says, else as the iterator's class in a trace tells."""
    workers, loader = case.worker_count, case.facts.run.loader
    if workers is None:
        return ""
    if loader is not None:
        return f"; it loads with {workers} worker{'s' if workers != 1 else ''}"
    if workers == 0:
        return "; the training process loads the data itself (num_workers=0)"
    return "; worker processes load the data"


def _longest_wait(case: Case) -> tuple[int, int] | None:
    """The profiled step that waits longest, where to look."""
    account = case.facts.breakdown
    if account is None or not account.steps:
        return None
    step = max(account.steps, key=lambda s: s.parts_ns["data_wait"])
    return (step.start_ns, step.end_ns) if step.parts_ns["data_wait"] else None


# -- the cure ----------------------------------------------------------------------------------------------------------


def _cure(case: Case, wait: _Wait) -> tuple[tuple[tuple[str, str], ...], str]:
    """As many workers as loading takes (definitions.md, feeding), as far as there are cores for them."""
    loader, workers, inside = case.facts.run.loader, case.worker_count, case.facts.loading
    if inside is not None and workers and (handed_us := _handed_over_us(inside)):
        if inside.batch_us < handed_us:
            return (("workers", "0"),), (
                f"Load in the training process (num_workers=0): to make a batch takes {ms(inside.batch_us)}, "
                "less than to hand it over."
            )
        return (
            (),
            "Hand over less: smaller types (uint8 images made float on the device), fewer tensors, no Python objects.",
        )
    if loader is not None and loader.iterable:
        return (), "Give the iterable dataset workers that share its items, or prepare them before the training."
    if workers is None or (loader is None and workers):
        return (), "Load with more workers (num_workers), or make each item cheaper to load."
    room = _room_for_workers(case)
    wanted = min(_workers_needed(case, wait, workers), room)
    if wanted > workers:
        threads = _threads_beside(case, wait, wanted)
        leave = f" Leave them the cores: torch.set_num_threads({threads})." if threads else ""
        return (("workers", str(wanted)), *([("compute_threads", str(threads))] if threads else [])), (
            f"Load with {wanted} worker process{'es' if wanted > 1 else ''} beside the training: "
            f"DataLoader(…, num_workers={wanted}, persistent_workers=True).{leave}"
        )
    cause = "there is no further processor core for another worker" if room <= workers else "more would not help"
    return (("cache", "on"),), (
        f"It loads with {workers} worker{'s' if workers != 1 else ''} already and {cause}: make each item cheaper to "
        "load, or prepare the items once and keep them (decoded files, or in memory as the dataset cache does)."
    )


def _threads_beside(case: Case, wait: _Wait, workers: int) -> int | None:
    """Compute threads on a CPU that leave the workers their cores, where loading is most of the work; None: as is."""
    run, inside = case.facts.run, case.facts.loading
    cores, threads = run.environment.usable_cores, run.environment.compute_threads
    if case.on_gpu or cores is None or threads is None or threads <= 1 or threads + workers <= cores:
        return None
    if inside is None or _times(inside)["storage_bound"] >= inside.batch_us / 2:
        return None
    beside = max(1, math.floor(cores) - workers)
    return beside if wait.waited_us >= wait.step_us / 2 and beside < threads else None


def _workers_needed(case: Case, wait: _Wait, workers: int) -> int:
    """⌈time to make a batch / time to compute one⌉, and one more for an uneven one."""
    computing = max(wait.step_us - wait.waited_us, 0.01 * wait.step_us)
    inside = case.facts.loading
    making = inside.batch_us if inside is not None else wait.waited_us if not workers else workers * wait.step_us
    return math.ceil(making / computing) + 1


def _room_for_workers(case: Case) -> int:
    """Usable cores: more processes than that take time from each other, unless they wait for something else."""
    cores, inside = case.facts.run.environment.usable_cores, case.facts.loading
    if cores is None or (inside is not None and _times(inside)["storage_bound"] >= inside.batch_us / 2):
        return max(_UNKNOWN_MACHINE, int(cores or 0))
    return max(1, math.floor(cores))


# -- from inside the DataLoader ----------------------------------------------------------------------------------------


def _inside(case: Case, key: str) -> Finding | Untold | None:
    """The finding of that cause, where the step waits for data and this takes most of the time to make a batch."""
    wait, inside = _waiting(case), case.facts.loading
    if not isinstance(wait, _Wait):
        return None
    if inside is None:
        return Untold(
            key,
            "What inside the DataLoader takes the time: reading, decoding, or putting batches together",
            _why_not_inside(case),
        )
    if _handed_over_us(inside):
        return None
    times = _times(inside)
    cores_us = times["cpu_oversubscribed"]
    if key != "cpu_oversubscribed":  # which other programs may have taken too: the loading's own causes are told apart
        del times["cpu_oversubscribed"]
    of_us = inside.batch_us - (0.0 if key == "cpu_oversubscribed" else cores_us)
    if of_us <= 0 or times[key] < max(*times.values(), case.thresholds.loading_cause * of_us):
        return None
    share = percent(times[key] / of_us)
    return _finding(
        case, wait, key, f"{wait.sentence}: {_BECAUSE[key].format(share=share)}.", Evidence(_making(inside))
    )


_BECAUSE = {
    "cpu_preprocessing": "{share} of the loading is work for the processor: reading, decoding, transforming",
    "storage_bound": "for {share} of the loading the items are waited for, from a disk, a network or a lock",
    "slow_collate": "putting the items of a batch together takes {share} of the loading",
    "cpu_oversubscribed": "for {share} of the loading the workers wait for a free processor core",
}


def _times(inside: LoadingFacts) -> dict[str, float]:
    """µs per batch by cause. Waiting for a core is part of what computes; other waiting is not ready for one."""
    waited = inside.read_us * (inside.read_waited_fraction or 0.0)
    waited += inside.transform_us * (inside.transform_waited_fraction or 0.0)
    working, free = inside.read_us + inside.transform_us - waited, 1 - (inside.core_wait_fraction or 0.0)
    return {
        "cpu_preprocessing": working * free,
        "storage_bound": waited,
        "slow_collate": inside.collate_us * free,
        "cpu_oversubscribed": (working + inside.collate_us) * (1 - free),
    }


def _handed_over_us(inside: LoadingFacts) -> float:
    """Of the wait for a batch what it takes to come from a worker, where that is most of it; else 0."""
    wait = inside.wait
    return wait.hand_over_us if wait is not None and 2 * wait.hand_over_us > wait.total_us else 0.0


def _making(inside: LoadingFacts) -> str:
    return f"making one batch takes {ms(inside.batch_us)} (median of {inside.batches}), of it {_split(inside)}"


def _split(inside: LoadingFacts) -> str:
    parts = {
        "reading": inside.read_us,
        "transforming": inside.transform_us,
        "putting together": inside.collate_us,
        "page-locking": inside.pin_us or 0.0,
    }
    told = ", ".join(f"{name} {ms(us)}" for name, us in parts.items() if us >= 0.01 * inside.batch_us)
    waits = {"for a disk, a network or a lock": "storage_bound", "for a free processor core": "cpu_oversubscribed"}
    times = _times(inside)
    for what, key in waits.items():
        if times[key] >= 0.05 * inside.batch_us:
            told += f"; {ms(times[key])} is waiting {what}"
    return told


def _why_not_inside(case: Case) -> str:
    if case.facts.run.source == "trace":
        return "Run the training under gpulab: a trace from elsewhere holds nothing of the DataLoader's workers"
    lacking = next((m for m in case.facts.run.missing if m.key == "workers_inside"), None)
    if lacking is None:
        return "The batches of this run were not timed: run it again"
    return f"It was not timed: {lacking.reason}"
