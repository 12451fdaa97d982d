"""Waiting for other threads and processes, however busy the machine is."""

import time
from collections.abc import Callable
from typing import Any

#: Seconds after which whatever a test waits for hangs: ten times the longest wait on two idle cores.
HANG = 600.0


def wait_until(condition: Callable[[], Any], otherwise: str = "it never came") -> Any:
    """Poll until the condition holds, and return its value. Fails with the sentence ``otherwise`` if it hangs."""
    deadline = time.monotonic() + HANG
    while not (found := condition()):
        assert time.monotonic() < deadline, otherwise
        time.sleep(0.01)
    return found


def assert_never(condition: Callable[[], Any], seconds: float = 0.5) -> None:
    """Poll for a while; fails if the condition holds."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        assert not condition()
        time.sleep(0.01)
