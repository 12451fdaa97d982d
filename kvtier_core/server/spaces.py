"""The memory of a server, and the stacks that share it: one for each namespace that an engine has opened."""

from __future__ import annotations

import contextlib
import functools
import logging
import mmap
import os
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import attrs

from kvtier_core.config.compose import Runtime, open_arena, open_stack
from kvtier_core.config.model import ArenaTierConfig, StackConfig, StoreTierConfig
from kvtier_core.errors import BackendError, ConfigError
from kvtier_core.interfaces import AllocatorBackend, OpenContext
from kvtier_core.server.extents import Extents, Share, ShareConfig
from kvtier_core.server.kept import user_locks
from kvtier_core.server.kept.adoption import Adoption
from kvtier_core.server.kept.journal import Journal, Keeper
from kvtier_core.server.lent_arena import LentArena
from kvtier_core.server.protocol import Opening
from kvtier_core.server.sessions import Session, Space
from kvtier_core.server.tenants import UNBOUNDED, Quota, Tenants
from kvtier_core.stack.manager import StorageManager
from kvtier_core.storekit.folder import file_system_of, place_in
from kvtier_core.transfer.io_pool import IOPool
from kvtier_core.types import EPOCH, Event, Namespace

logger = logging.getLogger("kvtier")

#: Seconds between two times that extents are balanced.
_BALANCED_EVERY = 1.0
#: Stacks without engines that are kept for engines that come back; each has threads.
_MOST_UNUSED = 8
#: Seconds in which running engines find a server that replaces another one.
_COME_BACK = 30.0
#: Seconds that threads have to end when a stack without engines is closed.
_CLOSING = 1.0


@attrs.frozen
class Memory:
    """The memory of one arena of the file."""

    tier: ArenaTierConfig
    backend: AllocatorBackend
    extents: Extents
    nbytes: int  #: of the file that engines map
    journal: Journal | None = None  #: if it outlives the server
    #: Parts of which nothing is adopted, each with that which records that nobody touches it any more.
    formers: list[tuple[Share, Callable[[], None]]] = attrs.field(factory=list)

    def is_used_by_others(self, boot: int) -> bool:
        """May processes touch it that a server of another boot has lent it to?"""
        return self.journal is not None and user_locks.used_by_others(self.backend.descriptor, boot)

    def close(self) -> None:
        """May be called twice."""
        self.backend.close()
        if self.journal is not None:
            self.journal.close()


