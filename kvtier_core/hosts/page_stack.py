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

from kvtier_core.config.compose import Runtime, open_observers, open_stack
from kvtier_core.config.model import StackConfig
from kvtier_core.engine.observers import Observers
from kvtier_core.engine.scheduler.event_log import EventLog
from kvtier_core.errors import ConfigError
from kvtier_core.interfaces import OpenContext
from kvtier_core.layouts import ChunkLayout, KVGroup, KVKind, KVStructure
from kvtier_core.transfer.io_pool import IOPool
from kvtier_core.types import FRAME_HEADER_NBYTES, KEY_NBYTES, ChunkKey, Namespace

logger = logging.getLogger("kvtier")

#: Settings of engines that kvtier serves itself: the host decides about these.
_NOT_FOR_HOSTS = ("server", "record", "chunk_tokens", "save_decode")


class PageStack:
    """Call every method on one thread, the owner's. None waits for a store but `close`.

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
    ):
        """``wake`` is called on any thread when `step` has something to do. Raises ConfigError."""
        check(config)
        of_pages = namespace.narrowed("host's page", f"{page_nbytes} bytes")
        self._namespace = self._first_namespace = of_pages.narrowed("installed packages", _installed())
        pages = KVGroup("pages", KVKind.FULL_ATTENTION, (page_nbytes,), 1, "uint8", KVStructure.OPAQUE)
        layout = ChunkLayout([pages], 1)  # type: ignore[arg-type]  # mypy misreads the converter
        context = OpenContext(self._namespace, layout, replica=replica, replicas=replicas)
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
        for line in (*config.describe(), *self._stack.describe()):
            logger.info("kvtier: %s", line)
        logger.info("kvtier: identity %s", self._namespace.digest.hex())
        if cold := self._stack.why_cold():
            logger.info("kvtier: no page is found at first: %s", cold)

    @property
    def slots(self) -> int:
        """Pages that the hottest arena has room for."""
        return self._stack.arenas[0].capacity

    @property
    def jobs(self) -> int:
        """Pieces of work that are under way on threads."""
        return self._stack.jobs

    def name(self, keys: Collection[bytes]) -> None:
        """A request names these pages of one prompt, first page first."""
        self._stack.on_request([self._key(key) for key in keys])

    def known(self, keys: Collection[bytes]) -> list[bytes]:
        """Those of these pages that can be fetched now, as far as is known."""
        found = self._stack.whereabouts([self._key(key) for key in keys])
        return [key for key, where in zip(keys, found, strict=True) if where.tiers]

    def ask(self, key: bytes) -> None:
        """Ask the shared stores for a page that is not known here."""
        for tier in self._stack.tiers:
            tier.request_lookup([self._key(key)])

    def is_asked(self, key: bytes) -> bool:
        """Does a shared store owe an answer whether it has this page?"""
        return any(tier.is_asked(self._key(key)) for tier in self._stack.tiers)

    def take(self, pages: Mapping[bytes, memoryview], holder: str) -> set[bytes]:
        """Copy leading ones of these pages, which are not here, to slots. Returns for which there was room."""
        path = {self._key(key): key for key in pages}
        slots = self._stack.reserve(list(path), holder)
        for key, slot in slots.items():
            _copy(pages[path[key]], self._view(slot.arena, slot.index))
        if slots:
            self._stack.commit(holder)
        return {path[key] for key in slots}

    def fetch(self, key: bytes, holder: str, page: memoryview) -> bool | None:
        """Copy a page from its slot, or have it brought there: then None, and it is to be called again after a step.

        False: it is not here. What it holds is released unless it returns None.
        """
        if self._stack.still_pending(holder):
            return None
        found = self._stack.lookup([self._key(key)], holder)
        if found.pending:
            return None
        for slot in found.slots:
            _copy(self._view(slot.arena, slot.index), page)
        self._stack.release(holder)
        return bool(found.slots)

    def release(self, holder: str) -> None:
        """Nobody waits for the page of this holder any more."""
        self._stack.release(holder)

    def step(self) -> None:
        """Draw the consequences of what threads have done, and begin what was asked for."""
        self._events.record(self._stack.step())
        self._events.watch(self._stack.usage)

    def renew(self) -> None:
        """Never find again what was stored so far."""
        self._namespace = self._first_namespace.renewed()
        self._stack.invalidate_all(self._namespace)

    def close(self) -> None:
        """Let writes under way finish for some seconds, then close every tier and log the totals."""
        if self._namespace is not self._first_namespace:
            self._stack.invalidate_all(self._first_namespace)  # no other process could find a later epoch's
        self._events.record(self._stack.close())
        self._events.log_totals()
        self._events.close()

    def _key(self, key: bytes) -> ChunkKey:
        """The key in the present namespace of a page that the host names so."""
        digest = hashlib.blake2b(key, key=self._namespace.digest, digest_size=KEY_NBYTES, person=b"kvtier-page")
        return ChunkKey(digest.digest())

    def _view(self, arena: int, slot: int) -> memoryview:
        """The page in a slot."""
        return self._stack.arenas[arena].memory.view(slot)[self._payload]


def check(config: StackConfig) -> None:
    """Raise ConfigError for settings that mean nothing for pages of a host."""
    fields = {name: getattr(config, name) for name in _NOT_FOR_HOSTS}
    problems = [
        config.problem(f"$.{name}", "it is of no use where the host moves the pages", "remove it")
        for name, value in fields.items()
        if value not in (None, "auto", False)
    ]
    if problems:
        raise ConfigError(problems)


def _installed() -> str:
    """A digest of all packages and their versions: a host does not say whose code computes its pages."""
    # Where Python looks from its start: some packages add places of their own while they are imported.
    path = [*site.getsitepackages(), site.getusersitepackages(), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    found = sorted(
        {f"{each.name} {each.version}" for each in importlib.metadata.distributions(path=filter(None, path))}
    )
    return hashlib.blake2b("\n".join(found).encode(), digest_size=16).hexdigest()


def _copy(source: memoryview, into: memoryview) -> None:
    """Copy a page; other threads run meanwhile."""
    addresses = [ctypes.addressof(ctypes.c_char.from_buffer(view)) for view in (into, source)]
    ctypes.memmove(*addresses, len(source))
