"""A plan as its user wrote it, in the words of `--ab`, `--sweep` and `--set`: they mean what the code has them mean."""

from __future__ import annotations

from msgspec import Struct

from gpulab.knobs.catalogue import grid, parse_settings, parse_sweeps
from gpulab.knobs.variables import Variables
from gpulab.tuning.plan import Arm, Plan


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
