"""A connection between two nodes, and what they say to each other. Numbers are little-endian.

    both    `_GREETING`, the number that this node has drawn (16 bytes), and one for this connection (32)
    client  a proof that it knows the token (32)
    server  the same
    client  the digest of the namespace whose frames it looks for (32)

Then questions, as often as the client likes:

    client  FOLLOW (1), milliseconds (4), the version of the server's digest that it has, or 0 (8)
    server  as soon as it has another one, and after that time at the latest: the version to which its changes apply, or
            0 (8), the version that they make (8), how many fingerprints are gone (4), how many come (4), and these, as
            they are in keys (4 each)

    client  READ (1), how many keys (4), the keys (32 each), the most bytes that the frame of each may have (8 each)
    server  for each the bytes of the frame (8), or 0 if it does not show it, or if it is too long; the frame; and a
            byte: 1 if it showed the frame until all of it was copied. If not, what was sent may be anything
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import ipaddress
import math
import secrets
import socket
import ssl
import struct
import time
from array import array
from collections.abc import Iterator, Sequence
from itertools import chain, islice

import attrs

from kvtier_core.errors import BackendError
from kvtier_core.types import KEY_NBYTES, ChunkKey, Namespace
from kvtier_peers.digest import FINGERPRINT_NBYTES, MOST_CHUNKS, Changes
from kvtier_peers.settings import Address, PeersSettings

#: Keys of one question.
MOST_KEYS = 1024

_FOLLOW, _READ = 1, 2

VERSION = 2  #: of this protocol
#: A node that shows no frame of this key answers with zeros, for others to measure how fast it is.
TRIED, TRIED_NBYTES = ChunkKey(bytes(KEY_NBYTES)), 16 << 20

_GREETING = b"kvtier peers %d\r\n" % VERSION
_NUMBER_NBYTES = 16
_NONCE_NBYTES = 32
_QUESTION = struct.Struct("<BI")
_NBYTES = struct.Struct("<Q")
_CHANGES = struct.Struct("<QQII")
_AT_A_TIME = 8192  # fingerprints that are sent while other threads of Python wait
_SHORTEST_TOKEN = 32
_CHANGES_WITHIN = 10.0  # seconds, beside those that the other side may wait
_ADMITTED_WITHIN = 10.0  # seconds, however often a stranger sends a byte
_IN_VAIN = TimeoutError, BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError  # waited, as they are raised


@attrs.frozen
class Door:
    """How a connection begins: with TLS or without, and with a proof of the token."""

    namespace: bytes  #: the digest of that whose frames this side looks for
    token: bytes = attrs.field(repr=False)  #: empty: there is none
    inwards: ssl.SSLContext | None  #: of who connects to this node; None: without TLS
    outwards: ssl.SSLContext | None
    patience: float  #: seconds that each wait for the other side may take
    #: Drawn when it was made: a node that meets itself knows it.
    number: bytes = attrs.field(factory=lambda: secrets.token_bytes(_NUMBER_NBYTES))

    @classmethod
    def of(cls, config: PeersSettings, namespace: Namespace) -> Door:
        """Reads the token and the files of TLS. Raises BackendError."""
        token = config.token.value.encode() if config.token is not None else b""
        if 0 < len(token) < _SHORTEST_TOKEN:
            raise BackendError(f"a token has at least {_SHORTEST_TOKEN} characters: openssl rand -base64 32")
        inwards, outwards = _tls(config, ssl.PROTOCOL_TLS_SERVER), _tls(config, ssl.PROTOCOL_TLS_CLIENT)
        return cls(namespace.digest, token, inwards, outwards, config.patience)

    def opens_to(self, host: str) -> bool:
        """May frames be shown to this address, and taken from it?"""
        return bool(self.token or self.inwards) or ipaddress.ip_address(host.partition("%")[0]).is_loopback

    def admit(self, sock: socket.socket) -> tuple[Link, bytes]:
        """Greet who has connected to this node, and learn its namespace. Raises BackendError if it may not."""
        with _named("it"), contextlib.ExitStack() as closing:
            closing.enter_context(sock).settimeout(self.patience)
            if self.inwards:
                sock = closing.enter_context(self.inwards.wrap_socket(sock, server_side=True))
            link = Link(sock, self.patience)
            link.ends = time.monotonic() + _ADMITTED_WITHIN
            mine, _, theirs = link.greet(self.number)
            link.must_prove(self._proof(b"client", theirs, mine))
            link.send(self._proof(b"server", theirs, mine))
            namespace = link.receive(len(self.namespace))
            link.ends = math.inf
            closing.pop_all()
            return link, namespace

    def enter(self, address: Address, ends: float) -> tuple[Link, bytes]:
        """Connect to another node by ``ends``; returns its number, too. Raises BackendError."""
        with _named(address), contextlib.ExitStack() as closing:
            patience = max(0.001, min(self.patience, ends - time.monotonic()))
            sock = closing.enter_context(socket.create_connection(address, patience))
            if not self.opens_to(sock.getpeername()[0]):
                raise BackendError("beyond loopback peers need a token or TLS")
            if self.outwards:
                sock = closing.enter_context(self.outwards.wrap_socket(sock))
            link = Link(sock, self.patience)
            link.ends = ends
            mine, number, theirs = link.greet(self.number)
            link.send(self._proof(b"client", mine, theirs))
            link.must_prove(self._proof(b"server", mine, theirs))
            link.send(self.namespace)
            closing.pop_all()
            return link, number

    def _proof(self, role: bytes, of_client: bytes, of_server: bytes) -> bytes:
        return hmac.digest(self.token, role + of_client + of_server, hashlib.sha256)


@attrs.frozen
class Following:
    """The question what has changed in this side's digest."""

    version: int  #: since which
    within: float  #: seconds after which it is answered in any case


