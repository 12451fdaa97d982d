"""The memory of a server, and the stacks that share it: one for each namespace that an engine has opened."""

from __future__ import annotations

import contextlib
import functools
import logging
import mmap
import os
import time
from collections.abc import Callable, Iterator

import attrs

from kvtier_core.config.compose import Runtime, open_arena, open_stack
from kvtier_core.config.model import ArenaTierConfig, StackConfig, StoreTierConfig
from kvtier_core.errors import BackendError, ConfigError
from kvtier_core.interfaces import AllocatorBackend, OpenContext
from kvtier_core.server.extents import Extents, ShareConfig
from kvtier_core.server.lent_arena import LentArena
from kvtier_core.server.protocol import Opening, ServedArena
from kvtier_core.server.sessions import Session, Space
from kvtier_core.server.tenants import UNBOUNDED, Quota, Tenants
from kvtier_core.stack.manager import StorageManager
from kvtier_core.transfer.io_pool import IOPool
from kvtier_core.types import EPOCH, Event, Namespace

logger = logging.getLogger("kvtier")

#: Seconds between two times that extents are balanced.
_BALANCED_EVERY = 1.0
#: Stacks without engines that are kept for engines that come back; each has threads.
_MOST_UNUSED = 8
#: Seconds that threads have to end when a stack without engines is closed.
_CLOSING = 1.0


@attrs.frozen
class Memory:
    """The memory of one arena of the file."""

    tier: ArenaTierConfig
    backend: AllocatorBackend
    extents: Extents
    nbytes: int  #: of the file that engines map


class Spaces:
    """Opens stacks on demand. The owner's thread calls every method."""

    def __init__(self, config: StackConfig, wake: Callable[[], None], quota: Quota = UNBOUNDED):
        """Allocates the memory.

        ``wake`` is called on threads whenever a stack can be stepped. ``quota`` is that of each tenant.

        Raises ConfigError with everything that is wrong with the arenas.
        """
        self._config = config
        self._wake = wake
        self._spaces: dict[bytes, Space] = {}  # by the digest of the namespace
        self.tenants = Tenants(quota)
        self._opened = 0
        self._next_balance = 0.0
        self.listeners: list[Callable[[Space, list[Event]], None]] = []  #: called with what happens in a space
        with contextlib.ExitStack() as closing:
            self.memories = [_memory(config, number, closing) for number, _ in enumerate(config.arenas)]
            closing.pop_all()

    def describe(self) -> list[str]:
        """A line for each arena, and for each tier below them."""
        lines = []
        for memory in self.memories:
            facts = "".join(f", {name}: {fact}" for name, fact in memory.backend.facts().items())
            lines.append(f"{memory.tier.name}: {memory.tier.capacity}{facts}")
        return lines + [f"{tier.name}: opened for the first engine" for tier in self._config.stores]

    def __iter__(self) -> Iterator[Space]:
        return iter(self._spaces.values())

    def open(self, opening: Opening) -> Space:
        """The space of a namespace. Raises ConfigError or BackendError if it cannot be had now."""
        space = self._spaces.get(opening.namespace.digest)
        if space is None:
            space = self._make(opening)
            self.add(space)
        if space.layout != opening.layout:
            raise BackendError("the layout of its chunks is another one, though its namespace is the same")
        return space

    def add(self, space: Space) -> None:
        """Serve a stack that was opened elsewhere."""
        self._opened += 1
        space.number = self._opened
        self._spaces[space.namespace.digest] = space

    def _make(self, opening: Opening) -> Space:
        shares = {memory.tier.name: ShareConfig(memory.extents) for memory in self.memories}
        tiers = [
            attrs.evolve(tier, config=shares.get(tier.name, tier.config))
            for tier in self._config.tiers
            if isinstance(tier, ArenaTierConfig) or tier.config.shared or self._is_free(tier)
        ]
        config = attrs.evolve(self._config, tiers=tuple(tiers), chunk_tokens=opening.layout.tokens)
        context = OpenContext(namespace=opening.namespace, layout=opening.layout)
        arena = functools.partial(LentArena, tenants=self.tenants)
        runtime = Runtime(pool=self._pool, arena=arena)
        stack = open_stack(config, context, runtime)
        for tier, arena in zip(config.arenas, stack.arenas, strict=True):
            arena.memory.recall_slots = functools.partial(_recall, stack, arena)
            arena.memory.next_victims = arena.next_victims
            tier.config.extents.make_place(arena.memory)
        arenas = tuple(ServedArena(arena.name, arena.memory.slot_nbytes) for arena in stack.arenas)
        for line in stack.describe():
            logger.info("kvtier: %s: %s", opening.model, line)
        media = {tier.name: tier.config.medium for tier in self._config.tiers}
        named = opening.model, opening.namespace, opening.layout
        return Space(*named, stack, arenas, media, self.tenants, stack.why_cold(), config.stores)

    def renew(self, session: Session, namespace: Namespace) -> None:
        """The KV of an engine has another namespace from now on, because its weights may have changed.

        An engine that is alone takes its stack along. Raises as `open`.
        """
        space = session.space
        if space.sessions == {session} and namespace.digest not in self._spaces:
            del self._spaces[space.namespace.digest]
            self._spaces[namespace.digest] = space
            space.namespace = namespace
            space.stack.invalidate_all(namespace)
        else:
            session.move(self.open(attrs.evolve(session.opening, namespace=namespace)))

    def _is_free(self, tier: StoreTierConfig) -> bool:
        """May a stack have this tier, whose store is of one namespace alone? The first one has it."""
        return all(tier.name not in space.stack.media for space in self)

    def _pool(self, name: str, threads: int) -> IOPool:
        return IOPool(name, threads, self._wake)

    def step(self) -> None:
        """Let time pass in all stacks, and close those that nobody will need again."""
        for space in list(self):
            if events := space.step():
                for listener in self.listeners:
                    listener(space, events)
        unused = [space for space in self if not space.sessions and not space.stack.jobs]
        dead = [space for space in unused if EPOCH in dict(space.namespace.facts)]
        for space in dead or unused[:-_MOST_UNUSED]:
            del self._spaces[space.namespace.digest]
            space.stack.close(_CLOSING)
        now = time.monotonic()
        if now >= self._next_balance:
            for memory in self.memories:
                memory.extents.balance(_BALANCED_EVERY)
            self._next_balance = now + _BALANCED_EVERY

    def close(self, timeout: float) -> None:
        """Give writes under way ``timeout`` seconds in all, then close all tiers."""
        deadline = time.monotonic() + timeout
        for space in self:
            space.stack.close(max(0.0, deadline - time.monotonic()))
        self._spaces.clear()
        for memory in self.memories:
            memory.backend.close()


def _recall(stack: StorageManager, arena: LentArena, slots: range) -> None:
    stack.evicted(arena, arena.recall(slots), "for another model")


def _memory(config: StackConfig, number: int, closing: contextlib.ExitStack) -> Memory:
    """Allocate the memory of an arena, and map it."""
    tier = config.arenas[number]
    backend = open_arena(config, config.tiers.index(tier), closing)
    nbytes = os.fstat(backend.descriptor).st_size
    try:
        mapped = mmap.mmap(backend.descriptor, nbytes)
    except OSError as error:
        why = f"its memory cannot be mapped: {error.strerror}"
        raise ConfigError([config.problem(tier.source.path, why)]) from error
    return Memory(tier, backend, Extents(mapped, backend.slots * backend.slot_nbytes), nbytes)
