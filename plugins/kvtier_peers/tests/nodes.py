"""Nodes whose memory is a folder, so that a test, or another process, can put frames into it."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import attrs
from servers.ports import free_port

from kvtier_core.interfaces import OpenContext
from kvtier_core.types import ChunkKey, EnvSecret, Seconds
from kvtier_peers.config import PeersConfig
from kvtier_testing.samples import make_context, make_frame, make_keys

KEYS = make_keys(4)
FRAMES = {key: make_frame(key) for key in KEYS}
NBYTES = len(FRAMES[KEYS[0]])
TOKEN = EnvSecret("KVTIER_TEST_PEERS")
os.environ[TOKEN.variable] = "what all nodes of the tests know of each other"


class Memory(Mapping[ChunkKey, memoryview]):
    """The frames of a node: a file each. The view of a key is another one when its file is."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._views: dict[ChunkKey, tuple[int, memoryview]] = {}
        folder.mkdir(parents=True, exist_ok=True)

    def put(self, key: ChunkKey, frame: bytes | memoryview) -> None:
        new = self._path(key).with_suffix(f".{time.monotonic_ns()}")
        new.write_bytes(frame)
        new.rename(self._path(key))

    def drop(self, key: ChunkKey) -> None:
        self._path(key).unlink(missing_ok=True)

    def __getitem__(self, key: ChunkKey) -> memoryview:
        try:
            with self._path(key).open("rb") as file:
                inode = os.fstat(file.fileno()).st_ino
                if self._views.get(key, (0,))[0] != inode:
                    self._views[key] = inode, memoryview(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ))
        except FileNotFoundError:
            raise KeyError(key) from None
        return self._views[key][1]

    def __iter__(self) -> Iterator[ChunkKey]:
        return iter([ChunkKey(bytes.fromhex(path.name)) for path in self._folder.iterdir() if not path.suffix])

    def __len__(self) -> int:
        return len(list(self._folder.iterdir()))

    def _path(self, key: ChunkKey) -> Path:
        return self._folder / key.hex()


def open_node(memory: Mapping[ChunkKey, memoryview] | None = None, ctx: OpenContext | None = None, **settings):
    """A node that shows this memory; its ``address`` is where.

    It has a token, since a `Proxy` may stand between it and others.
    """
    settings = {"listen": f"127.0.0.1:{free_port()}", "token": TOKEN, "patience": Seconds(10), **settings}
    node = PeersConfig(**settings).open(attrs.evolve(ctx or make_context(), sealed={} if memory is None else memory))
    node.address = settings["listen"]
    return node


def read(node, keys, nbytes=NBYTES):
    """The frames that a node gets, and what it says of those that it does not get."""
    into = [memoryview(bytearray(nbytes)) for _ in keys]
    counts = node.read(keys, into)
    return [bytes(view[:count]) if isinstance(count, int) else count for view, count in zip(into, counts, strict=True)]


def finds(node, *keys):
    return list(node.contains(keys)) == [True] * len(keys)


def holders(node):
    """How many peers are known to show each frame."""
    return list(map(len, node.holders(KEYS)))
