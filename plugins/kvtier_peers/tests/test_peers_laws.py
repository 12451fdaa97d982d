"""The laws of a shared backend, kept by a node and its peer, into whose memory the tests put what the laws write."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import attrs
from nodes import Memory, free_port
from patience import wait_until

from kvtier_core.interfaces import Backend, BackendConfig, OpenContext
from kvtier_core.testing import SharedBackendLaws
from kvtier_core.testing.samples import make_key
from kvtier_core.types import EnvSecret, Seconds
from kvtier_peers.backend import PeersBackend
from kvtier_peers.config import PeersConfig

THERE = make_key(1 << 40)  #: so that a test sees when a node has found its peer


class Pair(Backend):
    """A node and its peer."""

    shared = True

    def __init__(self, memory: Memory, peer: PeersBackend, node: PeersBackend):
        self._memory, self._peer, self._node = memory, peer, node
        self._closed = False
        self.facts = node.facts

    def contains(self, keys):
        """When the peer has told what it shows: the laws know of no delay."""
        wait_until(lambda: self._closed or [key in self._memory for key in keys] == list(self._node.contains(keys)))
        return self._node.contains(keys)

    def read(self, keys, into):
        self.contains(keys)
        return self._node.read(keys, into)

    def write(self, keys, frames):
        for key, frame in zip(keys, frames, strict=True):
            self._memory.put(key, frame)

    def delete(self, keys):
        for key in keys:
            self._memory.drop(key)

    def close(self):
        self._closed = True
        self._node.close()
        self._peer.close()


@attrs.frozen
class PairConfig(BackendConfig):
    type: ClassVar[str] = "peers"
    shared: ClassVar[bool] = True

    folder: Path
    token: EnvSecret | None = None

    def open(self, ctx: OpenContext) -> Backend:
        memory = Memory(self.folder / ctx.namespace.digest.hex()[:16])
        memory.put(THERE, b"x")
        addresses = [f"127.0.0.1:{free_port()}" for _ in range(2)]
        settings = {"token": self.token, "patience": Seconds(10)}
        peer = PeersConfig(listen=addresses[0], **settings).open(attrs.evolve(ctx, sealed=memory))
        node = PeersConfig(listen=addresses[1], peers=addresses[:1], **settings).open(ctx)
        wait_until(lambda: node.contains([THERE]) == [True])
        return Pair(memory, peer, node)


class TestPeers(SharedBackendLaws):
    persistent = True

    def config(self, folder):
        return PairConfig(folder)
