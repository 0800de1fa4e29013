"""One door for all predictions: what a setting of the knobs would bring, from the figures of one run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

from msgspec import Struct

from gpulab.analysis.facts import Facts
from gpulab.formatting import capitalized, number
from gpulab.prediction import batch, dataloader, kernels, optimizer
from gpulab.prediction.baseline import Refused
from gpulab.prediction.calibration import recalibrated
from gpulab.prediction.prediction import NOTHING, TO_TRY, Prediction, PriorEvidence
from gpulab.prediction.step import Projection, plan_of

Predictor = Callable[[Projection, str, PriorEvidence], Projection]

CLEARLY = 1.25  # ratio, up or down; ours, more than most knobs bring
WIDEST = 5.0  # times, from end to end of a range that holds the speed of now; ours: four times the batch has 4.3

Memory = Literal["unchanged", "predicted", "unknown"]


class Formula(Struct, frozen=True):
    """What one knob does to a step, and to the GPU's memory: `predicted` by the projection itself."""

    apply: Predictor
    memory: Memory = "unknown"


_CHECKS = "try it: the finding says what the check takes, and only a run shows that nothing else takes its place"
_OF_RANKS = "try it: only a run shows how much communication the ranks overlap with computing"

# By knob, in the order in which they are asked: what changes the making of data before what rests on it. A text in
# place of a formula is the reason why nothing can be predicted.
PREDICTORS: dict[str, Formula | str] = {
    "cache": Formula(dataloader.cache, "unchanged"),
    "workers": Formula(dataloader.workers, "unchanged"),
    "prefetch": "try it: batches loaded ahead even out slow ones, and only a run shows by how much",
    "pin_memory": "try it: only a run shows how much of each copy to the GPU is already overlapped",
    "persistent_workers": Formula(dataloader.persistent_workers, "unchanged"),
    "compute_threads": "try it: only a run shows how threads and DataLoader workers compete for cores",
    "anomaly": _CHECKS,
    "validate_args": _CHECKS,
    "bucket_cap_mb": _OF_RANKS,
    "gradient_as_bucket_view": _OF_RANKS,
    "static_graph": _OF_RANKS,
    "comm_hook": _OF_RANKS,
    "local_sgd": _OF_RANKS,
    "reshard_after_forward": _OF_RANKS,
    "amp": Formula(kernels.amp),
    "tf32": Formula(kernels.tf32, "unchanged"),
    "attention": Formula(kernels.attention),
    "fused_optimizer": Formula(optimizer.fused_optimizer),
    "compile": Formula(kernels.compiled),
    "channels_last": "try it: depending on its convolutions, a model becomes faster or slower in this layout",
    "accumulate": Formula(optimizer.accumulate),
    "batch_size": Formula(batch.batch_size, "predicted"),
}


def predict(facts: Facts, settings: Mapping[str, str], evidence: PriorEvidence = NOTHING) -> Prediction:
    """What these settings would bring to that run. Never raises: `refused` says why nothing is predicted.

    The interval is the formula's own, made wider or narrower by `known.errors` of `knobs_named(settings)`.
    """
    try:
        projection = plan_of(facts)
    except Refused as why:
        return refused(settings, str(why))
    return predict_from(projection, settings, evidence)


def predict_from(projection: Projection, settings: Mapping[str, str], evidence: PriorEvidence = NOTHING) -> Prediction:
    """As `predict`, of a projection that changes nothing yet: what it has found out serves several predictions."""
    chosen = dict(settings)
    try:
        for name in [*(n for n in PREDICTORS if n in chosen), *(n for n in chosen if n not in PREDICTORS)]:
            formula = _formula(name)
            try:
                projection = formula.apply(projection, chosen[name], evidence)
            except ValueError:
                raise Refused(f"{name}={chosen[name]} is no value of this setting") from None
        if not chosen:
            raise Refused("nothing is changed")
        if len(projection.already) == len(chosen):
            raise Refused(f"nothing changes: {'; '.join(projection.already)}")
        predicted = _of(projection, chosen)
    except Refused as why:
        return refused(chosen, str(why))
    return _telling(recalibrated(predicted, evidence.errors.get(knobs_named(chosen), ())))


def _telling(prediction: Prediction) -> Prediction:
    """The same, refused where its range tells a user nothing: it reaches clearly faster and clearly slower, or it holds
    the time of now and is wide."""
    assert prediction.interval is not None, "a refused one has returned before"
    low, high = prediction.interval
    if low >= 1 or high <= 1 or ((low * CLEARLY > 1 or high < CLEARLY) and high <= WIDEST * low):
        return prediction
    speedup = f"{number(1 / high)}× to {number(1 / low)}×"
    why = f"{TO_TRY}this run allows a speedup of {speedup}, which is too wide to be useful"
    return refused(prediction.settings, why)


def _formula(name: str) -> Formula:
    """Raises Refused."""
    formula = PREDICTORS.get(name, f"there is no formula for another {name}")
    if isinstance(formula, str):
        raise Refused(formula)
    return formula


def refused(settings: Mapping[str, str], why: str) -> Prediction:
    """A prediction that says only why there is none."""
    return Prediction(dict(settings), None, None, "", refused=why)


def knobs_named(settings: Mapping[str, str]) -> str:
    """Under which name the scoreboard keeps such predictions: "workers", "amp + workers"."""
    return " + ".join(sorted(settings))


def _of(projection: Projection, settings: Mapping[str, str]) -> Prediction:
    """Raises Refused where the step has to be played again, and the GPU's work was not recorded."""
    middle, low, high = projection.ratio()
    basis = "; ".join(dict.fromkeys(projection.basis))
    memory, its_basis = _memory(projection, settings)
    return Prediction(
        dict(settings),
        middle,
        (low, high),
        capitalized(basis),
        memory,
        projection.only_sign,
        memory_basis=its_basis,
        setup_s=projection.setup_s,
    )


def _memory(projection: Projection, settings: Mapping[str, str]) -> tuple[float | None, str]:
    """What becomes of the peak of the GPU's memory, and from what that is known."""
    if not projection.today.on_gpu:
        return None, ""
    kinds = {_formula(name).memory for name in settings}
    if kinds <= {"unchanged"}:
        return 1.0, "GPU memory stays the same"
    if projection.memory_ratio is None or "unknown" in kinds:
        return None, "its effect on GPU memory is not predicted"
    return projection.memory_ratio, "GPU memory by a linear fit through the peaks of short runs"


__all__ = ["NOTHING", "PREDICTORS", "PriorEvidence", "knobs_named", "predict", "predict_from", "refused"]
