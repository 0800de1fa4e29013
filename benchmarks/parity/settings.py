"""The settings that a search goes through: every value of every knob that can act and leaves the training the same."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import combinations, product

from gpulab.knobs.catalogue import KNOBS, changes_steps
from gpulab.knobs.knob import Knob, StepTimes, Value
from gpulab.knobs.loader_options import with_settings
from gpulab.knobs.observation import Observation

Settings = dict[str, Value]

VALUES_OF_A_KNOB = 2  # that go into combinations: the best of those that helped
MOST_TOGETHER = 15  # combinations that are all measured; of more only the pairs, and greedily from there
COMPILE = "compile"


def alone(observation: Observation, cores: float, base: Mapping[str, Value] | None = None) -> list[Settings]:
    """One other knob each, at every value that it does not refuse on top of `base`. Nothing that changes the steps."""
    before = dict(base or {})
    imagined = with_settings(observation, before)
    return [
        {knob.name: value}
        for knob in KNOBS.values()
        if not changes_steps(knob.name) and knob.name not in before
        for value in _values(knob, imagined, cores)
        if not _is_now(knob, value, imagined) and not refusal({**before, knob.name: value}, observation)
    ]


def refusal(settings: Mapping[str, Value], observation: Observation) -> str:
    """Why these cannot be set together; empty where they can."""
    imagined = with_settings(observation, settings)
    reasons = [
        KNOBS[name].machine_refuses(value) or KNOBS[name].refuses(imagined, value) for name, value in settings.items()
    ]
    return "; ".join(filter(None, reasons))


def together(helpful: Mapping[str, Iterable[Value]], observation: Observation) -> list[Settings]:
    """All combinations of two knobs and more that can be set together; too many: the pairs of their best values."""
    names = list(helpful)
    values = {name: list(helpful[name])[:VALUES_OF_A_KNOB] for name in names}
    whole = [
        {name: value for name, value in zip(names, chosen, strict=True) if value is not None}
        for chosen in product(*([None, *values[name]] for name in names))
    ]
    grid = [s for s in whole if len(s) > 1 and not refusal(s, observation)]
    if len(grid) <= MOST_TOGETHER:
        return grid
    pairs: list[Settings] = [{a: values[a][0], b: values[b][0]} for a, b in combinations(names, 2)]
    return [pair for pair in pairs if not refusal(pair, observation)]


def words(settings: Mapping[str, object]) -> str:
    """As in `--ab`; as written where there is none."""
    return ", ".join(f"{name}={value}" for name, value in settings.items()) or "as written"


def _values(knob: Knob, observation: Observation, cores: float) -> Iterator[Value]:
    """Those of the panel and those that a climb would try; of workers and threads none far beyond the cores."""
    numbers = knob.name in ("workers", "compute_threads")
    now = knob.value_in(observation)
    for value in dict.fromkeys((*knob.options, *knob.next_values(now, StepTimes(cores)))):
        if not (numbers and int(value) > 2 * cores):
            yield value


def _is_now(knob: Knob, value: Value, observation: Observation) -> bool:
    now = knob.value_in(observation)
    return type(now) is type(value) and now == value
