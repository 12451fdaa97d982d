"""Questions over the status socket that only the owner can answer: an installed package has the class that does."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from importlib.metadata import entry_points

from kvtier_core.stack.interface import Stack
from kvtier_core.telemetry.status_server import Answer
from kvtier_core.types import ChunkKey

_GROUP = "kvtier.steering"  # of entry points
#: Precedes the name of a pinned prompt in its holder. No engine of a server has this number.
PINNED = "0/pin "
#: The keys of a prompt's chunks, and the salt in them, from its tokens and ``cache_salt``.
Name = Callable[[Sequence[int], str], tuple[list[ChunkKey], bytes]]


class Steering:
    """Answers questions and carries out orders. This class refuses all; it is used if no package has another.

    The owner calls every method; `why_not` is called on any thread. ``clock`` returns seconds.
    """

    def __init__(self, stack: Stack, chunk_tokens: int, name: Name, clock: Callable[[], float]):
        self.stack, self.chunk_tokens, self.name, self.clock = stack, chunk_tokens, name, clock

    def why_not(self, asked: Answer) -> str:
        """A refusal before the owner is asked; empty if it is to be asked."""
        return "expected one of: status, request, requests; others need kvtier-doctor: pip install 'kvtier[doctor]'"

    def answer(self, asked: Answer) -> Answer:
        """Carry out an order or refuse it, as a whole."""
        return {"error": self.why_not(asked)}

    def step(self) -> None:
        """The engine makes a step."""

    def end(self) -> None:
        """Release all pins: the engine closes, or its namespace has changed."""


@functools.cache
def steering() -> type[Steering]:
    """The installed class."""
    found: type[Steering] = next((entry.load() for entry in entry_points(group=_GROUP)), Steering)
    return found
