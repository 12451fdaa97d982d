"""The composition root: opens the stack that a StackConfig describes. Errors of plugins become ConfigErrors."""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import attrs

from kvtier_core.builtin.packed_slots import OfUnpacked
from kvtier_core.config.model import ArenaTierConfig, StackConfig, StoreTierConfig
from kvtier_core.config.yaml_nodes import ProblemCollector
from kvtier_core.errors import BackendError, ConfigError, Problem
from kvtier_core.frames.codec import FrameCodec
from kvtier_core.frames.identity import identity_of
from kvtier_core.frames.sealed_names import SealedNames
from kvtier_core.frames.shown_store import ShownStore
from kvtier_core.interfaces import (
    MAX_POLICY_STATE_NBYTES,
    AllocatorBackend,
    Backend,
    DirectReader,
    EvictionPolicy,
    Mover,
    Observer,
    OpenContext,
    PagedKVCache,
    Serializer,
    StoredFrames,
    SupportsDirectReads,
    SupportsKeeping,
    SupportsSharing,
    TokenDatabase,
)
from kvtier_core.layouts import ChunkLayout, KVGroup, KVKind, KVStructure
from kvtier_core.quality.report import Report, ReportRefused
from kvtier_core.stack.arena import Arena
from kvtier_core.stack.index.cache_index import CacheIndex
from kvtier_core.stack.index.parted_index import PartedIndex
from kvtier_core.stack.manager import StorageManager
from kvtier_core.stack.store_tier.tier import StoreTier
from kvtier_core.transfer.io_pool import IOPool, Pool, run
from kvtier_core.types import FRAME_ALIGNMENT, FRAME_HEADER_NBYTES, Namespace, Nbytes

if TYPE_CHECKING:
    from kvtier_core.frames.keyed_seal import KeyedSeal

logger = logging.getLogger("kvtier")

T = TypeVar("T")

#: The number of a shared store's frames that an engine remembers. It asks again for those that it forgot.
_REMEMBERED_FRAMES = 1 << 16

#: Why an engine that does not recompute reads no store by itself.
FAILS_REQUESTS = "the engine fails requests whose load fails (kv_load_failure_policy)"


@attrs.frozen
class Runtime:
    """A stack's needs besides its tiers. The simulator provides its own."""

    pool: Callable[[str, int], Pool] = IOPool  #: makes a pool of threads from its name and their number
    clock: Callable[[], float] = time.monotonic  #: seconds
    codec: type[FrameCodec] = FrameCodec
    arena: type[Arena] = Arena
    recomputes: bool = True  #: does the engine compute what a load could not bring?
    serves: bool = True  #: do answers depend on it? Then a lossy codec needs a report of `kvtier quality`
    seals_all: bool = False  #: is every chunk sealed that an engine stores, also those that no tier below takes?


_REAL = Runtime()


@attrs.frozen
class OpenedTier:
    """A tier whose plugins are open, before it is a level of a stack."""

    tier: ArenaTierConfig | StoreTierConfig
    store: AllocatorBackend | Backend
    index: CacheIndex
    codec: FrameCodec
    capacity: Nbytes  #: this engine's share; of a shared store, bytes of the frames that it remembers to be there
    opening: _Opening


