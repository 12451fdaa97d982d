"""The laws for one tier, and its serializer, of a user's own configuration file, collected by `kvtier conform`.

The store may hold frames of others, so the laws ask of it only what an engine with another model would ask. Every law
has its own namespaces, which are emptied when it ends, and no capacity for which others would have to make room.
"""

from __future__ import annotations

import contextlib
import functools
import secrets
import statistics
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ClassVar

import attrs
import pytest

from kvtier_core.config.load import load_config
from kvtier_core.config.model import ArenaTierConfig, StoreTierConfig
from kvtier_core.config.registry import Registry
from kvtier_core.errors import BackendError, Gone
from kvtier_core.interfaces import BackendConfig, OpenContext, SerializerConfig, SupportsNamespaces, SupportsWalk
from kvtier_core.types import ChunkKey, Namespace, Nbytes
from kvtier_testing.laws.arenas import ArenaLaws
from kvtier_testing.laws.backend_calls import HOSTILE_KEYS, BackendCallLaws
from kvtier_testing.laws.backends import BackendLaws
from kvtier_testing.laws.base import Laws, laws_of
from kvtier_testing.laws.serializers import SerializerLaws
from kvtier_testing.laws.shared_backends import SharedBackendLaws
from kvtier_testing.laws.shared_processes import store, write
from kvtier_testing.samples import make_context, make_frame, make_key, make_keys, make_layout

#: Capacity of a store that belongs to one engine: it never makes room by deleting what others left there.
_ENDLESS = Nbytes(1 << 60)
#: Capacity of a store that was made for the laws, and takes that much immediately.
_APART = Nbytes(256 << 20)
#: Laws that would have to harm what others keep in the store.
_TOO_MUCH = {
    "test_what_other_namespaces_left_counts_against_the_capacity": "would delete what other engines left in this store"
}
#: Laws that compare what a lossy codec decodes with its payload.
_OF_CLOSENESS = (
    "test_a_payload_comes_back_in_full",
    "test_an_error_that_is_stated_tells_payloads_apart",
    "test_one_instance_serves_several_threads",
    "test_views_begin_anywhere_and_hold_anything",
)
#: For the speed of a store: frame length (as with `chunk_tokens: auto`), number of frames, rounds (the median counts).
_FRAME_NBYTES, _FRAMES, _ROUNDS = 1 << 20, 32, 3
#: Every key that a law writes.
_KEYS = [*make_keys(512), *HOSTILE_KEYS, *(make_key(1000 * seed + i) for seed in range(1, 9) for i in range(12))]


def find_tier(file: str, name: str) -> ArenaTierConfig | StoreTierConfig:
    """The tier of a configuration file. Raises ConfigError, or BackendError if there is none that can be tried."""
    config = load_config(Path(file), Registry.discover())
    tiers = {tier.name: tier for tier in config.tiers}
    if name not in tiers:
        raise BackendError(f"{file} has no tier {name!r}; it has: {', '.join(tiers)}")
    if getattr(tiers[name].config, "read_only", False):
        raise BackendError(f"{name} does not accept writes, which the laws need")
    return tiers[name]


def suites_of(tier: ArenaTierConfig | StoreTierConfig, excused: Mapping[str, str]) -> list[type[Laws]]:
    """The laws for this tier, and for its serializer if it has one.

    Raises KvtierError if one cannot be opened, TypeError for an excuse that is not valid.
    """
    if isinstance(tier, ArenaTierConfig):
        # Each engine has its own memory for an arena: nothing of others can be touched.
        return [type("TestTier", (ArenaLaws,), {"config": lambda *_: tier.config, "excused": excused})]
    suite = SharedBackendLaws if tier.config.shared else BackendLaws
    of_codec = {law: excused[law] for law in laws_of(SerializerLaws) if law in excused}
    of_store = {law: why for law, why in excused.items() if law in laws_of(suite) or law not in of_codec}
    kept = {"tier": tier, "persistent": survives(tier), "excused": {**_TOO_MUCH, **of_store}}
    suites = [type("TestTier", (_LiveStore, suite), kept)]
    if tier.serializer.open(make_context()) is not None:
        its = {"config": lambda *_: tier.serializer, "excused": _unknown(tier.serializer) | of_codec}
        suites.append(type("TestSerializer", (SerializerLaws,), its))
    return suites


def _unknown(serializer: SerializerConfig) -> dict[str, str]:
    """Laws that need to know more than the configuration file states."""
    laws = {}
    if attrs.fields(type(serializer)):
        laws["test_other_options_are_another_codec"] = "only its own tests name other options"
    if not serializer.lossless:
        laws |= dict.fromkeys(_OF_CLOSENESS, "only its own tests say how close it comes")
    return laws


