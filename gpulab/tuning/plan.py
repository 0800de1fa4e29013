"""What an experiment is to do: its arms, how long its blocks are and how much time it may take."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from typing import Any, Literal, Protocol

from msgspec import Struct, field

from gpulab.knobs.catalogue import KNOBS, grid, parse_settings, parse_sweeps
from gpulab.knobs.knob import written
from gpulab.knobs.variables import Plain, Variables
from gpulab.tuning.record import BASELINE


class Code(Protocol):
    """The code of the user that is run again and again, unmodified.

    `names` are those of `namespace` that it uses itself; None: it may use all. `roots` are objects besides, from which
    its state is reached; `variables` those that can be set.
    """

    @property
    def text(self) -> str: ...
    @property
    def source(self) -> Literal["cell", "statement", "block", "script"]: ...
    @property
    def namespace(self) -> dict[str, Any]: ...
    @property
    def names(self) -> frozenset[str] | None: ...
    @property
    def roots(self) -> tuple[object, ...]: ...
    @property
    def variables(self) -> Variables: ...

    def run(self) -> object:
        """Run it once, as the user would; its exceptions pass."""

    def replacing(self, variables: Mapping[str, Plain]) -> Code:
        """The same code with these variables set: names it assigns as literals at its top, else names it reads."""

    def through(self, names: MutableMapping[str, Any]) -> Code:
        """The same code, whose own lines use its namespace through this."""


class Arm(Struct, frozen=True):
    """One setting of the knobs; no setting at all is the baseline."""

    settings: Mapping[str, Plain] = field(default_factory=dict)

    @property
    def label(self) -> str:
        return ", ".join(f"{k}={v}" for k, v in self.shown.items()) or BASELINE

    @property
    def shown(self) -> dict[str, str]:
        return {k: written(v) if k in KNOBS else str(v) for k, v in self.settings.items()}


class Plan(Struct, frozen=True):
    """Arms beside the baseline, and bounds. None: gpulab chooses, and says so."""

    arms: tuple[Arm, ...]
    base: Arm = field(default_factory=Arm)  # what they are compared with: the baseline
    block_steps: int | None = None  # counted steps of a block
    pairs: int | None = None
    budget_s: float | None = None  # all that the user waits
    full_run_s: float | None = None  # of a run with its trace, after its first step
    seeds: int = 0  # runs of A with other seeds, for the band of the loss
    interleaved: bool = True  # False: one run of each arm, no blocks (`--set`)
    early: bool = False  # a turn of blocks comes before the full run of each arm: figures as soon as there can be any
    screening: bool = False  # blocks alone, without a full run of each arm; the slower half drops out again and again
    name: str = ""
    device: str = "auto"
    trace: bool = True
    save: bool = True

    def run_name(self, arm: Arm) -> str:
        """By which a user finds the run of an arm among others: "workers=2,4: baseline", "workers=2"."""
        if self.name:
            return f"{self.name}: {arm.label}"
        tried = dict.fromkeys(pair for other in self.arms for pair in other.shown.items())
        values = {name: ",".join(value for n, value in tried if n == name) for name, _ in tried}
        settings = ", ".join(f"{name}={shown}" for name, shown in values.items())
        return arm.label if arm.settings or not settings else f"{settings}: {arm.label}"


class Progress(Struct, frozen=True):
    """Where an experiment stands. `seconds_left` is None while it cannot be told yet."""

    what: str  # "baseline: step 12 of 40", "workers=2", "block 7 of 40: workers=2"
    done: float
    total: int
    seconds_left: float | None
    in_blocks: bool = False  # the runs with their trace come before the blocks
    elapsed_s: float | None = None  # since the experiment began
    about_s: float | None = None  # what it takes in all
    most_s: float | None = None  # after which it ends with what there is
    note: str = ""  # a sentence about the time


Listener = Callable[[Progress], None]


# A plan as its user wrote it, in the words of `--ab`, `--sweep` and `--set`: they mean what the code has them mean.


class PlanRequest(Struct, frozen=True):
    """What was asked for; `only` leaves one arm of all, by its number."""

    ab: tuple[str, ...] = ()
    sweep: tuple[str, ...] = ()
    set: tuple[str, ...] = ()
    steps: int | None = None
    pairs: int | None = None
    budget_s: float | None = None
    seeds: int = 0
    name: str = ""
    device: str = "auto"
    trace: bool = True
    save: bool = True
    only: int | None = None

    def plan(self, names: Variables) -> Plan:
        """For code with these variables. Raises UsageError for a name or a value that it cannot have."""
        fixed = parse_settings([*self.ab, *self.set], names.has, names.names)
        sweeps = parse_sweeps(self.sweep, names.has, names.names)
        arms = tuple(Arm(values) for values in grid(sweeps, fixed))
        return Plan(
            arms=arms if self.only is None else arms[self.only : self.only + 1],
            block_steps=self.steps,
            pairs=self.pairs,
            budget_s=self.budget_s,
            seeds=self.seeds,
            name=self.name,
            device=self.device,
            trace=self.trace,
            save=self.save,
        )