def open_stack(config: StackConfig, ctx: OpenContext, runtime: Runtime = _REAL) -> StorageManager:
    """Open all tiers.

    ``ctx`` is completed with the values that differ from tier to tier. Capacities are those of the node: when several
    engines share the configuration (`OpenContext.replicas`), each gets an equal part.

    Raises ConfigError with everything that is wrong with every tier that is required; then nothing stays open.
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
                    logger.warning("kvtier: %s", told)
        stored: list[StoredFrames] = []
        ctx = attrs.evolve(ctx, sealed={}, stored=stored)
        problems = functools.partial(_unless_optional, collector)
        opened = _open_tiers(config, range(len(config.tiers)), ctx, runtime, closing, problems)
        stored += [each.store for each in opened if isinstance(each.store, ShownStore)]
        collector.raise_if_any()  # a tier may evict from its store as it starts, so none starts before all are open
        for each in opened:
            with problems(each.opening):
                levels.append(each.opening.start(each, sum(isinstance(level, Arena) for level in levels)))
        collector.raise_if_any()
        pool = _pool("seal", 1, runtime, closing)
        media = {tier.name: tier.config.medium for tier in config.tiers}
        if config.has_peers and isinstance(levels[0], Arena):
            levels[0].sealed = ctx.sealed
        of_all = {"namespace": ctx.namespace, "layout": ctx.layout, "media": media, "clock": runtime.clock}
        manager = StorageManager(levels, pool=pool, seals_all=runtime.seals_all or config.has_peers, **of_all)
        closing.pop_all()
    return manager


def check_quality(config: StackConfig, number: int, weights: str | None = None) -> str:
    """How far answers may differ behind a tier's codec; empty if it is lossless.

    ``weights`` is the fact of the engine's namespace, None if there is no engine yet. Raises ConfigError if nobody has
    measured it for them and for this codec, or if it did not pass.
    """
    tier = config.tiers[number]
    if isinstance(tier, ArenaTierConfig) or getattr(tier.serializer, "lossless", None) is not False:
        return ""
    path, chosen = config.path_of(number), tier.serializer
    call = _Call(config.plugin_of(chosen), "the serializer", f"{path}.serializer", config.problem)
    codec = call.ask(lambda: identity_of(chosen))
    if tier.accept_quality:
        return f"{tier.name}: answers may differ: {codec}; nobody has measured how far (accept_quality: unmeasured)"
    options = [f"{field.alias}: {getattr(chosen, field.name)}" for field in attrs.fields(type(chosen)) if field.init]
    named = f"'{{{', '.join([f'type: {chosen.type}', *options])}}}'"
    hint = f"run kvtier quality --model FOLDER --codec {named} --out FILE, and write quality: FILE"
    if tier.quality is None:
        why = f"{codec}: answers may differ, and no report says how far"
        raise ConfigError([config.problem(f"{path}.serializer", why, f"{hint}, or accept_quality: unmeasured")])
    try:
        report = Report.read(tier.quality)
        report.check(weights, codec)
    except ReportRefused as error:
        why = f"{tier.quality} does not count: {error}"
        raise ConfigError([config.problem(f"{path}.quality", why, hint)]) from error
    return f"{tier.name}: answers may differ: {codec}; {report} ({tier.quality})"


def open_keyed_seal(tier: StoreTierConfig) -> KeyedSeal | None:
    """The keyed seal that a tier's ``seal_key`` and ``encrypt`` ask for; None without a ``seal_key``.

    Raises BackendError if the secret is not there, or too short, or if there is no library for it.
    """
    if tier.seal_key is None:
        return None
    try:
        from kvtier_core.frames.keyed_seal import KeyedSeal  # only here: no other tier needs its library

        return KeyedSeal.of(tier.seal_key.value, encrypt=tier.encrypt)
    except ImportError as error:
        raise BackendError(f"{error}; pip install 'kvtier[seal]'") from error
    except ValueError as error:
        raise BackendError(f"the secret in {tier.seal_key.variable} cannot be used: {error}") from None


def packs(config: StackConfig, device: str) -> bool:
    """Are shards to be packed in all arenas, for an engine on this type of device? Chunks are copied between them."""
    return all(tier.packing == "auto" and device in tier.config.packs for tier in config.arenas)


def open_arena(
    config: StackConfig, number: int, keep: Path | None, closing: contextlib.ExitStack, *, checking: bool = False
) -> AllocatorBackend:
    """The memory of an arena alone, in the folder ``keep`` if there is one; ``closing`` closes it.

    Raises ConfigError, also if other processes cannot map it.
    """
    tier = config.tiers[number]
    page = KVGroup("memory", KVKind.FULL_ATTENTION, (FRAME_ALIGNMENT,), 1, "uint8", KVStructure.OPAQUE)
    context = OpenContext(Namespace.of({}), ChunkLayout([page], 1), tier.capacity, keep=keep, checking=checking)
    memory = _Opening(config, number, tier, _REAL, closing).store(context)
    if not isinstance(memory, SupportsSharing):
        why = f"the memory of {tier.source.plugin} cannot be shared with other processes (SupportsSharing)"
        raise ConfigError([config.problem(config.path_of(number), why)])
    if keep is not None and not (isinstance(memory, SupportsKeeping) and memory.kept):
        why = f"the memory of {tier.source.plugin} cannot outlive the server (SupportsKeeping)"
        raise ConfigError([config.problem(f"{config.path_of(number)}.keep", why, "remove it")])
    return memory


@contextlib.contextmanager
def _gc_paused() -> Iterator[None]:
    """Python looks through all objects again and again while millions are made, and all of these stay."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextlib.contextmanager
