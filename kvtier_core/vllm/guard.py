"""Keeps errors of kvtier from stopping the engine: a side that raises an exception is disabled."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, Protocol

logger = logging.getLogger("kvtier")


class Guarded(Protocol):
    """The attributes of the connector that the decorator needs."""

    side: object | None

    def disable(self) -> None:
        """Drop the side, so that it is not called again."""


def guarded(default: Any = None) -> Callable:
    """Decorates a method of the connector that needs a side. It returns ``default`` without one, or if it raises."""

    def wrap(method: Callable) -> Callable:
        @functools.wraps(method)
        def guard(self: Guarded, *args: Any, **kwargs: Any) -> Any:
            if self.side is None:
                return default
            try:
                return method(self, *args, **kwargs)
            except Exception:
                logger.exception("kvtier: %s failed; the engine goes on without kvtier", method.__name__)
                self.disable()
                return default

        return guard

    return wrap
