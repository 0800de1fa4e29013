"""Calls that take a part of the counted steps, from looks at the training thread's stack during the whole run."""

from __future__ import annotations

import re
from collections.abc import Collection

import numpy as np
from msgspec import Struct

from gpulab.analysis.breakdown import Breakdown, layers
from gpulab.analysis.host.hot_line import LineCount, hot_place, lower_share
from gpulab.intervals import Intervals, covers, intersect, joined, measure, subtract, union, union_of
from gpulab.run import CALL_KINDS, CallKind, Int32, Phase, Place, Run, StepFlag

LEAST_LOOKS = 40  # ours, at all calls together: the interval of a share is then 31 points wide at most
MOSTLY_BARE = 0.5  # of a function's time, surely, by looks in the traced steps: PyTorch runs nothing; ours

# What a function is there for, by how a user writes it; the first that fits. Whatever fits none is named without it.
_KINDS = tuple(
    (word, re.compile(pattern))
    for word, pattern in (
        ("schedulers", r"\blr_scheduler\."),
        ("metrics", r"^(torchmetrics|sklearn\.metrics|sacrebleu|evaluate)\."),
        ("saving", r"\.to_(csv|parquet|json|pickle|excel|hdf)$|\.write_table$|^(h5py|zarr)\.|^joblib\.dump"),
        ("saving", r"\bsave\w*$|\b(write|dump|on)_?\w*[Cc]heckpoint\w*$|\bModelCheckpoint\.on_"),
        ("serialization", r"^(json|pickle|yaml|msgpack|toml\w*|csv|xml|joblib|pyarrow)\."),
        ("logging", r"^(logging|wandb|mlflow|tensorboard\w*|rich|tqdm|loguru|comet_ml|neptune|aim|tabulate)\."),
        ("logging", r"\.log(_metrics)?$"),
        ("plotting", r"^(matplotlib|seaborn|plotly|bokeh|altair)\."),
        ("tokenizing", r"^tokenizers\.|Tokenizer|^(sentencepiece|tiktoken|spacy|nltk)\."),
        ("environment steps", r"^(gym|gymnasium|pettingzoo|dm_control|pybullet|mujoco)\.|\bEnv\w*\.step$"),
        ("database", r"^(sqlalchemy|sqlite3|pymongo|redis|psycopg\w*|duckdb)\."),
        ("checking data", r"^(jsonschema|pydantic|pandera|great_expectations)\."),
        ("image processing", r"^(PIL|cv2|skimage|imageio|albumentations|torchvision)\."),
        ("evaluation", r"\b(evaluate|validate)$"),
    )
)  # fmt: skip


class Call(Struct, frozen=True):
    """One call, with `others` that are there for the same at its line: of `whole` looks `looks` have met it.

    All in the counted steps and up to the next ones. `times` up to the looks, [n, 2] in ns; `hot`: the line of the
    user's within it that takes most, None where it is `line` or none surely does. `word`: what such a function is there
    for; empty: not known.
    """

    line: Place
    callee: str
    looks: int
    whole: int
    share: float
    interval: tuple[float, float]
    cost_us: float  # per step, mean
    times: Intervals
    hot: Place | None = None
    word: str = ""
    others: int = 0
    exact: bool = True


def costliest_call(
    run: Run, account: Breakdown | None, kinds: Collection[CallKind], *, saving: bool = False
) -> Call | None:
    """The call of these kinds that most looks in the counted steps have met; None without enough of them.

    `saving`: of those that write files; else of all others.

    Pauses are left out, for they are known by name, but for garbage that is collected in the call. A function of the
    user's from which the loss is computed counts only where PyTorch runs nothing in most of it: else it is the training
    itself.
    """
    looks, (steps, count_steps) = run.call_looks, _counted(run)
    if looks is None or not run.callees:
        return None
    since_ns = np.concatenate((looks.t_ns[:1], looks.t_ns[:-1]))
    inside = covers(steps, looks.t_ns)
    weight = np.where(inside, 1 if looks.exact else looks.t_ns - since_ns, 0)
    whole, total = int(inside.sum()), int(weight.sum())
    if whole < LEAST_LOOKS or not total:
        return None
    within = ("gc", "checkpoint_save") if saving else ("gc",)
    paused = covers(union_of((p.start_ns, p.end_ns) for p in run.pauses if p.kind not in within), looks.t_ns)
    mine = inside & ~paused & (looks.place >= 0) & np.isin(looks.kind, [CALL_KINDS.index(kind) for kind in kinds])
    words = [next((word for word, pattern in _KINDS if pattern.search(callee)), "") for callee in run.callees]
    group = np.array([words.index(word) if word else i for i, word in enumerate(words)], np.int64)
    alike = looks.place.astype(np.int64) * len(CALL_KINDS) + looks.kind
    keys = alike * len(words) + group[looks.callee]
    met, counts = np.unique(keys[mine], return_counts=True)
    for key in met[np.argsort(-counts)].tolist():
        rows = mine & (keys == key)
        place, kind = divmod(key // len(words), len(CALL_KINDS))
        word = words[key % len(words)]
        if (word == "saving") != saving:
            continue
        if CALL_KINDS[kind] == "own" and not saving and not _is_bare(run, account, looks.within[rows]):
            continue
        part, count = float(weight[rows].sum()) / total, int(rows.sum())
        line, callees = run.places[place], np.bincount(looks.callee[rows])
        return Call(
            line=line,
            callee=run.callees[int(callees.argmax())],
            looks=count,
            whole=whole,
            share=part,
            interval=(lower_share(round(part * whole), whole), 1 - lower_share(round((1 - part) * whole), whole)),
            cost_us=part * measure(steps) / count_steps / 1e3,
            times=intersect(union(since_ns[rows], looks.t_ns[rows]), steps),
            hot=_hot(run, looks.within[rows], line),
            word=word,
            others=int(np.count_nonzero(callees)) - 1,
            exact=looks.exact,
        )
    return None


def _counted(run: Run) -> tuple[Intervals, int]:
    """The steps without a profiler, those too in which something rare happens, each up to the next; and how many."""
    odd = StepFlag.PROFILER_EDGE | StepFlag.FIRST
    counted = (run.steps.phase == Phase.MEASURED) & (run.steps.flags & odd == 0)
    goes_on = np.append(counted[1:], False)
    end_ns = np.where(goes_on, np.append(run.steps.start_ns[1:], 0), run.steps.end_ns)
    return union(run.steps.start_ns[counted], end_ns[counted]), int(counted.sum())


def _hot(run: Run, within: Int32, line: Place) -> Place | None:
    places, counts = np.unique(within[within >= 0], return_counts=True)
    lines = [LineCount(run.places[p], int(n)) for p, n in zip(places.tolist(), counts.tolist(), strict=True)]
    hot = hot_place(lines, len(within))
    return None if hot == line else hot


def _is_bare(run: Run, account: Breakdown | None, within: Int32) -> bool:
    """Whether PyTorch mostly runs nothing where the traced steps are at these lines."""
    stack = run.stack
    if run.timeline is None or stack is None or account is None or account.step_host_windows is None:
        return False
    windows = account.step_host_windows
    steps = union(windows[:, 0], windows[:, 1])
    bare = subtract(steps, joined(*layers(run.timeline, account).values()))
    places = {run.places[p] for p in np.unique(within).tolist() if p >= 0}
    rows = np.isin(stack.place, [i for i, place in enumerate(run.places) if place in places]) & covers(
        steps, stack.t_ns
    )
    return lower_share(int(covers(bare, stack.t_ns[rows]).sum()), int(rows.sum())) >= MOSTLY_BARE
