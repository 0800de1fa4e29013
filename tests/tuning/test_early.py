"""An early end of a comparison costs no truth: played with ratios of many kinds, whose true value is known."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import pytest

from gpulab.run import Float64
from gpulab.tuning.compare.blocks import FEWEST_PAIRS, decide
from gpulab.tuning.compare.statistics import noise_floor, paired
from gpulab.verdict import Verdict, is_decided, verdict

MOST_PAIRS = 30
PLAYED = 300
SPREAD = 0.03

Noise = Callable[[np.random.Generator], Float64]  # of `MOST_PAIRS` logarithms


def normal(random: np.random.Generator) -> Float64:
    return random.normal(0, SPREAD, MOST_PAIRS)


def heavy_tails(random: np.random.Generator) -> Float64:
    return SPREAD * random.standard_t(2, MOST_PAIRS)


def spikes(random: np.random.Generator) -> Float64:
    """Now and then another program takes a core from one side for a moment."""
    hit = random.random(MOST_PAIRS) < 0.15
    return random.normal(0, SPREAD / 3, MOST_PAIRS) + np.where(hit, random.exponential(0.3, MOST_PAIRS), 0.0)


def quiet(random: np.random.Generator) -> Float64:
    return random.normal(0, SPREAD / 10, MOST_PAIRS)


def drifts(random: np.random.Generator) -> Float64:
    """Neighbouring pairs are alike, as where a machine slows down and recovers."""
    steps = random.normal(0, SPREAD / 2, MOST_PAIRS)
    noise = np.zeros(MOST_PAIRS)
    for i in range(MOST_PAIRS):
        noise[i] = 0.5 * noise[i - 1] + steps[i]
    return noise


KINDS = (normal, heavy_tails, spikes, quiet, drifts)


def ended(noise: Noise, true_ratio: float, seed: int, *, precise: bool = False) -> tuple[Verdict, Float64]:
    """The verdict, and the ratios that there were when it was said."""
    random = np.random.default_rng(seed)
    ratios, same = true_ratio * np.exp(noise(random)), np.exp(noise(random))
    count = MOST_PAIRS
    for pairs in range(FEWEST_PAIRS, MOST_PAIRS):
        if decide(ratios[:pairs], same[:pairs], precise=precise):
            count = pairs
            break
    estimate = paired(ratios[:count])
    assert estimate is not None
    return verdict(estimate.ratio, estimate.interval, noise_floor(same[:count]), count), ratios[:count]


@functools.cache
def played(noise: Noise, true_ratio: float) -> list[tuple[Verdict, Float64]]:
    return [ended(noise, true_ratio, seed) for seed in range(PLAYED)]


def holds(ratios: Float64, true_ratio: float) -> bool:
    estimate = paired(ratios)
    assert estimate is not None and estimate.interval is not None
    return estimate.interval[0] <= true_ratio <= estimate.interval[1]


@pytest.mark.parametrize("noise", KINDS)
def test_what_is_alike_is_not_told_apart(noise: Noise) -> None:
    said = [verdict for verdict, _ in played(noise, 1.0)]
    assert sum(one in ("faster", "slower") for one in said) <= 0.05 * PLAYED


@pytest.mark.parametrize("noise", [normal, heavy_tails, quiet])
@pytest.mark.parametrize("true_ratio", [1.0, 1.05, 0.8, 0.5])
def test_the_interval_holds_the_true_ratio(noise: Noise, true_ratio: float) -> None:
    """Where one pair does not depend on the last: spikes move the median itself."""
    held = sum(holds(ratios, true_ratio) for _, ratios in played(noise, true_ratio))
    assert held >= 0.93 * PLAYED


@pytest.mark.parametrize("true_ratio", [1.05, 1 / 1.05])
def test_no_difference_is_not_said_of_five_per_cent(true_ratio: float) -> None:
    said = [verdict for noise in KINDS for verdict, _ in played(noise, true_ratio)]
    assert said.count("no measurable difference") <= 0.02 * len(said)


@pytest.mark.parametrize(
    ("noise", "true_ratio", "said", "share", "pairs"),
    [
        (normal, 0.5, "faster", 1.0, 4),
        (quiet, 0.5, "faster", 1.0, 4),
        (quiet, 1.0, "no measurable difference", 0.95, 8),
        (normal, 1.05, "slower", 0.9, 20),
    ],
)
def test_what_is_clear_is_decided_early(
    noise: Noise, true_ratio: float, said: Verdict, share: float, pairs: int
) -> None:
    ends = played(noise, true_ratio)
    assert sum(verdict == said for verdict, _ in ends) >= share * PLAYED
    assert np.median([len(ratios) for _, ratios in ends]) <= pairs


def test_what_ends_early_is_decided() -> None:
    for noise in KINDS:
        for said, ratios in played(noise, 0.9):
            assert len(ratios) == MOST_PAIRS or is_decided(said)


def test_several_settings_go_on_until_they_are_told_apart() -> None:
    alone, among = (ended(normal, 0.5, 1, precise=precise)[1] for precise in (False, True))
    assert len(among) >= len(alone)
    estimate = paired(among)
    assert estimate is not None and estimate.interval is not None
    assert len(among) == MOST_PAIRS or estimate.interval[1] / estimate.interval[0] <= 1.11


def test_two_pairs_decide_nothing() -> None:
    assert not decide(np.array([0.5, 0.5]), np.array([1.0, 1.0]))
    assert not decide(np.array([]), np.array([]))
