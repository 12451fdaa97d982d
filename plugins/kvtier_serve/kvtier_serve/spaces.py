"""The stacks of a server, which share its memory: one for each namespace that an engine has opened."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import os
import secrets
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping

import attrs

from kvtier_core.config.later import bound
from kvtier_core.config.model import ArenaTierConfig, StackConfig, StoreTierConfig
from kvtier_core.config.open import Runtime, open_stack
from kvtier_core.errors import BackendError, ConfigError
from kvtier_core.interfaces import OpenContext
from kvtier_core.layouts import ChunkLayout
from kvtier_core.stack.manager import StorageManager
from kvtier_core.storekit.folder_lock import FolderLock
from kvtier_core.types import EPOCH, Event, Namespace
from kvtier_core.work.io_pool import IOPool, Outcome, Then, run
from kvtier_remote.protocol import Opening
from kvtier_serve.aside import Aside
from kvtier_serve.extents import Share, ShareConfig
from kvtier_serve.kept.adoption import Adoption
from kvtier_serve.kept.journal import Keeper
from kvtier_serve.lent_arena import LentArena
from kvtier_serve.memories import Memory, claim_all, described, lock_private, open_memory
from kvtier_serve.private_stores import PrivateStores
from kvtier_serve.sessions import Session, Space
from kvtier_serve.tenants import UNBOUNDED, Quota, Tenants

logger = logging.getLogger("kvtier")

#: Seconds between two times that extents are balanced.
_BALANCED_EVERY = 1.0
#: The most stacks without engines that are kept for engines that come back; each has threads.
_MOST_UNUSED = 8
#: Seconds within which running engines find a server that replaces another.
_COME_BACK = 30.0
#: The most threads that the stacks of a server have together; a container may let a process have a few thousand.
_MOST_THREADS = 1024
#: Number of results of store calls applied in a turn: one may be of all chunks that were committed together.
_OUTCOMES = 1
#: Number of namespaces that are stepped in a turn although nothing has happened in them: breakers close, calls hang.
_IN_TURN = 8
#: Number of tenants beyond their hard quotas that are looked at in a turn, and of chunks evicted for that.
_TENANTS, _EVICTED = 4, 64
#: Number of tenants that are judged in a turn after their quotas changed.
_JUDGED = 64
#: Seconds for writes to end if the memory is broken: what they read there is worthless.
_BROKEN = 1.0
#: Seconds for a call to a store to end when a stack without engines is closed: three years.
_CLOSING = 1e8


@attrs.frozen
class _Claim:
    """What a namespace takes from others while its stack is opened, open, or being closed."""

    threads: int
    private: frozenset[str]  #: the tiers that only its stack may have
    space: Space | None = None  #: once its stack is open


class Spaces:
    """Opens stacks on demand. The owner's thread calls every method, and waits for no store."""

    def __init__(
        self,
        config: StackConfig,
        wake: Callable[[], None],
        quota: Quota = UNBOUNDED,
        boot: int = 0,
        tenants_key: bytes = b"",
    ):
        """Allocates the memory, or takes over what a former server has left.

        ``wake`` is called on threads whenever a stack can be stepped. ``quota`` is that of each tenant. ``boot`` is the
        server's. ``tenants_key`` is that of the tenants' names, unless the kept memory has another.

        Raises ConfigError with everything that is wrong with the arenas.
        """
        self._config = config
        self._wake = wake
        self._quota = quota
        self.listeners: list[Callable[[Space, list[Event]], None]] = []  #: called with what happens in a space
        self._begin(boot, tenants_key)

    def _begin(self, boot: int, tenants_key: bytes) -> None:
        self._spaces: dict[bytes, Space] = {}  # by the digest of the namespace
        self.opening: dict[bytes, list[Then]] = {}  #: by the same: what waits for a stack that is being opened
        self._claims: dict[int, _Claim] = {}  # by the number of the space
        self._woken: deque[int] = deque()  # numbers of spaces whose threads have done something
        self._touched: dict[Space, None] = {}  # by engines, since the last step
        self._in_turn: OrderedDict[Space, None] = OrderedDict()
        self._unused: dict[Space, None] = {}  # without engines; for the longest time first
        self._stacks: dict[LentArena, StorageManager] = {}  # that have these arenas
        self.shrinking: dict[str, None] = {}  #: models that may be beyond their hard quotas
        self._aside = Aside(self._wake)
        self._boot = boot
        self._opened = 0
        self._restoring = 0  # stacks of a former server that are being opened
        self._next_balance = 0.0
        self._back_by = 0.0  # until then engines of a former server may come back to their stacks
        self._adoptions: list[Adoption] = []
        with contextlib.ExitStack() as closing:
            key = tenants_key or secrets.token_bytes(32)
            self.memories: list[Memory] = []
            for number, _ in enumerate(self._config.arenas):
                memory = open_memory(self._config, number, key, closing)
                self.memories.append(memory)
                key = memory.journal.tenants_key if memory.journal else key
            self.tenants = Tenants(self._quota, key, self._stacks)
            self._private = PrivateStores(self._config.stores)
            #: Folders that no stack has yet: another server must be refused when it starts, not when its engines come.
            self._locked = lock_private(self._config, FolderLock.take)
            closing.callback(self._unlock, list(self._locked))
            self._verifying = IOPool("verify", 1, self._wake, check=self._must_be_whole)
            closing.callback(self._verifying.close, 0.0)
            self._restore()
            closing.pop_all()

    @property
    def is_broken(self) -> bool:
        """Was a memory truncated, or could others write to it?"""
        return any(memory.mapped.is_broken for memory in self.memories)

    def _must_be_whole(self) -> None:
        """Raise BackendError if what was read or computed in a memory may be worthless. Any thread may call this."""
        if self.is_broken:
            raise BackendError("the memory was truncated or opened to others")

    def begin_anew(self, boot: int) -> None:
        """Replace broken memory as the next server would; no engine has a session any more. Raises ConfigError."""
        for memory in self.memories:
            if memory.mapped.is_broken:
                os.ftruncate(
                    memory.backend.descriptor, 0
                )  # it is replaced even if it has the right mode and length again
        self.close(_BROKEN)
        self._begin(boot, self.tenants.key)

    def describe(self) -> list[str]:
        """A line for each arena, and for each tier below them."""
        return described(self._config, self.memories)

    def __iter__(self) -> Iterator[Space]:
        return iter(self._spaces.values())

    def open(self, opening: Opening, then: Then) -> None:
        """Open the space of a namespace. ``then`` gets it, or a ConfigError or BackendError: now, or in a `step`."""
        digest = opening.namespace.digest
        if (space := self._spaces.get(digest)) is not None:
            then(run(lambda: _checked(space, opening)))
        elif digest in self.opening:
            self.opening[digest].append(functools.partial(_check_and, opening, then))
        else:
            told = functools.partial(_check_and, opening, then)
            begun = run(lambda: self._begin_opening(opening, self._opened + 1, {}, told))
            if begun.error is not None:
                then(begun)

    def add(self, space: Space) -> None:
        """Serve a stack that is open."""
        space.number = space.number or self._opened + 1
        self._opened = max(self._opened, space.number)
        self._spaces[space.namespace.digest] = space
        self._in_turn[space] = None

    def touch(self, space: Space) -> None:
        """An engine uses this space: step it in this turn."""
        self._touched[space] = None

    def _begin_opening(self, opening: Opening, number: int, claimed: Mapping[str, Share], then: Then) -> None:
        """Open the stack of a namespace on a thread, with what is ``claimed`` of each memory."""
        shares = {
            memory.tier.name: ShareConfig(memory.extents, opening.model, claimed.get(memory.tier.name))
            for memory in self.memories
        }
        packed = opening.layout.packed and all(memory.tier.packing == "auto" for memory in self.memories)
        layout = attrs.evolve(opening.layout, packed=packed)
        tiers: list[ArenaTierConfig | StoreTierConfig] = []
        for tier in self._config.tiers:
            if isinstance(tier, ArenaTierConfig):
                tiers.append(attrs.evolve(tier, config=shares[tier.name], keep=None))
            elif self._private.is_for(tier, opening, layout) and (tier.config.shared or self._is_free(tier)):
                tiers.append(tier)
        stores = [tier for tier in tiers if isinstance(tier, StoreTierConfig)]
        claim = _Claim(
            1 + sum(tier.threads for tier in stores), frozenset(t.name for t in stores if not t.config.shared)
        )
        if sum(each.threads for each in self._claims.values()) + claim.threads > _MOST_THREADS:
            raise BackendError(
                f"the server has {len(self._claims)} namespaces open, and at most {_MOST_THREADS} threads for "
                "them; it can open another once all engines of one have ended"
            )
        config = attrs.evolve(self._config, tiers=tuple(tiers), chunk_tokens=opening.layout.tokens)
        context = OpenContext(namespace=opening.namespace, layout=layout)
        runtime = Runtime(
            pool=functools.partial(self._pool, number),
            arena=functools.partial(LentArena, tenants=self.tenants),
            seals_all=any(memory.journal for memory in self.memories),
        )
        self._opened = max(self._opened, number)
        self._claims[number] = claim
        self.opening[opening.namespace.digest] = [then]
        self._unlock(claim.private)
        self._aside.begin(
            lambda: _open(config, context, runtime),
            lambda outcome: self._end_opening(opening, number, outcome, layout, new=not claimed),
            "open",
            undo=lambda opened: opened[0].close(0.0),
        )

    def _end_opening(self, opening: Opening, number: int, outcome: Outcome, layout: ChunkLayout, *, new: bool) -> None:
        """The stack is open, or cannot be opened: tell those who wait for it."""
        if outcome.error is None:
            stack, cold = outcome.value
            outcome = run(lambda: self._space(opening, number, stack, cold, layout, new=new))
        if outcome.error is not None:
            del self._claims[number]
        for then in self.opening.pop(opening.namespace.digest):
            then(outcome)

    def _space(
        self, opening: Opening, number: int, stack: StorageManager, cold: str, layout: ChunkLayout, *, new: bool
    ) -> Space:
        keepers: list[Keeper] = []
        media = {tier.name: tier.config.medium for tier in self._config.tiers}
        of_engine = opening.model, opening.namespace, layout
        space = Space(*of_engine, stack, media, self.tenants, cold, self._config.stores, number, keepers)
        for memory, arena in zip(self.memories, space.arenas, strict=True):
            share = arena.share
            share.recall_slots = functools.partial(_recall, stack, arena)
            share.next_victims = arena.next_victims
            if memory.journal:
                share.keeper = Keeper(memory.journal, number, share.slot_nbytes)
                keepers.append(share.keeper)
            self._stacks[arena] = stack
            memory.extents.add(share)
            memory.extents.make_place(share)
        for line in stack.describe():
            logger.info("kvtier: %s: %s", opening.model, line)
        claim = self._claims[number]
        self._claims[number] = attrs.evolve(claim, private=claim.private & stack.media.keys(), space=space)
        self.add(space)
        if new:
            _record(space)
        return space

    def _restore(self) -> None:
        """Open the stacks again that had parts of the kept memories, and adopt what these parts hold."""
        claimed: dict[int, dict[str, Share]] = {}  # by the number of the space, and the name of the tier
        for memory in self.memories:
            for number, share in claim_all(memory).items():
                claimed.setdefault(number, {})[memory.tier.name] = share
        self._opened = max(claimed, default=0)
        for number, shares in sorted(claimed.items()):
            memories = [memory for memory in self.memories if memory.tier.name in shares]
            opening = memories[0].kept.spaces[number].opening
            restored = functools.partial(self._restored, number, memories, shares)
            self._restoring += 1
            begun = run(lambda: self._begin_opening(opening, number, shares, restored))  # noqa: B023
            if begun.error is not None:
                restored(begun)

    def _restored(self, number: int, memories: list[Memory], shares: Mapping[str, Share], outcome: Outcome) -> None:
        self._restoring -= 1
        kept = {memory.tier.name: memory.kept.spaces[number] for memory in memories}
        if outcome.error is not None:
            model = next(iter(kept.values())).opening.model
            logger.warning("kvtier: in-memory cache of %s discarded: %s", model, outcome.error)
            for memory in memories:
                share = shares[memory.tier.name]
                memory.extents.add(share)
                memory.formers.append((share, Keeper(memory.kept, number, share.slot_nbytes).closed))
            return
        self._back_by = time.monotonic() + _COME_BACK
        self._adoptions += [
            Adoption(outcome.value, arena, kept[arena.name].slots, self._verifying)
            for arena in outcome.value.stack.arenas
            if arena.name in kept
        ]

    @property
    def adopts(self) -> bool:
        """Is there memory that is not verified, or that processes of a former server may still touch?"""
        return bool(self._restoring or self._adoptions) or any(memory.formers for memory in self.memories)

    def _adopt(self) -> None:
        self._verifying.step()
        if not any(memory.is_used_by_others(self._boot) for memory in self.memories):
            self._adoptions = [each for each in self._adoptions if not each.end()]
            for memory in self.memories:
                while memory.formers:
                    share, record = memory.formers.pop()
                    share.close()
                    record()

    def renew(self, session: Session, namespace: Namespace, then: Then) -> None:
        """Give an engine's KV another namespace: its weights may have changed. ``then`` gets the space, as in `open`.

        An engine that is alone in its space keeps its stack.
        """
        space = session.space
        if space.sessions == {session} and namespace.digest not in {**self._spaces, **self.opening}:
            del self._spaces[space.namespace.digest]
            self._spaces[namespace.digest] = space
            space.namespace = namespace
            _record(space)
            space.stack.invalidate_all(namespace)
            then(Outcome(space))
        else:
            self.open(attrs.evolve(session.opening, namespace=namespace), then)

    def set_quota(self, model: str, quota: Quota) -> None:
        """Bound a model's part of each memory, by the name that its engines give it. It shrinks in the next steps."""
        self.shrinking[model] = None
        for memory in self.memories:
            memory.extents.set_quota(model, quota)

    @property
    def config(self) -> StackConfig:
        """The tiers of each stack that is opened."""
        return self._config

    def adjust(self, config: StackConfig) -> None:
        """Bound store tiers as ``config`` defines. Raises ConfigError, and changes nothing, if one could not be."""
        bounds = {tier.name: tier for tier in config.stores}
        tiers = [(bounds[tier.name], tier) for space in self for tier in space.stack.tiers]
        if too_small := [
            config.problem(
                f"{written.source.path}.capacity", f"{written.capacity} is smaller than one chunk of an open namespace"
            )
            for written, tier in tiers
            if written.resizable and written.capacity is not None and written.capacity < tier.longest
        ]:
            raise ConfigError(too_small)
        for space in self:
            bound(space.stack, bounds)
        self._config = config

    def _is_free(self, tier: StoreTierConfig) -> bool:
        """Does no other namespace have this tier, whose store takes only one?"""
        return all(tier.name not in claim.private for claim in self._claims.values())

    def _unlock(self, names: Iterable[str]) -> None:
        for name in names:
            for lock in self._locked.pop(name, ()):
                lock.release()

    def _pool(self, space: int, name: str, threads: int) -> IOPool:
        def wake() -> None:
            self._woken.append(space)
            self._wake()

        return IOPool(name, threads, wake, _OUTCOMES, self._must_be_whole)

    def step(self) -> None:
        """Step the stacks in which something has happened, and close those that no engine will need again."""
        self._aside.step()
        for space in self._due():
            if events := space.step():
                for listener in self.listeners:
                    listener(space, events)
            if space.sessions or space.stack.jobs:
                self._unused.pop(space, None)
            else:
                self._unused.setdefault(space)
        self._keep_quotas()
        if self.adopts:
            self._adopt()
        self._close_unused()
        now = time.monotonic()
        if now >= self._next_balance:
            for memory in self.memories:
                memory.extents.balance(_BALANCED_EVERY)
            self._next_balance = now + _BALANCED_EVERY

    def _due(self) -> list[Space]:
        """The spaces to step in this turn."""
        due, self._touched = self._touched, {}
        while self._woken:
            claim = self._claims.get(self._woken.popleft())
            if claim is not None and claim.space is not None:
                due[claim.space] = None
        for space in itertools.islice(self._in_turn, _IN_TURN):
            due[space] = None
        for space in due:
            self._in_turn.move_to_end(space)
        return list(due)

    def _keep_quotas(self) -> None:
        """Evict some of what is beyond hard quotas. If there was anything, the next turn continues."""
        left, more = _EVICTED, self.tenants.judge(_JUDGED)
        for tenant in self.tenants.in_turn(self.tenants.over_hard, _TENANTS):
            for arena in self.tenants.books_of(tenant):
                assert isinstance(arena, LentArena), "books are those of `_stacks`"
                if victims := arena.beyond_quota(tenant, left):
                    self._stacks[arena].evicted(arena, arena.drop(victims), "its tenant is beyond the quota")
                    left -= len(victims)
        for model in list(self.shrinking)[:1]:
            if not any(memory.extents.shrink(model) for memory in self.memories):
                del self.shrinking[model]
        if left < _EVICTED or more or self.shrinking:
            self._wake()

    def _close_unused(self) -> None:
        """Close one of the stacks that have no engines: that of an epoch that is over, or the first of too many."""
        if not self._unused or time.monotonic() < self._back_by:
            return
        adopting = {each.space for each in self._adoptions}
        unused = [space for space in self._unused if not (space.sessions or space.stack.jobs or space in adopting)]
        dead = [space for space in unused if EPOCH in dict(space.namespace.facts)]
        for space in dead[:1] or unused[:-_MOST_UNUSED][:1]:
            del self._spaces[space.namespace.digest], self._unused[space], self._in_turn[space]
            space.stack.close_arenas()  # it has no jobs, so that no thread is about to use them
            for arena in space.arenas:
                del self._stacks[arena]
            for keeper in space.keepers:
                keeper.closed()
            close = functools.partial(space.stack.close_tiers, time.monotonic() + _CLOSING)
            self._aside.begin(close, functools.partial(self._closed, space.number), "close")
            self._wake()

    def _closed(self, number: int, outcome: Outcome) -> None:
        self._claims.pop(number, None)

    def close(self, timeout: float) -> None:
        """Give writes under way ``timeout`` seconds in all, then close all tiers."""
        deadline = time.monotonic() + timeout
        self._aside.close(timeout)
        for space in self:
            space.stack.close(max(0.0, deadline - time.monotonic()))
        self._spaces.clear()
        self._unlock(list(self._locked))
        self._verifying.close(0.0)
        for memory in self.memories:
            memory.close()


def _open(config: StackConfig, context: OpenContext, runtime: Runtime) -> tuple[StorageManager, str]:
    """A stack, and why it is cold. Waits for its stores."""
    stack = open_stack(config, context, runtime)
    return stack, stack.why_cold()


def _check_and(opening: Opening, then: Then, outcome: Outcome) -> None:
    then(outcome if outcome.error is not None else run(lambda: _checked(outcome.value, opening)))


def _checked(space: Space, opening: Opening) -> Space:
    """The space. Raises BackendError if it is not for this engine."""
    if space.layout not in (opening.layout, attrs.evolve(opening.layout, packed=False)):
        raise BackendError("the layout of its chunks differs, though its namespace is the same")
    return space


def _record(space: Space) -> None:
    for keeper in space.keepers:
        keeper.opened(Opening(space.model, "", space.namespace, space.layout))


def _recall(stack: StorageManager, arena: LentArena, slots: range) -> None:
    stack.evicted(arena, arena.recall(slots), "for another model")
