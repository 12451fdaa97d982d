"""The YAML file as classes, and the composition root: from a StackConfig to an open StorageManager."""

from __future__ import annotations

import contextlib
import math
import pathlib
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal

import attrs

from kvtier_core.builtin.chained import ChainedConfig
from kvtier_core.builtin.raw import RawConfig
from kvtier_core.config import decode as structure
from kvtier_core.config import yaml_nodes as nodes
from kvtier_core.config.decode import Choose, Setting, Unavailable
from kvtier_core.config.registry import KINDS, Registry
from kvtier_core.config.yaml_nodes import Node, ProblemCollector
from kvtier_core.errors import BackendError, ConfigError, Problem
from kvtier_core.frames.codec import FrameCodec
from kvtier_core.interfaces import (
    MAX_POLICY_STATE_NBYTES,
    AllocatorBackend,
    ArenaConfig,
    Backend,
    BackendConfig,
    EvictionConfig,
    OpenContext,
    SerializerConfig,
    TokenDatabaseConfig,
)
from kvtier_core.policies.gittins import GittinsConfig
from kvtier_core.stack.arena import Arena
from kvtier_core.stack.index.cache_index import CacheIndex
from kvtier_core.stack.manager import StorageManager
from kvtier_core.stack.store_tier.tier import StoreTier
from kvtier_core.transfer.io_pool import IOPool, Pool
from kvtier_core.types import FRAME_ALIGNMENT, Nbytes, Seconds

#: `chunk_tokens: auto` puts at least so much into a frame: at 1 MiB a disk is as fast as at 32 (benchmarks/RESULTS.md),
#: and at 256 KiB it was seen to write a third less, for a frame costs a file or a request besides its bytes.
_FRAME_NBYTES = 1 << 20
#: But no more tokens, unless a block has more: of each prompt half a chunk, on average, is computed again.
_MOST_TOKENS = 256

_KIND_OF = {family: word for word, kind in KINDS.items() for family in kind.families}


#: Of any tier: how many requests must name a chunk before it is kept.
_STORE_AFTER = {"default": 1, "validator": attrs.validators.ge(1)}

#: Of a tier below the arenas. More threads than this wait for each other and for the GIL, whatever the store can do.
_MOST_THREADS = 64


@attrs.frozen
class ArenaTierConfig:
    """One entry of ``tiers``: the core's own keys, and in ``config`` those of the plugin."""

    name: str
    config: ArenaConfig
    capacity: Nbytes
    eviction: EvictionConfig = attrs.field(factory=GittinsConfig)
    store_after: int = attrs.field(**_STORE_AFTER)


@attrs.frozen
class StoreTierConfig:
    """One entry of ``tiers``: the core's own keys, and in ``config`` those of the plugin."""

    name: str
    config: BackendConfig
    capacity: Nbytes
    eviction: EvictionConfig = attrs.field(factory=GittinsConfig)
    serializer: SerializerConfig = attrs.field(factory=RawConfig)
    threads: int = attrs.field(default=4, validator=[attrs.validators.ge(1), attrs.validators.le(_MOST_THREADS)])
    inflight: Nbytes = attrs.field(default=Nbytes(1 << 30))  #: bytes of arena slots that calls to this tier may hold
    store_after: int = attrs.field(**_STORE_AFTER)


@attrs.frozen
class RecordConfig:
    """Where the traffic of a live engine is recorded, for `kvtier simulate`."""

    path: pathlib.Path  #: a folder; each start of an engine adds a file
    capacity: Nbytes = attrs.field(default=Nbytes(256 << 20))  #: of all files in it; then recording ends


#: How the name begins under which an operator vouches for weights.
NAMED = "name:"


def _known_way(config: object, field: attrs.Attribute, way: str) -> None:
    named = way.startswith(NAMED) and way != NAMED
    if not named and way not in ("full", "sampled"):
        raise ValueError(f"{way!r} is none of full, sampled, {NAMED}…")


