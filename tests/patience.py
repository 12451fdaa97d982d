"""Waiting for other threads and processes, however busy the machine is."""

import os
import time
from collections.abc import Callable
from typing import Any

from kvtier_core.errors import BackendError

#: Seconds after which whatever a test waits for hangs: ten times the longest wait on two idle cores. Fewer where a
#: mutant is expected to hang.
HANG = float(os.environ.get("KVTIER_HANG", "600"))


def wait_until(condition: Callable[[], Any], otherwise: str = "it never came") -> Any:
    """Poll until the condition holds, and return its value. Fails with the sentence ``otherwise`` if it hangs."""
    deadline = time.monotonic() + HANG
    while not (found := condition()):
        assert time.monotonic() < deadline, otherwise
        time.sleep(0.01)
    return found


def answered(call: Callable[[], Any]) -> Any:
    """The result of a call to a tier whose `timeout` is short, because the test waits for its end elsewhere.

    The call is made again as long as it raises BackendError: a busy machine may need more time for an answer.
    """
    deadline = time.monotonic() + HANG
    while True:
        try:
            return call()
        except BackendError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def assert_never(condition: Callable[[], Any], seconds: float = 0.5) -> None:
    """Poll for a while; fails if the condition holds."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        assert not condition()
        time.sleep(0.01)
