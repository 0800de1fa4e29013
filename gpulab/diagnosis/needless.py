"""Checks for work that need not be done: facts that are read off torch, each with the proof of its size.

Of what has no proof of its size only a hint remains.
"""

from __future__ import annotations

import math

from gpulab.analysis.operators import DIVISIBLE_NS, divisible_share, share_of, unused_share
from gpulab.diagnosis.finding import Confidence, Evidence, Finding, FindingKind, RuleContext
from gpulab.formatting import duration, number, percent, plural, size
from gpulab.run import TrainingFacts
from gpulab.timeline.labels import EVALUATING, NODES, What

_FREE = 0.5  # ours, of a core: less is taken up by the turns of other programs
_MOST = 0.5  # ours, of the parameters
_NOTHING = TrainingFacts()
_UNKNOWN = (Evidence("its cost was not measured: try without it"),)
_COMPUTING = ("compute", "optimizer")
_CHECKED = ("aten::isnan", "aten::_is_any_true", "aten::any")
_TABLES = (f"{EVALUATING}EmbeddingBackward0", f"{EVALUATING}EmbeddingBagBackward0")


def idle_cores(context: RuleContext) -> Finding | None:
    """Long operators are computed by fewer threads than there are cores that nobody uses."""
    run, cores = context.facts.run, context.facts.cores
    threads, free = run.environment.compute_threads, None if cores is None else cores.free_cores
    if context.on_gpu or run.job is not None or not threads or free is None:
        return None
    count = math.floor(run.environment.usable_cores or 1)
    more = min(free, count - threads)
    if more < _FREE:
        return None
    share = context.of_typical(divisible_share(run.timeline, context.facts.breakdown), *_COMPUTING)
    words = (
        f"{number(round(free, 1))} of {plural(count, 'core')} had nothing to do (mean)",
        f"operators that threads can share, {duration(DIVISIBLE_NS / 1e3)} or longer, take {percent(share)} of a step",
    )
    what = f"{plural(threads, 'compute thread')} on {plural(count, 'core')}: more threads save up to {{}} of each step."
    setting = ("compute_threads", str(min(count, threads + math.ceil(more))))
    cure = (
        f"torch.set_num_threads({setting[1]}) before the training, or OMP_NUM_THREADS={setting[1]} in the environment."
    )
    saved = share * more / (threads + more)
    return _costly(context, "idle_cores", saved, what, words, cure, _COMPUTING, "likely", (setting,))


def repeated_batches(context: RuleContext) -> Finding | None:
    """Each worker reads the whole of an IterableDataset."""
    facts, loader = _facts(context), context.facts.run.loader
    count = facts.batch_copies
    if loader is None or count < 2 or count != loader.num_workers:
        return None
    what = f"Each batch comes {count} times, for each worker reads the whole dataset: {{}} of the steps repeat others."
    words = (f"the first batches of all {count} workers are equal byte for byte, round after round",)
    cure = f"{loader.dataset}.__iter__ yields only its worker's part: torch.utils.data.get_worker_info() tells which."
    return _costly(context, "repeated_batches", 1 - 1 / count, what, words, cure)


def anomaly_detection(context: RuleContext) -> Finding | None:
    """Autograd notes the whole stack at each operator, and looks through each gradient for NaN."""
    facts = _facts(context)
    if not facts.anomaly_detection:
        return None
    noting = facts.calls.get("anomaly_detection", 0.0)
    checking = share_of(context.facts.run.timeline, context.facts.breakdown, names=_CHECKED, within=NODES)
    words = (
        f"noting the stack at each operator takes {percent(noting)} of the time",
        f"looking for NaN in each gradient takes {percent(checking)} of each step",
    )
    cure = "torch.autograd.set_detect_anomaly(False) once the NaN is found; detect_anomaly=False in Lightning."
    hint = Finding("anomaly_detection", "Anomaly detection is on.", _UNKNOWN, None, "possible", cure=cure)
    what = "Anomaly detection is on: it takes {} of each step."
    settings = (("anomaly", "False"),)
    return _costly(context, "anomaly_detection", noting + checking, what, words, cure, settings=settings) or hint


