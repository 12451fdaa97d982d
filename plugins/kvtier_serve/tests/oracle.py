"""The bytes of a chunk, known outside kvtier: they follow from its key and from the epoch in which it was computed."""

from __future__ import annotations

import functools
import hashlib

from kvtier_core.types import ChunkKey


@functools.lru_cache(maxsize=4096)
def kv_of(key: ChunkKey, epoch: bytes, nbytes: int) -> bytes:
    """All that a load of this key may give in this epoch, which may have any name."""
    return hashlib.shake_128(key + epoch).digest(nbytes)