def open_tiers(config: StackConfig, numbers: Iterable[int], ctx: OpenContext) -> Iterator[list[OpenedTier]]:
    """Some tiers of a stack, by their numbers, for commands that look at them: nothing is indexed, nothing evicted.

    Raises ConfigError with everything that is wrong with every tier; then nothing stays open.
    """
    collector = ProblemCollector()
    with contextlib.ExitStack() as closing:
        opened = _open_tiers(config, numbers, ctx, _REAL, closing, lambda opening: collector)
        collector.raise_if_any()
        yield opened


def open_token_database(config: StackConfig, namespace: Namespace) -> TokenDatabase:
    """The token database of a stack whose ``chunk_tokens`` is a number. Raises ConfigError."""
    chosen, path = config.token_database, "$.token_database"
    call = _Call(config.plugin_of(chosen), "the token database", path, config.problem)
    return call.returns(TokenDatabase, lambda: chosen.open(namespace, config.chunk_tokens))


def open_observers(config: StackConfig, ctx: OpenContext) -> list[tuple[str, Observer]]:
    """The observers of a configuration, by the names that the log gives them.

    Raises ConfigError with everything that is wrong with every observer; then none stays open.
    """
    collector, opened = ProblemCollector(), []
    with contextlib.ExitStack() as closing:
        for i, chosen in enumerate(config.observers):
            name = f"observer {chosen.type}"
            call = _Call(config.plugin_of(chosen), name, f"$.observers[{i}]", config.problem)
            with collector:
                observer = call.returns(Observer, functools.partial(chosen.open, ctx))
                closing.callback(run, observer.close)
                opened.append((f"{name} ($.observers[{i}])", observer))
        collector.raise_if_any()
        closing.pop_all()
    return opened


def attach(tier: ArenaTierConfig, handle: str, cache: PagedKVCache) -> Mover:
    """In a worker process: a mover between the engine's pages and the slots of this arena.

    ``handle`` is what `AllocatorBackend.handle` said where the arena was opened. Raises ConfigError.
    """
    return _worker_call(tier, "attach to").returns(Mover, lambda: tier.config.attach(handle, cache))


def attach_reader(tier: StoreTierConfig, handle: str, cache: PagedKVCache) -> DirectReader:
    """In a worker process: what reads the frames of this store by itself, into the engine's pages.

    ``handle`` is what `SupportsDirectReads.reader_handle` said where the store was opened. Raises ConfigError.
    """
    call = _worker_call(tier, "read the frames of")
    return call.returns(DirectReader, lambda: tier.config.attach_reader(handle, cache, tier.timeout))


def _worker_call(tier: ArenaTierConfig | StoreTierConfig, verb: str) -> _Call:
    problem = functools.partial(Problem, tier.source.where)
    return _Call(tier.source.plugin, f"tier {tier.name}", tier.source.path, problem, verb)


