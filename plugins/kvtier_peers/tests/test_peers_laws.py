"""The laws of a shared backend, kept by a node and its peer, into whose memory the tests put what the laws write.

A network is between the two, which fails in the laws of trouble: these hold over TLS, too.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import ClassVar

import attrs
from nodes import TOKEN, Memory
from patience import wait_until
from servers.ports import free_port
from servers.redis import make_certificate

from kvtier_core.interfaces import Backend, BackendConfig, OpenContext
from kvtier_core.types import Seconds
from kvtier_peers.config import PeersConfig
from kvtier_testing import Proxy, SharedBackendLaws
from kvtier_testing.laws.base import laws_of
from kvtier_testing.laws.shared_trouble import SharedTroubleLaws
from kvtier_testing.samples import make_key

THERE = make_key(1 << 40)  #: so that a test sees when a node has found its peer
pairs: dict[Path, list[Pair]] = {}  #: that are open, by their folders


class Pair(Backend):
    """A node and its peer."""

    shared = True

    def __init__(self, memory: Memory, node: Backend, network: Proxy, closing):
        self._memory, self._node, self._network, self._closing = memory, node, network, closing
        self._fails = self._closed = False
        self.facts = node.facts

    def contains(self, keys):
        """When the peer has told what it shows: the laws know of no delay."""
        wait_until(lambda: self._closed or self._fails or self._shows_all(keys))
        return self._node.contains(keys)

    @contextlib.contextmanager
    def failing(self, fail):
        """The network fails in this way until the context ends."""
        self.contains(list(self._memory))
        self._fails = True
        fail(self._network)
        try:
            yield
        finally:
            self._network.heal()
            self._fails = False

    def has_noticed(self):
        return not any(self._node.contains([THERE]))

    def _shows_all(self, keys):
        return [key in self._memory for key in keys] == list(self._node.contains(keys))

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
        self._closing.close()
        for each in pairs.values():
            each[:] = [pair for pair in each if pair is not self]


@attrs.frozen
class PairConfig(BackendConfig):
    type: ClassVar[str] = "peers"
    shared: ClassVar[bool] = True

    folder: Path
    tls: bool = False

    def open(self, ctx: OpenContext) -> Backend:
        memory = Memory(self.folder / ctx.namespace.digest.hex()[:16])
        memory.put(THERE, b"x")
        settings = {"token": TOKEN, "patience": Seconds(10), **(self._files() if self.tls else {})}
        with contextlib.ExitStack() as closing:
            port = free_port()
            peer = PeersConfig(listen=f"127.0.0.1:{port}", **settings).open(attrs.evolve(ctx, sealed=memory))
            closing.callback(peer.close)
            network = closing.enter_context(Proxy(("127.0.0.1", port)))
            settings |= {"listen": f"127.0.0.1:{free_port()}", "peers": [f"127.0.0.1:{network.port}"]}
            node = PeersConfig(**settings).open(ctx)
            closing.callback(node.close)
            wait_until(
                lambda: node.read([THERE], [memoryview(bytearray(1))]) == [1]
            )  # there is a connection to read on
            pair = Pair(memory, node, network, closing.pop_all())
        pairs.setdefault(self.folder, []).append(pair)
        return pair

    def _files(self):
        folder = self.folder / "tls"
        if not folder.exists():
            folder.mkdir(parents=True)
            make_certificate(folder)
        return {"ca": folder / "ca.pem", "cert": folder / "ca.pem", "key": folder / "key.pem"}


class OverANetwork(SharedTroubleLaws):
    persistent = True

    @contextlib.contextmanager
    def stalled_store(self, folder):
        with self._all(folder, Proxy.stall):
            yield True

    @contextlib.contextmanager
    def interrupted(self, folder):
        with self._all(folder, Proxy.drop):
            for pair in pairs[folder]:  # the end of a connection is noticed on another thread
                wait_until(pair.has_noticed)
            yield True

    @contextlib.contextmanager
    def _all(self, folder, fail):
        with contextlib.ExitStack() as failing:
            for pair in pairs[folder]:
                failing.enter_context(pair.failing(fail))
            yield


class TestPeers(OverANetwork, SharedBackendLaws):
    def config(self, folder):
        return PairConfig(folder)


class TestPeersOverTLS(OverANetwork):
    """Whatever trouble a plain connection survives, one over TLS does."""

    others = set(laws_of(SharedTroubleLaws)).difference(vars(SharedTroubleLaws))
    excused: ClassVar = dict.fromkeys(others, "this suite tries only the laws of trouble")

    def config(self, folder):
        return PairConfig(folder, tls=True)
