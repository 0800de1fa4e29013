"""The rows of a bench: each is one setting of a cell, measured against the first row, and is kept across processes.

The first row is the baseline. The blocks of every other row are interleaved with blocks of the first; their pairs give
the speed. Applying an edit changes the text of the cell, so the cell gets a new baseline. All functions are pure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from msgspec import Struct, field
from msgspec.structs import replace

from gpulab.analysis.facts import Facts
from gpulab.formatting import settings_words
from gpulab.knobs.edits import ELSEWHERE, diff
from gpulab.knobs.observation import Observation
from gpulab.run import Change
from gpulab.tuning.climb_record import Attempt, Climb
from gpulab.tuning.compare.blocks import FEWEST_PAIRS, carries_verdict, compare_blocks, pair_ratios
from gpulab.tuning.compare.cost import SetupCost, cell_ratio, cell_steps, setup_cost
from gpulab.tuning.compare.headline import disturbed
from gpulab.tuning.compare.parts import run_agrees, run_us
from gpulab.tuning.compare.statistics import paired
from gpulab.tuning.compare.verdicts import with_times
from gpulab.tuning.record import BASELINE, Block, Comparison, Experiment, Side, Speed
from gpulab.verdict import verdict

OTHER_TIME = "the one traced run took another time than the blocks"
MOST_LOSSES = 400  # stored per run, for the loss curve


class Prediction(Struct, frozen=True):
    """The ratio of times that was predicted before the row ran, with its 95 % interval."""

    ratio: float
    interval: tuple[float, float]


class Row(Struct, frozen=True):
    """One setting of the cell. Its full run is in the store under `run_id`; empty if there is none."""

    id: str
    settings: dict[str, str] = field(default_factory=dict)  # as shown; empty: the baseline
    name: str = ""  # chosen by the user
    pinned: bool = False
    run_id: str = ""
    blocks: tuple[Block, ...] = ()
    speed: Speed | None = None  # None: the first row, or nothing was compared yet
    step_us: float | None = None  # of the full run; in `Bench.table`, of the blocks if there are any
    run_us: float | None = None  # of the full run, if `step_us` is of the blocks
    by_blocks: bool = False
    block_us: float | None = None  # first row only: step in the blocks of its first comparison; scales all times
    block_pairs: int = 0  # of that comparison; one with only a few pairs is replaced by the next
    contended: bool = False  # the full run was short of CPU cores
    samples_per_step: float | None = None
    cell_steps: int | None = None  # steps of a complete run of the cell; None: not known
    run_shares: dict[str, float] = field(default_factory=dict)  # of a step, by part, in the full run
    other_trace: str = ""  # how the traced runs disagree with the blocks; empty: they agree
    memory_bytes: int | None = None
    utilization: float | None = None  # of the device, as a fraction; None: not measured
    loss: str = ""  # the verdict on the losses of both; empty: none
    loss_words: str = ""
    losses: tuple[float | None, ...] = ()
    loss_steps: int = 0  # steps that the losses span: a long run's losses are thinned; 0: every loss is kept
    checks: tuple[Change, ...] = ()
    prediction: Prediction | None = None
    failure: str = ""
    edit: str = ""  # makes the setting permanent
    cell: str = ""  # the cell with that edit; empty if the edit is no diff
    origin: str = ""  # "rung 2 of a climb"; empty: run by hand
    code: str = ""  # the text of the cell when it was measured; empty: the present text

    @property
    def label(self) -> str:
        return settings_words(self.settings) or BASELINE

    @property
    def title(self) -> str:
        return self.name or self.label

    @property
    def run_agrees(self) -> bool:
        """Whether the full run took about as long as the blocks; if not, its parts do not describe the blocks' time."""
        return run_agrees(self.run_us, self.blocks, self.step_us)

    @property
    def no_shares_reason(self) -> str:
        """Why the parts of the full run are not shown."""
        return self.other_trace or ("" if self.run_agrees else OTHER_TIME)

    @property
    def shares(self) -> dict[str, float]:
        """Fractions of a step, by part."""
        return {} if self.no_shares_reason else self.run_shares

    @property
    def is_baseline(self) -> bool:
        return not self.settings and self.speed is None

    @property
    def samples_per_s(self) -> float | None:
        return self.samples_per_step * 1e6 / self.step_us if self.step_us and self.samples_per_step else None


def plain_text(code: str) -> str:
    """The text of a cell as its key: without empty lines around it."""
    return code.rstrip().lstrip("\n")


