"""Frames of another process, read over TCP: from its memory, against a bare socket; from its disk, against a disk."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import attrs

from benchmarks.measure import GIB, Case, Table, interleaved, progress, scratch, sized
from kvtier_core.encoding.codec import FrameCodec
from kvtier_core.frames.format import seal
from kvtier_core.interfaces import Backend, OpenContext
from kvtier_core.relays.shown_store import ShownStore
from kvtier_core.types import FRAME_HEADER_NBYTES, Nbytes, Seconds
from kvtier_core.work.buffers import Buffers
from kvtier_disk.config import DiskConfig
from kvtier_peers.backend import PeersBackend
from kvtier_peers.config import PeersConfig
from kvtier_testing.samples import make_context, make_keys, make_layout

ROUNDS = sized(21, 1)
MOVED = sized(128 << 20, 32 << 20)  # bytes of a round
FRAMES = (1 << 20, 32 << 20)
KEYS = 128
BARE = "bare socket"
PEERS = "kvtier_peers"
BYTE = "one byte there and back"
CONTAINS = f"kvtier_peers, `contains` of {KEYS} keys"
DISK = "kvtier_disk, of this node"
THREADS = 4
ON_DISK = sized(512 << 20, 32 << 20)  # bytes of a round
LAYOUT = make_layout((2 << 20,), blocks=8)


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
    progress(f"peers: from a disk, {ROUNDS} rounds")
    with _disks(folder) as (own, node):
        reads = interleaved([Case(DISK, partial(_read_all, own)), Case(PEERS, partial(_read_all, node))], ROUNDS)
    yield Table(
        title="Peers: from the disk of another node",
        says=f"{Nbytes(ON_DISK)} in frames of {Nbytes(LAYOUT.payload_nbytes)}, by {THREADS} threads, past the page "
        "cache. The other process has its frames on the same drive, reads and verifies each, and sends it over the "
        f"loopback interface. Ratios are of speeds in the same round: median (min to max) of {ROUNDS}.",
        header=("", "read GiB/s", "of the disk"),
        rows=[
            (case, f"{ON_DISK / reads.median(case) / GIB:.2f}", "1" if case == DISK else reads.ratio(DISK, case))
            for case in reads.seconds
        ],
    )


def _disk(path: Path) -> tuple[Backend, OpenContext]:
    ctx = make_context(layout=LAYOUT, capacity=2 * ON_DISK)
    return DiskConfig(path=path, min_free=Nbytes(0)).open(ctx), ctx


def _owner_of_a_disk(path: Path, ports: multiprocessing.SimpleQueue) -> None:
    """In the other process."""
    disk, ctx = _disk(path)
    store = ShownStore(disk, FrameCodec(ctx.namespace, LAYOUT))
    for _ in store.scan():
        pass
    node = PeersBackend(PeersConfig(listen=f"127.0.0.1:{_free_port()}"), attrs.evolve(ctx, stored=[store]))
    ports.put((node.facts()["listen"],))
    time.sleep(3600)


@contextlib.contextmanager
def _disks(folder: Path) -> Iterator[tuple[Backend, Backend]]:
    """A disk of this node, and a node that reads from the disk of another one. Both hold the same frames."""
    with scratch(folder) as place, contextlib.ExitStack() as closing:
        buffer = Buffers(LAYOUT.frame_nbytes).take()
        buffer[FRAME_HEADER_NBYTES:] = os.urandom(len(buffer) - FRAME_HEADER_NBYTES)
        for name in ("own", "other"):
            disk, ctx = _disk(place / name)
            for key in _keys():
                seal(buffer, ctx.namespace, key, LAYOUT.payload_nbytes)
                disk.write([key], [buffer])
            disk.close()
        (listen,) = closing.enter_context(_process(_owner_of_a_disk, place / "other"))
        config = PeersConfig(listen=f"127.0.0.1:{_free_port()}", peers=[listen], patience=Seconds(5))
        node = closing.enter_context(contextlib.closing(PeersBackend(config, ctx)))
        while not all(node.contains(_keys())):
            time.sleep(0.01)
        yield closing.enter_context(contextlib.closing(_disk(place / "own")[0])), node


def _keys() -> list:
    return make_keys(ON_DISK // LAYOUT.payload_nbytes)


_buffers = Buffers(LAYOUT.frame_nbytes)


def _read_all(backend: Backend) -> None:
    def read(key: Any) -> None:
        view = _buffers.take()
        assert backend.read([key], [view]) == [len(view)]
        _buffers.give_back([view])

    with ThreadPoolExecutor(THREADS) as threads:
        list(threads.map(read, _keys()))


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
    with _process(_owner, nbytes) as ports, contextlib.closing(_Bench(nbytes, *ports)) as bench:
        yield bench


@contextlib.contextmanager
def _process(target: Callable[..., None], *arguments: object) -> Iterator[Any]:
    """Another process, and what it says first."""
    context = multiprocessing.get_context("spawn")
    ports = context.SimpleQueue()
    owner = context.Process(target=target, args=(*arguments, ports), daemon=True)
    owner.start()
    try:
        yield ports.get()
    finally:
        owner.kill()
        owner.join()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]