def survives(tier: StoreTierConfig) -> bool:
    """Is a frame still there after close and open? Raises BackendError or ConfigError if the store does not serve."""
    key = make_key(0)
    with own_namespace(tier) as (config, ctx):
        with contextlib.closing(config.open(ctx)) as backend:
            store(backend, key, make_frame(key))
        with contextlib.closing(config.open(ctx)) as backend:
            return bool(backend.contains([key])[0])


def throughput(tier: StoreTierConfig) -> dict[str, float]:
    """GB/s of ``write`` and ``read``, and milliseconds of ``contains`` for an absent key. Raises BackendError.

    Medians of a few rounds, with the tier's number of threads. Only frames count for which a write returned None, and a
    read the whole length. Each is read just after it was written, so the store may still have it in memory.
    """
    keys = make_keys(_FRAMES)
    frames = [make_frame(key, _FRAME_NBYTES) for key in keys]
    into = [memoryview(bytearray(_FRAME_NBYTES)) for _ in keys]

    def rate(call: Callable[[list[ChunkKey], list[memoryview]], Sequence[object]], views: list[memoryview]) -> float:
        begin = time.perf_counter()
        moved = threads.map(lambda key, view: call([key], [view])[0] in (None, _FRAME_NBYTES), keys, views)
        return sum(moved) * _FRAME_NBYTES / (time.perf_counter() - begin) / 1e9

    def milliseconds() -> float:
        begin = time.perf_counter()
        backend.contains([ChunkKey(bytes(32))])
        return (time.perf_counter() - begin) * 1e3

    layout = make_layout([_FRAME_NBYTES // 4 - 1024], blocks=4)
    with (
        own_namespace(tier) as (config, ctx),
        ThreadPoolExecutor(tier.threads) as threads,
        contextlib.closing(config.open(attrs.evolve(ctx, layout=layout))) as backend,
    ):
        writes = functools.partial(write, backend)
        rounds = [(rate(writes, frames), rate(backend.read, into), milliseconds()) for _ in range(_ROUNDS)]
    return dict(zip(("write", "read", "contains"), map(statistics.median, zip(*rounds, strict=True)), strict=True))


@contextlib.contextmanager
def own_namespace(tier: StoreTierConfig) -> Iterator[tuple[BackendConfig, OpenContext]]:
    """The tier's store, and what the stack would tell it in a namespace of its own; emptied afterwards."""
    with tier.config.apart() as config:
        ctx = _own(tier, config, make_context(), secrets.token_hex(8))
        try:
            yield config, ctx
        finally:
            empty(config, [ctx])


def empty(config: BackendConfig, contexts: Collection[OpenContext]) -> None:
    """Remove all that the laws may have left in these namespaces. Raises BackendError."""
    if isinstance(config, SupportsWalk):  # what was quarantined is in no namespace any more
        with config.walk() as stored:
            for each in stored:
                if each.home and any(ctx.namespace.digest.startswith(each.home) for ctx in contexts):
                    with contextlib.suppress(Gone):
                        each.remove()
    for ctx in contexts:
        with contextlib.closing(config.open(ctx)) as backend:
            there = zip(_KEYS, backend.contains(_KEYS), strict=True)
            backend.delete([key for key, is_there in there if is_there])
            if isinstance(backend, SupportsNamespaces):
                backend.drop_namespace()


def _own(tier: StoreTierConfig, config: BackendConfig, ctx: OpenContext, run: str) -> OpenContext:
    capacity = _ENDLESS if config is tier.config else _APART
    return attrs.evolve(
        ctx,
        namespace=ctx.namespace.narrowed("conform", run),
        capacity=Nbytes(0) if tier.config.shared else capacity,
        timeout=tier.timeout,
    )


class _LiveStore(BackendCallLaws):
    """Another namespace for each law, and nothing left in it."""

    tier: ClassVar[StoreTierConfig]

    @pytest.fixture(autouse=True)
    def _leave_nothing(self) -> Iterator[None]:
        self._run = secrets.token_hex(8)
        self._contexts: dict[Namespace, OpenContext] = {}
        with self.tier.config.apart() as self._config:
            yield
            if self._config is self.tier.config:  # else it is removed as a whole
                empty(self._config, self._contexts.values())

    def config(self, folder: Path) -> BackendConfig:
        return self._config

    def context(self, model: str = "tiny", capacity: int = 0, codec: str = "") -> OpenContext:
        ctx = _own(self.tier, self._config, super().context(model, capacity, codec), self._run)
        self._contexts[ctx.namespace] = ctx
        return ctx
