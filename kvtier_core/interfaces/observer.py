"""A receiver of events: a log, a metrics endpoint, a notification."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import ClassVar

import attrs

from kvtier_core.interfaces.context import OpenContext
from kvtier_core.types import Event


class Observer(abc.ABC):
    """Receives every event of one engine's stack once, in order.

    Called on its own thread: neither the engine nor other observers wait for it. Calls do not overlap. Events are
    immutable. An observer that raises, or falls tens of thousands of events behind, is dropped; this is logged once,
    and the engine continues.

    Any release may add kinds of events: ignore unknown ones.
    """

    @abc.abstractmethod
    def observe(self, events: Sequence[Event]) -> None:
        """Receive the events since the last call, at least one."""

    def close(self) -> None:
        """Release all threads, descriptors and sockets. Called once, after the last `observe` has returned.

        Not called if that hangs.
        """


@attrs.frozen
class ObserverConfig(abc.ABC):
    """Names an observer and its options, and opens it."""

    type: ClassVar[str]  #: the name in ``observers[].type``

    @abc.abstractmethod
    def open(self, ctx: OpenContext) -> Observer:
        """Open the observer. Called once, on the owner's thread, before the engine serves.

        Engines that share the configuration each open one (`OpenContext.replica`), at the same time. ``ctx`` describes
        no tier.

        Raises BackendError, or ConfigError with problems whose path begins at ``$``, the observer.
        """