@attrs.frozen
class _Call:
    """Calls to one plugin. Whatever it raises or returns, the caller gets the right type or a ConfigError."""

    plugin: str
    what: str  #: what is opened: ``tier disk``
    path: str  #: of the setting that chose the plugin
    problem: Callable[[str, str, str], Problem]  #: made from a path, why, and a hint
    verb: str = "open"

    def returns(self, expected: type[T], work: Callable[[], Any]) -> T:
        """Call the plugin and return the result. Raises ConfigError if it is not of the expected type."""
        value = self.ask(work)
        if not isinstance(value, expected):
            found = "None" if value is None else f"a value of type {type(value).__name__}"
            raise self.failed(f"it returned {found}, and not a {expected.__name__}")
        return value

    def ask(self, work: Callable[[], T]) -> T:
        """Call the plugin and return the result. Errors that plugins may raise become problems with the same text."""
        outcome = run(work)
        if (error := outcome.error) is None:
            return outcome.value
        if isinstance(error, ConfigError):  # its `$` is the setting that chose this plugin
            problems = [(self.path + each.path.removeprefix("$"), each.why, each.hint) for each in error.problems]
            raise ConfigError([self.problem(*each) for each in problems]) from error
        if isinstance(error, BackendError | ImportError):
            raise ConfigError([self.problem(self.path, str(error), "")]) from error
        failed = self.failed(f"{type(error).__name__}: {error}")
        logger.debug("kvtier: %s", failed, exc_info=error)
        raise failed from error

    def failed(self, why: str) -> ConfigError:
        """The error for a plugin that does what the interface does not allow."""
        why = f"plugin {self.plugin} cannot {self.verb} {self.what}: {why}"
        return ConfigError([self.problem(self.path, why, "")])


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
        if isinstance(tier, ArenaTierConfig) and tier.keep is not None:
            path = f"{self.config.path_of(self.number)}.keep"
            raise ConfigError([self.config.problem(path, "only kvtier serve keeps its memory", "remove it")])
        codec = self._codec(ctx)
        if isinstance(tier, StoreTierConfig) and tier.config.of_peers and not codec.is_raw:
            why = "frames in the memory of peers have neither a serializer nor a keyed seal"
            hint = "remove 'serializer', 'seal_key' and 'encrypt'; the tier's own settings say who may read"
            raise ConfigError([self.config.problem(self.config.path_of(self.number), why, hint)])
        sharers = 1 if self._shared else ctx.replicas  # engines that divide the capacity
        if tier.capacity is not None:
            self._check_limit("capacity", tier.capacity, "holds", codec.max_frame_nbytes, sharers)
        ctx = attrs.evolve(ctx, namespace=codec.namespace, capacity=Nbytes((tier.capacity or 0) // sharers))
        if isinstance(tier, StoreTierConfig):
            self._check_limit("inflight", tier.inflight, "lets through", ctx.layout.frame_nbytes)
            ctx = attrs.evolve(ctx, timeout=tier.timeout)
        policy = self._call(tier.eviction, "eviction").returns(EvictionPolicy, tier.eviction.open)
        # The state of the policy is stored as a frame too.
        longest = Nbytes(max(codec.max_frame_nbytes, FRAME_HEADER_NBYTES + MAX_POLICY_STATE_NBYTES))
        store = self.store(attrs.evolve(ctx, max_frame_nbytes=longest, slot_nbytes=codec.max_frame_nbytes))
        if codec.keyed_seal is not None:
            store = SealedNames(store, codec.keyed_seal)
        if isinstance(store, Backend) and codec.is_raw and not self._shared and self.config.has_peers:
            store = ShownStore(store, codec)
            self.closing.callback(store.close)
        capacity = Nbytes(_REMEMBERED_FRAMES * codec.max_frame_nbytes) if self._shared else ctx.capacity
        index = (PartedIndex if len(ctx.layout.parts) > 1 else CacheIndex)(policy, tier.store_after)
        return OpenedTier(tier, store, index, codec, capacity, self)

    @property
    def _shared(self) -> bool:
        """Is it a tier whose store other engines use as well?"""
        return isinstance(self.tier, StoreTierConfig) and self.tier.config.shared

    def start(self, opened: OpenedTier, arenas: int) -> Arena | StoreTier:
        """Make it a level of the stack, below ``arenas`` arenas. Raises ConfigError."""
        tier = self.tier
        if isinstance(tier, ArenaTierConfig):
            return self.runtime.arena(tier.name, arenas, opened.store, opened.index)
        pool = _pool(tier.name, tier.threads, self.runtime, self.closing)
        return self._call(tier.config, verb="start").ask(
            lambda: StoreTier(
                tier.name,
                opened.store,
                pool=pool,
                index=opened.index,
                codec=opened.codec,
                capacity=opened.capacity,
                inflight=tier.inflight,
                timeout=tier.timeout,
                threads=tier.threads,
                not_direct=self._why_not_direct(opened),
                takes_writes=not tier.config.of_peers,
                clock=self.runtime.clock,
            )
        )

    def _why_not_direct(self, opened: OpenedTier) -> str:
        """Why workers may not read the frames of this store by themselves; empty if they may."""
        if not isinstance(opened.store, SupportsDirectReads) or not opened.store.reader_handle():
            return "the tier does not offer it"
        if not opened.codec.is_raw:
            return "they are encoded or have a keyed seal"
        if opened.codec.regroups:
            return "frames of other numbers of ranks are rearranged in slots"
        if opened.codec.parts > 1:
            return "the model's chunks have several parts"
        if opened.codec.packs and not self.tier.config.reads_packed:
            return "its reader does not unpack the frames of an arena that packs"
        return "" if self.runtime.recomputes else FAILS_REQUESTS

    def _codec(self, ctx: OpenContext) -> FrameCodec:
        if isinstance(self.tier, ArenaTierConfig):
            return self.runtime.codec(ctx.namespace, ctx.layout)
        chosen = self.tier.serializer
        call = self._call(chosen, "serializer")
        unpacked = attrs.evolve(ctx, layout=attrs.evolve(ctx.layout, packed=False))
        serializer = call.ask(lambda: chosen.open(unpacked))
        identity = None
        if serializer is not None:
            serializer = call.returns(Serializer, lambda: serializer)
            identity = call.ask(lambda: identity_of(chosen, packed=ctx.layout.packed))
            if ctx.layout.packed:
                serializer = OfUnpacked(serializer, unpacked.layout)
        keyed_seal = self._call(self.tier.seal_key, "seal_key").ask(lambda: open_keyed_seal(self.tier))
        apart = {"shared": self._shared, "keyed_seal": keyed_seal}
        return call.ask(lambda: self.runtime.codec(ctx.namespace, ctx.layout, serializer, identity, **apart))

    def store(self, ctx: OpenContext) -> AllocatorBackend | Backend:
        """Open the memory of an arena, or a backend, alone. Raises ConfigError."""
        call = self._call(self.tier.config)
        expected = AllocatorBackend if isinstance(self.tier, ArenaTierConfig) else Backend
        store = call.returns(expected, lambda: self.tier.config.open(ctx))
        self.closing.callback(lambda: run(store.close))
        if isinstance(store, AllocatorBackend) and (why := call.ask(lambda: _contradiction(store, ctx))):
            raise call.failed(why)
        if isinstance(store, Backend) and store.shared != self._shared:
            raise call.failed(f"its config says shared = {self._shared}, and its backend {store.shared}")
        return store

    def _call(self, chosen: object, key: str = "", verb: str = "open") -> _Call:
        """A call to a plugin of this tier. ``key`` is the setting that chose it, empty for the tier itself."""
        path = self.config.path_of(self.number)
        return _Call(
            self.config.plugin_of(chosen),
            f"the {key} of tier {self.tier.name}" if key else f"tier {self.tier.name}",
            f"{path}.{key}" if key else path,
            self.config.problem,
            verb,
        )

    def _check_limit(self, key: str, limit: Nbytes, verb: str, chunk_nbytes: int, replicas: int = 1) -> None:
        if limit // replicas < chunk_nbytes:
            kib = -(-chunk_nbytes // 1024)
            divided = f", divided among {replicas} data parallel replicas," if replicas > 1 else ""
            why = f"{limit}{divided} {verb} no chunk: one is {math.ceil(kib / 102.4) / 10:g}MiB"
            hint = f"write at least {kib * replicas}KiB"
            raise ConfigError([self.config.problem(f"{self.config.path_of(self.number)}.{key}", why, hint)])


def _contradiction(arena: AllocatorBackend, ctx: OpenContext) -> str:
    """How an arena's memory violates the interface; empty if it does not."""
    slots, nbytes = arena.slots, arena.slot_nbytes
    if not isinstance(slots, int) or slots < 1:
        return f"an arena has at least one slot, and it says {slots!r}"
    if nbytes != ctx.slot_nbytes:
        return f"a slot holds one frame of {ctx.slot_nbytes} bytes, and it says {nbytes!r}"
    if slots * nbytes > ctx.capacity:
        return f"{slots} slots of {nbytes} bytes are more than its capacity of {ctx.capacity}"
    if slots < ctx.layout.self_test_slots:
        return f"copies are tested in {ctx.layout.self_test_slots} slots before anything is stored, and it has {slots}"
    for slot in (0, slots - 1):
        view = arena.view(slot)
        if not isinstance(view, memoryview) or view.readonly or (len(view), view.nbytes) != (nbytes, nbytes):
            return f"the view of slot {slot} is not a writable memoryview of {nbytes} bytes"
    if not isinstance(arena.handle, str):
        return f"a handle is text, and it says {arena.handle!r}"
    return ""


def _open_tiers(
    config: StackConfig,
    numbers: Iterable[int],
    ctx: OpenContext,
    runtime: Runtime,
    closing: contextlib.ExitStack,
    problems: Callable[[_Opening], contextlib.AbstractContextManager],
) -> list[OpenedTier]:
    """All that can be opened; ``problems`` takes the ConfigErrors of a tier."""
    opened = []
    for number in numbers:
        opening = _Opening(config, number, config.tiers[number], runtime, closing.enter_context(contextlib.ExitStack()))
        with problems(opening):
            opened.append(opening.open(ctx))
    return opened


@contextlib.contextmanager
def _unless_optional(collector: ProblemCollector, opening: _Opening) -> Iterator[None]:
    """The problems of a tier go to ``collector``; or to the log, if the stack goes on without it: then it is closed."""
    try:
        yield
    except ConfigError as error:
        if isinstance(opening.tier, ArenaTierConfig) or opening.tier.required:
            collector.problems += error.problems
        else:
            opening.closing.close()
            why = str(error).replace("\n", "; ")
            logger.warning("kvtier: %s: not opened, and not required: %s", opening.tier.name, why)


def _pool(name: str, threads: int, runtime: Runtime, closing: contextlib.ExitStack) -> Pool:
    pool = runtime.pool(name, threads)
    closing.callback(pool.close, 1.0)
    return pool
