"""A receiver of the events of chunks: a log, a metrics endpoint, a notification."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import ClassVar

import attrs

from kvtier_core.interfaces.context import OpenContext
from kvtier_core.types import Event


class Observer(abc.ABC):
    """Is told every event of one engine's stack, once, in order.

    Called on a thread of its own, never on the owner's: neither the engine nor another observer waits for it. No two
    calls overlap. Events are immutable; those that wait for a slow observer take memory, so one that falls tens of
    thousands behind is dropped, and so is one that raises. The log says so, once, and the engine goes on.

    Kinds of events may be added in any release: one that is not known is no error.
    """

    @abc.abstractmethod
    def observe(self, events: Sequence[Event]) -> None:
        """These events have happened since the last call. There is at least one."""

    def close(self) -> None:
        """Release threads, descriptors, sockets: everything. Called once, after the last `observe` has returned; not
        if that hangs.
        """


@attrs.frozen
class ObserverConfig(abc.ABC):
    """Names an observer and its options, and opens it."""

    type: ClassVar[str]  #: what users write in ``observers[].type``

    @abc.abstractmethod
    def open(self, ctx: OpenContext) -> Observer:
        """Open the observer. Called once, on the owner's thread, before the engine serves.

        Engines that share the configuration open one each (`OpenContext.replica`), at the same time. Of a tier
        ``ctx`` says nothing.

        Raises BackendError, or ConfigError with problems whose path begins at ``$``, the observer.
        """
