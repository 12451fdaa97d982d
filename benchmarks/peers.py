"""Frames in the memory of another process, read over TCP, against a bare socket that receives as many bytes."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import attrs

from benchmarks.measure import GIB, Case, Table, interleaved, progress
from kvtier_core.testing.samples import make_context, make_keys
from kvtier_core.types import Nbytes, Seconds
from kvtier_peers.backend import PeersBackend
from kvtier_peers.config import PeersConfig

ROUNDS = 21
MOVED = 128 << 20  # bytes of a round
FRAMES = (1 << 20, 32 << 20)
KEYS = 128
BARE = "bare socket"
PEERS = "kvtier_peers"
BYTE = "one byte there and back"
CONTAINS = f"kvtier_peers, `contains` of {KEYS} keys"


def tables(folder: Path) -> Iterator[Table]:
    rows = []
    for nbytes in FRAMES:
        progress(f"peers: frames of {Nbytes(nbytes)}, {ROUNDS} rounds")
        with _bench(nbytes) as bench:
            reads = interleaved(bench.reads(), ROUNDS)
            asked = interleaved(bench.questions(), 10 * ROUNDS, repeats=5)
        for case in reads.seconds:
            ratio = "1" if case == BARE else reads.ratio(BARE, case)
            rows.append((Nbytes(nbytes), case, f"{MOVED / reads.median(case) / GIB:.2f}", ratio))
    yield Table(
        title="Peers, over TCP on the loopback interface",
        says=f"{Nbytes(MOVED)} in frames, by one thread and one connection each, from another process on the same "
        "cores. Bare is `recv_into` the same memory of what one `sendall` sends from it. kvtier_peers also asks after "
        "each frame whether it was shown until its end; the stack's checksums are not in here. "
        f"Ratios are of speeds in the same round: median (min to max) of {ROUNDS}.",
        header=("frames of", "", "read GiB/s", "of bare"),
        rows=rows,
    )
    yield Table(
        title=f"Peers: which of {KEYS} keys one of them shows",
        says="A lookup in the digest of that peer, which sends nothing. "
        f"Median (min to max) of {10 * ROUNDS} rounds, each the best of 5.",
        header=("", "µs", "times a byte"),
        rows=[(case, f"{asked.median(case) * 1e6:.0f}", asked.ratio(case, BYTE)) for case in asked.seconds],
    )


def _owner(nbytes: int, ports: multiprocessing.SimpleQueue) -> None:
    """In the other process: shows frames, and sends as many bytes to who sends it one."""
    memory = memoryview(bytearray(os.urandom(1 << 16) * (MOVED >> 16)))
    keys = make_keys(max(KEYS, MOVED // nbytes))
    shown = {key: memory[at : at + nbytes] for key, at in zip(keys, range(0, MOVED, nbytes), strict=False)}
    shown |= {key: memory[:1] for key in keys[len(shown) :]}
    node = PeersBackend(PeersConfig(listen=f"127.0.0.1:{_free_port()}"), attrs.evolve(make_context(), sealed=shown))
    with socket.create_server(("127.0.0.1", 0)) as server:
        ports.put((node.facts()["listen"], server.getsockname()))
        client = server.accept()[0]
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while asked := client.recv(1):
            client.sendall(memory if asked == b"\1" else asked)


class _Bench:
    def __init__(self, nbytes: int, listen: str, bare: tuple[str, int]):
        own = f"127.0.0.1:{_free_port()}"
        config = PeersConfig(listen=own, peers=[listen], patience=Seconds(5))  # type: ignore[list-item]
        self._node = PeersBackend(config, make_context())
        self._bare = socket.create_connection(bare)
        self._bare.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._memory = memoryview(bytearray(MOVED))
        self._keys = make_keys(MOVED // nbytes)
        self._into = [self._memory[at : at + nbytes] for at in range(0, MOVED, nbytes)]
        self._many = make_keys(KEYS)
        while not all(self._node.contains(self._keys)):
            time.sleep(0.01)
        self.close = lambda: (self._bare.close(), self._node.close())

    def reads(self) -> list[Case]:
        return [Case(BARE, self._receive), Case(PEERS, lambda: self._arrived(self._node.read(self._keys, self._into)))]

    def questions(self) -> list[Case]:
        return [Case(BYTE, self._there_and_back), Case(CONTAINS, lambda: self._node.contains(self._many))]

    def _receive(self) -> None:
        self._bare.sendall(b"\1")
        view = self._memory
        while view:
            view = view[self._bare.recv_into(view) :]

    def _arrived(self, counts: object) -> None:
        assert counts == [len(view) for view in self._into], counts

    def _there_and_back(self) -> None:
        self._bare.sendall(b"\2")
        self._bare.recv(1)


@contextlib.contextmanager
def _bench(nbytes: int) -> Iterator[_Bench]:
    context = multiprocessing.get_context("spawn")
    ports = context.SimpleQueue()
    owner = context.Process(target=_owner, args=(nbytes, ports), daemon=True)
    owner.start()
    bench = _Bench(nbytes, *ports.get())
    try:
        yield bench
    finally:
        bench.close()
        owner.kill()
        owner.join()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]
