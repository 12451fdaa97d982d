"""The settings of users, as classes. `load` reads them from YAML, `open` opens the stack that they describe."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

import attrs

from kvtier_core.builtin.chained import ChainedConfig
from kvtier_core.builtin.raw import RawConfig
from kvtier_core.errors import ConfigError, Problem
from kvtier_core.interfaces import (
    ArenaConfig,
    BackendConfig,
    EvictionConfig,
    ObserverConfig,
    SerializerConfig,
    TokenDatabaseConfig,
)
from kvtier_core.policies.gittins import GittinsConfig
from kvtier_core.types import EnvSecret, Nbytes, Seconds

#: `chunk_tokens: auto` aims at frames of this size. At 1 MiB a disk is as fast as at 32 MiB (benchmarks/RESULTS.md). At
#: 256 KiB it wrote a third less in some runs, because each frame costs a file or a request besides its bytes.
_FRAME_NBYTES = 1 << 20
#: But a chunk has no more tokens than this, unless a block has. On average half a chunk of each prompt is recomputed.
_MOST_TOKENS = 256

#: Maximum of threads of a store tier. More would only wait for each other and for the GIL, even with a fast store.
_MOST_THREADS = 64

#: What plugins offer.
Config = ArenaConfig | BackendConfig | EvictionConfig | ObserverConfig | SerializerConfig | TokenDatabaseConfig

#: Prefix of the address of a server.
UNIX = "unix:"

#: Prefix of the setting by which an operator names the weights.
NAMED = "name:"


def _positive(config: object, field: attrs.Attribute, nbytes: Nbytes) -> None:
    if nbytes <= 0:
        raise ValueError(f"'{field.alias}' must be greater than 0B")


def _with_a_key(config: StoreTierConfig, field: attrs.Attribute, encrypt: bool) -> None:
    if encrypt and config.seal_key is None:
        raise ValueError("'encrypt' needs a 'seal_key'")


def _instead_of_a_report(config: StoreTierConfig, field: attrs.Attribute, accepted: str | None) -> None:
    if accepted and config.quality is not None:
        raise ValueError("'accept_quality' and 'quality' exclude each other")


@attrs.frozen
class Source:
    """The place where a tier was configured, and its plugin; for error messages."""

    where: str = "StackConfig"  #: file and line
    path: str = "$"  #: in that file
    plugin: str = "unknown"  #: ``distribution:entry point version``


@attrs.frozen
class ArenaTierConfig:
    """An arena in ``tiers``: the core's own keys, and in ``config`` those of the plugin."""

    name: str  #: its type, with a number from the second tier of a type on: ``cpu#2``
    config: ArenaConfig
    capacity: Nbytes = attrs.field(validator=_positive)  #: bytes of the frames in its slots; never exceeded
    eviction: EvictionConfig = attrs.field(factory=GittinsConfig)  #: decides what leaves it when it is full
    #: Number of requests that must have named a chunk before it is stored here.
    store_after: int = attrs.field(default=1, validator=attrs.validators.ge(1))
    #: ``auto`` packs KV in bfloat16 into slots of four fifths of the size, where packing keeps up with memory. It is
    #: lossless. KV that does not fit is not stored.
    packing: Literal["auto", "off"] = "off"
    #: For a server: a folder on a tmpfs, such as ``/dev/shm/kvtier``, where the memory outlives it. Default: none.
    keep: pathlib.Path | None = None
    source: Source = attrs.field(default=Source(), eq=False, repr=False)


@attrs.frozen
class WritesConfig:
    """How many bytes of frames a store tier may write."""

    per_day: Nbytes = attrs.field(validator=_positive)  #: divided among data parallel replicas
    #: Bytes that may be written at once after a time with few writes. Default: those of an hour.
    burst: Nbytes | None = attrs.field(default=None, validator=attrs.validators.optional(_positive))
    #: Bytes that may be written to the drive in all, as its maker states it; for `kvtier status`.
    endurance: Nbytes | None = attrs.field(default=None, validator=attrs.validators.optional(_positive))


