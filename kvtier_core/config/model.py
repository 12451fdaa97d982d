"""What a user may configure, as classes. `load` reads them from YAML, `compose` opens what they describe."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping
from typing import Literal

import attrs

from kvtier_core.builtin.chained import ChainedConfig
from kvtier_core.builtin.raw import RawConfig
from kvtier_core.errors import ConfigError, Problem
from kvtier_core.interfaces import ArenaConfig, BackendConfig, EvictionConfig, SerializerConfig, TokenDatabaseConfig
from kvtier_core.policies.gittins import GittinsConfig
from kvtier_core.types import Nbytes, Seconds

#: `chunk_tokens: auto` puts at least so much into a frame: at 1 MiB a disk is as fast as at 32 (benchmarks/RESULTS.md),
#: and at 256 KiB it was seen to write a third less, for a frame costs a file or a request besides its bytes.
_FRAME_NBYTES = 1 << 20
#: But no more tokens, unless a block has more: of each prompt half a chunk, on average, is computed again.
_MOST_TOKENS = 256

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
