"""Peers that are no Redis, or answer what nobody asked for: BackendErrors, and not a byte beyond a view."""

from __future__ import annotations

import contextlib
import socket
import threading

import attrs
import pytest
from frames import NBYTES, PART, frame, read, write
from sizes import some

from kvtier_core.errors import BackendError, StoreFull
from kvtier_core.types import Seconds
from kvtier_redis.config import RedisConfig
from kvtier_testing.samples import Poisoned, make_context, make_keys

ONE, TWO = make_keys(2)
MANIFEST = b"kvtier-1 %d %d " % (NBYTES, PART) + b"0" * 24
FOUND = b"*1\r\n$%d\r\n%b\r\n" % (len(MANIFEST), MANIFEST)
GARBAGE = {
    "http": b"HTTP/1.1 400 Bad Request\r\n\r\n",
    "random": bytes(range(256)) * 40,
    "nothing": b"",
    "no end of a line": b"$" + b"1" * 5000,
    "a long value": b"$99999999999999\r\n",
    "a long list": b"*99999999\r\n",
    "a long list in a list": b"*1\r\n*99999999\r\n",
    "a long map": b"%99999999\r\n",
    "lists in lists": b"*1\r\n" * 1000,
    "a negative list": b"*-7\r\n",
    "a number": b":1\r\n",
    "a word": b"+OK\r\n",
    "too short a list": b"*0\r\n",
    "too long a list": b"*3\r\n:1\r\n:1\r\n:1\r\n",
    "no list": b"*-1\r\n",
    "a value that is no number": b"$x\r\n",
    "RESP3": b"%1\r\n+a\r\n#f\r\n",
}


class Peer:
    """Answers each request with the next of its answers, and ends every connection when they are used up."""

    def __init__(self, *answers):
        self.answers = list(answers)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"redis://127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self):
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                with connection, contextlib.suppress(OSError):
                    while connection.recv(1 << 16) and self.answers:
                        connection.sendall(self.answers.pop(0))

    def close(self):
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()


@pytest.fixture
def meet():
    """Opens a tier on a peer that answers so, after it has taken the facts of the namespace."""
    with contextlib.ExitStack() as stack:

        def meet(*answers, **settings):
            peer = Peer(b":1\r\n", *answers)
            stack.callback(peer.close)
            ctx = attrs.evolve(make_context(capacity=0), timeout=Seconds(0.5))
            tier = RedisConfig(url=peer.url, **settings).open(ctx)
            stack.callback(tier.close)
            return tier

        yield meet


each_garbage = pytest.mark.parametrize("garbage", GARBAGE.values(), ids=GARBAGE)


@each_garbage
def test_garbage_at_the_start_is_no_crash(garbage):
    peer = Peer(garbage)
    tier = RedisConfig(url=peer.url).open(attrs.evolve(make_context(capacity=0), timeout=Seconds(0.5)))
    tier.close()
    peer.close()


@each_garbage
@pytest.mark.parametrize("mode", some(["cluster", "sentinel"]))
def test_garbage_from_those_who_say_where_the_frames_are(garbage, mode):
    peer = Peer(*[garbage] * 10)
    asked = peer.url.removeprefix("redis://")
    config = RedisConfig(url=peer.url, mode=mode, sentinels=[asked], service="kv")
    tier = config.open(attrs.evolve(make_context(capacity=0), timeout=Seconds(0.5)))
    with pytest.raises(BackendError, match=asked if mode == "cluster" else "kv"):
        tier.contains([ONE])
    tier.close()
    peer.close()


@each_garbage
def test_garbage_for_manifests(meet, garbage):
    with pytest.raises(BackendError):
        meet(garbage).contains([ONE, TWO])
    room = Poisoned(NBYTES)
    with pytest.raises(BackendError):
        meet(garbage).read([ONE, TWO], [room.view, memoryview(bytearray(NBYTES))])
    assert room.untouched_beyond(0)


@each_garbage
def test_garbage_for_parts(meet, garbage):
    room = Poisoned(NBYTES)
    with pytest.raises(BackendError):
        meet(FOUND, garbage).read([ONE], [room.view])
    assert room.untouched_beyond(NBYTES)


@pytest.mark.parametrize("beyond", [2, 100, 1 << 20])
def test_a_part_longer_than_announced(meet, beyond):
    room = Poisoned(NBYTES)
    answer = b"$%d\r\n" % PART + bytes(PART + beyond)
    with pytest.raises(BackendError, match="more than it had announced"):
        meet(FOUND, answer).read([ONE], [room.view])
    assert room.untouched_beyond(PART)


@pytest.mark.parametrize("name", [name for name in GARBAGE if name != "a word"])  # which is the right answer
def test_garbage_for_writes(meet, name):
    with pytest.raises(BackendError):
        write(meet(GARBAGE[name]), ONE)


@pytest.mark.parametrize(
    "told",
    [
        "LOADING Redis is loading the dataset in memory",
        "CLUSTERDOWN The cluster is down",
        "MASTERDOWN Link with MASTER is down and replica-serve-stale-data is set to 'no'.",
        "NOAUTH Authentication required.",
        "NOPERM User engine has no permissions to run the 'mget' command",
        "READONLY You can't write against a read only replica.",
        "MISCONF Redis is configured to save RDB snapshots, but it is unable to persist to disk.",
        "MOVED 1 127.0.0.1:1",
        "ERR something else",
    ],
)
def test_an_error_of_the_server_is_reported(meet, told):
    answer = f"-{told}\r\n".encode()
    for call in (lambda tier: tier.contains([ONE]), lambda tier: read(tier, ONE), lambda tier: write(tier, ONE)):
        with pytest.raises(BackendError, match=told.split()[0]):
            call(meet(*[answer] * 10))


def test_an_error_of_the_server_cannot_fill_the_log(meet):
    with pytest.raises(BackendError) as failed:
        meet(b"-ERR \x1b[2J" + b"x" * 5000 + b"\r\n").contains([ONE])
    assert str(failed.value).isprintable() and len(str(failed.value)) < 300


def test_a_frame_that_did_not_fit_is_the_store_that_is_full(meet):
    with pytest.raises(StoreFull) as failed:
        meet(*[b"-OOM command not allowed when used memory > 'maxmemory'.\r\n"] * 10).write([ONE], [frame(ONE)])
    assert failed.value.missing == NBYTES
