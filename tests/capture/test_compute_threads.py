"""CPU time of the training's own threads is no work of a dataset that sleeps meanwhile."""

from __future__ import annotations

import threading

from gpulab.capture.fetch_clock import EVERY, ComputeThreads, native_threads, thread_cpu_ns


class Machine:
    """Threads by number, and the CPU time that each has used."""

    def __init__(self, *threads: int) -> None:
        self.cpu_ns = dict.fromkeys(threads, 0)
        self.watched = ComputeThreads(lambda: list(self.cpu_ns), lambda thread: self.cpu_ns.get(thread, -1))

    def step(self, within: dict[int, int], beside: dict[int, int]) -> int:
        """What is said of one batch, in which the threads use so much; the others use theirs after it."""
        self.watched.begin()
        self.cpu_ns = {t: used + within.get(t, 0) for t, used in self.cpu_ns.items()}
        foreign_ns = self.watched.end()
        self.cpu_ns = {t: used + beside.get(t, 0) for t, used in self.cpu_ns.items()}
        return foreign_ns


def test_a_pool_that_spins_after_the_step_is_the_trainings() -> None:
    machine = Machine(7)
    machine.step({7: 0}, {7: 500})
    assert [machine.step({7: 8_000}, {7: 500}) for _ in range(20)] == [8_000] * 20
    del machine.cpu_ns[7]
    assert machine.step({}, {}) == 0, "a thread that has ended counts no more"


def test_a_pool_that_works_for_the_dataset_alone_is_the_datasets() -> None:
    machine = Machine(7, 8)
    assert [machine.step({7: 9_000, 8: 100}, {8: 900}) for _ in range(5)] == [0, 100, 100, 100, 100]


def test_threads_that_start_later_are_met() -> None:
    machine = Machine()
    machine.step({}, {})
    machine.cpu_ns[9] = 50  # the first step has started the pool
    assert [machine.step({9: 1_000}, {9: 1_000}) for _ in range(3)][-1] == 1_000
    for _ in range(EVERY):
        machine.step({9: 1}, {9: 1})
    machine.cpu_ns[10] = 5
    assert 1_001 in [machine.step({9: 1, 10: 1_000}, {10: 1_000}) for _ in range(EVERY + 2)]


def test_a_threads_clock_is_the_systems_own() -> None:
    here = threading.get_native_id()
    before = thread_cpu_ns(here)
    assert 0 < before <= thread_cpu_ns(here)
    assert thread_cpu_ns(2**22 + 1) == -1, "a number that no thread has"
    assert here not in native_threads(), "it runs Python"
