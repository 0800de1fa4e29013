"""A deadline that one thread starts while another ends it."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from gpulab.capture import threads
from gpulab.capture.threads import Deadline


def nothing() -> None:
    pass


def test_a_run_that_ends_while_stop_begins_leaves_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    deadline = Deadline(3600.0, nothing, nothing)
    begun, go_on = threading.Event(), threading.Event()
    start = deadline._thread.start

    def slowly(*_: Any) -> None:
        begun.set()
        assert go_on.wait(60)
        start()

    monkeypatch.setattr(deadline._thread, "start", slowly)
    stop = threading.Thread(target=deadline.start)
    stop.start()
    assert begun.wait(60)
    ends = threading.Timer(0.05, go_on.set)
    ends.start()
    deadline.cancel()
    assert go_on.is_set() and not deadline._thread.is_alive(), "the end waits for the beginning"
    stop.join()
    ends.join()


def test_what_is_full_is_over_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "RETRY_S", 0.01)
    looks, called = list[int](), threading.Event()

    def full() -> bool:
        looks.append(1)
        return len(looks) > 2

    deadline = Deadline(3600.0, called.set, nothing, full)
    deadline.start()
    until_s = time.monotonic() + 60
    while not called.is_set() and time.monotonic() < until_s:
        time.sleep(0.001)  # bytecodes, between which the main thread is called
    deadline.cancel()
    assert called.is_set() and len(looks) >= 3


def test_after_its_end_it_does_not_begin() -> None:
    deadline = Deadline(3600.0, nothing, nothing)
    deadline.cancel()
    deadline.start()
    assert deadline._thread.ident is None
