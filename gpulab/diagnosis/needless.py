"""Rules about needless work: facts read from torch's state, each with a measure of its cost.

Without a measured cost, only a hint is given.
"""

from __future__ import annotations

from gpulab.analysis.operators import divisible_share, share_of, unused_share
from gpulab.diagnosis.finding import Confidence, Finding, FindingKind, RuleContext, evidence
from gpulab.formatting import percent, plural, size
from gpulab.run import TrainingFacts
from gpulab.timeline.labels import EVALUATING, NODES, What

_MOST = 0.5  # ours, share of the parameters
_COMPUTING = ("compute", "optimizer")
_CHECKED = ("aten::isnan", "aten::_is_any_true", "aten::any")
_TABLES = (f"{EVALUATING}EmbeddingBackward0", f"{EVALUATING}EmbeddingBagBackward0")


def repeated_batches(context: RuleContext) -> Finding | None:
    """Each worker reads the whole IterableDataset."""
    loader, count = context.loader, _facts(context).batch_copies
    if loader is None or count < 2 or count != loader.num_workers:
        return None
    return _costly(
        context,
        "repeated_batches",
        1 - 1 / count,
        f"Each batch comes {count} times, for each worker reads the whole dataset: {{}} of the steps repeat others.",
        f"{loader.dataset}.__iter__ yields only its worker's part: torch.utils.data.get_worker_info() tells which.",
        f"the first batches of all {count} workers are equal byte for byte, round after round",
    )


def anomaly_detection(context: RuleContext) -> Finding | None:
    """Anomaly detection is on: autograd records the stack at each operator and searches each gradient for NaN."""
    facts, key = _facts(context), "anomaly_detection"
    if not facts.anomaly_detection:
        return None
    noting = facts.calls.get(key, 0.0)
    checking = share_of(context.run.timeline, context.breakdown, names=_CHECKED, within=NODES)
    cure = "torch.autograd.set_detect_anomaly(False) once the NaN is found; detect_anomaly=False in Lightning."
    unknown = evidence("its cost was not measured: try without it")
    return _costly(
        context,
        key,
        noting + checking,
        "Anomaly detection is on: it takes {} of each step.",
        cure,
        f"noting the stack at each operator takes {percent(noting)} of the time",
        f"looking for NaN in each gradient takes {percent(checking)} of each step",
        settings=(("anomaly", "False"),),
    ) or Finding(key, "Anomaly detection is on.", unknown, None, "possible", cure=cure)


def unused_gradients(context: RuleContext) -> Finding | None:
    """The backward pass computes gradients that no optimizer uses."""
    facts = _facts(context)
    share = 0.0 if context.on_gpu else unused_share(context.run.timeline, context.breakdown, facts.passes)
    if facts.unheld:
        whose = "no optimizer holds"
        cure = "requires_grad_(False) on that part, and torch.no_grad() around its forward pass."
    else:
        whose = "their optimizer drops"
        cure = "detach() what another network gave; requires_grad_(False) on one that is fixed."
    return _costly(
        context,
        "unused_gradients",
        context.of_typical(share, "compute"),
        f"{{}} of each step computes gradients of parameters that {whose}.",
        cure,
        *(
            f"{sum(u > 0 for u in p.unused)} of {len(p.nodes)} operations of a backward pass compute such gradients"
            for p in facts.passes
        ),
        parts=("compute",),
        confidence="likely",
    )


def dense_gradients(context: RuleContext) -> Finding | None:
    """All rows of an embedding get a gradient and an update, although only a few rows were looked up."""
    tables, timeline, account = _facts(context).dense_gradients, context.run.timeline, context.breakdown
    if not tables or context.on_gpu:
        return None
    part = min(1.0, sum(t.parameters_fraction for t in tables))
    used = sum(t.used_fraction * t.parameters_fraction for t in tables) / max(part, 1e-9)
    filling = share_of(timeline, account, names=_TABLES)
    updating = part * share_of(timeline, account, What.UPDATE, What.ZEROING)
    return _costly(
        context,
        "dense_gradients",
        context.of_typical((1 - used) * (filling + updating), *_COMPUTING),
        f"Dense gradients of {plural(len(tables), 'embedding')}: {{}} of each step is for rows not looked up.",
        "nn.Embedding(…, sparse=True), which Adagrad and plain SGD take; instead of Adam, SparseAdam.",
        f"of {max(t.rows for t in tables):,} rows {percent(used)} get a gradient in a step",
        f"of a traced step filling the gradients takes {percent(filling)}, updating all rows {percent(updating)}",
        parts=_COMPUTING,
    )


def float64(context: RuleContext) -> Finding | None:
    """Most parameters are float64, twice the bytes that training needs. Linear algebra may need the digits."""
    wide, timeline = _facts(context).float64_fraction, context.run.timeline
    if wide < _MOST or context.on_gpu or timeline is None or any("linalg" in name for name in timeline.names):
        return None
    return _costly(
        context,
        "float64",
        _divisible_share(context) / 2,
        "The model computes in float64: float32 saves up to {} of each step.",
        "model.float() and float32 batches.",
        f"{percent(wide)} of the parameters are float64: twice the bytes, half the speed",
        parts=("compute/matrix", "optimizer"),
        confidence="likely",
    )