@attrs.frozen
class StoreTierConfig:
    """A store tier in ``tiers``: the core's own keys, and in ``config`` those of the plugin."""

    name: str  #: its type, with a number from the second tier of a type on: ``disk#2``
    config: BackendConfig
    #: Required unless the tier is shared: then its store limits itself, or all its users together keep within this.
    capacity: Nbytes | None = attrs.field(default=None, validator=attrs.validators.optional(_positive))
    eviction: EvictionConfig = attrs.field(factory=GittinsConfig)  #: decides what leaves it when it is full
    serializer: SerializerConfig = attrs.field(factory=RawConfig)  #: encodes its chunks
    #: Maximum number of simultaneous calls to the store.
    threads: int = attrs.field(default=4, validator=[attrs.validators.ge(1), attrs.validators.le(_MOST_THREADS)])
    #: Bytes of arena slots that calls to this tier may hold at a time.
    inflight: Nbytes = attrs.field(default=Nbytes(1 << 30), validator=_positive)
    timeout: Seconds = Seconds(5)  #: of one call to the store; while one takes longer, no other is made
    #: Number of requests that must have named a chunk before it is stored here.
    store_after: int = attrs.field(default=1, validator=attrs.validators.ge(1))
    writes: WritesConfig | None = None  #: limits the bytes that it writes; by default nothing does
    #: A secret without which no frame of this tier can be forged: at least 32 characters, used exactly as written.
    seal_key: EnvSecret | None = None
    encrypt: bool = attrs.field(default=False, validator=_with_a_key)  #: encrypt the tier's frames, with ``seal_key``
    #: The file with the report of `kvtier quality` for this model and codec. A tier with a lossy serializer needs it.
    quality: pathlib.Path | None = None
    #: ``unmeasured``: open the tier without a report. Answers differ, by an unknown amount.
    accept_quality: Literal["unmeasured"] | None = attrs.field(default=None, validator=_instead_of_a_report)
    #: For a server: only engines of this model, as they name it, use the tier. By default a private store is for the
    #: namespace whose frames it holds, else for the first one.
    model: str | None = None
    required: bool = True  #: ``false``: if it does not open, an engine starts without it, and tries once a minute
    source: Source = attrs.field(default=Source(), eq=False, repr=False)

    @property
    def resizable(self) -> bool:
        """May its capacity change while it is open? All users of a shared store calculate with the same one."""
        return self.config.resizable and not self.config.shared


def _known_way(config: object, field: attrs.Attribute, way: str) -> None:
    named = way.startswith(NAMED) and way != NAMED
    if not named and way not in ("full", "sampled"):
        raise ValueError(f"expected full, sampled or {NAMED}…, got {way!r}")


@attrs.frozen
class IdentityConfig:
    """How an engine determines whether it may share KV with others."""

    #: ``full`` reads every byte of the weights, ``sampled`` a part of each tensor. ``name:…`` is a name that
    #: the operator gives to weights that do not come from files; it is not checked.
    weights: str = attrs.field(default="full", validator=_known_way)

    #: ``any`` shares KV with engines that have another number of tensor-parallel ranks. It is equal except for
    #: rounding: other ranks add the parts of a sum in another order.
    ranks: Literal["own", "any"] = "own"

    @property
    def named(self) -> bool:
        """Does the operator name the weights?"""
        return self.weights.startswith(NAMED)


@attrs.frozen
class SaltConfig:
    """What `RequestsConfig` says, for the requests with one ``cache_salt``."""

    cache_salt: EnvSecret
    store: Literal["all", "memory", "no"] | None = None  #: by default as for requests with other salts
    load: Literal["all", "memory", "no"] | None = None  #: by default as for requests with other salts


