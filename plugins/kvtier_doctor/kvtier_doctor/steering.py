"""Prompts that are brought into memory ahead of their requests, or kept there by name: in an engine, or a server."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs

from kvtier_core.engine.scheduler.steering import PINNED, Name, Steering
from kvtier_core.outside import LONGEST, printable
from kvtier_core.stack.interface import Stack
from kvtier_core.stack.manager import StorageManager
from kvtier_core.stack.outcomes import Lookup, Terms
from kvtier_core.telemetry.status_server import Answer
from kvtier_core.types import ChunkKey

logger = logging.getLogger("kvtier")

#: Seconds for which a prompt is pinned, by default and at most.
PINNED_FOR, PINNED_AT_MOST = 24 * 3600.0, 30 * 24 * 3600.0
#: All pins together take at most one in this many slots of the first arena; those of a tenant, half of that.
_SHARE = 4
#: Chunks that a prefetch requests at a time.
_PIECE = 128
#: The questions that an engine's owner answers: their fields, of which those in brackets may be left out.
_QUESTIONS = ("prompt [cache_salt]", "prefetch [cache_salt]", "pin prompt [cache_salt] [seconds]", "unpin", "pins")


@attrs.define
class _Pin:
    path: Sequence[ChunkKey]  #: what of the prompt has room, and was there or on its way at the last lookup
    chunks: int  #: of the prompt
    terms: Terms
    until: float
    room: int  #: the most slots that it may take
    pending: int = 0  #: chunks that the last lookup awaited


class Pins:
    """The pinned prompts of a stack. Call every method on the owner's thread; ``clock`` returns seconds."""

    def __init__(self, stack: StorageManager, clock: Callable[[], float] = time.monotonic):
        self._stack, self._clock = stack, clock
        self._pins: dict[str, _Pin] = {}

    def prefetch(self, path: Sequence[ChunkKey], salt: bytes) -> Iterator[dict[str, Any]]:
        """Bring a path into memory, a piece at a time. Yields what is there and what comes, of all pieces so far."""
        stack, coming = self._stack, 0
        there = max(arena.ready_run(path) for arena in stack.arenas) if path else 0
        for begin in range(0, len(path) or 1, _PIECE):
            before = stack.promoting
            stack.prefetch(path[begin : begin + _PIECE], Terms(salt=salt, not_direct=stack.media))
            coming += stack.promoting - before
            asked = stack.shared if there + coming < len(path) else []
            yield {"chunks": coming, "in_memory": there, "asked": asked}

    def pin(self, name: str, path: Sequence[ChunkKey], salt: bytes, seconds: float) -> dict[str, Any]:
        """Keep a path in memory for ``seconds``, as far as there is room. What stores have of it comes there first.

        A former pin of this name ends.
        """
        slots, others = self._stack.pins_by_holder(), {key: pin for key, pin in self._pins.items() if key != name}
        taken = {other: max(len(pin.path), slots[PINNED + other]) for other, pin in others.items()}
        most = self._stack.arenas[0].capacity // _SHARE
        own = sum(taken[other] for other, pin in others.items() if pin.terms.salt == salt)
        room = max(0, min(most - sum(taken.values()), most // 2 - own))
        terms = Terms(salt=salt, not_direct=self._stack.media, lasting=True)
        pin = self._pins[name] = _Pin(path[:room], len(path), terms, self._clock() + seconds, room)
        found, asked = self._look(name, pin)
        return {"chunks": found.chunks, "pending": found.pending, "left_out": len(path) - asked, "seconds": seconds}

    def _look(self, name: str, pin: _Pin) -> tuple[Lookup, int]:
        """Also returns how many chunks have room: a chunk may have several parts, each in a slot."""
        found = self._stack.lookup(pin.path, PINNED + name, pin.terms)
        while (slots := self._stack.pins_by_holder()[PINNED + name]) > pin.room:
            pin.path = pin.path[: len(pin.path) * pin.room // slots]
            found = self._stack.lookup(pin.path, PINNED + name, pin.terms)
        asked, pin.pending = len(pin.path), found.pending
        pin.path = pin.path[: found.chunks + found.pending]
        return found, asked

    def unpin(self, name: str) -> int:
        """Delete a pin. Returns the number of slots that it kept; 0 if there is none."""
        slots = self._stack.pins_by_holder()[PINNED + name]
        self._pins.pop(name, None)
        self._stack.release(PINNED + name)
        return slots

    def unpin_all(self) -> None:
        """Delete all pins."""
        for name in list(self._pins):
            self.unpin(name)

    def listed(self) -> Iterator[dict[str, Any]]:
        """Each pin: chunks of its prompt, slots that it keeps now, whether more come, and seconds until it expires."""
        slots, now = self._stack.pins_by_holder(), self._clock()
        for name, pin in self._pins.items():
            kept = {"slots": slots[PINNED + name], "pending": self._stack.still_pending(PINNED + name)}
            yield {"name": name, "chunks": pin.chunks, **kept, "seconds": round(pin.until - now, 3)}

    def step(self) -> None:
        """Delete the pins whose time is over, and pin what stores have delivered."""
        now = self._clock() if self._pins else 0.0
        for name, pin in list(self._pins.items()):
            if pin.until <= now:
                logger.info("kvtier: the pin %r has expired; it kept %d slots", name, self.unpin(name))
            elif pin.pending and not self._stack.still_pending(PINNED + name):
                self._look(name, pin)


class EngineSteering(Steering):
    """Where the chunks of a prompt are, in any engine; pins and prefetches, in one whose stack is its own."""

    def __init__(self, stack: Stack, chunk_tokens: int, name: Name, clock: Callable[[], float]):
        super().__init__(stack, chunk_tokens, name, clock)
        self._pins = Pins(stack, clock) if isinstance(stack, StorageManager) else None

    def why_not(self, asked: Answer) -> str:
        """Why the owner is not asked; empty if it is."""
        if not isinstance(asked, dict) or not any(_has_form(asked, question) for question in _QUESTIONS):
            return f"expected the fields of one of: status; request; requests; {'; '.join(_QUESTIONS)}"
        tokens, name = asked.get("prefetch", asked.get("prompt", [])), asked.get("pin", asked.get("unpin", "-"))
        if not (isinstance(tokens, list) and all(type(token) is int for token in tokens)):
            return "expected token ids, as [1, 2, 3]"
        if not (isinstance(name, str) and name and name == printable(name)):
            return f"expected a name of 1 to {LONGEST} printable characters"
        if not isinstance(asked.get("cache_salt", ""), str):
            return "expected a text as cache_salt"
        seconds = asked.get("seconds", PINNED_FOR)
        if type(seconds) not in (int, float) or not 0 < seconds <= PINNED_AT_MOST:
            return f"expected more than 0 and at most {PINNED_AT_MOST:.0f} seconds"
        return ""

    def answer(self, asked: Answer) -> Answer:
        path, salt = self.name(asked.get("prefetch", asked.get("prompt", ())), asked.get("cache_salt", ""))
        if "prompt" in asked and "pin" not in asked:
            places = zip(path, self.stack.whereabouts(path), strict=True)
            chunks = [{"key": key.hex(), **attrs.asdict(place)} for key, place in places]
            return {"tokens": len(asked["prompt"]), "chunk_tokens": self.chunk_tokens, "chunks": chunks}
        if self._pins is None:
            return {"error": "a server has the memory of this engine: ask it, with kvtier serve pins or POST /prefetch"}
        match asked:
            case {"prefetch": _}:
                *_, brought = self._pins.prefetch(path, salt)
                return brought
            case {"pin": name}:
                told = self._pins.pin(name, path, salt, asked.get("seconds", PINNED_FOR))
                words = "kvtier: the pin %r keeps %d chunks, %d may follow; it expires in %.0f s"
                logger.info(words, name, told["chunks"], told["pending"], told["seconds"])
                return told
            case {"unpin": name}:
                slots = self._pins.unpin(name)
                logger.info("kvtier: the pin %r was deleted; it kept %d slots", name, slots)
                return {"chunks": slots}
        return {"pins": list(self._pins.listed())}

    def step(self) -> None:
        if self._pins:
            self._pins.step()

    def end(self) -> None:
        if self._pins:
            self._pins.unpin_all()


def _has_form(asked: Answer, question: str) -> bool:
    fields = question.replace("[", "").replace("]", "").split()
    required = {field for field in question.split() if field in fields}
    return required <= asked.keys() <= set(fields)