class Spaces:
    """Opens stacks on demand. The owner's thread calls every method."""

    def __init__(self, config: StackConfig, wake: Callable[[], None], quota: Quota = UNBOUNDED, boot: int = 0):
        """Allocates the memory, or takes over what a former server has left.

        ``wake`` is called on threads whenever a stack can be stepped. ``quota`` is that of each tenant. ``boot`` is
        the server's.

        Raises ConfigError with everything that is wrong with the arenas.
        """
        self._config = config
        self._wake = wake
        self._spaces: dict[bytes, Space] = {}  # by the digest of the namespace
        self._boot = boot
        self._opened = 0
        self._next_balance = 0.0
        self._back_by = 0.0  # until then engines of a former server may come back to their stacks
        self._adoptions: list[Adoption] = []
        self.listeners: list[Callable[[Space, list[Event]], None]] = []  #: called with what happens in a space
        with contextlib.ExitStack() as closing:
            tenants_key = secrets.token_bytes(32)
            self.memories: list[Memory] = []
            for number, _ in enumerate(config.arenas):
                memory = _memory(config, number, tenants_key, closing)
                self.memories.append(memory)
                tenants_key = memory.journal.tenants_key if memory.journal else tenants_key
            self.tenants = Tenants(quota, tenants_key)
            self._verifying = self._pool("verify", 1)
            closing.callback(self._verifying.close, 0.0)
            self._restore()
            closing.pop_all()

    def describe(self) -> list[str]:
        """A line for each arena, and for each tier below them."""
        return _described(self._config, self.memories)

    def __iter__(self) -> Iterator[Space]:
        return iter(self._spaces.values())

    def open(self, opening: Opening) -> Space:
        """The space of a namespace. Raises ConfigError or BackendError if it cannot be had now."""
        space = self._spaces.get(opening.namespace.digest)
        if space is None:
            space = self._make(opening, self._opened + 1, {})
            self.add(space)
            _record(space)
        if space.layout not in (opening.layout, attrs.evolve(opening.layout, packed=False)):
            raise BackendError("the layout of its chunks is another one, though its namespace is the same")
        return space

    def add(self, space: Space) -> None:
        """Serve a stack that was opened elsewhere."""
        space.number = space.number or self._opened + 1
        self._opened = max(self._opened, space.number)
        self._spaces[space.namespace.digest] = space

    def _make(self, opening: Opening, number: int, claimed: Mapping[str, Share]) -> Space:
        """Open the stack of a namespace, with what is ``claimed`` of each memory."""
        shares = {
            memory.tier.name: ShareConfig(memory.extents, opening.model, claimed.get(memory.tier.name))
            for memory in self.memories
        }
        tiers = [
            attrs.evolve(tier, config=shares[tier.name], keep=None) if tier.name in shares else tier
            for tier in self._config.tiers
            if isinstance(tier, ArenaTierConfig) or tier.config.shared or self._is_free(tier)
        ]
        config = attrs.evolve(self._config, tiers=tuple(tiers), chunk_tokens=opening.layout.tokens)
        packed = opening.layout.packed and all(memory.tier.packing == "auto" for memory in self.memories)
        layout = attrs.evolve(opening.layout, packed=packed)
        context = OpenContext(namespace=opening.namespace, layout=layout)
        arena = functools.partial(LentArena, tenants=self.tenants)
        seals_all = any(memory.journal for memory in self.memories)
        runtime = Runtime(pool=self._pool, arena=arena, seals_all=seals_all)
        stack = open_stack(config, context, runtime)
        keepers = []
        for memory, arena in zip(self.memories, stack.arenas, strict=True):
            arena.memory.recall_slots = functools.partial(_recall, stack, arena)
            arena.memory.next_victims = arena.next_victims
            if memory.journal:
                arena.memory.keeper = Keeper(memory.journal, number, arena.memory.slot_nbytes)
                keepers.append(arena.memory.keeper)
            memory.extents.make_place(arena.memory)
        for line in stack.describe():
            logger.info("kvtier: %s: %s", opening.model, line)
        media = {tier.name: tier.config.medium for tier in self._config.tiers}
        of_engine = opening.model, opening.namespace, layout
        return Space(*of_engine, stack, media, self.tenants, stack.why_cold(), config.stores, number, keepers)

    def _restore(self) -> None:
        """Open the stacks again that had parts of the kept memories, and adopt what these parts hold."""
        claimed: dict[int, dict[str, Share]] = {}  # by the number of the space, and the name of the tier
        for memory in self.memories:
            for number, share in _claim_all(memory).items():
                claimed.setdefault(number, {})[memory.tier.name] = share
        for number, shares in sorted(claimed.items()):
            memories = [memory for memory in self.memories if memory.tier.name in shares]
            kept = {memory.tier.name: memory.journal.spaces[number] for memory in memories}
            opening = next(iter(kept.values())).opening
            try:
                space = self._make(opening, number, shares)
            except (ConfigError, BackendError) as error:
                logger.warning("kvtier: what %s had in memory is lost: %s", opening.model, error)
                for memory in memories:  # what it had was given back when its tiers were closed
                    (share,) = _claimed(memory, {number}).values()
                    memory.formers.append((share, Keeper(memory.journal, number, share.slot_nbytes).closed))
                continue
            self.add(space)
            self._back_by = time.monotonic() + _COME_BACK
            self._adoptions += [
                Adoption(space, arena, kept[arena.name].slots, self._verifying)
                for arena in space.stack.arenas
                if arena.name in kept
            ]

    @property
    def adopts(self) -> bool:
        """Is there memory that is not verified, or that processes of a former server may still touch?"""
        return bool(self._adoptions) or any(memory.formers for memory in self.memories)

    def _adopt(self) -> None:
        self._verifying.step()
        if not any(memory.is_used_by_others(self._boot) for memory in self.memories):
            self._adoptions = [each for each in self._adoptions if not each.end()]
            for memory in self.memories:
                while memory.formers:
                    share, record = memory.formers.pop()
                    share.close()
                    record()

    def renew(self, session: Session, namespace: Namespace) -> None:
        """Give an engine's KV another namespace: its weights may have changed. Raises as `open`.

        An engine that is alone in its space keeps its stack.
        """
        space = session.space
        if space.sessions == {session} and namespace.digest not in self._spaces:
            del self._spaces[space.namespace.digest]
            self._spaces[namespace.digest] = space
            space.namespace = namespace
            _record(space)
            space.stack.invalidate_all(namespace)
        else:
            session.move(self.open(attrs.evolve(session.opening, namespace=namespace)))

    def set_quota(self, model: str, quota: Quota) -> None:
        """Bound a model's part of each memory, by the name that its engines give it."""
        for memory in self.memories:
            memory.extents.set_quota(model, quota)

    def _is_free(self, tier: StoreTierConfig) -> bool:
        """Is this tier, whose store takes one namespace, in no stack yet?"""
        return all(tier.name not in space.stack.media for space in self)

    def _pool(self, name: str, threads: int) -> IOPool:
        return IOPool(name, threads, self._wake)

    def step(self) -> None:
        """Step all stacks, and close those that nobody will need again."""
        for space in list(self):
            if events := space.step():
                for listener in self.listeners:
                    listener(space, events)
        if self.adopts:
            self._adopt()
        self._close_unused()
        now = time.monotonic()
        if now >= self._next_balance:
            for memory in self.memories:
                memory.extents.balance(_BALANCED_EVERY)
            self._next_balance = now + _BALANCED_EVERY

    def _close_unused(self) -> None:
        if time.monotonic() < self._back_by:
            return
        adopting = {each.space for each in self._adoptions}
        unused = [space for space in self if not space.sessions and not space.stack.jobs and space not in adopting]
        dead = [space for space in unused if EPOCH in dict(space.namespace.facts)]
        for space in dead or unused[:-_MOST_UNUSED]:
            del self._spaces[space.namespace.digest]
            space.stack.close(_CLOSING)
            for keeper in space.keepers:
                keeper.closed()

    def close(self, timeout: float) -> None:
        """Give writes under way ``timeout`` seconds in all, then close all tiers."""
        deadline = time.monotonic() + timeout
        for space in self:
            space.stack.close(max(0.0, deadline - time.monotonic()))
        self._spaces.clear()
        self._verifying.close(0.0)
        for memory in self.memories:
            memory.close()