def unused_gradients(context: RuleContext) -> Finding | None:
    """The backward pass computes gradients that no optimizer takes."""
    facts, figures = _facts(context), context.facts
    share = 0.0 if context.on_gpu else unused_share(figures.run.timeline, figures.breakdown, facts.passes)
    whose, cure = (
        "their optimizer drops",
        "detach() what another network gave; requires_grad_(False) on one that is fixed.",
    )
    if facts.unheld:
        whose, cure = (
            "no optimizer holds",
            "requires_grad_(False) on that part, and torch.no_grad() around its forward pass.",
        )
    words = tuple(
        f"{sum(u > 0 for u in p.unused)} of {len(p.nodes)} operations of a backward pass compute such gradients"
        for p in facts.passes
    )
    what = f"{{}} of each step computes gradients of parameters that {whose}."
    share = context.of_typical(share, "compute")
    return _costly(context, "unused_gradients", share, what, words, cure, ("compute",), "likely")


def dense_gradients(context: RuleContext) -> Finding | None:
    """A table's gradient is filled and its every row updated, for a few rows that were looked up."""
    tables, figures = _facts(context).dense_gradients, context.facts
    part = min(1.0, sum(t.parameters_fraction for t in tables))
    used = sum(t.used_fraction * t.parameters_fraction for t in tables) / max(part, 1e-9)
    if not tables or context.on_gpu:
        return None
    filling = share_of(figures.run.timeline, figures.breakdown, names=_TABLES)
    updating = part * share_of(figures.run.timeline, figures.breakdown, What.UPDATE, What.ZEROING)
    words = (
        f"of {max(t.rows for t in tables):,} rows {percent(used)} get a gradient in a step",
        f"of a traced step filling the gradients takes {percent(filling)}, updating all rows {percent(updating)}",
    )
    what = f"Dense gradients of {plural(len(tables), 'embedding')}: {{}} of each step is for rows not looked up."
    cure = "nn.Embedding(…, sparse=True), which Adagrad and plain SGD take; instead of Adam, SparseAdam."
    share = context.of_typical((1 - used) * (filling + updating), *_COMPUTING)
    return _costly(context, "dense_gradients", share, what, words, cure, _COMPUTING)


def float64(context: RuleContext) -> Finding | None:
    """Most parameters have twice the bytes that training needs; solving equations does need the digits."""
    wide, timeline = _facts(context).float64_fraction, context.facts.run.timeline
    if wide < _MOST or context.on_gpu or timeline is None or any("linalg" in name for name in timeline.names):
        return None
    share = context.of_typical(divisible_share(timeline, context.facts.breakdown), *_COMPUTING) / 2
    words = (f"{percent(wide)} of the parameters are float64: twice the bytes, half the speed",)
    what, cure = (
        "The model computes in float64: float32 saves up to {} of each step.",
        "model.float() and float32 batches.",
    )
    return _costly(context, "float64", share, what, words, cure, ("compute/matrix", "optimizer"), "likely")


def graph_kept(context: RuleContext) -> Finding | None:
    """Backward passes go through the graphs of earlier ones once more: those of one step, or of all before."""
    part = _facts(context).repeated_fraction
    words = f"{percent(part)} of a backward pass's operations ran in an earlier one, too (mean of three)"
    what = "Backward passes run again through graphs of earlier ones: that takes {} of each step."
    cure = "detach() what is passed on, e.g. a hidden state; add losses and call backward once, without retain_graph."
    return _of_backward(context, "graph_kept", part, what, words, cure)


def batch_graph(context: RuleContext) -> Finding | None:
    """The dataset's tensors want gradients, so each row that is read is an operation of the backward pass."""
    part = min(1.0, _facts(context).batch_nodes_fraction)
    words = f"{percent(part)} of a backward pass's operations are those that made the batch"
    what = "The batches hang on a graph: going back through it takes up to {} of each step."
    cure = "Keep requires_grad off in the Dataset; x.requires_grad_() on the batch, where its gradient is needed."
    return _of_backward(context, "batch_graph", part, what, words, cure)


def recomputation(context: RuleContext) -> Finding | None:
    """Activation checkpointing saves memory that may be free."""
    share, memory = _facts(context).calls.get("recomputation", 0.0), context.facts.run.memory
    if context.host_memory_full or context.on_gpu:
        return None
    total = context.facts.run.environment.memory_total_bytes
    words = (
        (f"the process took {size(memory.peak_rss_bytes)} of {size(total)}",) if memory.peak_rss_bytes and total else ()
    )
    what = "Activation checkpointing: {} of each step computes the forward pass a second time."
    cure = "Checkpoint nothing, or fewer blocks, as long as the memory is enough."
    return _costly(context, "recomputation", share, what, words, cure, ("compute",))


