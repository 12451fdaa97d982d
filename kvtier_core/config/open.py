"""The composition root: opens the stack that a StackConfig describes. Errors of plugins become ConfigErrors."""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import attrs

from kvtier_core.builtin.packed_slots import OfUnpacked
from kvtier_core.builtin.raw import RawConfig
from kvtier_core.config.guard import PluginCall
from kvtier_core.config.later import LaterTiers
from kvtier_core.config.model import ArenaTierConfig, StackConfig, StoreTierConfig
from kvtier_core.config.quality import check_quality
from kvtier_core.config.suitable import refuse, unset_secrets, unsuitable
from kvtier_core.config.yaml_nodes import ProblemCollector
from kvtier_core.encoding.codec import FrameCodec
from kvtier_core.errors import BackendError, ConfigError
from kvtier_core.forks import only_here
from kvtier_core.frames.identity import identity_of
from kvtier_core.interfaces import (
    MAX_POLICY_STATE_NBYTES,
    AllocatorBackend,
    Backend,
    EvictionPolicy,
    Observer,
    OpenContext,
    Serializer,
    StoredFrames,
    SupportsDirectReads,
    TokenDatabase,
)
from kvtier_core.relays.relay import Untouched
from kvtier_core.relays.sealed_names import SealedNames
from kvtier_core.relays.shown_store import ShownStore
from kvtier_core.stack.arena import Arena
from kvtier_core.stack.index.cache_index import CacheIndex
from kvtier_core.stack.index.parted_index import PartedIndex
from kvtier_core.stack.index.write_budget import WriteBudget
from kvtier_core.stack.manager import StorageManager
from kvtier_core.stack.store_tier.tier import StoreTier
from kvtier_core.types import FRAME_HEADER_NBYTES, ChunkKey, Namespace, Nbytes
from kvtier_core.work.io_pool import IOPool, Pool, run

if TYPE_CHECKING:
    from kvtier_core.encoding.keyed_seal import KeyedSeal

logger = logging.getLogger("kvtier")

#: The number of a shared store's frames that an engine remembers. It queries the store again for forgotten ones.
_REMEMBERED_FRAMES = 1 << 16

#: The number of copies by peers that are remembered until the engine's next step.
_REMEMBERED_COPIES = 1 << 14

#: The reason why the workers of an engine that does not recompute read no store directly.
FAILS_REQUESTS = "the engine fails requests whose load fails (kv_load_failure_policy)"

#: Logs what a stack or an engine starts without.
log_warning = functools.partial(logger.warning, "kvtier: %s")


@attrs.frozen
class Runtime:
    """A stack's needs besides its tiers. The simulator provides its own."""

    pool: Callable[[str, int], Pool] = IOPool  #: makes a pool of threads from its name and their number
    clock: Callable[[], float] = time.monotonic  #: seconds
    codec: type[FrameCodec] = FrameCodec
    arena: Callable[..., Arena] = Arena
    recomputes: bool = True  #: does the engine compute KV whose load failed?
    serves: bool = True  #: do answers depend on it? Then a lossy codec needs a report of `kvtier quality`
    seals_all: bool = False  #: is every stored chunk sealed, even if no tier below takes it?
    warn: Callable[[str], object] = log_warning  #: is told what the stack starts without


_REAL = Runtime()


@attrs.frozen
class OpenedTier:
    """A tier whose plugins are open, before it is a level of a stack."""

    tier: ArenaTierConfig | StoreTierConfig
    store: AllocatorBackend | Backend
    index: CacheIndex
    codec: FrameCodec
    capacity: Nbytes  #: this engine's share; for a shared store, bytes of the frames that it remembers
    opening: _Opening


