"""Helpers of the laws of backends: read a frame, use a store from several threads and processes, kill a writer."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection

from kvtier_core.errors import BackendError
from kvtier_core.frames.format import verify
from kvtier_core.interfaces import Backend, BackendConfig, OpenContext, SupportsListing
from kvtier_core.types import FRAME_ALIGNMENT, ChunkKey, Namespace
from kvtier_testing.samples import make_frame, make_key, make_keys, same

_SOAK_SECONDS = 1.0


def read(backend: Backend, key: ChunkKey, nbytes: int) -> bytes:
    """The frame of a key; empty if it is a miss."""
    into = memoryview(bytearray(nbytes))
    (count,) = backend.read([key], [into])
    return bytes(_filled(into, count))


def _filled(view: memoryview, count: int | BackendError) -> memoryview:
    """What a read left in a view."""
    if isinstance(count, BackendError):
        raise AssertionError(f"cannot read a frame that was written whole: {count}") from count
    return view[:count]


def listed(backend: Backend) -> Iterator[tuple[ChunkKey, int]]:
    """The frames that a backend lists; none if it lists nothing."""
    return iter(backend.scan()) if isinstance(backend, SupportsListing) else iter(())


def damage_of(whole: bytes | memoryview, key: ChunkKey, namespace: Namespace) -> str:
    """The fault of a frame; empty if it is whole and that of the key."""
    damage = verify(memoryview(whole), namespace, key)
    return "" if damage is None else damage.value


def release_view(view: memoryview, buffer: bytearray) -> None:
    """Release a view. Raises AssertionError if anything else still holds it, or a view made from it."""
    try:
        view.release()
        buffer.clear()
    except BufferError as error:
        raise AssertionError(f"the backend keeps a view after the call has returned: {error}") from error


def soak(backend: Backend, seed: int) -> None:
    """Write, read and delete batches of this thread's own keys, and know what must come back."""
    rng = random.Random(seed)
    keys = [make_key(1000 * (seed + 1) + i) for i in range(12)]
    held: dict[ChunkKey, memoryview] = {}
    deadline = time.monotonic() + _SOAK_SECONDS
    while time.monotonic() < deadline:
        batch = rng.sample(keys, rng.randint(1, 4))
        match rng.choice(("write", "read", "delete")):
            case "write":
                sizes = [rng.randint(1, 8) * FRAME_ALIGNMENT for _ in batch]
                seeds = [rng.getrandbits(32) for _ in batch]
                frames = [make_frame(*of) for of in zip(batch, sizes, seeds, strict=True)]
                backend.write(batch, frames)
                held.update(zip(batch, frames, strict=True))
            case "read":
                into = [memoryview(bytearray(8 * FRAME_ALIGNMENT)) for _ in batch]
                counts = backend.read(batch, into)
                got = [_filled(view, count) for view, count in zip(into, counts, strict=True)]
                assert same(got, [held.get(key, b"") for key in batch]), (
                    "of four threads, each with keys of its own, one read other bytes than it had written"
                )
                there = [key in held for key in batch]
                assert list(backend.contains(batch)) == there, "contains() does not say what this thread has written"
            case "delete":
                backend.delete(batch)
                for key in batch:
                    held.pop(key, None)


def come_and_go(backend: Backend, keys: Sequence[ChunkKey], nbytes: int, rounds: int) -> None:
    """Write all and delete all, again and again."""
    frames = [make_frame(key, nbytes=nbytes) for key in keys]
    for _ in range(rounds):
        backend.write(keys, frames)
        backend.delete(keys)


def write_for_ever(
    config: BackendConfig, ctx: OpenContext, seed: int, count: int, pages: Sequence[int], started: Connection
) -> None:
    """Write the first of ``count`` keys once and the others for ever, in frames of ``pages`` pages."""
    rng = random.Random(seed)
    first, *keys = make_keys(count)
    frames = [[make_frame(key, nbytes=each * FRAME_ALIGNMENT) for each in pages] for key in keys]
    backend = config.open(ctx)
    backend.write([first], [make_frame(first)])
    started.send("writing")
    while True:
        i, j = rng.sample(range(len(keys)), 2)
        backend.write([keys[i], keys[j]], [rng.choice(frames[i]), rng.choice(frames[j])])
        backend.delete([rng.choice(keys)])