def padding(context: RuleContext) -> Finding | None:
    """Columns of a batch are the same in all rows: most of what is computed for them is thrown away."""
    part = _facts(context).padding_fraction
    busy = context.share("compute") if context.idle is None else 1 - context.idle
    words = (f"in each of the first batches at least {percent(part)} of the columns are the same in all rows",)
    what = "Padding: up to {} of each step computes columns that are padding in all rows."
    cure = 'Pad to the longest of the batch, in collate_fn (padding="longest"); group samples of like length.'
    return _costly(context, "padding", part * busy, what, words, cure, ("compute",), "likely", of_device=True)


def emulated_type(context: RuleContext) -> Finding | None:
    """The parameters have 16 bits, for which this CPU has no instructions."""
    timeline, part = context.facts.run.timeline, _facts(context).emulated_fraction
    share = context.of_typical(divisible_share(timeline, context.facts.breakdown), *_COMPUTING)
    words = (f"{percent(part)} of the parameters have 16 bits; this CPU has no instructions for them",)
    what = "The model computes in 16 bits, which this CPU emulates: that slows {} of each step."
    cure = "model.float() on this machine, and float32 batches."
    return None if part < _MOST else _costly(context, "emulated_type", share, what, words, cure, _COMPUTING, "likely")


def argument_validation(context: RuleContext) -> Finding | None:
    """Distributions check their arguments and samples at each use."""
    share = _facts(context).calls.get("argument_validation", 0.0)
    what = "torch.distributions checks arguments and samples: that takes {} of each step."
    cure = "torch.distributions.Distribution.set_default_validate_args(False), once the code is right."
    settings = (("validate_args", "False"),)
    return _costly(context, "argument_validation", share, what, (), cure, settings=settings)


def _facts(context: RuleContext) -> TrainingFacts:
    return context.facts.run.training or _NOTHING


def _of_backward(context: RuleContext, key: str, part: float, what: str, words: str, cure: str) -> Finding | None:
    """That part of all operations of a backward pass need not be run."""
    run, account = context.facts.run, context.facts.breakdown
    backward = context.of_typical(share_of(run.timeline, account, *NODES), "compute")
    return _costly(context, key, part * backward, what, (words,), cure, ("compute",), "likely")


def _costly(
    context: RuleContext,
    key: str,
    share: float,
    what: str,
    words: tuple[str, ...],
    cure: str,
    parts: tuple[str, ...] = (),
    confidence: Confidence = "measured",
    settings: tuple[tuple[str, str], ...] = (),
    of_device: bool = False,
) -> Finding | None:
    """Takes that share of the step; on a GPU at most what it idles, unless it is the device's own time."""
    share = min(share, (context.idle or 0.0) if context.on_gpu and not of_device else 1.0)
    evidence, cost_us = tuple(map(Evidence, words)), share * (context.step_us or 0.0)
    if share < context.thresholds.silence:
        return None
    return Finding(key, what.format(percent(share)), evidence, cost_us, confidence, parts, settings, cure)


FINDINGS = (
    FindingKind("idle_cores", "idle CPU cores", idle_cores),
    FindingKind("repeated_batches", "repeated batches", repeated_batches),
    FindingKind("anomaly_detection", "anomaly detection", anomaly_detection),
    FindingKind("unused_gradients", "unused gradients", unused_gradients, explains=("graph_kept",)),
    FindingKind("dense_gradients", "dense gradients", dense_gradients, explains=("unfused_optimizer",)),
    FindingKind("float64", "float64", float64),
    FindingKind("graph_kept", "graphs that are kept", graph_kept, explains=("small_batch",)),
    FindingKind("batch_graph", "batches with a graph", batch_graph, explains=("small_batch",)),
    FindingKind("recomputation", "activation checkpointing", recomputation),
    FindingKind("padding", "padding", padding),
    FindingKind("emulated_type", "an emulated number type", emulated_type),
    FindingKind("argument_validation", "argument validation", argument_validation),
)
