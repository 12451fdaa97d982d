"""Tiers with frames in each form, and bundles of them."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterable, Sequence
from pathlib import Path

from kvtier_core.cli import main
from kvtier_core.config.load import load_config
from kvtier_core.config.open import OpenedTier, open_tier, open_token_database
from kvtier_core.config.registry import Registry
from kvtier_core.engine.request_view import KVIdentity
from kvtier_core.errors import BackendError
from kvtier_core.frames.format import seal_part
from kvtier_core.frames.identity import codec_of_slots, namespace_of_slots
from kvtier_core.interfaces import OpenContext
from kvtier_core.layouts import ChunkLayout, part_key
from kvtier_core.types import FRAME_HEADER_NBYTES, ChunkKey
from kvtier_testing.samples import make_context, make_namespace

TOKENS = 64  #: of a chunk


def write_file(name: str, *tiers: str) -> str:
    """A configuration file with these tiers below the arena; returns its name."""
    lines = ["version: 1", f"chunk_tokens: {TOKENS}", "tiers:", "  - {type: heap, capacity: 64MiB}"]
    Path(name).write_text("\n".join([*lines, *(f"  - {{{each}}}" for each in tiers)]) + "\n")
    return name


def keys_of(file: str, tokens: Sequence[int], ctx: OpenContext, cache_salt: str = "") -> list[ChunkKey]:
    """The keys of a prompt's chunks."""
    database = open_token_database(load_config(file, Registry.discover()), ctx.namespace)
    identity = KVIdentity.of(cache_salt)
    return ctx.layout.keys(database.keys(tokens, salt=identity.salt), identity.tenant)


def payload_of(key: ChunkKey, nbytes: int) -> bytes:
    """The payload of a chunk in these tests: compressible, and different for each key."""
    return (random.Random(key).randbytes(nbytes // 4 + 1) * 4)[:nbytes]


def parts_of(keys: Iterable[ChunkKey], layout: ChunkLayout) -> list[ChunkKey]:
    """The keys of all parts of chunks."""
    if len(layout.parts) == 1:
        return list(keys)
    return [part_key(key, part.number) for key in keys for part in layout.parts]


@contextlib.contextmanager
def opened(file: str, ctx: OpenContext, number: int = 1):
    """A tier of a file, as an engine opens it."""
    with open_tier(load_config(file, Registry.discover()), number, ctx) as tier:
        yield tier


def fill(file: str, ctx: OpenContext, keys: Iterable[ChunkKey], salt: bytes = b"") -> None:
    """Store the chunks with these keys in the first store tier of a file."""
    with opened(file, ctx) as tier:
        for key in parts_of(keys, ctx.layout):
            part = ctx.layout.part_of(key)
            slot = memoryview(bytearray(part.frame_nbytes))
            slot[FRAME_HEADER_NBYTES:][: part.payload_nbytes] = payload_of(key, part.payload_nbytes)
            seal_part(slot, namespace_of_slots(ctx.namespace, ctx.layout), key, part, codec=codec_of_slots(ctx.layout))
            assert not any(tier.store.write([key], [tier.codec.encode(key, slot, salt)]) or ())


def found(tier: OpenedTier, ctx: OpenContext, keys: Iterable[ChunkKey], salt: bytes = b"") -> list[ChunkKey]:
    """The keys among these whose frame the tier serves. Each has the right payload."""
    served = []
    for key in parts_of(keys, ctx.layout):
        slot = memoryview(bytearray(ctx.layout.frame_nbytes))
        buffer = tier.codec.read_buffer(slot)
        with contextlib.suppress(BackendError):
            (count,) = tier.store.read([key], [buffer])
            if not isinstance(count, int) or not count or tier.codec.decode_verified(key, buffer, count, slot, salt):
                continue
            nbytes = ctx.layout.part_of(key).payload_nbytes
            assert slot[FRAME_HEADER_NBYTES:][:nbytes] == payload_of(key, nbytes), "wrong KV"
            served.append(key)
    return served


def run(*arguments: object) -> int:
    """The exit code of a command."""
    return main([str(each) for each in arguments])


def context(layout: ChunkLayout | None = None, model: str = "tiny") -> OpenContext:
    """The context of an engine with this layout."""
    return make_context(layout=layout, namespace=make_namespace(model))
