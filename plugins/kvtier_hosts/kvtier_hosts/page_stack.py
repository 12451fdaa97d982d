"""The stack below a `PageStore`: a page in each slot of its arenas, and the tiers of a configuration below them."""

from __future__ import annotations

import ctypes
import hashlib
import importlib.metadata
import logging
import os
import site
import time
from collections.abc import Callable, Collection, Mapping

from kvtier_core.config.model import StackConfig
from kvtier_core.config.open import Runtime, open_observers, open_stack
from kvtier_core.errors import ConfigError
from kvtier_core.interfaces import OpenContext
from kvtier_core.layouts import ChunkLayout, KVGroup, KVKind, KVStructure
from kvtier_core.telemetry.event_log import EventLog
from kvtier_core.telemetry.observer_feed import Observers
from kvtier_core.types import FRAME_HEADER_NBYTES, KEY_NBYTES, ChunkKey, Namespace, Slot
from kvtier_core.work.io_pool import IOPool

logger = logging.getLogger("kvtier")


class PageStack:
    """Call every method on one thread, the owner's. Only `close` waits for a store.

    Keys are the host's. A *holder* is a name for one page of one job: see `Stack`.
    """

    def __init__(
        self,
        config: StackConfig,
        namespace: Namespace,
        page_nbytes: int,
        *,
        wake: Callable[[], None],
        replica: int = 0,
        replicas: int = 1,
        follow: Callable[[bytes, bool], None] | None = None,
    ):
        """``wake`` is called on any thread when `step` has something to do. Raises ConfigError.

        ``follow`` is called with the key of a page that was taken or fetched, and True, when a tier of this process has
        it, and with False when none has it any more.
        """
        config.check_host()
        of_pages = namespace.narrowed("host's page", f"{page_nbytes} bytes")
        self._namespace = self._first_namespace = of_pages.narrowed("installed packages", _installed())
        pages = KVGroup("pages", KVKind.FULL_ATTENTION, (page_nbytes,), 1, "uint8", KVStructure.OPAQUE)
        layout = ChunkLayout([pages], 1)
        context = OpenContext(self._namespace, layout, replica=replica, replicas=replicas)
        self._follow = follow
        self._followed: dict[ChunkKey, bytes] = {}  # pages that are reported as present
        self._payload = slice(FRAME_HEADER_NBYTES, FRAME_HEADER_NBYTES + page_nbytes)
        observers = Observers(open_observers(config, context))
        try:
            runtime = Runtime(pool=lambda name, threads: IOPool(name, threads, wake))
            self._stack = open_stack(config, context, runtime)
        except ConfigError:
            observers.close()
            raise
        for tier in self._stack.tiers:
            self._stack.stop_direct_reads(tier.name, "the host's pages are copied from slots")
        self._events = EventLog(observers, time.monotonic)
        for line in self._stack.describe():
            logger.info("kvtier: %s", line)
        logger.info("kvtier: identity %s", self._namespace.digest.hex())
        if cold := self._stack.why_cold():
            logger.info("kvtier: no page will be found at first: %s", cold)

    @property
    def slots(self) -> int:
        """Number of pages for which the hottest arena has room."""
        return self._stack.arenas[0].capacity

    @property
    def jobs(self) -> int:
        """Number of pieces of work under way on threads."""
        return self._stack.jobs

    def name(self, keys: Collection[bytes]) -> None:
        """Note that a request names these pages of one prompt, first page first."""
        self._stack.on_request([self._key(key) for key in keys])

    def known(self, keys: Collection[bytes]) -> list[bytes]:
        """The pages among these that can be fetched now, as far as is known."""
        found = self._stack.whereabouts([self._key(key) for key in keys])
        return [key for key, where in zip(keys, found, strict=True) if where.tiers]

    def ask(self, key: bytes) -> None:
        """Ask the shared stores for a page that is not known here."""
        for tier in self._stack.tiers:
            tier.remote.request([self._key(key)])

    def is_asked(self, key: bytes) -> bool:
        """Has a shared store yet to answer whether it has this page?"""
        return any(self._key(key) in tier.remote for tier in self._stack.tiers)

    def take(self, pages: Mapping[bytes, memoryview], holder: str) -> set[bytes]:
        """Copy leading pages of these, which are not here, to slots. Returns those for which there was room."""
        path = {self._key(key): key for key in pages}
        slots = self._stack.reserve(list(path), holder)
        for key, slot in slots.items():
            _copy(pages[path[key]], self._view(slot.arena, slot.index))
        if slots:
            self._stack.commit(holder)
            self._note({key: path[key] for key in slots})
        return {path[key] for key in slots}

    def fetch(self, key: bytes, holder: str, page: memoryview) -> bool | None:
        """Copy a page from its slot, or have it brought there: then returns None; call it again after a step.

        False: it is not here. What the holder has is released unless it returns None.
        """
        if self._stack.still_pending(holder):
            return None
        found = self._stack.lookup([self._key(key)], holder)
        if found.pending:
            return None
        for slot in found.slots:
            assert isinstance(slot, Slot), "no worker reads frames directly"
            _copy(self._view(slot.arena, slot.index), page)
        self._stack.release(holder)
        if found.slots:
            self._note({self._key(key): key})
        return bool(found.slots)

    def release(self, holder: str) -> None:
        """No job waits for the page of this holder any more."""
        self._stack.release(holder)

    def step(self) -> None:
        """Process what threads have done, and begin what was asked for."""
        events = self._stack.step()
        self._events.record(events)
        self._events.watch(self._stack.usage)
        if self._followed:
            touched = {key for event in events for key in event.keys}
            self._note({key: self._followed[key] for key in self._followed.keys() & touched})

    def _note(self, pages: Mapping[ChunkKey, bytes]) -> None:
        """Report which of these came to the tiers of this process, or left the last. Shared stores are not its own."""
        if self._follow is None or not pages:
            return
        for (key, page), where in zip(pages.items(), self._stack.whereabouts(list(pages)), strict=True):
            here = not set(where.tiers).issubset(self._stack.shared)
            if here != (key in self._followed):
                self._follow(page, here)
            if here:
                self._followed[key] = page
            else:
                self._followed.pop(key, None)

    def _note_all_gone(self) -> None:
        if self._follow is not None:
            for page in self._followed.values():
                self._follow(page, False)
            self._followed.clear()

    def renew(self) -> None:
        """Never find again what was stored so far."""
        self._note_all_gone()
        self._namespace = self._first_namespace.renewed()
        self._stack.invalidate_all(self._namespace)

    def close(self) -> None:
        """Let writes under way finish for a few seconds, then close every tier and log the totals."""
        self._note_all_gone()
        if self._namespace is not self._first_namespace:
            self._stack.invalidate_all(self._first_namespace)  # no other process could find a later epoch's
        self._events.record(self._stack.close())
        self._events.log_totals()
        self._events.close()

    def _key(self, key: bytes) -> ChunkKey:
        """The key, in the present namespace, of the page that has this key in the host."""
        digest = hashlib.blake2b(key, key=self._namespace.digest, digest_size=KEY_NBYTES, person=b"kvtier-page")
        return ChunkKey(digest.digest())

    def _view(self, arena: int, slot: int) -> memoryview:
        """The page in a slot."""
        return self._stack.arenas[arena].memory.view(slot)[self._payload]


def _installed() -> str:
    """A digest of all packages and their versions: a host does not report whose code computes its pages."""
    # Where Python looks at its start: some packages add their own places while they are imported.
    path = [*site.getsitepackages(), site.getusersitepackages(), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    packages = importlib.metadata.distributions(path=[each for each in path if each])
    found = sorted({f"{each.name} {each.version}" for each in packages})
    return hashlib.blake2b("\n".join(found).encode(), digest_size=16).hexdigest()


def _copy(source: memoryview, into: memoryview) -> None:
    """Copy a page; other threads run meanwhile."""
    there, here = (ctypes.addressof(ctypes.c_char.from_buffer(view)) for view in (into, source))
    ctypes.memmove(there, here, len(source))
