"""What a tier's policy learned, kept in the tier's own store as one more frame: sealed, verified, replaced when it closes."""

from __future__ import annotations

import hashlib

from kvtier_core import frame
from kvtier_core.errors import BackendError
from kvtier_core.interfaces import Backend
from kvtier_core.types import KEY_NBYTES, PAGE_NBYTES, ChunkKey, Namespace


def key_of(namespace: Namespace) -> ChunkKey:
    """No chunk has this key: the digests of chunks cover tokens."""
    return ChunkKey(hashlib.blake2b(b"what the policy learned" + namespace.digest, digest_size=KEY_NBYTES).digest())


def nbytes_of(saved: bytes) -> int:
    """What it takes in a store."""
    return PAGE_NBYTES + -(-len(saved) // PAGE_NBYTES) * PAGE_NBYTES if saved else 0


def write(backend: Backend, namespace: Namespace, saved: bytes) -> None:
    """Raises BackendError."""
    sealed = memoryview(bytearray(nbytes_of(saved)))
    sealed[PAGE_NBYTES : PAGE_NBYTES + len(saved)] = saved
    frame.seal(sealed, namespace, key_of(namespace), len(saved))
    backend.write([key_of(namespace)], [sealed])


def read(backend: Backend, namespace: Namespace, length: int) -> bytes:
    """What was written, if it is whole and as long as it should be; else nothing, and the policy starts cold."""
    key = key_of(namespace)
    landed = memoryview(bytearray(nbytes_of(bytes(length))))
    try:
        count = backend.read([key], [landed])[0]
    except BackendError:
        return b""
    if not 0 < count <= len(landed) or frame.check(landed[:count], namespace, key, payload_nbytes=length):
        return b""
    return bytes(frame.payload_of(landed[:count]))
