"""Rules about memory that runs out, grows, or is fragmented: by the ledgers of a run and the account of its failure."""

from __future__ import annotations

from gpulab.analysis.memory_peak import is_kept_by_python, what_frees
from gpulab.diagnosis.finding import Evidence, Finding, FindingKind, RuleContext, evidence
from gpulab.formatting import number, plural, size
from gpulab.memory_record import Growth, Holding, MemoryAccount, OutOfMemory

SOON = 20  # ours, times the steps of this run: memory that lasts longer is a hint, no finding
FRAGMENTED = 0.2  # ours, share of the reserved memory that is free and still of no use


def out_of_memory(context: RuleContext) -> Finding | None:
    """The run ended because memory ran out."""
    account = context.run.memory_account
    failure = account.failure if account is not None else None
    if account is None or failure is None:
        return None
    step = f"in step {failure.steps + 1:,}" if failure.steps else "in its first step"
    asked = f" asking for {size(failure.request_bytes)}" if failure.request_bytes else ""
    where = f" at {failure.line}" if failure.line else ""
    return Finding(
        "out_of_memory",
        f"Out of memory {step},{asked}{where}." if asked else f"Out of memory {step}{where}.",
        evidence(_free(failure), *map(_held, failure.holdings[:3]), _unusable(failure)),
        None,
        "measured",
        cure=_cure(failure),
        level="bad",
        source_line=failure.line,
        memory=f"{size(failure.request_bytes)} asked for" if failure.request_bytes else "more than there is",
    )


def _free(failure: OutOfMemory) -> str:
    room = failure.room
    if room is None:
        return ""
    enough = failure.pool is None and failure.request_bytes is not None and failure.request_bytes <= room.free_bytes
    after = " after the failed call had released what it took" if enough else ""
    return f"{size(room.free_bytes)} of {size(room.total_bytes)} were free{after} ({room.limit})"


def _held(holding: Holding) -> str:
    also = f", also held by {', '.join(holding.others[:2])}" if holding.others else ""
    return f"{size(holding.bytes)} are held by {holding.owner}{also}"


def _unusable(failure: OutOfMemory) -> str:
    pool, request = failure.pool, failure.request_bytes
    if pool is None or request is None:
        return ""
    cached = pool.reserved_bytes - pool.allocated_bytes
    if cached < request or pool.largest_free_bytes >= request:
        return ""
    return f"{size(cached)} were cached, but in blocks of {size(pool.largest_free_bytes)} at most: fragmentation"


def _cure(failure: OutOfMemory) -> str:
    """What to do next. Advice on the allocator only where its figures carry it."""
    words = "%gpulab fit batch_size finds the largest batch that fits, and what makes the present one fit."
    if _unusable(failure):
        words = f"Set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True before Python starts. {words}"
    if any(holding.owner.startswith(("traceback", "sys.last_traceback", "Out[")) for holding in failure.holdings[:5]):
        words = f"%gpulab memory --free traceback,out lets go of what only dead cells hold. {words}"
    return words


def memory_growth(context: RuleContext) -> Finding | None:
    """Memory grows by the same amount in each step."""
    account = context.run.memory_account
    growth = next(iter(account.growth), None) if account is not None else None
    if account is None or growth is None:
        return None
    left = steps_left(account, growth)
    steps = len(context.run.steps)
    soon = left is not None and left <= SOON * max(steps, 1)
    dies = "" if left is None else f"; at this rate memory runs out after about {number(left)} more steps"
    return Finding(
        "memory_growth",
        f"Memory grows by {size(growth.bytes_each)} in each step: {growth.owner} keeps it{_at(growth)}.",
        (Evidence(f"{size(growth.bytes_each * growth.count)} in {plural(growth.count, 'step')}{dies}"),),
        None,
        "measured" if soon else "possible",
        memory=f"{size(growth.bytes_each)} per step",
        cure="Keep numbers, not tensors (loss.item(), loss.detach()), bound caches, or move what must stay to the CPU.",
        source_line=growth.line,
    )


def _at(growth: Growth) -> str:
    return f" ({growth.line})" if growth.line else ""


def steps_left(account: MemoryAccount, growth: Growth) -> float | None:
    """After how many more steps the free memory is used up; None if it is not known."""
    return account.room.free_bytes / growth.bytes_each if account.room is not None else None


def rerun_leak(context: RuleContext) -> Finding | None:
    """Each run of the same cell keeps more memory."""
    account = context.run.memory_account
    growth = account.rerun if account is not None else None
    if growth is None:
        return None
    statement = what_frees(growth.owner) if is_kept_by_python(growth.owner) else ""  # the cell needs its own names
    free = f"{statement} before the next run." if statement else "Empty it before the next run."
    return Finding(
        "rerun_leak",
        f"Each run of this cell keeps {size(growth.bytes_each)} more: {growth.owner} holds it{_at(growth)}.",
        (Evidence(f"memory grew with each of the last {plural(growth.count, 'run')}"),),
        None,
        "measured",
        cure=f"{free} %gpulab memory shows all owners.",
        source_line=growth.line,
        memory=f"{size(growth.bytes_each)} per run",
    )


def fragmentation(context: RuleContext) -> Finding | None:
    """The caching allocator emptied its cache and asked again, and yet held much more than tensors ever needed.

    Peaks are compared, because at the end of a run most of the cache is free in any case.
    """
    account, memory = context.run.memory_account, context.run.memory
    pool = account.pool if account is not None else None
    reserved, allocated = memory.peak_reserved_bytes, memory.peak_allocated_bytes
    if pool is None or not pool.retries or not reserved or allocated is None:
        return None
    unused = reserved - allocated
    if unused < FRAGMENTED * reserved:
        return None
    return Finding(
        "fragmentation",
        f"Fragmented GPU memory: at their peaks the allocator held {size(reserved)}, and tensors {size(allocated)}.",
        (Evidence(f"the allocator gave its cache back and asked again {plural(pool.retries, 'time')}"),),
        None,
        "likely",
        cure="Set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True before Python starts, and pad batches to few sizes.",
        memory=f"{size(unused)} of no use",
    )


FINDINGS = (
    FindingKind("out_of_memory", "running out of memory", out_of_memory, lesson="06_memory", role="end of the run"),
    FindingKind("memory_growth", "growing memory", memory_growth, lesson="06_memory", beside_headline=True),
    FindingKind("rerun_leak", "memory kept by each run", rerun_leak, lesson="06_memory", beside_headline=True),
    FindingKind("fragmentation", "fragmented GPU memory", fragmentation, lesson="06_memory"),
)
