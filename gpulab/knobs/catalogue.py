"""All knobs in the order of the bench, and how `--set`, `--ab` and `--sweep` name them.

With an observation, a knob's name denotes the knob if the code uses what the knob changes and the knob can be set.
Otherwise the name denotes a variable that the code reads or assigns as a literal at its top level. Without such a
variable it stays the knob, which says why it cannot be set. Without an observation see `tuning/resolve.py`.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import product

from gpulab.errors import UsageError
from gpulab.knobs.accumulation import ACCUMULATE
from gpulab.knobs.backend_settings import ANOMALY, ATTENTION, COMPUTE_THREADS, TF32, VALIDATE_ARGS
from gpulab.knobs.checkpointing import CHECKPOINTING
from gpulab.knobs.compile import COMPILE
from gpulab.knobs.dataset_cache import CACHE
from gpulab.knobs.distributed import (
    BUCKET_CAP_MB,
    COMM_HOOK,
    GRADIENT_AS_BUCKET_VIEW,
    LOCAL_SGD,
    RESHARD_AFTER_FORWARD,
    STATIC_GRAPH,
)
from gpulab.knobs.fused_optimizer import FUSED_OPTIMIZER
from gpulab.knobs.knob import Kind, Knob
from gpulab.knobs.loader_options import BATCH_SIZE, PERSISTENT_WORKERS, PIN_MEMORY, PREFETCH, WORKERS
from gpulab.knobs.memory_format import CHANNELS_LAST
from gpulab.knobs.mixed_precision import AMP
from gpulab.knobs.observation import Observation
from gpulab.knobs.variables import Plain, is_plain, plain_value

_LIST: tuple[Knob, ...] = (
    BATCH_SIZE,
    WORKERS,
    PREFETCH,
    PIN_MEMORY,
    PERSISTENT_WORKERS,
    CACHE,
    COMPUTE_THREADS,
    ANOMALY,
    VALIDATE_ARGS,
    AMP,
    TF32,
    ATTENTION,
    FUSED_OPTIMIZER,
    COMPILE,
    CHANNELS_LAST,
    CHECKPOINTING,
    ACCUMULATE,
    BUCKET_CAP_MB,
    GRADIENT_AS_BUCKET_VIEW,
    STATIC_GRAPH,
    COMM_HOOK,
    LOCAL_SGD,
    RESHARD_AFTER_FORWARD,
)
KNOBS: dict[str, Knob] = {knob.name: knob for knob in _LIST}

IsVariable = Callable[[str], bool]

_PAIR = re.compile(r"\s*(?P<name>[^\W\d]\w*)\s*=(?!=)(?P<value>.*)", re.DOTALL)
_OPENING, _CLOSING, _QUOTES = "([{", ")]}", "'\""


def decide(name: str, observation: Observation, is_variable: IsVariable) -> Knob | None:
    """The knob that a name denotes in observed code; None for a variable. `is_variable`: whether the code has one.

    Raises UsageError if it is neither.
    """
    knob = KNOBS.get(name)
    if knob is not None and (_can_apply(knob, observation) or not _can_be_set(name, is_variable)):
        return knob
    if is_variable(name):
        return None
    raise _unknown(name, ())


def parse_settings(pairs: Sequence[str], is_variable: IsVariable, variables: Collection[str] = ()) -> dict[str, Plain]:
    """Read `NAME=VALUE` pairs; one text may hold several, separated by commas ("workers=4, amp=bf16").

    `is_variable`: whether the code has a variable of that name; it may raise UsageError with the reason why the
    variable cannot be set. `variables`: all variables of the code, to suggest the nearest. Raises UsageError.
    """
    values: dict[str, Plain] = {}
    texts: dict[str, str] = {}
    for pair in (pair for text in pairs for pair in _split_pairs(text)):
        name, text = _name_and_text(pair, "workers=4")
        if name in values:
            raise UsageError(f"{name} is set twice: {name}={texts[name]} and {name}={text}. Set it once.")
        values[name], texts[name] = _value(name, text, is_variable, variables), text
    return values


def parse_sweeps(
    texts: Sequence[str], is_variable: IsVariable, variables: Collection[str] = ()
) -> dict[str, tuple[Plain, ...]]:
    """Read `NAME=VALUE,VALUE,…`: the values of each knob or variable. Raises UsageError, also for two of one name."""
    sweeps: dict[str, tuple[Plain, ...]] = {}
    for text in texts:
        name, rest = _name_and_text(text, "batch_size=8,16,32,64")
        if name in sweeps:
            raise UsageError(f"{name} is swept twice: put all its values into one --sweep.")
        words = [word.strip() for word in _split(rest)]
        if not all(words):
            raise UsageError(f"--sweep {text.strip()}: a value is missing, e.g. {example(name)}.")
        values: list[Plain] = []
        for word in words:
            value = _value(name, word, is_variable, variables)
            if any(type(value) is type(v) and value == v for v in values):
                raise UsageError(f"--sweep {text.strip()}: {word} appears twice, name it once.")
            values.append(value)
        sweeps[name] = tuple(values)
    return sweeps


def grid(sweeps: Mapping[str, Sequence[Plain]], settings: Mapping[str, Plain]) -> tuple[dict[str, Plain], ...]:
    """All combinations, the last sweep varying fastest, each with `settings` added. Raises UsageError."""
    for name in sweeps:
        if name in settings:
            raise UsageError(f"{name} is both set and swept: drop one of the two.")
    return tuple({**settings, **dict(zip(sweeps, values, strict=True))} for values in product(*sweeps.values()))


def changes_steps(name: str) -> bool:
    """Whether the name is a knob that changes the number of optimizer steps per epoch."""
    return name in KNOBS and KNOBS[name].changes_steps


def knobs_against(finding: str) -> list[Knob]:
    """The knobs that help against the cause that a finding names, in the order in which a climb tries them."""
    helping = [knob for knob in KNOBS.values() if finding in knob.helps_against]
    return sorted(helping, key=lambda knob: knob.helps_against[finding])


def parsed_value(name: str, raw: object) -> Plain:
    """A value passed in code, not as text. Raises UsageError if it cannot be set."""
    if name in KNOBS:
        return KNOBS[name].parse(raw)
    if not is_plain(raw):
        raise UsageError(f"{name} must be a number, a string, a bool, None, or a tuple or list of these, got {raw!r}.")
    return raw


# -- details -----------------------------------------------------------------------------------------------------------


def _can_apply(knob: Knob, observation: Observation) -> bool:
    """Whether its object (loader, optimizer, module) was observed, and there is a value that it can be set to."""
    available: dict[Kind, bool] = {
        "DataLoader option": bool(observation.loaders),
        "module call": bool(observation.modules),
        "optimizer option": bool(observation.optimizers),
    }
    if not available.get(knob.kind, True):
        return False
    present = knob.value_in(observation)
    values = knob.options if present is None else (*knob.options, present)
    return any(knob.refuses(observation, value) is None for value in values)


def _can_be_set(name: str, is_variable: IsVariable) -> bool:
    try:
        return is_variable(name)
    except UsageError:
        return False


def _value(name: str, text: str, is_variable: IsVariable, variables: Collection[str]) -> Plain:
    knob = KNOBS.get(name)
    if knob is None:
        if not is_variable(name):
            raise _unknown(name, variables)
        return plain_value(text)
    try:
        return knob.parse(text)
    except UsageError:
        if _can_be_set(name, is_variable):  # a value of the variable; if the knob applies, the knob refuses it
            return plain_value(text)
        raise


def _unknown(name: str, variables: Collection[str]) -> UsageError:
    if name == "ranks":
        return UsageError("To compare the number of ranks, use --sweep ranks=1,2 on its own.")
    near = _nearest(name, [*variables, *KNOBS])
    hint = f"Did you mean {near}?" if near is not None else f"Settings: {', '.join(KNOBS)}."
    return UsageError(f"{name} is neither a setting nor a variable of the code. {hint}")


def _nearest(name: str, candidates: Sequence[str]) -> str | None:
    """The nearest candidate: by alias, by beginning, or by similar letters."""
    word = name.lower()
    if (alias := knob_by_alias(word)) is not None:
        return alias
    longer = [k for k in candidates if len(word) > 2 and k.startswith(word)]
    return next(iter([*longer, *difflib.get_close_matches(word, candidates, n=1, cutoff=0.6)]), None)


def knob_by_alias(word: str) -> str | None:
    """The knob of this name or with this alias."""
    return next((knob.name for knob in KNOBS.values() if word in (knob.name, *knob.aliases)), None)


def nearest_knob(name: str) -> str | None:
    """The knob most similar to a name that is no knob."""
    return _nearest(name, tuple(KNOBS))


def _name_and_text(pair: str, otherwise: str) -> tuple[str, str]:
    match = _PAIR.fullmatch(pair)
    if match is None:
        near = nearest_knob(pair.strip())
        raise UsageError(f"Expected NAME=VALUE, e.g. {example(near) if near else otherwise}, got {pair.strip()!r}.")
    if not match["value"].strip():
        raise UsageError(f"{match['name']}= needs a value, e.g. {example(match['name'])}.")
    return match["name"], match["value"].strip()


def example(name: str) -> str:
    """An example setting of this knob."""
    knob = KNOBS.get(name)
    return f"{name}={knob.options[-1]}" if knob is not None and knob.options else f"{name}=VALUE"


def _split_pairs(text: str) -> list[str]:
    """Split at commas that precede another `NAME=`: "workers=4, amp=bf16", but not "sizes=64,64"."""
    pairs: list[str] = []
    for part in _split(text):
        if pairs and _PAIR.fullmatch(part) is None:
            pairs[-1] += f",{part}"
        else:
            pairs.append(part)
    return pairs


def _split(text: str) -> list[str]:
    """Split at commas outside brackets and quotes."""
    parts, depth, quote = [""], 0, ""
    for sign in text:
        if quote:
            quote = "" if sign == quote else quote
        elif sign in _QUOTES:
            quote = sign
        elif sign in _OPENING:
            depth += 1
        elif sign in _CLOSING:
            depth -= 1
        if sign == "," and depth <= 0 and not quote:
            parts.append("")
        else:
            parts[-1] += sign
    return parts
