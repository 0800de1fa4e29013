"""What a rule is given, what it may answer besides a finding, and what is declared of a kind of finding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from msgspec import Struct

from gpulab.analysis.facts import Facts
from gpulab.analysis.source_lines import line_of, sees_python
from gpulab.analysis.step_shares import StepShares
from gpulab.diagnosis.finding import Finding, Undetermined
from gpulab.formatting import capitalized, duration
from gpulab.intervals import Intervals
from gpulab.prediction.removal import Pauses, Waits
from gpulab.thresholds import Thresholds

FEWEST_STEPS = 6  # ours: a warm-up, a step that counts, the profiled ones and those beside them

_MOST = 0.5  # ours: what makes up half of it is its first cause


class RuleContext(Struct, frozen=True):
    """The figures of one run, and from where on something is worth telling."""

    facts: Facts
    thresholds: Thresholds
    own: StepShares | None = None  # shares of the process's own time, where others take its cores: all rules go by them

    @property
    def step_us(self) -> float | None:
        """The typical step: unprofiled where there is one, else profiled; a trace without steps stands as one."""
        step, account = self.facts.typical_step_us, self.facts.breakdown
        if step is not None:
            return step.median
        return account.mean_step_us if account is not None else None

    @property
    def whole_us(self) -> float | None:
        """Mean time per step with all that lies between steps (`Facts.whole_us`); at least `step_us`."""
        whole = self.facts.whole_us
        return None if whole is None else max(whole, self.step_us or 0.0)

    def share(self, *parts: str) -> float:
        """Of the typical step, or of `own` time, what these parts have together; 0 without an accounting."""
        shares = self.own or self.facts.shares
        return 0.0 if self.facts.breakdown is None or shares is None else shares.of(*parts)

    def part_us(self, *parts: str) -> float:
        """The same in µs of the typical step."""
        return self.share(*parts) * (self.step_us or 0.0)

    def of_typical(self, profiled_share: float, *parts: str) -> float:
        """What is a share of the profiled steps and lies in these parts, as a share of the typical step: these parts
        may have another share there, and nothing in them is larger than they are.
        """
        account = self.facts.breakdown
        held = 0.0 if account is None else sum(account.share[part] for part in parts)
        return self.share(*parts) * min(1.0, profiled_share / held) if held > 0 else profiled_share

    @property
    def loop_waits(self) -> float:
        """Share of the step that the loop waits for data and the GPU idles; where that is withheld, works or not."""
        waited = self.facts.data_wait_fraction
        if self.withheld("idle_causes") is None or waited is None:
            return self.share("data_wait")
        return min(1.0, waited)

    @property
    def waits_mostly_for_data(self) -> bool:
        """Whether the loop's wait for data is most of the GPU's idle time; on a CPU nothing contradicts it."""
        return self.loop_waits >= _MOST * (self.idle or 0.0)

    @property
    def host_memory_full(self) -> bool:
        """Whether the machine's memory is nearly full: then nothing that needs more of it can be advised."""
        rss, host = self.facts.run.memory.peak_rss_bytes, self.facts.run.environment.memory_total_bytes
        return bool(rss and host and rss / host >= self.thresholds.memory_full)

    @property
    def too_few_steps(self) -> bool:
        """No step ran undisturbed, and those that ran are a beginning, which is not like the rest."""
        run = self.facts.run
        own = run.source != "trace" and len(run.steps) > 0
        return own and self.facts.step_us is None and len(run.steps) < FEWEST_STEPS

    @property
    def is_cut_short(self) -> bool:
        """The trace file ends in the middle: nothing can be concluded from what is left."""
        origin = self.facts.run.origin
        return origin is not None and origin.is_cut_short

    @property
    def names_no_cause(self) -> bool:
        """What was recorded is not like the rest of the training, or not whole: only a verdict says so."""
        return self.too_few_steps or self.is_cut_short or self.facts.run.device.kind == "unknown"

    @property
    def unit(self) -> str:
        """What shares are shares of, in words: "each step", or "the profiled time" where no step was found."""
        account = self.facts.breakdown
        return "each step" if account is None or not account.whole_window else "the traced time"

    @property
    def whole(self) -> str:
        """What a time is a part of: "each 9.20 ms step", or "9.20 ms traced" where no step was found."""
        step = duration(self.step_us or 0.0)
        return f"each {step} step" if self.unit == "each step" else f"{step} traced"

    @property
    def on_gpu(self) -> bool:
        """Whether the accounted device is a GPU."""
        return self.facts.run.device.kind == "cuda"

    @property
    def idle(self) -> float | None:
        """Share of the typical step in which the GPU does nothing; None on a CPU or without an accounting."""
        account, shares = self.facts.breakdown, self.own or self.facts.shares
        return None if account is None or account.busy_fraction is None or shares is None else shares.idle

    def withheld(self, figure: str) -> str | None:
        """Why the trace cannot carry that figure, as a sentence; None where it can, or there is no trace."""
        reason = self.facts.integrity.reason(figure) if self.facts.integrity is not None else None
        return None if reason is None else capitalized(reason)

    def line_at(self, times: Intervals) -> str:
        """The user's line that surely runs at these times; empty where none does."""
        place = line_of(self.facts.run, times)
        return "" if place is None else str(place)

    def python_line_at(self, times: Intervals) -> str:
        """The same of times in which Python itself may work; empty where nobody could look while it did."""
        return self.line_at(times) if sees_python(self.facts.run) else ""


def record_again(key: str, what: str, why: str) -> Undetermined:
    """What that rule cannot tell, because the trace is too damaged for it; `why` is of `RuleContext.withheld`."""
    return Undetermined(key, what, f"{why}; record the trace again")


Rule = Callable[[RuleContext], Finding | Undetermined | None]
Role = Literal["cause", "context", "all is well", "open question"]


class FindingKind(Struct, frozen=True):
    """One key, and all that is said of it by name.

    `title` is a few plain words, as a title and within a sentence. `rule` returns findings of this kind; None where
    only all ranks of a job together show it. `lesson` is the notebook about it; a rule may name one for some of its
    findings only. `removal` is what falls away where an edit of the code, and no knob, is the cure. Which knobs help
    against it is known to the knobs (`helps_against`).

    `explains` are keys of symptoms: they go where a finding of this kind has a time, for that time is this cause's.
    `asked_again` once the first finding is thought away: its limit is far above the silence. `of_job`: it concerns all
    ranks of a job, not one alone. `is_bound`: what faster kernels would save, by the bytes that they would not move. A
    `role` of "context" is no cause, but told with each; any other than these two is a
    verdict: it speaks where no cause does.
    """

    key: str
    title: str
    rule: Rule | None = None
    lesson: str = ""
    removal: Pauses | Waits | None = None
    explains: tuple[str, ...] = ()
    asked_again: bool = False
    of_job: bool = False
    is_bound: bool = False
    role: Role = "cause"

    @property
    def is_verdict(self) -> bool:
        """Whether it says how the run is as a whole, and names no cause."""
        return self.role in ("all is well", "open question")


__all__ = ["FEWEST_STEPS", "FindingKind", "Role", "Rule", "RuleContext", "Undetermined"]