@attrs.frozen
class Reading:
    """The question for frames."""

    keys: list[ChunkKey]
    most: list[int]  #: the bytes that each frame may have


class Link:
    """A connection. Every method raises OSError or BackendError, and then the connection is of no use any more."""

    def __init__(self, sock: socket.socket, patience: float):
        self._sock = sock
        self._patience = patience
        self._owed = b""  # to be sent with what follows
        self.ends = math.inf  #: when what is under way must have ended, as `time.monotonic` has it
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.settimeout(None)  # Python would poll before each call; the kernel's limits cost nothing
        self._limit(socket.SO_SNDTIMEO, patience)
        self._limit(socket.SO_RCVTIMEO, patience)

    def hang_up(self) -> None:
        """End it for the thread that uses it, which then closes it."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """For the thread that uses it, or if none does."""
        self._sock.close()

    # -- the beginning -----------------------------------------------------------------------------

    def greet(self, number: bytes) -> tuple[bytes, bytes, bytes]:
        """Returns this side's nonce, and the number and the nonce of the other side."""
        nonce = secrets.token_bytes(_NONCE_NBYTES)
        self.send(_GREETING + number + nonce)
        greeting = self.receive(len(_GREETING))
        if greeting != _GREETING:
            raise BackendError("it speaks another protocol, or another version of this one")
        return nonce, self.receive(_NUMBER_NBYTES), self.receive(_NONCE_NBYTES)

    def must_prove(self, proof: bytes) -> None:
        """The other side knows the token."""
        if not hmac.compare_digest(self.receive(len(proof)), proof):
            raise BackendError("its token is another one")

    # -- a client ----------------------------------------------------------------------------------

    def follow(self, version: int, within: float) -> Changes:
        """What has changed in the other side's digest since that version. It may wait ``within`` seconds for that."""
        self.ends = time.monotonic() + within + _CHANGES_WITHIN
        self._limit(socket.SO_RCVTIMEO, within + self._patience)
        self.send(_QUESTION.pack(_FOLLOW, int(within * 1e3)) + _NBYTES.pack(version))
        base, made, gone, come = _CHANGES.unpack(self.receive(_CHANGES.size))
        if max(gone, come) > MOST_CHUNKS:
            raise BackendError(f"it announces more than {MOST_CHUNKS} chunks")
        marks = [array("I", self.receive(number * FINGERPRINT_NBYTES)) for number in (gone, come)]
        return Changes(base, made, *map(frozenset, marks))

    def request(self, keys: Sequence[ChunkKey], most: Sequence[int]) -> None:
        """Ask for frames, each of ``most`` bytes; `frame` follows for each key."""
        self.send(_QUESTION.pack(_READ, len(keys)) + b"".join(keys) + b"".join(map(_NBYTES.pack, most)))

    def frame(self, into: memoryview) -> int:
        """The bytes of the next frame, which lie in ``into`` now; 0 if it is not shown any more, or too long."""
        (nbytes,) = _NBYTES.unpack(self.receive(_NBYTES.size))
        if not nbytes:
            return 0
        if nbytes > len(into):
            raise BackendError(f"it sends {nbytes} bytes where there is room for {len(into)}")
        self._fill(into[:nbytes])
        return nbytes if self.receive(1) == b"\1" else 0

    # -- a server ----------------------------------------------------------------------------------

    def question(self) -> Following | Reading:
        """The next question, however long it takes to come. Raises EOFError if there is none."""
        self._limit(socket.SO_RCVTIMEO, 0)
        first = self._sock.recv(1)
        if not first:
            raise EOFError
        self._limit(socket.SO_RCVTIMEO, self._patience)
        question, number = _QUESTION.unpack(first + self.receive(_QUESTION.size - 1))
        if question == _FOLLOW:
            return Following(_NBYTES.unpack(self.receive(_NBYTES.size))[0], number / 1e3)
        if question != _READ or number > MOST_KEYS:
            raise BackendError("its question is not one of this protocol")
        data = self.receive(number * KEY_NBYTES)
        keys = [ChunkKey(data[at : at + KEY_NBYTES]) for at in range(0, len(data), KEY_NBYTES)]
        return Reading(keys, [nbytes for (nbytes,) in _NBYTES.iter_unpack(self.receive(number * _NBYTES.size))])

    def tell(self, changes: Changes) -> None:
        """Answer with what has changed."""
        head = _CHANGES.pack(changes.base, changes.version, len(changes.gone), len(changes.come))
        marks = chain(changes.gone, changes.come)
        while part := array("I", islice(marks, _AT_A_TIME)):
            self.send(head + part.tobytes())
            head = b""
        self.send(head)

    def show(self, frame: memoryview | None) -> None:
        """Answer with a frame, or that it is not shown. Returns when all of it was copied; then `showed` follows."""
        head, self._owed = self._owed + _NBYTES.pack(0 if frame is None else len(frame)), b""
        if frame is None or isinstance(self._sock, ssl.SSLSocket):
            self.send(head)
            self.send(frame or b"")
            return
        sent = self._sock.sendmsg([head, frame])
        self.send(head[sent:])
        self.send(frame[max(0, sent - len(head)) :])

    def showed(self, is_whole: bool) -> None:
        """Was the frame shown until all of it was copied? Goes with what is sent next."""
        self._owed = b"\1" if is_whole else b"\0"

    def end(self) -> None:
        """All frames of a READ were answered for."""
        self.send(self._owed)
        self._owed = b""

    # -- bytes -------------------------------------------------------------------------------------

    def send(self, data: bytes | memoryview) -> None:
        """Return when the kernel has copied it."""
        self._sock.sendall(data)

    def receive(self, nbytes: int) -> bytes:
        """The next ``nbytes`` bytes."""
        data = bytearray(nbytes)
        self._fill(memoryview(data))
        return bytes(data)

    def _fill(self, view: memoryview) -> None:
        while len(view):
            count = self._sock.recv_into(view)
            if not count:
                raise ConnectionResetError("it closed the connection")
            view = view[count:]
            if time.monotonic() > self.ends:
                raise TimeoutError

    def _limit(self, wait: int, seconds: float) -> None:
        """Of each wait, to send or to receive; 0: there is none."""
        self._sock.setsockopt(socket.SOL_SOCKET, wait, struct.pack("@ll", int(seconds), int(seconds % 1 * 1e6)))


@contextlib.contextmanager
def _named(who: object) -> Iterator[None]:
    """Errors of a connection that begins name the other side."""
    try:
        yield
    except (OSError, BackendError) as error:
        raise failure(who, error) from error


def failure(who: object, error: OSError | BackendError) -> BackendError:
    """The error of a connection as the stack reports it."""
    if isinstance(error, _IN_VAIN):
        return BackendError(f"{who}: no answer in time")
    return BackendError(f"{who}: {getattr(error, 'strerror', None) or error}")


def _tls(config: PeersSettings, protocol: int) -> ssl.SSLContext | None:
    """Each side shows a certificate that ``ca`` has signed. Its names do not count: peers are known by addresses."""
    if config.ca is None or config.cert is None or config.key is None:
        return None
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    try:
        context.load_verify_locations(config.ca)
        context.load_cert_chain(config.cert, config.key)
    except (OSError, ssl.SSLError) as error:
        raise BackendError(f"TLS: {error}") from error
    return context
