"""Looks at the training thread by script: each sleep of that thread gives so many, however busy the machine is."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from msgspec.structs import replace

from gpulab.capture.stack_sampler import ThreadSamples

PERIOD_S = 0.002
_sleep = time.sleep


class ScriptedWatcher:
    """In place of `SamplingProcess`; `sleep` in place of `time.sleep`."""

    def __init__(self) -> None:
        self.channel = ScriptedChannel(self)
        self._thread: int | None = None
        self._key = ""
        self._seen: dict[str, ThreadSamples] = {}

    # -- as SamplingProcess has it ------------------------------------------------------------------------------------

    def start(self) -> None:
        self._thread = None

    def stop(self) -> None:
        self._thread = None

    def wait_until_ready(self) -> None:
        pass

    def begin(self, key: str) -> bool:
        if not key.startswith("training"):
            return False
        self._key, self._thread = key, threading.get_ident()
        self._seen[key] = ThreadSamples([], [], [], time.perf_counter_ns())
        return True

    def end(self, key: str) -> None:
        if key == self._key:
            self._thread = None

    def samples(self, key: str) -> ThreadSamples | None:
        return self._seen.get(key)

    # -- what is seen --------------------------------------------------------------------------------------------

    def sleep(self, seconds: float) -> None:
        """Sleep, and be seen in the line that has called this every 2 ms."""
        began_ns = time.perf_counter_ns()
        _sleep(seconds)
        count = max(int(seconds / PERIOD_S), 1)
        step_ns = (time.perf_counter_ns() - began_ns) // (count + 1)
        self._take(sys._getframe(1), [began_ns + (i + 1) * step_ns for i in range(count)])

    def each(self, items: Iterable[Any]) -> Iterator[Any]:
        """Be seen in the line that asks for these, once for each."""
        for item in items:
            self._take(sys._getframe(1), [time.perf_counter_ns()])
            yield item

    def _take(self, frame: Any, times_ns: list[int]) -> None:
        if threading.get_ident() != self._thread:
            return
        stack = []
        while frame is not None:
            stack.append((frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_qualname))
            frame = frame.f_back
        seen = self._seen[self._key]
        self._seen[self._key] = replace(
            seen,
            t_ns=[*seen.t_ns, *times_ns],
            stack=[*seen.stack, *[len(seen.stacks)] * len(times_ns)],
            stacks=[*seen.stacks, tuple(stack)],
        )


class ScriptedChannel:
    """In place of `Channel`."""

    def __init__(self, watcher: ScriptedWatcher) -> None:
        self._watcher = watcher

    def sample(self, key: str, *_: Any, **__: Any) -> bool:
        return self._watcher.begin(key)

    def stop(self, key: str) -> None:
        self._watcher.end(key)


def installed(put: Callable[[object, str, Any], None] = setattr) -> ScriptedWatcher:
    """In this process, from now on."""
    from gpulab.capture import recorder

    monitor = ScriptedWatcher()
    put(recorder, "SamplingProcess", lambda: monitor)
    put(time, "sleep", monitor.sleep)
    return monitor