@attrs.frozen
class RequestsConfig:
    """Whether requests that do not say it themselves are stored and loaded: not at all, in memory only, everywhere."""

    store: Literal["all", "memory", "no"] = "all"  #: the ``kvtier.store`` of requests that do not have it
    load: Literal["all", "memory", "no"] = "all"  #: the ``kvtier.load`` of requests that do not have it
    salts: tuple[SaltConfig, ...] = ()  #: exceptions by ``cache_salt``; the first that fits counts

    def of(self, cache_salt: str | None) -> RequestsConfig:
        """What counts for the requests with this salt."""
        own = next((each for each in self.salts if each.cache_salt.value == cache_salt), None)
        return attrs.evolve(self, store=own.store or self.store, load=own.load or self.load) if own else self


def _one_or_more(config: object, field: attrs.Attribute, value: int | str) -> None:
    if not isinstance(value, str):
        attrs.validators.ge(1)(config, field, value)


def _a_socket(config: object, field: attrs.Attribute, address: str) -> None:
    if not address.startswith(f"{UNIX}/"):
        raise ValueError(f"{address!r} is not a server address; expected {UNIX}/absolute/path")


@attrs.frozen
class ProgramConfig:
    """A program that runs beside a server, and ends with it."""

    name: str = attrs.field(validator=attrs.validators.min_len(1))  #: in the log, the status and the metrics
    command: tuple[str, ...] = attrs.field(validator=attrs.validators.min_len(1))  #: its words; no shell reads them


def _distinct(config: object, field: attrs.Attribute, programs: tuple[ProgramConfig, ...]) -> None:
    if len({program.name for program in programs}) < len(programs):
        raise ValueError("two programs have the same name")