def emulated_type(context: RuleContext) -> Finding | None:
    """The parameters have 16 bits, for which this CPU has no instructions."""
    part = _facts(context).emulated_fraction
    if part < _MOST:
        return None
    return _costly(
        context,
        "emulated_type",
        _divisible_share(context),
        "The model computes in 16 bits, which this CPU emulates: that slows {} of each step.",
        "model.float() on this machine, and float32 batches.",
        f"{percent(part)} of the parameters have 16 bits; this CPU has no instructions for them",
        parts=_COMPUTING,
        confidence="likely",
    )


def graph_kept(context: RuleContext) -> Finding | None:
    """Backward passes traverse the graphs of earlier passes again: those of one step, or of all previous steps."""
    part = _facts(context).repeated_fraction
    return _costly(
        context,
        "graph_kept",
        part * _backward_share(context),
        "Backward passes run again through graphs of earlier ones: that takes {} of each step.",
        "detach() what is passed on, e.g. a hidden state; add losses and call backward once, without retain_graph.",
        f"{percent(part)} of a backward pass's operations ran in an earlier one, too (mean of three)",
        parts=("compute",),
        confidence="likely",
    )


def batch_graph(context: RuleContext) -> Finding | None:
    """The dataset's tensors require gradients, so reading a row adds an operation to the backward pass."""
    part = min(1.0, _facts(context).batch_nodes_fraction)
    return _costly(
        context,
        "batch_graph",
        part * _backward_share(context),
        "The batches hang on a graph: going back through it takes up to {} of each step.",
        "Keep requires_grad off in the Dataset; x.requires_grad_() on the batch, where its gradient is needed.",
        f"{percent(part)} of a backward pass's operations are those that made the batch",
        parts=("compute",),
        confidence="likely",
    )


def recomputation(context: RuleContext) -> Finding | None:
    """Activation checkpointing saves memory that may be free."""
    peak, total = context.run.memory.peak_rss_bytes, context.run.environment.memory_total_bytes
    if context.host_memory_full or context.on_gpu:
        return None
    return _costly(
        context,
        "recomputation",
        _facts(context).calls.get("recomputation", 0.0),
        "Activation checkpointing: {} of each step computes the forward pass a second time.",
        "Checkpoint nothing, or fewer blocks, as long as the memory is enough.",
        f"the process took {size(peak)} of {size(total)}" if peak and total else "",
        parts=("compute",),
    )


def padding(context: RuleContext) -> Finding | None:
    """Columns of a batch are equal in all rows: they are padding, whose computing is mostly wasted."""
    part = _facts(context).padding_fraction
    busy = context.share("compute") if context.idle is None else 1 - context.idle
    return _costly(
        context,
        "padding",
        part * busy,
        "Padding: up to {} of each step computes columns that are padding in all rows.",
        'Pad to the longest of the batch, in collate_fn (padding="longest"); group samples of like length.',
        f"in each of the first batches at least {percent(part)} of the columns are the same in all rows",
        parts=("compute",),
        confidence="likely",
        of_device=True,
    )


def argument_validation(context: RuleContext) -> Finding | None:
    """Distributions check their arguments and samples at each use."""
    return _costly(
        context,
        "argument_validation",
        _facts(context).calls.get("argument_validation", 0.0),
        "torch.distributions checks arguments and samples: that takes {} of each step.",
        "torch.distributions.Distribution.set_default_validate_args(False), once the code is right.",
        settings=(("validate_args", "False"),),
    )


def _facts(context: RuleContext) -> TrainingFacts:
    return context.run.training or TrainingFacts()


def _divisible_share(context: RuleContext) -> float:
    """The share of a typical step in operators long enough for their time to depend on the size of their data."""
    return context.of_typical(divisible_share(context.run.timeline, context.breakdown), *_COMPUTING)


def _backward_share(context: RuleContext) -> float:
    """The share of a typical step in operations of the backward pass."""
    share = share_of(context.run.timeline, context.breakdown, *NODES)
    return context.of_typical(share, "compute")


def _costly(
    context: RuleContext,
    key: str,
    share: float,
    summary: str,
    cure: str,
    *words: str,
    parts: tuple[str, ...] = (),
    confidence: Confidence = "measured",
    settings: tuple[tuple[str, str], ...] = (),
    of_device: bool = False,
) -> Finding | None:
    """A finding that costs `share` of the step; on a GPU at most its idle share, unless `of_device`."""
    share = min(share, (context.idle or 0.0) if context.on_gpu and not of_device else 1.0)
    if share < context.thresholds.silence:
        return None
    cost_us, figures = share * context.step_us, evidence(*words)
    return Finding(key, summary.format(percent(share)), figures, cost_us, confidence, parts, settings, cure)


FINDINGS = (
    FindingKind("repeated_batches", "repeated batches", repeated_batches),
    FindingKind("anomaly_detection", "anomaly detection", anomaly_detection),
    FindingKind("unused_gradients", "unused gradients", unused_gradients, explains=("graph_kept",)),
    FindingKind("dense_gradients", "dense gradients", dense_gradients, explains=("unfused_optimizer",)),
    FindingKind("float64", "float64", float64),
    FindingKind("emulated_type", "an emulated number type", emulated_type),
    FindingKind("graph_kept", "graphs that are kept", graph_kept, explains=("small_batch",)),
    FindingKind("batch_graph", "batches with a graph", batch_graph, explains=("small_batch",)),
    FindingKind("recomputation", "activation checkpointing", recomputation),
    FindingKind("padding", "padding", padding),
    FindingKind("argument_validation", "argument validation", argument_validation),
)
