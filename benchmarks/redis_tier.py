"""Frames to a Redis server on this machine and back, against a bare socket that sends the same commands."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import attrs
import hiredis

from benchmarks.bare import must
from benchmarks.measure import GIB, Case, Table, Times, interleaved, progress, scratch, sized
from benchmarks.stores import RedisPlaces, redis
from kvtier_core.interfaces import Backend, OpenContext
from kvtier_core.types import FRAME_ALIGNMENT, FRAME_HEADER_NBYTES, KEY_NBYTES, ChunkKey, Namespace, Nbytes
from kvtier_redis.config import RedisConfig
from kvtier_testing.samples import make_layout

ROUNDS = sized(11, 1)
FRAME = sized(32 << 20, 4 << 20)
FRAMES = 4
PART = 1 << 20
WINDOW = 4  # requests ahead of their answers, in both clients
KEYS = 128
BARE = "bare socket"
TIER = "kvtier_redis"
PING = "one PING"
MGET = "bare socket, MGET of 128 manifests"
CONTAINS = "kvtier_redis, `contains` of 128 keys"


@attrs.frozen
class _Way:
    """How a server is reached."""

    name: str
    url: str
    connect: Callable[[], socket.socket]


def tables(folder: Path) -> Iterator[Table]:
    with scratch(folder) as place, redis(place) as server:
        for way in [] if server is None else _ways(server):
            progress(f"redis, {way.name}: {FRAMES} frames of {Nbytes(FRAME)}, {ROUNDS} rounds each way")
            with contextlib.closing(_Bench(way)) as bench:
                yield _frames(way.name, bench)
                yield _existence(way.name, bench)


def _frames(way: str, bench: _Bench) -> Table:
    writes = interleaved(bench.writes(), ROUNDS)
    reads = interleaved(bench.reads(), ROUNDS)
    return Table(
        title=f"Redis, {way}: frames of {Nbytes(FRAME)}",
        says=f"{FRAMES} new frames, parts of {Nbytes(PART)}, one thread and one connection each, the server on "
        "the same cores. Bare is `sendmsg` of each SET from the frame's memory, and `recv_into` of each answer to "
        f"GET, into it, {WINDOW} requests ahead. kvtier_redis moves manifests, too, and keeps a deadline for all. "
        f"Ratios are of speeds in the same round: median (min to max) of {ROUNDS}.",
        header=("", "write GiB/s", "of bare", "read GiB/s", "of bare"),
        rows=[(case, *_cells(writes, case), *_cells(reads, case)) for case in writes.seconds],
    )


def _cells(times: Times, case: str) -> Iterator[object]:
    yield f"{FRAMES * FRAME / times.median(case) / GIB:.2f}"
    yield "1" if case == BARE else times.ratio(BARE, case)


def _existence(way: str, bench: _Bench) -> Table:
    times = interleaved(bench.questions(), 10 * ROUNDS, repeats=5)
    return Table(
        title=f"Redis, {way}: which of {KEYS} keys are there",
        says=f"All are. The PING goes over the same bare socket. Median (min to max) of {10 * ROUNDS} rounds, each the "
        "best of 5.",
        header=("", "µs", "times a PING", "times the bare MGET"),
        rows=[
            (case, f"{times.median(case) * 1e6:.0f}", times.ratio(case, PING), times.ratio(case, MGET))
            for case in times.seconds
        ],
    )


class _Bench:
    def __init__(self, way: _Way):
        layout = make_layout((FRAME - FRAME_HEADER_NBYTES,), 1)
        context = OpenContext(Namespace.of({"benchmark": "redis"}), layout)
        self.bare = _BareClient(way.connect())
        self.tier: Backend = RedisConfig(url=way.url, part=Nbytes(PART)).open(context)
        self.keys = [ChunkKey(os.urandom(KEY_NBYTES)) for _ in range(FRAMES)]
        self.frames = [memoryview(bytearray(os.urandom(1 << 16) * (FRAME >> 16))) for _ in self.keys]
        self.buffers = [memoryview(bytearray(FRAME)) for _ in self.keys]
        self.many = [ChunkKey(os.urandom(KEY_NBYTES)) for _ in range(KEYS)]
        self.tier.write(self.many, [self.frames[0][:FRAME_ALIGNMENT]] * KEYS)
        self.names = [b"manifest:%d" % number for number in range(KEYS)]
        for name in self.names:
            self.bare.ask(b"SET", name, bytes(51))

    def writes(self) -> list[Case]:
        return [
            Case(BARE, lambda: self.bare.write(self.frames), before=self._empty),
            Case(TIER, lambda: self.tier.write(self.keys, self.frames), before=self._empty),
        ]

    def reads(self) -> list[Case]:
        self._empty()
        self.bare.write(self.frames)
        self.tier.write(self.keys, self.frames)
        return [
            Case(BARE, lambda: self._arrived(self.bare.read(self.buffers)), before=self._wipe),
            Case(TIER, lambda: self._arrived(self.tier.read(self.keys, self.buffers)), before=self._wipe),
        ]

    def questions(self) -> list[Case]:
        return [
            Case(PING, lambda: self.bare.ask(b"PING")),
            Case(MGET, lambda: self.bare.ask(b"MGET", *self.names)),
            Case(CONTAINS, lambda: must(all(self.tier.contains(self.many)))),
        ]

    def _empty(self) -> None:
        self.bare.delete(FRAMES)
        self.tier.delete(self.keys)
        time.sleep(0.1)  # the server frees in the background

    def _wipe(self) -> None:
        for view in self.buffers:
            view[:FRAME_ALIGNMENT] = view[-FRAME_ALIGNMENT:] = bytes(FRAME_ALIGNMENT)

    def _arrived(self, counts: Sequence[object]) -> None:
        must(counts == [FRAME] * FRAMES)
        for view, frame in zip(self.buffers, self.frames, strict=True):
            ends = slice(0, FRAME_ALIGNMENT), slice(FRAME - FRAME_ALIGNMENT, FRAME)
            must(all(view[end] == frame[end] for end in ends))

    def close(self) -> None:
        self.tier.close()
        self.bare.close()


class _BareClient:
    """Numbers for names, no manifests, no deadlines, no errors: what any client has to do at least."""

    def __init__(self, connection: socket.socket):
        self._connection = connection
        self._line = memoryview(bytearray(64))

    def write(self, frames: Sequence[memoryview]) -> None:
        parts = _parts(frames)
        for number, part in enumerate(parts):
            name = b"part:%d" % number
            head = b"*3\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (len(name), name, PART)
            must(self._connection.sendmsg([head, part, b"\r\n"]) == len(head) + PART + 2)
            if number >= WINDOW:
                self._receive(self._line[:5])
        for _ in parts[-WINDOW:]:
            self._receive(self._line[:5])
        must(bytes(self._line[:5]) == b"+OK\r\n")

    def read(self, frames: Sequence[memoryview]) -> list[int]:
        parts = _parts(frames)
        head = self._line[: len(b"$%d\r\n" % PART)]
        for number, part in enumerate(parts):
            for ahead in range(WINDOW) if number == 0 else [number + WINDOW - 1]:
                if ahead < len(parts):
                    name = b"part:%d" % ahead
                    self._connection.sendall(b"*2\r\n$3\r\nGET\r\n$%d\r\n%b\r\n" % (len(name), name))
            self._receive(head)
            must(bytes(head) == b"$%d\r\n" % PART)
            self._receive(part)
            self._receive(self._line[:2])
        return [len(frame) for frame in frames]

    def delete(self, frames: int) -> None:
        self.ask(b"UNLINK", *(b"part:%d" % number for number in range(frames * FRAME // PART)))

    def ask(self, *words: bytes) -> object:
        """One command, packed and parsed by hiredis."""
        self._connection.sendall(hiredis.pack_command(words))  # type: ignore[arg-type]
        reader = hiredis.Reader()
        while (answer := reader.gets()) is False:
            reader.feed(self._connection.recv(1 << 16))
        return answer

    def close(self) -> None:
        self._connection.close()

    def _receive(self, view: memoryview) -> None:
        received = 0
        while received < len(view):
            received += self._connection.recv_into(view[received:])


def _parts(frames: Sequence[memoryview]) -> list[memoryview]:
    return [frame[begin : begin + PART] for frame in frames for begin in range(0, len(frame), PART)]


def _ways(server: RedisPlaces) -> list[_Way]:
    return [
        _Way("a Unix socket", f"unix://{server.path}", lambda: _unix(server.path)),
        _Way("TCP", f"redis://127.0.0.1:{server.port}", lambda: socket.create_connection(("127.0.0.1", server.port))),
    ]


def _unix(path: Path) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(str(path))
    return connection