class Bench(Struct, frozen=True):
    """All rows of one cell, the baseline first, then in the order in which they came.

    A row is compared with the baseline of its own text only; `own` are the rows of the cell's present text.
    """

    code: str
    rows: tuple[Row, ...] = ()
    texts: tuple[str, ...] = ()  # earlier texts of the cell, before edits were applied
    observation: Observation | None = None  # of the last run of the baseline

    @property
    def own(self) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if row.code in ("", self.code))

    def at(self, code: str) -> Bench:
        """The bench of the cell under this text: all rows stay, each with the text it was measured on."""
        code = plain_text(code)
        if code == self.code:
            return self
        rows = tuple(replace(row, code=row.code or self.code) for row in self.rows)
        return Bench(code, rows, tuple(text for text in (*self.texts, self.code) if text != code))

    def joined(self, other: Bench) -> Bench:
        """This bench plus the rows and texts that only the other bench of the cell has."""
        rows = (*self.rows, *(row for row in other.rows if self.row(row.id) is None))
        texts = dict.fromkeys((*other.texts, *self.texts))
        return replace(self, rows=rows, texts=tuple(texts), observation=self.observation or other.observation)

    @property
    def baseline(self) -> Row | None:
        return self.of({})

    def row(self, row_id: str) -> Row | None:
        return next((row for row in self.rows if row.id == row_id), None)

    def of(self, settings: Mapping[str, str]) -> Row | None:
        """The row with these settings, whatever their order."""
        return next((row for row in self.own if row.settings == dict(settings)), None)

    @property
    def best(self) -> Row | None:
        best = best_of([replace(row, step_us=self.step_us(row)) for row in self.own])
        return self.row(best.id) if best is not None else None

    def step_us(self, row: Row) -> float | None:
        """The row's step: for the first row from the blocks of its first comparison, else that time × the pairs' ratio.

        So times and speedups of a bench always agree, and no later run changes them. A row that was not compared has
        the step of its own full run.
        """
        by_blocks = self._block_us(row)
        return row.step_us if by_blocks is None else by_blocks

    def _block_us(self, row: Row) -> float | None:
        baseline, speed = self.baseline, row.speed
        if baseline is None or baseline.block_us is None or not row.settings:
            return None if row.settings else row.block_us
        if speed is None or speed.ratio is None:
            return None
        if speed.unit == "step":
            return baseline.block_us * speed.ratio
        if not baseline.samples_per_step or not row.samples_per_step:
            return None
        return baseline.block_us / baseline.samples_per_step * speed.ratio * row.samples_per_step

    @property
    def table(self) -> tuple[Row, ...]:
        """The rows of the cell's present text, as every view shows them."""
        rows = (replace(row, code=self.code) for row in self.own)
        return tuple(row if (us := self._block_us(row)) is None else with_time(row, us) for row in rows)

    def edit_between(self, a: Row, b: Row) -> str:
        """The edit from A to B: a diff if the code of both is known, then the snippets that have no place in it."""
        cells = [plain_text(row.cell or ("" if row.settings else row.code or self.code)) for row in (a, b)]
        marked = list(zip("AB", (a, b), strict=True))
        loose = [(mark, row.edit.partition(ELSEWHERE)[2] if row.cell else row.edit) for mark, row in marked]
        parts = [diff(*cells, *(f"{mark}: {row.title}" for mark, row in marked))] if all(cells) else []
        parts += [f"# Of {mark}, where it belongs:\n{text.strip()}" for mark, text in loose if text.strip()]
        return "\n".join(filter(None, parts))

    @property
    def next_turn(self) -> int:
        """The number of the next turn of blocks; pairs are formed within a turn.

        It is even, as the first turn of an experiment: even turns pair with the earlier of two equally near blocks.
        """
        last = max((block.turn for row in self.rows for block in row.blocks), default=-1)
        return 2 * (last // 2 + 1)

    def put(self, row: Row) -> Bench:
        """This row replaces the one with the same id, else it is appended; the baseline stays first."""
        if self.row(row.id) is not None:
            return replace(self, rows=tuple(row if other.id == row.id else other for other in self.rows))
        return replace(self, rows=(*self.rows, row) if row.settings else (row, *self.rows))

    def so_far(self, rows: Sequence[Row], blocks: Sequence[Block], turn: int) -> Bench:
        """The bench while an experiment runs: its rows, in the order of its arms, with the blocks so far."""
        baseline = self.baseline
        if baseline is None:
            return self
        baseline, *others = (_with_blocks(row, blocks, arm, turn) for arm, row in enumerate((baseline, *rows)))
        in_blocks = with_times(Side(BASELINE, {}, None, baseline.blocks)).us_per_step
        settled = baseline.block_pairs >= FEWEST_PAIRS
        bench = self.put(replace(baseline, block_us=baseline.block_us if settled else in_blocks))
        for row in others:
            bench = bench.put(replace(row, speed=_speed_so_far(baseline.blocks, row.blocks)))
        return bench

    def remove(self, row_id: str) -> Bench:
        """The bench without this row; the first row stays as long as others are measured against it."""
        row = self.row(row_id)
        if row is None or (not row.settings and len(self.at(row.code or self.code).own) > 1):
            return self
        return replace(self, rows=tuple(other for other in self.rows if other.id != row_id))

    def with_attempt(self, rung: Attempt, row_id: str, origin: str) -> Bench:
        """The bench with an attempt of a climb as a row, together with the settings kept before.

        Its speed against the first row is the product with the speed of the kept settings. A row that was measured
        against the first row directly stays as it is.
        """
        comparison = rung.comparison
        settings = comparison.b.settings if comparison is not None else dict(rung.settings)
        row = self.of(settings)
        if comparison is None:
            return self if row is not None else self.put(Row(row_id, settings, origin=origin))
        base = self.of(comparison.a.settings)
        if base is None or not settings or (row is not None and row.blocks):
            return self
        if comparison.evidence != "interleaved" and comparison.verdict == "undecided" and not comparison.b.failure:
            return self  # it was stopped before its first pair
        row = replace(row or Row(row_id, settings), origin=origin)
        speed = comparison.speed.after(base.speed)
        return self.put(replace(row_of(row, comparison, base, 0), speed=speed, blocks=()))

    def with_climb(self, climb: Climb) -> Bench:
        """The bench with the final comparison of a climb: all kept settings against the first row."""
        whole, baseline = climb.whole, self.baseline
        row = self.of(whole.b.settings) if whole is not None else None
        if whole is None or baseline is None or row is None:
            return self
        return self.with_comparisons(whole.a, [replace(row, blocks=())], [whole], self.next_turn)

    def with_comparisons(self, a: Side, rows: Sequence[Row], comparisons: Sequence[Comparison], turn: int) -> Bench:
        """The bench with the measurements of an experiment for the baseline and these rows; its turns follow `turn`.

        A row stays as it is if the experiment was stopped before it.
        """
        assert self.baseline is not None
        baseline = baseline_row(self.baseline, a, turn, comparisons)
        bench = self.put(baseline)
        for row, comparison in zip(rows, comparisons, strict=False):
            if comparison.b.failure or comparison.b.blocks or comparison.b.facts is not None:
                bench = bench.put(row_of(row, comparison, baseline, turn))
        return bench


# rows


def best_of(rows: Sequence[Row]) -> Row | None:
    """Of the rows with the verdict "faster", the one whose cell takes least time, one-time cost included.

    If the number of the cell's steps is unknown, by the step. None if no row saves as much as its one-time cost.
    """
    candidates = []
    for row in rows:
        cost = cost_of_row(rows[0], row)
        if row.speed is not None and row.speed.verdict == "faster" and (cost is None or cost.pays):
            candidates.append((cell_ratio(row.speed, cost, rows[0].step_us), row))
    return min(candidates, key=lambda pair: pair[0], default=(1.0, None))[1]


def cost_of_row(first: Row, row: Row) -> SetupCost | None:
    """The one-time cost of a row, and after how many steps of the first row it pays off."""
    if row.speed is None or row.failure:
        return None
    return setup_cost(row.speed, first.step_us, first.cell_steps)


def rows_of(comparisons: Sequence[Comparison]) -> tuple[Row, ...]:
    """A row for the common baseline of the comparisons, then one for each of them, with the times of the comparison."""
    a = comparisons[0].a
    label = Row("", a.settings).label
    first = Row("0", name=_name(a, BASELINE), origin="" if label in (BASELINE, a.label) else label)
    first = replace(baseline_row(first, a, 0, comparisons), blocks=a.blocks, failure=a.failure)
    rows = [_with_times(first, comparisons[0], a)]
    for i, c in enumerate(comparisons, 1):
        row = Row(str(i), c.b.settings)
        rows.append(_with_times(row_of(replace(row, name=_name(c.b, row.label)), c, first, 0), c, c.b))
    return tuple(rows)


def _name(side: Side, label: str) -> str:
    return side.label if side.label != label else ""


def _with_times(row: Row, comparison: Comparison, side: Side) -> Row:
    """The row with the step time and the samples per step of the side, both from the same blocks."""
    if not side.us_per_step:
        return row
    samples = side.us_per_step / side.us_per_sample if side.us_per_sample else None
    if comparison.evidence != "interleaved":
        return replace(row, step_us=side.us_per_step, samples_per_step=samples)
    return with_time(replace(row, samples_per_step=samples), side.us_per_step)


def with_time(row: Row, block_us: float) -> Row:
    """The row with its step by blocks."""
    return replace(row, step_us=block_us, run_us=row.step_us, by_blocks=True)


def pair_speeds(baseline: Row, row: Row) -> tuple[float, ...]:
    """How many times as fast the row was in each pair of blocks; empty if there are no pairs."""
    if row.speed is None or not row.speed.pairs:
        return ()
    a, b = (Side("", {}, None, one.blocks) for one in (baseline, row))
    speeds = 1 / pair_ratios(a, b, row.speed.unit)
    return tuple(speeds[np.isfinite(speeds)].tolist())


def speed_by_blocks(baseline: Sequence[Block], blocks: Sequence[Block]) -> Speed | None:
    """The speed from blocks alone; None without a pair."""
    compared = compare_blocks(*_sides(baseline, blocks))
    return compared.speed if compared.ratio is not None else None


def _speed_so_far(baseline: Sequence[Block], blocks: Sequence[Block]) -> Speed | None:
    """The speed while a row is measured; it has a verdict once more pairs would not change it."""
    speed = speed_by_blocks(baseline, blocks)
    if speed is None:
        return None
    sure = carries_verdict(*_sides(baseline, blocks), precise=False)
    return replace(speed, is_running=True, verdict=speed.verdict if sure else "undecided")


def _sides(baseline: Sequence[Block], blocks: Sequence[Block]) -> tuple[Side, Side]:
    return Side(BASELINE, {}, None, tuple(baseline)), Side("", {}, None, tuple(blocks))


def _with_blocks(row: Row, blocks: Sequence[Block], arm: int, turn: int) -> Row:
    """The row with the blocks of that arm added; the blocks give its samples per step if no full run has."""
    own = [replace(block, turn=block.turn + turn, arm=0) for block in blocks if block.arm == arm]
    samples = [block.sample_count / block.step_count for block in own if block.sample_count and block.step_count]
    per_step = row.samples_per_step or (float(np.median(samples)) if samples else None)
    return replace(row, blocks=(*row.blocks, *own), samples_per_step=per_step)


def with_run(row: Row, side: Side) -> Row:
    """The row with the figures of its full run."""
    figures = side.facts
    if figures is None or not len(figures.run.steps):
        return row
    rows = figures.selection.rows
    samples = figures.run.steps.sample_count[rows] if len(rows) else figures.run.steps.sample_count
    return replace(
        row,
        run_id=figures.run.id,
        step_us=run_us(figures),
        cell_steps=cell_steps(figures) or row.cell_steps,
        samples_per_step=float(np.median(samples)) if len(samples) and (samples >= 0).all() else None,
        run_shares=_shares(figures),
        memory_bytes=memory_peak_bytes(figures),
        utilization=_utilization(figures),
        contended=bool(disturbed(side)),
        losses=_thinned(side.losses),
        loss_steps=len(side.losses),
        checks=side.checks,
    )


def baseline_row(row: Row, side: Side, turn: int, comparisons: Sequence[Comparison]) -> Row:
    """The first row with the baseline's measurements in an experiment; its turns follow `turn`."""
    row = with_run(replace(row, blocks=(*row.blocks, *_stored(side.blocks, turn))), side)
    interleaved = [c for c in comparisons if c.evidence == "interleaved" and c.pairs]
    if interleaved and row.block_pairs < FEWEST_PAIRS:
        most = max(interleaved, key=lambda c: c.pairs)
        row = replace(row, block_us=most.a.us_per_step, block_pairs=most.pairs)
    others = [_other_trace(comparison) for comparison in comparisons]
    return replace(row, other_trace=others[0] if others and all(others) else "")


def _other_trace(comparison: Comparison) -> str:
    """How the traced runs disagree with the blocks, if each took as long as its own blocks."""
    own = all(run_agrees(run_us(side.facts), side.blocks) for side in (comparison.a, comparison.b))
    return comparison.no_parts_reason if own else ""


def row_of(row: Row, comparison: Comparison, baseline: Row, turn: int) -> Row:
    """The row with the measurements of a comparison, added to the blocks that it had before."""
    side, loss = comparison.b, comparison.loss
    blocks = (*row.blocks, *_stored(side.blocks, turn))
    speed = comparison.speed
    if row.blocks and not side.failure:
        costs_s = [s.setup_s for s in (row.speed, speed) if s is not None and s.setup_s is not None]
        speed = replace(speed_by_blocks(baseline.blocks, blocks) or speed, setup_s=max(costs_s, default=None))
    predicted = side.prediction
    if predicted is not None and predicted.ratio is not None and predicted.interval is not None:
        row = replace(row, prediction=Prediction(predicted.ratio, predicted.interval))
    row = with_run(row, side)
    return replace(
        row,
        blocks=blocks,
        speed=speed,
        other_trace=_other_trace(comparison),
        loss=loss.verdict if loss is not None else row.loss,
        loss_words=loss.words if loss is not None else row.loss_words,
        failure=side.failure,
        edit=side.edit,
        cell=side.edit_cell if side.edit_is_diff else "",
    )


def _stored(blocks: Sequence[Block], turn: int) -> tuple[Block, ...]:
    return tuple(replace(block, turn=block.turn + turn, arm=0, losses=()) for block in blocks)


def _shares(figures: Facts) -> dict[str, float]:
    shares = figures.shares
    if shares is None or figures.few_steps is not None:
        return {}
    return {name: share for name, share in shares.share.items() if share > 0}


def memory_peak_bytes(figures: Facts | None) -> int | None:
    """The memory that a setting needs: tensors on the GPU, else the process and its workers."""
    on_cpu = figures is not None and figures.run.device.kind == "cpu"
    return peak_bytes(figures, "peak_rss_bytes" if on_cpu else "peak_allocated_bytes")


def peak_bytes(figures: Facts | None, field: str) -> int | None:
    """None if an earlier run of the process hides the exact peak: a lower bound cannot be compared."""
    if figures is None or (field != "peak_rss_bytes" and any(m.key == "memory" for m in figures.run.missing)):
        return None
    value: int | None = getattr(figures.run.memory, field)
    return value


def _utilization(figures: Facts) -> float | None:
    series = figures.run.samples.get("gpu_utilization_pct")
    if series is None or not np.isfinite(series.value).any():
        return None
    return float(np.nanmean(series.value)) / 100


def _thinned(losses: Sequence[float]) -> tuple[float | None, ...]:
    every = max(1, math.ceil(len(losses) / MOST_LOSSES))
    return tuple(loss if math.isfinite(loss) else None for loss in losses[::every])


# several rows


class Sum(Struct, frozen=True):
    """Whether the gains of settings add up: compares the product of their ratios with the ratio of all together."""

    expected: float
    measured: float
    verdict: str  # "less", "more", "as much" or "undecided": the joint gain against the product of the single ones


def add_up(experiment: Experiment) -> Sum | None:
    """For an experiment whose last arm has all settings of the other arms together; None if a pair is missing.

    Decided turn by turn, so that what the machine did in a turn cancels out.
    """
    *single, together = experiment.comparisons
    if len(single) < 2 or any(c.ratio is None or c.evidence != "interleaved" for c in experiment.comparisons):
        return None
    ratios = [pair_ratios(c.a, c.b, c.unit) for c in experiment.comparisons]
    turns = min(map(len, ratios))
    *alone, joint = (np.log(of_turns[:turns]) for of_turns in ratios)
    excess = paired(np.exp(joint - np.sum(alone, axis=0)))
    said = verdict(excess.ratio, excess.interval, None, turns) if excess is not None else ""
    words = {"slower": "less", "faster": "more", "no measurable difference": "as much"}
    return Sum(math.prod(c.ratio or 1.0 for c in single), together.ratio or 1.0, words.get(said, "undecided"))


def between(a: Row, b: Row) -> Speed | None:
    """B against A, each measured against the first row only: the quotient of their ratios.

    None if the two first rows belong to different texts of the cell.
    """
    if a.code != b.code:
        return None
    if a.speed is None:
        return b.speed
    return a.speed.inverse if b.speed is None else b.speed.after(a.speed.inverse)