def open_stack(config: StackConfig, ctx: OpenContext, runtime: Runtime = _REAL) -> StorageManager:
    """Open all tiers.

    ``ctx`` is completed with the values that differ from tier to tier. Capacities are those of the node: when several
    engines share the configuration (`OpenContext.replicas`), each gets an equal part.

    Raises ConfigError with all problems of all required tiers; then nothing stays open.
    """
    collector = ProblemCollector()
    levels: list[Arena | StoreTier] = []
    with _gc_paused(), contextlib.ExitStack() as closing:
        if config.chunk_tokens != "auto":
            with collector:  # a tier that cannot be opened is reported together with all other problems
                open_token_database(config, ctx.namespace)
        for number in range(len(config.tiers)) if runtime.serves else ():
            with collector:
                if told := check_quality(config, number, dict(ctx.namespace.facts).get("weights", "")):
                    runtime.warn(told)
        sealed: dict[ChunkKey, memoryview] = {}
        copied: deque[ChunkKey] = deque(maxlen=_REMEMBERED_COPIES)
        stored: list[StoredFrames] = []
        ctx = attrs.evolve(ctx, sealed=sealed, copied=copied, stored=stored)
        absent: list[_Opening] = []
        problems = functools.partial(_unless_optional, collector, absent)
        opened: list[OpenedTier] = []
        for number, tier in enumerate(config.tiers):
            opening = _Opening(config, number, tier, runtime, closing.enter_context(contextlib.ExitStack()))
            with problems(opening):
                opened.append(opening.open(ctx))
        stored += [each.store for each in opened if isinstance(each.store, ShownStore)]
        collector.raise_if_any()  # a tier may evict from its store when it starts, so none starts before all are open
        for each in opened:
            with problems(each.opening):
                levels.append(each.opening.start(each, sum(isinstance(level, Arena) for level in levels)))
        collector.raise_if_any()
        pool = _pool("seal", 1, runtime, closing)
        media = {tier.name: tier.config.medium for tier in config.tiers}
        if (config.has_peers or runtime.seals_all) and isinstance(levels[0], Arena):
            levels[0].sealed, levels[0].copied = sealed, copied
        chosen = {tier.name: ", ".join(_chosen(tier)) for tier in config.tiers}
        later = None
        if absent:
            tiers = [functools.partial(opening.open_later, ctx, stored) for opening in absent]
            later = LaterTiers(tiers, _pool("later", 1, runtime, closing), runtime.clock)
        of_all = functools.partial(StorageManager, namespace=ctx.namespace, layout=ctx.layout, clock=runtime.clock)
        manager = of_all(levels, pool=pool, media=media, chosen=chosen, later=later)
        closing.pop_all()
    return manager


def _chosen(tier: ArenaTierConfig | StoreTierConfig) -> Iterator[str]:
    """What decides about the frames of a tier, for people."""
    if isinstance(tier, ArenaTierConfig) or not tier.config.shared:  # one engine's policy does not empty a shared store
        yield tier.eviction.type
    if isinstance(tier, StoreTierConfig) and tier.serializer != RawConfig():
        yield f"serializer {tier.serializer.type}"


def open_keyed_seal(tier: StoreTierConfig) -> KeyedSeal | None:
    """The keyed seal that a tier's ``seal_key`` and ``encrypt`` ask for; None without a ``seal_key``.

    Raises BackendError if the secret is missing or too short, or if its library is missing.
    """
    if tier.seal_key is None:
        return None
    try:
        from kvtier_core.encoding.keyed_seal import KeyedSeal  # only here: no other tier needs its library

        return KeyedSeal.of(tier.seal_key.value, encrypt=tier.encrypt)
    except ImportError as error:
        raise BackendError(f"{error}; pip install 'kvtier[seal]'") from error
    except ValueError as error:
        raise BackendError(f"invalid secret in {tier.seal_key.variable}: {error}") from None


def packs(config: StackConfig, device: str) -> bool:
    """Are shards packed, for this type of device? In all arenas or none, because chunks are copied between them."""
    return all(tier.packing == "auto" and device in tier.config.packs for tier in config.arenas)


def open_arena(config: StackConfig, number: int, ctx: OpenContext, closing: contextlib.ExitStack) -> AllocatorBackend:
    """Only the memory of an arena; ``closing`` closes it. Raises ConfigError."""
    memory = _Opening(config, number, config.tiers[number], _REAL, closing).store(ctx)
    assert isinstance(memory, AllocatorBackend), "not an arena"
    return memory