@attrs.frozen
class IdentityConfig:
    """How an engine finds out whether it may share KV with others."""

    #: ``full`` reads every byte of the weights, ``sampled`` some of each tensor; ``name:…`` takes the operator's word
    #: for what they are, where they do not come from files.
    weights: str = attrs.field(default="full", validator=_known_way)

    @property
    def named(self) -> bool:
        """Does the operator say what the weights are?"""
        return self.weights.startswith(NAMED)


def _one_or_more(config: object, field: attrs.Attribute, tokens: int | str) -> None:
    if tokens != "auto":
        attrs.validators.ge(1)(config, field, tokens)


@attrs.frozen
class StackConfig:
    tiers: tuple[ArenaTierConfig | StoreTierConfig, ...]  #: hottest first
    chunk_tokens: int | Literal["auto"] = attrs.field(default="auto", validator=_one_or_more)
    token_database: TokenDatabaseConfig = attrs.field(factory=ChainedConfig)
    load_wait: Seconds = attrs.field(default=Seconds(2))  #: how long a request waits for what lies below the arenas
    save_decode: bool = False
    identity: IdentityConfig = attrs.field(factory=IdentityConfig)
    #: When vLLM resets its caches. It does so for new weights, a sleep and a pause, and does not say for which:
    #: ``keep`` is for an engine whose weights never change while it runs.
    on_reset: Literal["forget", "keep"] = "forget"
    record: RecordConfig | None = None
    _places: Mapping[str, str] = attrs.field(factory=dict, eq=False, repr=False)

    @property
    def arenas(self) -> tuple[ArenaTierConfig, ...]:
        return tuple(tier for tier in self.tiers if isinstance(tier, ArenaTierConfig))

    def origin(self, path: str) -> str:
        """Where this setting was written, or ``default``."""
        return self._places.get(path, "default")

    def problem(self, path: str, why: str, hint: str = "") -> Problem:
        """A problem at this path, or at the nearest place above it that was written."""
        written = [each for each in self._places if path.startswith(each) and path[len(each) :][:1] in ("", ".", "[")]
        return Problem(self._places[max(written, key=len)] if written else "StackConfig", path, why, hint)

    def check_engine(self, block_size: int) -> None:
        """Raises ConfigError if the stack does not suit an engine with blocks of this many tokens."""
        if self.chunk_tokens == "auto":
            return
        below = self.chunk_tokens // block_size * block_size
        if below == self.chunk_tokens:
            return
        nearest = f"{below} or {below + block_size}" if below else f"{block_size}"
        why = f"{self.chunk_tokens} is not a multiple of the engine's block size {block_size}"
        raise ConfigError([self.problem("$.chunk_tokens", why, f"write {nearest}")])

    def sized(self, block_size: int, block_nbytes: int) -> StackConfig:
        """With ``chunk_tokens`` as a number, for an engine whose blocks have so many bytes in all layers and ranks."""
        if self.chunk_tokens != "auto":
            return self
        blocks = min(-(-_FRAME_NBYTES // block_nbytes), max(1, _MOST_TOKENS // block_size))
        return attrs.evolve(self, chunk_tokens=blocks * block_size)


# -- from what was written to a StackConfig ------------------------------------------------------------


def load_config(source: pathlib.Path | str | Mapping, registry: Registry, label: str = "inline") -> StackConfig:
    """From a YAML file, or from plain values that somebody calls ``label``. Raises ConfigError with every problem."""

    def choose(family: type, name: str) -> type | Unavailable:
        return registry.choose(_KIND_OF[family], name)

    collector = ProblemCollector()
    root = (
        nodes.from_plain(source, label, collector)
        if isinstance(source, Mapping)
        else nodes.from_file(source, collector)
    )
    with collector:
        config = _read_stack(root, choose)
    collector.raise_if_any()
    return config


def _read_stack(root: Node, choose: Choose) -> StackConfig:
    known = {
        "version": Setting(structure.reader(Literal[1]), required=True),
        "tiers": Setting(_read_tiers, required=True),
        **structure.settings(StackConfig, but=("tiers", "_places")),
    }
    collector = ProblemCollector()
    values = structure.read_keys(root, known, choose, collector)
    structure.validate(StackConfig, root, values, collector)
    collector.raise_if_any()
    del values["version"]
    places = {node.path: node.where for node in root.walk()}
    return structure.construct(StackConfig, root, {**values, "places": places})


def _read_tiers(node: Node, choose: Choose) -> tuple[ArenaTierConfig | StoreTierConfig, ...]:
    items = node.items()
    if not items:
        raise node.wrong("a stack needs at least one tier")
    collector = ProblemCollector()
    plugins = [_plugin_of(item, choose, collector) for item in items]
    if plugins[0] is not None and not issubclass(plugins[0], ArenaConfig):
        why = f"the first tier must be an arena, and '{plugins[0].type}' is none: no engine can reach its memory"
        collector.problems.append(items[0].entries()["type"].problem(why, "put an arena first, cpu for instance"))
    tiers = []
    for item, plugin, name in zip(items, plugins, _names(plugins), strict=True):
        if plugin is not None:
            with collector:
                tiers.append(_read_tier(item, plugin, name, choose))
    collector.raise_if_any()
    return tuple(tiers)


def _plugin_of(node: Node, choose: Choose, collector: ProblemCollector) -> type | None:
    """None if nothing more can be said of this tier; then all that is wrong is in ``collector``."""
    with collector:
        return structure.chosen(node, BackendConfig, choose)
    if isinstance(node.value, dict):
        structure.read_known(node, _own_settings(StoreTierConfig), choose, collector)
    return None


def _read_tier(node: Node, plugin: type, name: str, choose: Choose) -> ArenaTierConfig | StoreTierConfig:
    shape = ArenaTierConfig if issubclass(plugin, ArenaConfig) else StoreTierConfig
    own, its = _own_settings(shape), structure.settings(plugin)
    known = {"type": Setting(structure.reader(str), required=True), **own, **its}
    collector = ProblemCollector()
    values = structure.read_keys(node, known, choose, collector)
    structure.validate(plugin, node, values, collector)
    structure.validate(shape, node, values, collector)
    collector.raise_if_any()
    config = structure.construct(plugin, node, {key: values[key] for key in its if key in values})
    core = {key: values[key] for key in own if key in values}
    return structure.construct(shape, node, {"name": name, "config": config, **core})


def _own_settings(shape: type) -> dict[str, Setting]:
    return structure.settings(shape, but=("name", "config"))


def _names(plugins: Sequence[type | None]) -> list[str]:
    """`disk`, and `disk#2` for the second of that type."""
    seen: Counter[type | None] = Counter()
    names = []
    for plugin in plugins:
        seen[plugin] += 1
        first = plugin.type if plugin else ""
        names.append(first if seen[plugin] == 1 else f"{first}#{seen[plugin]}")
    return names


# -- from a StackConfig to a StorageManager ------------------------------------------------------------


@attrs.frozen
class Runtime:
    """What a stack has around it: threads, time, and what frames go through. The simulator has its own."""

    pool: Callable[[str, int], Pool] = IOPool
    clock: Callable[[], float] = time.monotonic
    codec: type[FrameCodec] = FrameCodec


_HERE = Runtime()


@attrs.frozen
class _Opened:
    """A tier whose plugins are open."""

    tier: ArenaTierConfig | StoreTierConfig
    store: AllocatorBackend | Backend
    index: CacheIndex
    codec: FrameCodec
    capacity: Nbytes  #: this engine's share


def open_stack(config: StackConfig, ctx: OpenContext, runtime: Runtime = _HERE) -> StorageManager:
    """All tiers open, or none: then raises ConfigError with what is wrong with each.

    Capacities are those of the node: of several engines that share the configuration each gets an equal part.
    """
    collector = ProblemCollector()
    opened: list[_Opened] = []
    levels: list[Arena | StoreTier] = []
    with contextlib.ExitStack() as closing:
        for i, tier in enumerate(config.tiers):
            with _blaming(config, i, collector):
                share = Nbytes(tier.capacity // ctx.replicas)
                opened.append(_open(tier, attrs.evolve(ctx, capacity=share), runtime, closing))
        collector.raise_if_any()  # a tier may evict from its store as it starts, so none starts before all are open
        for i, each in enumerate(opened):
            with _blaming(config, i, collector):
                levels.append(_start(each, sum(isinstance(level, Arena) for level in levels), runtime, closing))
        collector.raise_if_any()
        pool = _pool("seal", 1, runtime, closing)
        manager = StorageManager(levels, namespace=ctx.namespace, layout=ctx.layout, pool=pool, clock=runtime.clock)
        closing.pop_all()
    return manager


@contextlib.contextmanager
def _blaming(config: StackConfig, i: int, collector: ProblemCollector) -> Iterator[None]:
    """Whatever speaks against opening tier ``i`` is a problem there. Of a ConfigError, `$` is the tier."""
    path = f"$.tiers[{i}]"
    try:
        yield
    except ConfigError as error:
        collector.problems += [
            config.problem(path + each.path.removeprefix("$"), each.why, each.hint) for each in error.problems
        ]
    except (BackendError, ImportError) as error:
        collector.problems.append(config.problem(path, str(error)))


def _open(
    tier: ArenaTierConfig | StoreTierConfig, ctx: OpenContext, runtime: Runtime, closing: contextlib.ExitStack
) -> _Opened:
    serializer = tier.serializer.open(ctx) if isinstance(tier, StoreTierConfig) else None
    codec = runtime.codec(ctx.namespace, ctx.layout, serializer)
    _check_room("$.capacity", tier.capacity, "holds", codec.bound, ctx.replicas)
    if isinstance(tier, StoreTierConfig):
        _check_room("$.inflight", tier.inflight, "lets through", ctx.layout.frame_nbytes)
    index = CacheIndex(tier.eviction.open(), tier.store_after)
    longest = max(
        codec.bound, FRAME_ALIGNMENT + MAX_POLICY_STATE_NBYTES
    )  # what a policy learned is kept as a frame, too
    store = tier.config.open(attrs.evolve(ctx, max_frame_nbytes=Nbytes(longest)))
    closing.callback(_close, store)
    return _Opened(tier, store, index, codec, ctx.capacity)


def _start(opened: _Opened, arenas: int, runtime: Runtime, closing: contextlib.ExitStack) -> Arena | StoreTier:
    tier = opened.tier
    if isinstance(tier, ArenaTierConfig):
        return Arena(tier.name, arenas, opened.store, opened.index)
    return StoreTier(
        tier.name,
        opened.store,
        pool=_pool(tier.name, tier.threads, runtime, closing),
        index=opened.index,
        codec=opened.codec,
        capacity=opened.capacity,
        inflight=tier.inflight,
        clock=runtime.clock,
    )


def _check_room(path: str, room: Nbytes, verb: str, chunk_nbytes: int, replicas: int = 1) -> None:
    if room // replicas < chunk_nbytes:
        kib = -(-chunk_nbytes // 1024)
        divided = f", divided among {replicas} data parallel replicas," if replicas > 1 else ""
        why = f"{room}{divided} {verb} no chunk: one is {math.ceil(kib / 102.4) / 10:g}MiB"
        raise ConfigError([Problem("", path, why, f"write at least {kib * replicas}KiB")])


def _pool(name: str, threads: int, runtime: Runtime, closing: contextlib.ExitStack) -> Pool:
    pool = runtime.pool(name, threads)
    closing.callback(pool.close, 1.0)
    return pool


def _close(store: AllocatorBackend | Backend) -> None:
    with contextlib.suppress(BackendError):
        store.close()