@attrs.frozen
class StackConfig:
    """A whole configuration: the tiers, and the settings of the stack."""

    tiers: tuple[ArenaTierConfig | StoreTierConfig, ...]  #: hottest first
    #: Tokens that are stored, found and loaded together. ``auto``: the fewest blocks with 1 MiB, at most 256 tokens.
    chunk_tokens: int | Literal["auto"] = attrs.field(default="auto", validator=_one_or_more)
    token_database: TokenDatabaseConfig = attrs.field(factory=ChainedConfig)  #: computes the keys of chunks
    load_wait: Seconds = attrs.field(default=Seconds(2))  #: the longest wait of a request for chunks from store tiers
    #: ``auto`` loads from a store tier if that is faster than computing; ``always`` loads every chunk that it has.
    load: Literal["auto", "always"] = "auto"
    save_decode: bool = False  #: store chunks of generated tokens, too
    requests: RequestsConfig = attrs.field(factory=RequestsConfig)  #: which requests are stored and loaded
    #: One hit in this many is audited: the engine computes its last chunk and compares it with the stored one.
    audit_every: int | Literal["off"] = attrs.field(default=1000, validator=_one_or_more)
    identity: IdentityConfig = attrs.field(factory=IdentityConfig)  #: decides which engines may share KV
    #: The reaction to a reset of vLLM's caches. vLLM resets them for new weights, a sleep or a pause, and does not
    #: report which: ``keep`` is for an engine whose weights never change while it runs.
    on_reset: Literal["forget", "keep"] = "forget"
    #: The socket of `kvtier status`, `top` and `explain`: ``auto`` is one in XDG_RUNTIME_DIR, ``off`` none.
    status: str = "auto"
    log_requests: Literal["all", "hits", "misses", "off"] = "all"  #: which requests have a line in the log
    observers: tuple[ObserverConfig, ...] = ()  #: receivers of every event
    #: The `kvtier serve` of this node that has the tiers, in place of ``tiers``: ``unix:/run/kvtier/kvtier.sock``.
    server: str | None = attrs.field(default=None, validator=attrs.validators.optional(_a_socket))
    #: For a server: programs that it runs.
    programs: tuple[ProgramConfig, ...] = attrs.field(default=(), validator=_distinct)
    _places: Mapping[str, str] = attrs.field(factory=dict, eq=False, repr=False)  # by path: file and line
    _plugins: Mapping[type, str] = attrs.field(factory=dict, eq=False, repr=False)  # by Config class: its plugin

    @property
    def arenas(self) -> tuple[ArenaTierConfig, ...]:
        """The tiers whose memory the engine can reach; the first one is always an arena."""
        return tuple(tier for tier in self.tiers if isinstance(tier, ArenaTierConfig))

    @property
    def stores(self) -> tuple[StoreTierConfig, ...]:
        """The tiers below the arenas."""
        return tuple(tier for tier in self.tiers if isinstance(tier, StoreTierConfig))

    @property
    def has_peers(self) -> bool:
        """Is one of them a tier of peers?"""
        return any(tier.config.of_peers for tier in self.stores)

    def path_of(self, number: int) -> str:
        """The path of the tier with this number in its file."""
        path = self.tiers[number].source.path
        return f"$.tiers[{number}]" if path == Source().path else path

    def origin(self, path: str) -> str:
        """The file and line of this setting, or ``default``."""
        return self._places.get(path, "default")

    def plugin_of(self, chosen: object) -> str:
        """``distribution:entry point version`` of a plugin's Config; its class if that is not known."""
        cls = type(chosen)
        return self._plugins.get(cls, f"{cls.__module__}.{cls.__qualname__}")

    def problem(self, path: str, why: str, hint: str = "") -> Problem:
        """A problem at this path, with the line of the nearest written setting above it."""
        written = [each for each in self._places if path.startswith(each) and path[len(each) :][:1] in ("", ".", "[")]
        return Problem(self._places[max(written, key=len)] if written else "StackConfig", path, why, hint)

    def describe(self) -> Iterator[str]:
        """A line for each tier that names the plugins chosen for it, and one for each observer."""
        for tier in self.tiers:
            serializer = f", serializer {tier.serializer.type}" if isinstance(tier, StoreTierConfig) else ""
            yield f"{tier.name}: {self.plugin_of(tier.config)}, eviction policy {tier.eviction.type}{serializer}"
        for observer in self.observers:
            yield f"observer {observer.type}: {self.plugin_of(observer)}"

    def check_engine(self, block_size: int) -> None:
        """Raise ConfigError if the stack does not suit an engine whose blocks have this number of tokens."""
        for number, tier in enumerate(self.tiers):
            if isinstance(tier, StoreTierConfig) and tier.model is not None:
                path = f"{self.path_of(number)}.model"
                raise ConfigError([self.problem(path, "only kvtier serve supports several models", "remove it")])
        if self.programs:
            raise ConfigError([self.problem("$.programs", "only kvtier serve runs programs", "remove it")])
        if self.chunk_tokens == "auto" or self.chunk_tokens % block_size == 0:
            return
        below = self.chunk_tokens // block_size * block_size
        nearest = f"{below} or {below + block_size}" if below else f"{block_size}"
        why = f"{self.chunk_tokens} is not a multiple of the engine's block size {block_size}"
        raise ConfigError([self.problem("$.chunk_tokens", why, f"write {nearest}")])

    def check_host(self) -> None:
        """Raise ConfigError for settings that have no effect on the pages of another engine's own offloading."""
        default = StackConfig(self.tiers)
        problems = [
            self.problem(f"$.{name}", "it has no effect where the host moves the pages", "remove it")
            for name in ("server", "chunk_tokens", "save_decode", "requests", "audit_every", "log_requests", "programs")
            if getattr(self, name) != getattr(default, name)
        ]
        if problems:
            raise ConfigError(problems)

    def sized(
        self, block_size: int, block_nbytes: int, *, most: int | None = None, within: Sequence[int] = ()
    ) -> StackConfig:
        """This configuration with ``chunk_tokens`` as a number.

        A block of the engine has ``block_size`` tokens, and ``block_nbytes`` in all layers and on all ranks. A chunk
        has at most ``most`` tokens, a multiple of ``block_size``; None: a good default. Each number of tokens in
        ``within``, also a multiple of ``block_size``, must consist of whole chunks.
        """
        if self.chunk_tokens != "auto":
            return self
        blocks = min(-(-_FRAME_NBYTES // block_nbytes), max(1, (most or _MOST_TOKENS) // block_size))
        while any(tokens % (blocks * block_size) for tokens in within) and blocks > 1:
            blocks -= 1
        return attrs.evolve(self, chunk_tokens=blocks * block_size)