def _record(space: Space) -> None:
    for keeper in space.keepers:
        keeper.opened(Opening(space.model, "", space.namespace, space.layout))


def _recall(stack: StorageManager, arena: LentArena, slots: range) -> None:
    stack.evicted(arena, arena.recall(slots), "for another model")


def check(config: StackConfig) -> list[str]:
    """What `Spaces` would describe. Memory that is kept stays as it is. Raises ConfigError."""
    with contextlib.ExitStack() as closing:
        memories = [_memory(config, number, b"", closing, checking=True) for number, _ in enumerate(config.arenas)]
        return _described(config, memories)


def _described(config: StackConfig, memories: Iterable[Memory]) -> list[str]:
    lines = []
    for memory in memories:
        facts = "".join(f", {name}: {fact}" for name, fact in memory.backend.facts().items())
        lines.append(f"{memory.tier.name}: {memory.tier.capacity}{facts}")
    return lines + [f"{tier.name}: opens when the first engine connects" for tier in config.stores]


def _memory(
    config: StackConfig, number: int, tenants_key: bytes, closing: contextlib.ExitStack, *, checking: bool = False
) -> Memory:
    """Allocate the memory of an arena, or find it, and map it."""
    tier = config.arenas[number]
    try:
        keep = tier.keep and place_in(tier.keep)
        journal = _journal(keep, tenants_key, closing) if keep is not None else None
        backend = open_arena(config, config.tiers.index(tier), keep, closing, checking=checking)
        status = os.fstat(backend.descriptor)
        mapped = mmap.mmap(backend.descriptor, status.st_size)
        memory = Memory(tier, backend, Extents(mapped, backend.slots * backend.slot_nbytes), status.st_size, journal)
        if journal is not None and not checking and not journal.begin(status.st_ino):
            memory.formers.append((memory.extents.whole(), journal.resume))
    except (OSError, BackendError) as error:
        why = f"its memory cannot be had: {error}"
        raise ConfigError([config.problem(tier.source.path, why)]) from error
    return memory


def _journal(keep: Path, tenants_key: bytes, closing: contextlib.ExitStack) -> Journal:
    """That of the memory in a folder. Raises OSError and BackendError."""
    if (kind := file_system_of(keep.resolve())) != "tmpfs":
        raise BackendError(f"{keep} is not in memory but on a file system of type {kind}; name a folder on a tmpfs")
    journal = Journal(keep, tenants_key)
    closing.callback(journal.close)
    return journal


def _claim_all(memory: Memory) -> dict[int, Share]:
    """What each stack had of a kept memory, by the number of the space."""
    if memory.journal is None:
        return {}
    try:
        return _claimed(memory, memory.journal.spaces)
    except BackendError as error:
        logger.warning("kvtier: what was in the memory of %s is lost: %s", memory.tier.name, error)
        memory.journal.forget()
        memory.formers.append((memory.extents.whole(), memory.journal.resume))
        return {}


def _claimed(memory: Memory, numbers: Iterable[int]) -> dict[int, Share]:
    """What these stacks had. Raises BackendError."""
    shares = {}
    for number in numbers:
        kept = memory.journal.spaces[number]
        shares[number] = memory.extents.share(kept.slot_nbytes, kept.opening.model)
        shares[number].claim(kept.slots)
    return shares
