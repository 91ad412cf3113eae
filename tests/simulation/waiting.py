"""Waits for something that another thread or process does."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def wait_until(condition: Callable[[], object], timeout_s: float, interval_s: float = 0.1) -> bool:
    """Waits until `condition` is true. Returns False if it still is not after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(interval_s)
    return True


def wait_for_value(
    probe: Callable[[], T | None],
    description: str,
    timeout_s: float = 30.0,
    interval_s: float = 0.05,
) -> T:
    """Returns the first true value of `probe`.

    Raises AssertionError with the description if there is none within `timeout_s`.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        if value := probe():
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout_s:g} s: {description}")
        time.sleep(interval_s)
