"""Frames of the tests of this plugin: written, read, and found on the server."""

from __future__ import annotations

from kvtier_core.errors import BackendError
from kvtier_core.types import FRAME_ALIGNMENT
from kvtier_testing.samples import make_frame, same

NBYTES = 5 * FRAME_ALIGNMENT
PART = 2 * FRAME_ALIGNMENT
PARTS = 3  # of a frame


def frame(key, seed=0, nbytes=NBYTES):
    return make_frame(key, nbytes=nbytes, seed=seed)


def write(tier, *keys, seed=0):
    """The result of `Backend.write`."""
    return tier.write(keys, [frame(key, seed) for key in keys])


def read(tier, *keys, nbytes=NBYTES):
    """Of each key `hit`, `miss`, or its error. A hit has the bytes that `write` has written."""
    views = [memoryview(bytearray(nbytes)) for _ in keys]
    return [
        told(count) or ("hit" if same(view[:count], frame(key)) else "other bytes")
        for key, view, count in zip(keys, views, tier.read(keys, views), strict=True)
    ]


def told(count):
    return "miss" if count == 0 else str(count) if isinstance(count, BackendError) else ""


def names(server, pattern="*"):
    """The server's contents."""
    return sorted(server.ask("KEYS", pattern))


def manifests(server):
    return [name for name in names(server, "kvtier:*{*}") if name.endswith("}")]


def parts(server):
    return names(server, "kvtier:*{*}:*:*")
