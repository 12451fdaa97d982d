"""Threads, which the system may refuse: a pod's limit of processes counts them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from kvtier_core.work.io_pool import run_aside

logger = logging.getLogger("kvtier")

_refused = False  # the last one


def started(work: Callable[[], object], name: str) -> threading.Thread | None:
    """Run the work on its own thread. None if the system refuses one: that is logged, and the caller tries later."""
    global _refused
    try:
        thread = run_aside(work, name)
    except RuntimeError as error:
        if not _refused:
            logger.warning("kvtier: peers: %s; retrying; raise the process limit", error)
        _refused = True
        return None
    _refused = False
    return thread
