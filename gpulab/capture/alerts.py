"""Computes the alerts of a live run: one quiet line while something goes wrong for long.

An alert is a hint: it names a symptom, but neither a cause nor a share; the headline names these after the run. Shares
are smoothed, and an alert begins and ends at two different values, so that the line does not flicker. A record's alerts
are computed from its own steps and readings, so that a run without a live view has the same alerts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np
from msgspec import Struct, field

from gpulab.formatting import while_s
from gpulab.run import Alert, Samples, Steps
from gpulab.thresholds import Thresholds

SMOOTHED_S = 5.0
ENDS_BELOW = 0.8  # times the value at which an alert begins
UTILIZATION = "gpu_utilization_pct"
_BIN_NS = 250_000_000  # steps of a record that end in one interval of this length are added up

STARVING = "data_starved"
IDLE = "gpu_idle"
WORDS = {
    STARVING: "Waiting for data for {time}: the DataLoader's batches come late.",
    IDLE: "GPU idle for {time}: it had no work most of that time.",
}


class Smoothed(Struct):
    """A share over the last `SMOOTHED_S` seconds, which always includes the newest part. Times in s."""

    _rows: deque[tuple[float, float, float]] = field(default_factory=deque)
    _part: float = 0.0
    _whole: float = 0.0

    def add(self, t_s: float, part: float, whole: float) -> float:
        """Add `part` of `whole` at `t_s`, in order of time; returns the share."""
        self._rows.append((t_s, part, whole))
        self._part += part
        self._whole += whole
        while len(self._rows) > 1 and self._rows[0][0] <= t_s - SMOOTHED_S:
            _, old_part, old_whole = self._rows.popleft()
            self._part -= old_part
            self._whole -= old_whole
        return min(1.0, max(0.0, self._part / self._whole)) if self._whole > 0 else 0.0


class Lasting(Struct):
    """One condition: it is on once its share was high for `after_s`, and ends when the share falls again."""

    key: str
    begins_at: float
    after_s: float
    on: bool = False
    since_s: float | None = None  # since when the share has been high
    past: list[Alert] = field(default_factory=list)

    def update(self, t_s: float, share: float, *, blocked: bool = False) -> None:
        """Take the smoothed share at `t_s`. `blocked`: no alert may begin now."""
        if self.since_s is None:
            if share < self.begins_at:
                return
            self.since_s = t_s
        if share < ENDS_BELOW * self.begins_at:
            self.end(t_s)
        elif t_s - self.since_s >= self.after_s and share >= self.begins_at and not blocked:
            self.on = True

    def end(self, t_s: float) -> None:
        """The condition is over, or no longer known."""
        self.past += self.alert(t_s, until_ns=int(t_s * 1e9))
        self.on, self.since_s = False, None

    def alert(self, t_s: float, until_ns: int | None = None) -> tuple[Alert, ...]:
        """The alert at `t_s`; empty if it is not on."""
        if not self.on or self.since_s is None:
            return ()
        words = WORDS[self.key].format(time=while_s(t_s - self.since_s))
        return (Alert(self.key, words, int(self.since_s * 1e9), until_ns),)


class Alerts:
    """Gets steps and readings in order of time; times in s since the run began.

    There is no alert of an idle GPU while the steps wait for data, because that is the reason.
    """

    def __init__(self, thresholds: Thresholds) -> None:
        self._starving = Lasting(STARVING, thresholds.alert_data_wait, thresholds.alert_after_s)
        self._idle = Lasting(IDLE, thresholds.alert_gpu_idle, thresholds.alert_after_s)
        self._wait, self._rest = Smoothed(), Smoothed()
        self._stepped_s: float | None = None
        self._patience_s = 0.0

    def steps(self, end_s: float, wall_s: float, wait_s: float, count: int = 1) -> None:
        """`count` steps have ended, the last of them at `end_s`; together they took `wall_s` and waited `wait_s`."""
        self.advance(end_s - wall_s / max(1, count))
        self._starving.update(end_s, self._wait.add(end_s, wait_s, wall_s))
        self._stepped_s, self._patience_s = end_s, SMOOTHED_S + 2 * wall_s / max(1, count)

    def utilization(self, t_s: float, percent: float) -> None:
        idle = 1 - min(100.0, max(0.0, percent)) / 100
        share = self._rest.add(t_s, idle, 1.0)
        if self._starving.on:
            self._idle.end(t_s)
        else:
            self._idle.update(t_s, share, blocked=self._starving.since_s is not None)

    def advance(self, now_s: float) -> None:
        """The time is `now_s`: if no step has ended for long, it is unknown whether steps wait for data."""
        if self._stepped_s is not None and now_s - self._stepped_s > self._patience_s:
            self._starving.end(self._stepped_s)
            self._wait, self._stepped_s = Smoothed(), None

    def active(self, now_s: float) -> Alert | None:
        self.advance(now_s)
        return next(iter(self._starving.alert(now_s) + self._idle.alert(now_s)), None)

    def all(self, end_s: float) -> tuple[Alert, ...]:
        """All alerts of the run, which ends at `end_s`."""
        self.advance(end_s)
        every = [alert for each in (self._starving, self._idle) for alert in (*each.past, *each.alert(end_s))]
        return tuple(sorted(every, key=lambda alert: alert.since_ns))


def alerts_of(steps: Steps, samples: Samples, end_ns: int, thresholds: Thresholds) -> tuple[Alert, ...]:
    """The alerts of a finished run, from its record."""
    alerts = Alerts(thresholds)
    curve = samples.get(UTILIZATION)
    readings = [] if curve is None else zip((curve.t_ns / 1e9).tolist(), curve.value.tolist(), strict=True)
    events: list[tuple[Callable[..., None], tuple[float, ...]]] = [(alerts.utilization, row) for row in readings]
    events += [(alerts.steps, row) for row in _bunches(steps)]
    for add, row in sorted(events, key=lambda event: event[1][0]):
        add(*row)
    return alerts.all(end_ns / 1e9)


def _bunches(steps: Steps) -> list[tuple[float, ...]]:
    """Add up steps that end in the same quarter of a second: rows of end, wall and wait in s, and count."""
    if not len(steps):
        return []
    first = np.flatnonzero(np.diff(steps.end_ns // _BIN_NS, prepend=-1))
    last = np.append(first[1:], len(steps)) - 1
    columns = (
        steps.end_ns[last] / 1e9,
        np.add.reduceat(steps.wall_ns, first) / 1e9,
        np.add.reduceat(steps.data_wait_ns, first) / 1e9,
        last - first + 1,
    )
    return list(zip(*(column.tolist() for column in columns), strict=True))
