"""The phases of a run without torch's profiler: which window is open, when it ends, which recording is kept."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Struct, field

from gpulab.capture import profiler, windows
from gpulab.capture.profiler import ProfilerUnavailable
from gpulab.capture.windows import Phases
from gpulab.devices import gpus
from gpulab.run import Phase, Settings

EARLY, LATE = windows.plan(Settings(), None).windows
ON_GPU = windows.plan(Settings(), None, on_gpu=True).windows


class FakeWindow(Struct, dict=True):
    """A profiler session that records what it was told. `age_s` is set by the test."""

    number: int
    refuses: str = ""
    age_s: float = 0.0
    open: bool = False
    marks: list[tuple[int, int]] = field(default_factory=list)
    start_cost_ns: int = 5
    stop_cost_ns: int = 7

    def start(self) -> None:
        if self.refuses:
            raise ProfilerUnavailable(self.refuses)
        self.open = True

    def stop(self) -> str:
        assert self.open, "stopped twice or never started"
        self.open = False
        return f"recording {self.number}"

    def step_begins(self, number: int) -> None:
        assert self.open
        self.marks.append((number, 0))

    def loader_begins(self) -> None:
        assert self.open

    def loader_ends(self) -> None:
        assert self.open


class Loop:
    """Phases with fake windows, driven as the recorder drives them."""

    def __init__(
        self, settings: Settings | None = None, code: str = "", refuses: str = "", *, on_gpu: bool = False
    ) -> None:
        self.windows: list[FakeWindow] = []
        self.refuses = refuses
        self.phases = Phases(settings or Settings(), code, self._window, lambda: None, lambda: None, on_gpu=on_gpu)  # type: ignore[arg-type]
        self.done = 0
        self.seen: list[Phase] = []

    def _window(self) -> FakeWindow:
        self.windows.append(FakeWindow(len(self.windows) + 1, self.refuses))
        return self.windows[-1]

    def steps(self, count: int) -> Loop:
        for _ in range(count):
            self.seen.append(self.phases.next_phase())
            before, self.done = self.done, self.done + 1
            touched = self.phases.advance(self.done)
            touched = self.phases.begin(before, self.done) or touched
            if touched:
                self.phases.step_begins()
        return self

    @property
    def open(self) -> FakeWindow:
        (window,) = [w for w in self.windows if w.open]
        return window

    def finish(self, stepless: bool = False) -> Phases:
        self.phases.finish(stepless=stepless)
        assert not any(w.open for w in self.windows), "the profiler is left running"
        return self.phases


def whole() -> Loop:
    """A loop of which all is asked for."""
    loop = Loop(Settings(whole=True))
    loop.phases.profile_whole()
    return loop


def recording(phases: Phases) -> object:
    """What the phases keep: of a fake window it is the text that names the window."""
    return phases.recording


@pytest.fixture(autouse=True)
def deadlines(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """No thread: a deadline only notes that it was started and cancelled."""
    made: list[Any] = []

    class Noted:
        def __init__(self, after_s: float, due: Any, otherwise: Any, full: Any) -> None:
            self.after_s, self.full, self.running = after_s, full, False
            made.append(self)

        def start(self) -> None:
            self.running = True

        def cancel(self) -> None:
            self.running = False

    monkeypatch.setattr(windows, "Deadline", Noted)
    monkeypatch.setattr(windows, "in_backward", lambda: False)
    yield made
    assert not any(d.running for d in made), "a deadline outlives its window"


def test_an_early_window_is_replaced_by_the_later_one() -> None:
    loop = Loop().steps(60)
    marked = [[number for number, _ in window.marks] for window in loop.windows]
    assert marked == [[*range(w.after + 1, w.after + w.length + 1)] for w in (EARLY, LATE)]
    phases = loop.finish()
    assert recording(phases) == "recording 2"
    assert phases.traced == tuple(range(LATE.after + 1, LATE.after + LATE.length + 1))
    assert [i + 1 for i, p in enumerate(loop.seen) if p is Phase.TRACED] == [
        n for w in (EARLY, LATE) for n in range(w.after + 1, w.after + w.length + 1)
    ]
    assert phases.cost_ns == 2 * (5 + 7)
    assert not phases.missing


@pytest.mark.parametrize(
    ("steps", "on_gpu", "kept", "traced"),
    [
        (EARLY.after + 1, False, 1, (EARLY.after + 1,)),  # within its window: the whole steps
        (LATE.after, False, 1, (EARLY.after + 1, EARLY.after + 2)),  # the second has no whole step
        (60, True, 2, tuple(range(ON_GPU[1].after + 2, ON_GPU[1].after + ON_GPU[1].length + 2))),  # not the first step
        (ON_GPU[0].after + 1, True, 1, (ON_GPU[0].after + 1,)),  # there is no other
    ],
)
def test_which_steps_are_kept(steps: int, on_gpu: bool, kept: int, traced: tuple[int, ...]) -> None:
    phases = Loop(on_gpu=on_gpu).steps(steps).finish()
    assert recording(phases) == f"recording {kept}" and phases.traced == traced


def test_a_slow_window_ends_at_the_next_boundary_and_says_so() -> None:
    loop = Loop().steps(LATE.after)
    loop.open.age_s = windows.TRACE_LIMIT_S + 1
    phases = loop.steps(1).finish()
    assert phases.traced == (LATE.after + 1,)
    assert phases.truncated == f"ended after 1 step: longer than {windows.TRACE_LIMIT_S:g} s"


def test_a_cut_window_is_dropped_when_a_better_one_comes() -> None:
    loop = Loop().steps(EARLY.after)
    loop.open.age_s = windows.TRACE_HARD_LIMIT_S + 1
    assert loop.phases.end_overdue(stepless=False)
    assert recording(loop.phases) == "recording 1", "nothing better is there yet"
    assert "one step ran longer" in (loop.phases.truncated or "")
    phases = loop.steps(LATE.after + LATE.length).finish()
    assert recording(phases) == "recording 2" and phases.truncated is None


@pytest.mark.parametrize(("stepless", "limit_s"), [(True, 10.0), (False, 30.0)])
def test_the_whole_code_is_bounded_by_time(stepless: bool, limit_s: float, deadlines: list[Any]) -> None:
    assert (windows.TRACE_STEPLESS_LIMIT_S, windows.TRACE_HARD_LIMIT_S) == (10.0, 30.0)
    loop = whole()
    assert deadlines[0].after_s == 10.0, "asked from then on, again and again"
    loop.open.age_s = limit_s
    assert not loop.phases.end_overdue(stepless=stepless)
    loop.open.age_s = limit_s + 0.1
    assert loop.phases.end_overdue(stepless=stepless) and not loop.phases.profiling
    loop.phases.profile_whole()
    assert len(loop.windows) == 1, "what was cut short is not begun anew"
    phases = loop.finish()
    assert recording(phases) == "recording 1" and f"{limit_s:g} s at most" in (phases.truncated or "")


@pytest.mark.parametrize("on_gpu", [False, True])
def test_a_window_ends_when_its_events_take_much_memory(
    on_gpu: bool, deadlines: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    resident, given_back, clock_ns = [0], list[bool](), [0]
    monkeypatch.setattr(profiler, "resident_bytes", lambda: resident[0])
    monkeypatch.setattr(profiler, "perf_counter_ns", lambda: clock_ns[0])
    monkeypatch.setattr(windows, "return_free_memory", lambda: given_back.append(True))
    guessed = Loop(on_gpu=on_gpu)
    guessed.phases.profile_whole()
    limit_bytes = windows.GPU_TRACE_LIMIT_BYTES if on_gpu else windows.TRACE_LIMIT_BYTES
    for full in (False, True):
        assert not guessed.phases.end_overdue(stepless=True)
        clock_ns[0] += 2_000_000_000
        resident[0] += limit_bytes // 2 + 1
        assert deadlines[0].full() is full
    assert guessed.phases.end_overdue(stepless=True) and given_back
    assert "its events took" in (guessed.phases.truncated or "")
    guessed.steps(1).finish()
    assert recording(guessed.phases) is None, "what steps come after is of no use"


def test_all_steps_of_the_code_are_traced_only_where_asked() -> None:
    assert whole().steps(20).finish().traced == tuple(range(1, 21))
    guessed = Loop()
    guessed.phases.profile_whole()
    phases = guessed.steps(1).phases
    assert not phases.profiling and recording(phases) is None and phases.traced == ()
    assert recording(guessed.steps(9).finish()) == "recording 2"


def test_what_could_not_be_ended_in_time_is_said() -> None:
    loop = whole()
    loop.open.age_s = 41.0
    said = loop.finish(stepless=True).choices[-1]
    assert (said.what, said.value) == ("traced window", "41.0 s") and "10 s" in said.reason
    quick = whole()
    quick.open.age_s = 9.0
    assert all(c.value != "9.0 s" for c in quick.finish(stepless=True).choices)


def test_steps_taken_back_are_profiled_anew() -> None:
    loop = Loop().steps(8)
    assert loop.phases.recording is not None
    loop.phases.begin_again()
    loop.done = 0
    assert recording(loop.phases) is None and loop.phases.traced == ()
    phases = loop.steps(8).finish()
    assert phases.traced == (EARLY.after + 1, EARLY.after + 2) and recording(phases) == "recording 2"


def test_within_a_backward_pass_the_profiler_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop().steps(LATE.after)
    window = loop.open
    monkeypatch.setattr(windows, "in_backward", lambda: True)
    window.age_s = 1e9
    loop.steps(3)
    assert loop.open is window and not loop.phases.end_overdue(stepless=False)
    monkeypatch.setattr(windows, "in_backward", lambda: False)
    loop.steps(1)
    assert not window.open

    monkeypatch.setattr(windows, "in_backward", lambda: True)
    never = Loop().steps(60)
    assert not never.windows
    assert never.finish().timeline(0, 60) is None
    (missing,) = never.phases.missing
    assert missing.key == "breakdown" and "backward" in missing.reason


@pytest.mark.parametrize(
    ("settings", "code", "refuses", "reason"),
    [
        (Settings(), "", "another torch.profiler is active", "another torch.profiler is active"),
        (Settings(), "with torch.profiler.profile() as prof:", "", "your code uses torch's profiler itself"),
        (Settings(), "", "", "the run ended after 2 steps, before the traced window"),
    ],
    ids=["refused", "in the code", "too short"],
)
def test_a_missing_recording_has_one_reason(settings: Settings, code: str, refuses: str, reason: str) -> None:
    loop = Loop(settings, code, refuses).steps(2 if not code and not refuses else 60)
    loop.phases.expect(1000)
    phases = loop.finish()
    assert phases.timeline(0, loop.done) is None
    (missing,) = phases.missing
    assert missing.key == "breakdown" and missing.reason.startswith(reason)
    assert len(loop.windows) <= 1, "refused once, it is not asked again"


def test_without_a_trace_nothing_is_opened_or_missing() -> None:
    loop = Loop(Settings(trace=False))
    loop.phases.profile_whole()
    phases = loop.steps(60).finish()
    assert phases.timeline(0, 60) is None and not loop.windows and not phases.missing


def test_giving_up_stops_the_profiler_whatever_it_says() -> None:
    loop = whole()
    loop.open.stop = lambda: 1 / 0  # type: ignore[method-assign,assignment,return-value]
    loop.windows[0].open = False
    loop.phases.abandon()
    assert not loop.phases.profiling


@given(st.none() | st.integers(3, 300), st.none() | st.integers(1, 9), st.integers(0, 200))
def test_nothing_is_due_before_it_is_said_to_be(steps: int | None, asked: int | None, count: int) -> None:
    """A caller that skips all steps before `unchanged_until` sees the same windows and phases."""
    settings = Settings(steps=steps, trace_steps=asked)
    every, rare = Loop(settings), Loop(settings)
    phase = rare.phases.next_phase()
    every.seen.append(every.phases.next_phase())
    for done in range(1, count + 1):
        every.steps(1)
        if done >= rare.phases.unchanged_until:
            rare.done = done - 1
            rare.steps(1)
            phase = rare.phases.next_phase()
        assert phase == every.phases.next_phase()
        assert [w.marks for w in rare.windows] == [w.marks for w in every.windows]
    for loop in (every, rare):
        loop.finish()
    assert rare.phases.traced == every.phases.traced


# -- on a GPU ----------------------------------------------------------------------------------------------------------


def test_on_a_gpu_long_steps_do_not_put_the_first_window_off(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(windows, "perf_counter", lambda: clock[0])
    loop = Loop(on_gpu=True)
    clock[0] = 100.0  # building the model, and the first step, in which it is compiled
    loop.steps(3)
    assert loop.windows == [], "a slow start does not advance the window"
    clock[0] += windows.GPU_PATIENCE_S + 1
    loop.steps(4)
    assert loop.windows[0].marks[0][0] == 5, "after one step of warm-up and three measured ones"
    assert loop.finish().traced == (6, 7)


@pytest.mark.parametrize("where", ["in_graph_capture", "in_backward"])
def test_windows_rest_where_the_profiler_must_not_be_touched(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """But later, where it may be touched again."""
    capturing = [False]
    monkeypatch.setattr(windows if where == "in_backward" else gpus, where, lambda: capturing[0])
    early = ON_GPU[0]
    loop = Loop(on_gpu=True).steps(early.after - 1)
    capturing[0] = True
    loop.steps(3)
    assert loop.windows == []
    capturing[0] = False
    loop.steps(2)
    assert loop.open.marks[0][0] == early.after + 4
    capturing[0] = True
    loop.steps(early.lead_in + early.length + 1)
    assert loop.open.open
    capturing[0] = False
    loop.steps(1)
    assert not any(w.open for w in loop.windows) and recording(loop.phases) == "recording 1"