@contextlib.contextmanager
def _gc_paused() -> Iterator[None]:
    """While millions of objects are created, all of which stay, Python would scan them again and again."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextlib.contextmanager
def open_tier(config: StackConfig, number: int, ctx: OpenContext) -> Iterator[OpenedTier]:
    """One tier of a stack, by its number, for commands that look at it: nothing is indexed, nothing evicted.

    Raises ConfigError with all its problems; then nothing stays open.
    """
    with contextlib.ExitStack() as closing:
        yield _Opening(config, number, config.tiers[number], _REAL, closing).open(ctx)


def open_token_database(config: StackConfig, namespace: Namespace) -> TokenDatabase:
    """The token database of a stack whose ``chunk_tokens`` is a number. Raises ConfigError."""
    chosen, tokens, path = config.token_database, config.chunk_tokens, "$.token_database"
    assert tokens != "auto", "not sized"
    call = PluginCall(config.plugin_of(chosen), "the token database", path, config.problem)
    return call.returns(TokenDatabase, lambda: chosen.open(namespace, tokens))


def open_observers(config: StackConfig, ctx: OpenContext) -> list[tuple[str, Observer]]:
    """The observers of a configuration, with their names in the log.

    Raises ConfigError with all problems of all observers; then none stays open.
    """
    collector, opened = ProblemCollector(), []
    with contextlib.ExitStack() as closing:
        for i, chosen in enumerate(config.observers):
            name = f"observer {chosen.type}"
            call = PluginCall(config.plugin_of(chosen), name, f"$.observers[{i}]", config.problem)
            with collector:
                refuse(unset_secrets(config, chosen, f"$.observers[{i}]"))
                observer = call.returns(Observer, functools.partial(chosen.open, ctx))
                closing.callback(only_here(functools.partial(run, observer.close)))
                opened.append((f"{name} ($.observers[{i}])", observer))
        collector.raise_if_any()
        closing.pop_all()
    return opened


@attrs.frozen
class _Opening:
    """Opens and starts the plugins of one tier."""

    config: StackConfig
    number: int
    tier: ArenaTierConfig | StoreTierConfig
    runtime: Runtime
    closing: contextlib.ExitStack  #: closes everything if a later step fails

    def open(self, ctx: OpenContext) -> OpenedTier:
        """Open the store with its policy and codec. Raises ConfigError."""
        tier = self.tier
        refuse(unsuitable(self.config, self.number))
        if isinstance(tier, ArenaTierConfig) and tier.keep is not None:
            path = f"{self.config.path_of(self.number)}.keep"
            raise ConfigError([self.config.problem(path, "only kvtier serve can keep its memory", "remove it")])
        codec = self._codec(ctx)
        if isinstance(tier, StoreTierConfig) and tier.config.of_peers and not codec.is_raw:
            why = "frames in peers' memory support neither a serializer nor a keyed seal"
            hint = "remove 'serializer', 'seal_key' and 'encrypt'; the tier's own settings control who may read"
            raise ConfigError([self.config.problem(self.config.path_of(self.number), why, hint)])
        sharers = 1 if self._shared else ctx.replicas  # engines that divide the capacity
        if tier.capacity is not None:
            self._check_limit("capacity", tier.capacity, codec.max_frame_nbytes, sharers)
        ctx = attrs.evolve(ctx, namespace=codec.namespace, capacity=Nbytes((tier.capacity or 0) // sharers))
        if isinstance(tier, StoreTierConfig):
            self._check_limit("inflight", tier.inflight, ctx.layout.frame_nbytes)
            ctx = attrs.evolve(ctx, timeout=tier.timeout)
        policy = self._call(tier.eviction, "eviction").returns(EvictionPolicy, tier.eviction.open)
        # The state of the policy is stored as a frame too.
        longest = Nbytes(max(codec.max_frame_nbytes, FRAME_HEADER_NBYTES + MAX_POLICY_STATE_NBYTES))
        store = self.store(attrs.evolve(ctx, max_frame_nbytes=longest, slot_nbytes=codec.max_frame_nbytes))
        if isinstance(store, Backend):
            if ctx.checking:
                store = Untouched(store)
                self.closing.callback(store.close)
            if codec.keyed_seal is not None:
                store = SealedNames(store, codec.keyed_seal)
            if codec.is_raw and not self._shared and self.config.has_peers:
                store = ShownStore(store, codec)
                self.closing.callback(only_here(store.close))
        capacity = Nbytes(_REMEMBERED_FRAMES * codec.max_frame_nbytes) if self._shared else ctx.capacity
        index = (PartedIndex if len(ctx.layout.parts) > 1 else CacheIndex)(
            policy, tier.store_after, self._budget(codec.max_frame_nbytes, ctx.replicas)
        )
        return OpenedTier(tier, store, index, codec, capacity, self)

    def _budget(self, frame_nbytes: int, replicas: int) -> WriteBudget | None:
        """The tier's write budget, if it has one. Raises ConfigError."""
        if isinstance(self.tier, ArenaTierConfig) or (writes := self.tier.writes) is None:
            return None
        per_day = writes.per_day // replicas
        burst = per_day // 24 if writes.burst is None else writes.burst // replicas
        if burst < 2 * frame_nbytes:
            why = f"its burst, {Nbytes(burst)}, is smaller than two chunks of {frame_nbytes} bytes"
            hint = "raise 'burst'; by default it is a 24th of 'per_day'"
            raise ConfigError([self.config.problem(f"{self.config.path_of(self.number)}.writes", why, hint)])
        return WriteBudget(per_day, burst, writes.endurance, self.runtime.clock)

    @property
    def _shared(self) -> bool:
        """Is this a tier whose store other engines use, too?"""
        return isinstance(self.tier, StoreTierConfig) and self.tier.config.shared

    def start(self, opened: OpenedTier, arenas: int) -> Arena | StoreTier:
        """Make the tier a level of the stack, below ``arenas`` arenas. Raises ConfigError."""
        tier, store = self.tier, opened.store
        if isinstance(store, AllocatorBackend):
            return self.runtime.arena(tier.name, arenas, store, opened.index)
        assert isinstance(tier, StoreTierConfig), "an arena has a Backend"
        return self._call(tier.config, verb="start").ask(
            lambda: StoreTier(
                tier.name,
                store,
                pool=_pool(tier.name, tier.threads, self.runtime, self.closing),
                index=opened.index,
                codec=opened.codec,
                capacity=opened.capacity,
                inflight=tier.inflight,
                timeout=tier.timeout,
                threads=tier.threads,
                not_direct=self._why_not_direct(tier, opened),
                takes_writes=not (tier.config.of_peers or tier.config.read_only),
                of_all=tier.capacity if self._shared else None,
                clock=self.runtime.clock,
            )
        )

    def open_later(self, ctx: OpenContext, stored: list[StoredFrames]) -> StoreTier:
        """Open and start the tier of a stack that has started without it. Raises ConfigError."""
        with contextlib.ExitStack() as closing:
            opening = attrs.evolve(self, closing=closing)
            opened = opening.open(ctx)
            tier = opening.start(opened, 0)
            closing.pop_all()
        assert isinstance(tier, StoreTier), "an arena is required"
        tier.not_direct = "it was opened after the engine started"
        if isinstance(opened.store, ShownStore):
            stored.append(opened.store)
        logger.info("kvtier: %s: opened, and used from now on", tier.name)
        return tier

    def _why_not_direct(self, tier: StoreTierConfig, opened: OpenedTier) -> str:
        """Why workers may not read the frames of this store directly; empty if they may."""
        if not isinstance(opened.store, SupportsDirectReads) or not opened.store.reader_handle():
            return "the tier does not support it"
        if not opened.codec.is_raw:
            return "they are encoded or have a keyed seal"
        if opened.codec.regroups:
            return "frames from other numbers of ranks are rearranged in slots"
        if len(opened.codec.layout.parts) > 1:
            return "the model's chunks have several parts"
        if opened.codec.layout.packed and not tier.config.reads_packed:
            return "its reader cannot unpack the frames of an arena that packs"
        return "" if self.runtime.recomputes else FAILS_REQUESTS

    def _codec(self, ctx: OpenContext) -> FrameCodec:
        tier = self.tier
        if isinstance(tier, ArenaTierConfig):
            return self.runtime.codec(ctx.namespace, ctx.layout)
        chosen = tier.serializer
        call = self._call(chosen, "serializer")
        unpacked = attrs.evolve(ctx, layout=attrs.evolve(ctx.layout, packed=False))
        serializer = call.ask(lambda: chosen.open(unpacked))
        identity = None
        if serializer is not None:
            serializer = call.returns(Serializer, lambda: serializer)
            identity = call.ask(lambda: identity_of(chosen, packed=ctx.layout.packed))
            if ctx.layout.packed:
                serializer = OfUnpacked(serializer, unpacked.layout)
        keyed_seal = self._call(tier.seal_key, "seal_key").ask(lambda: open_keyed_seal(tier))
        codec = functools.partial(self.runtime.codec, shared=self._shared, keyed_seal=keyed_seal)
        return call.ask(lambda: codec(ctx.namespace, ctx.layout, serializer, identity))

    def store(self, ctx: OpenContext) -> AllocatorBackend | Backend:
        """Open only the memory of an arena, or a backend. Raises ConfigError."""
        call = self._call(self.tier.config)
        arena = isinstance(self.tier, ArenaTierConfig)
        expected: type[AllocatorBackend | Backend] = AllocatorBackend if arena else Backend
        store = call.returns(expected, lambda: self.tier.config.open(ctx))
        self.closing.callback(only_here(functools.partial(run, store.close)))
        if isinstance(store, AllocatorBackend) and (why := call.ask(lambda: _contradiction(store, ctx))):
            raise call.failed(why)
        if isinstance(store, Backend) and store.shared != self._shared:
            raise call.failed(f"its config has shared = {self._shared}, but its backend has {store.shared}")
        return store

    def _call(self, chosen: object, key: str = "", verb: str = "open") -> PluginCall:
        """A call to a plugin of this tier. ``key`` is the setting that chose it, empty for the tier itself."""
        path = self.config.path_of(self.number)
        return PluginCall(
            self.config.plugin_of(chosen),
            f"the {key} of tier {self.tier.name}" if key else f"tier {self.tier.name}",
            f"{path}.{key}" if key else path,
            self.config.problem,
            verb,
        )

    def _check_limit(self, key: str, limit: Nbytes, chunk_nbytes: int, replicas: int = 1) -> None:
        if limit // replicas < chunk_nbytes:
            kib = -(-chunk_nbytes // 1024)
            divided = f", divided among {replicas} data parallel replicas," if replicas > 1 else ""
            why = f"{limit}{divided} is smaller than one chunk ({math.ceil(kib / 102.4) / 10:g}MiB)"
            hint = f"write at least {kib * replicas}KiB"
            raise ConfigError([self.config.problem(f"{self.config.path_of(self.number)}.{key}", why, hint)])


def _contradiction(arena: AllocatorBackend, ctx: OpenContext) -> str:
    """How an arena's memory violates the interface; empty if it does not."""
    slots, nbytes = arena.slots, arena.slot_nbytes
    if not isinstance(slots, int) or slots < 1:
        return f"an arena must have at least one slot, got {slots!r}"
    if nbytes != ctx.slot_nbytes:
        return f"a slot must hold one frame of {ctx.slot_nbytes} bytes, got {nbytes!r}"
    if slots * nbytes > ctx.capacity:
        return f"{slots} slots of {nbytes} bytes exceed its capacity of {ctx.capacity}"
    if slots < ctx.layout.self_test_slots:
        return f"the self-test of copies needs {ctx.layout.self_test_slots} slots, got {slots}"
    for slot in (0, slots - 1):
        view = arena.view(slot)
        if not isinstance(view, memoryview) or view.readonly or (len(view), view.nbytes) != (nbytes, nbytes):
            return f"the view of slot {slot} is not a writable memoryview of {nbytes} bytes"
    if not isinstance(arena.handle, str):
        return f"handle must be a string, got {arena.handle!r}"
    return ""


@contextlib.contextmanager
def _unless_optional(collector: ProblemCollector, absent: list[_Opening], opening: _Opening) -> Iterator[None]:
    """Add the problems of a tier to ``collector``; or, if it is not required, warn and add it to ``absent``."""
    try:
        yield
    except ConfigError as error:
        if isinstance(opening.tier, ArenaTierConfig) or opening.tier.required:
            collector.problems += error.problems
        else:
            opening.closing.close()
            absent.append(opening)
            why = str(error).replace("\n", "; ")
            opening.runtime.warn(f"{opening.tier.name}: not opened, and not required: {why}")


def _pool(name: str, threads: int, runtime: Runtime, closing: contextlib.ExitStack) -> Pool:
    pool = runtime.pool(name, threads)
    closing.callback(pool.close, 1.0)
    return pool
