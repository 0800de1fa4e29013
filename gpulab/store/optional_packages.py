"""Other people's packages: whether they are there, and how they are called without their telemetry and chatter."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator, Mapping
from importlib.util import find_spec


def installed(name: str) -> bool:
    """Whether a package can be imported; it is not. A folder that merely has its name, as `wandb/` does, is none."""
    try:
        spec = find_spec(name)
    except (ImportError, ValueError):
        return False
    return spec is not None and spec.origin is not None


@contextlib.contextmanager
def environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables; put back what was there."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextlib.contextmanager
def only_warnings(*names: str) -> Iterator[None]:
    """Loggers say warnings and worse alone; put back what was set."""
    loggers = [logging.getLogger(name) for name in names]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)


def first_line(error: Exception) -> str:
    """What a package says went wrong, short enough for a sentence."""
    return next((line[:300] for line in str(error).splitlines() if line.strip()), type(error).__name__)
