"""A connection between two nodes, and the messages on it. Numbers are little-endian.

    both    `_GREETING`, the number that this node has drawn (16 bytes), and one for this connection (32)
    client  a proof that it knows the secret (32): the token, or on loopback that of this account
    server  the same
    client  the digest of the namespace whose frames it looks for (32)

Then questions, as often as the client likes:

    client  FOLLOW (1), milliseconds (4), the version of the server's digest that it has, or 0 (8)
    server  as soon as it has another, and after that time at the latest: the version to which its changes apply, or
            0 (8), the version that they make (8), how many fingerprints are gone (4), how many come (4), and these, as
            they are in keys (4 each)

    client  READ (1), the number of keys (4), the keys (32 each), the most bytes of the frame of each (8 each)
    server  for each, the length of the frame (8), or 0 if it does not show it, or if it is too long; the frame; and a
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
from collections.abc import Iterator, Sequence

import attrs
import numpy as np

from kvtier_core.errors import BackendError
from kvtier_core.interfaces import OpenContext
from kvtier_core.storekit.user_folders import user_secret
from kvtier_core.types import KEY_NBYTES, ChunkKey
from kvtier_peers.digest import FINGERPRINT_NBYTES, MOST_CHUNKS, Changes
from kvtier_peers.settings import Address, PeersSettings

#: The most keys in one question.
MOST_KEYS = 1024

_FOLLOW, _READ = 1, 2

VERSION = 2  #: of this protocol
#: A node that shows no frame of this key answers with zeros, so that others can measure how fast it is.
TRIED, TRIED_NBYTES = ChunkKey(bytes(KEY_NBYTES)), 16 << 20

_GREETING = b"kvtier peers %d\r\n" % VERSION
_NUMBER_NBYTES = 16
_NONCE_NBYTES = 32
_QUESTION = struct.Struct("<BI")
_NBYTES = struct.Struct("<Q")
_CHANGES = struct.Struct("<QQII")
_SHORTEST_TOKEN = 32
_PIECE_NBYTES = 1 << 16  # of what is sent over TLS: each has its own time limit
_CHANGES_WITHIN = 10.0  # seconds, in addition to those that the other side may wait
_SHORTEST_WAIT = 1e-3  # seconds
_ADMITTED_WITHIN = 10.0  # seconds, however often a stranger sends a byte
_IN_VAIN = TimeoutError, BlockingIOError  # the errors of a wait in vain


_NO_SECRET = 'or write token: "env:NAME" for each peer'
_OTHER_ACCOUNT = (
    "it is not known to belong to this account: it is another account's, behind a proxy, or in a container without "
    'this XDG_RUNTIME_DIR or /tmp; write token: "env:NAME" for each peer'
)


@attrs.frozen
class Door:
    """How a connection begins: with TLS or without, and with a proof of a secret."""

    namespace: bytes  #: the digest of the one whose frames this side looks for
    secret: bytes = attrs.field(repr=False)  #: the token; empty with TLS alone
    of_account: bool  #: there is neither a token nor TLS: the secret is this account's, and only loopback is open
    inwards: ssl.SSLContext | None  #: for nodes that connect to this one; None: without TLS
    outwards: ssl.SSLContext | None
    patience: float  #: seconds that each wait for the other side may take
    #: Random, drawn when it was made: a node that meets itself recognizes it.
    number: bytes = attrs.field(factory=lambda: secrets.token_bytes(_NUMBER_NBYTES))

    @classmethod
    def of(cls, config: PeersSettings, ctx: OpenContext) -> Door:
        """Reads the token, or the secret of this account, and the files of TLS. Raises BackendError."""
        token = config.token.value.encode() if config.token is not None else b""
        if 0 < len(token) < _SHORTEST_TOKEN:
            raise BackendError(
                f"a token must have at least {_SHORTEST_TOKEN} characters; create one with openssl rand -hex 32"
            )
        inwards, outwards = _tls(config, ssl.PROTOCOL_TLS_SERVER), _tls(config, ssl.PROTOCOL_TLS_CLIENT)
        of_account = not token and inwards is None
        secret = _secret_of_account(make=not ctx.checking) if of_account else token
        return cls(ctx.namespace.digest, secret, of_account, inwards, outwards, config.patience)

    def opens_to(self, host: str) -> bool:
        """May frames be shown to this address, and taken from it?"""
        return not self.of_account or ipaddress.ip_address(host.partition("%")[0]).is_loopback

    def admit(self, sock: socket.socket) -> tuple[Link, bytes]:
        """Greet a node that has connected, and learn its namespace. Raises BackendError if it is refused."""
        with _named("it"), contextlib.ExitStack() as closing:
            closing.enter_context(sock).settimeout(self.patience)
            if self.inwards:
                sock = closing.enter_context(self.inwards.wrap_socket(sock, server_side=True))
            link = Link(sock, self.patience)
            link.until(time.monotonic() + _ADMITTED_WITHIN)
            mine, _, theirs = link.greet(self.number)
            both = self._of_both(theirs, mine, sock.getpeername(), sock.getsockname())
            if not link.proves(self._proof(b"client", both)):
                raise BackendError(self._refusal)
            link.send(self._proof(b"server", both))
            namespace = link.receive(len(self.namespace))
            link.until(math.inf)
            closing.pop_all()
            return link, namespace

    def enter(self, address: Address, ends: float) -> tuple[Link, bytes]:
        """Connect to another node by ``ends``; returns its number, too. Raises BackendError."""
        with _named(address), contextlib.ExitStack() as closing:
            patience = min(self.patience, max(_SHORTEST_WAIT, ends - time.monotonic()))
            sock = closing.enter_context(socket.create_connection(address, patience))
            if not self.opens_to(sock.getpeername()[0]):
                raise BackendError("peers beyond loopback need a token or TLS")
            if self.outwards:
                sock = closing.enter_context(self.outwards.wrap_socket(sock))
            link = Link(sock, self.patience)
            link.until(ends)
            mine, number, theirs = link.greet(self.number)
            both = self._of_both(mine, theirs, sock.getsockname(), sock.getpeername())
            link.send(self._proof(b"client", both))
            try:
                is_proved = link.proves(self._proof(b"server", both))
            except ConnectionError:  # it has refused this side's proof
                is_proved = False
            if not is_proved:
                raise BackendError(self._refusal)
            link.send(self.namespace)
            closing.pop_all()
            return link, number

    def _of_both(self, client: bytes, server: bytes, *addresses: object) -> bytes:
        """The nonces; on loopback the addresses, too, so that nothing in between can pass on a proof."""
        return client + server + (repr(addresses).encode() if self.of_account else b"")

    def _proof(self, role: bytes, of_both: bytes) -> bytes:
        return hmac.digest(self.secret, role + of_both, hashlib.sha256)

    @property
    def _refusal(self) -> str:
        return _OTHER_ACCOUNT if self.of_account else "its token does not match ours"


@attrs.frozen
class Following:
    """The question about changes in this side's digest."""

    version: int  #: since which
    within: float  #: seconds after which it is answered in any case


@attrs.frozen
class Reading:
    """The question for frames."""

    keys: list[ChunkKey]
    most: list[int]  #: the most bytes that each frame may have


class Link:
    """A connection. Every method raises OSError or BackendError, and then the connection is of no further use."""

    def __init__(self, sock: socket.socket, patience: float):
        self._sock = sock
        self._patience = patience
        self._owed = b""  # to be sent with what follows
        self._ends = math.inf  # when what is under way must have ended
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._over_tls = isinstance(sock, ssl.SSLSocket)
        sock.settimeout(None)  # Python would poll before each call; the kernel's limits cost nothing
        self._limit(socket.SO_SNDTIMEO, patience)

    def until(self, ends: float) -> None:
        """What comes next must end by this reading of `time.monotonic`."""
        self._ends = ends
        self._limit(socket.SO_RCVTIMEO, min(self._patience, max(_SHORTEST_WAIT, ends - time.monotonic())))

    def hang_up(self) -> None:
        """End it for the thread that uses it, which then closes it."""
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self._sock, socket.SHUT_RDWR)  # that of TLS would send the rest in the clear

    def close(self) -> None:
        """Called by the thread that uses it, or when none does."""
        self._sock.close()

    # -- the beginning -----------------------------------------------------------------------------

    def greet(self, number: bytes) -> tuple[bytes, bytes, bytes]:
        """Returns this side's nonce, and the number and the nonce of the other side."""
        nonce = secrets.token_bytes(_NONCE_NBYTES)
        self.send(_GREETING + number + nonce)
        greeting = self.receive(len(_GREETING))
        if greeting != _GREETING:
            raise BackendError("protocol or version mismatch")
        return nonce, self.receive(_NUMBER_NBYTES), self.receive(_NONCE_NBYTES)

    def proves(self, proof: bytes) -> bool:
        """Does the other side send this proof?"""
        return hmac.compare_digest(self.receive(len(proof)), proof)

    # -- a client ----------------------------------------------------------------------------------

    def follow(self, version: int, within: float) -> Changes:
        """The changes in the other side's digest since that version. It may wait ``within`` seconds for them."""
        self._ends = time.monotonic() + within + _CHANGES_WITHIN
        self._limit(socket.SO_RCVTIMEO, within + self._patience)
        self.send(_QUESTION.pack(_FOLLOW, int(within * 1e3)) + _NBYTES.pack(version))
        base, made, gone, come = _CHANGES.unpack(self.receive(_CHANGES.size))
        if max(gone, come) > MOST_CHUNKS:
            raise BackendError(f"it announces more than {MOST_CHUNKS} chunks")
        marks = [np.frombuffer(self.receive(number * FINGERPRINT_NBYTES), np.uint32) for number in (gone, come)]
        return Changes(base, made, *map(np.unique, marks))

    def request(self, keys: Sequence[ChunkKey], most: Sequence[int]) -> None:
        """Ask for frames, each of at most ``most`` bytes; then call `frame` for each key."""
        self.send(_QUESTION.pack(_READ, len(keys)) + b"".join(keys) + b"".join(map(_NBYTES.pack, most)))

    def frame(self, into: memoryview) -> int:
        """Receive the next frame into ``into``. Returns its bytes; 0 if it is no longer shown, or too long."""
        (nbytes,) = _NBYTES.unpack(self.receive(_NBYTES.size))
        if not nbytes:
            return 0
        if nbytes > len(into):
            raise BackendError(f"it sends {nbytes} bytes, expected at most {len(into)}")
        self._fill(into[:nbytes])
        return nbytes if self.receive(1) == b"\1" else 0

    # -- a server ----------------------------------------------------------------------------------

    def question(self) -> Following | Reading:
        """The next question, however long it takes to come. Raises EOFError if there is none."""
        self._ends = math.inf
        self._limit(socket.SO_RCVTIMEO, 0)
        first = self._sock.recv(1)
        if not first:
            raise EOFError
        self._limit(socket.SO_RCVTIMEO, self._patience)
        question, number = _QUESTION.unpack(first + self.receive(_QUESTION.size - 1))
        if question == _FOLLOW:
            return Following(_NBYTES.unpack(self.receive(_NBYTES.size))[0], number / 1e3)
        if question != _READ or number > MOST_KEYS:
            raise BackendError("its request is not part of this protocol")
        data = self.receive(number * KEY_NBYTES)
        keys = [ChunkKey(data[at : at + KEY_NBYTES]) for at in range(0, len(data), KEY_NBYTES)]
        return Reading(keys, [nbytes for (nbytes,) in _NBYTES.iter_unpack(self.receive(number * _NBYTES.size))])

    def tell(self, changes: Changes) -> None:
        """Answer with the changes, which the other side must take within ten seconds."""
        self._ends = time.monotonic() + _CHANGES_WITHIN
        head = _CHANGES.pack(changes.base, changes.version, len(changes.gone), len(changes.come))
        self.send(head + changes.gone.tobytes() + changes.come.tobytes())

    def show(self, frame: memoryview | None) -> None:
        """Answer with a frame, or that it is not shown. Returns when all of it was copied; then call `showed`."""
        head, self._owed = self._owed + _NBYTES.pack(0 if frame is None else len(frame)), b""
        if frame is None or self._over_tls:
            self.send(head)
            self.send(frame or b"")
            return
        sent = self._sock.sendmsg([head, frame])
        self.send(head[sent:])
        self.send(frame[max(0, sent - len(head)) :])

    def showed(self, is_whole: bool) -> None:
        """State whether the frame was shown until all of it was copied. It is sent with what comes next."""
        self._owed = b"\1" if is_whole else b"\0"

    def end(self) -> None:
        """Complete the answer to a READ."""
        self.send(self._owed)
        self._owed = b""

    # -- bytes -------------------------------------------------------------------------------------

    def send(self, data: bytes | memoryview) -> None:
        """Return when the kernel has copied it."""
        view = memoryview(data)
        while len(view):
            view = view[self._sock.send(view[:_PIECE_NBYTES] if self._over_tls else view) :]
            if time.monotonic() > self._ends:
                raise TimeoutError

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
            if time.monotonic() > self._ends:
                raise TimeoutError

    def _limit(self, wait: int, seconds: float) -> None:
        """Limit each wait, to send or to receive; 0: no limit. Over TLS, one limit is for both."""
        if self._over_tls:  # OpenSSL would try again when the kernel's limit has passed
            self._sock.settimeout(seconds or None)
            return
        self._sock.setsockopt(socket.SOL_SOCKET, wait, struct.pack("@ll", int(seconds), int(seconds % 1 * 1e6)))


@contextlib.contextmanager
def _named(who: object) -> Iterator[None]:
    """Make errors of a connection that begins name the other side."""
    try:
        yield
    except (OSError, BackendError) as error:
        raise failure(who, error) from error


def failure(who: object, error: OSError | BackendError) -> BackendError:
    """The error of a connection as the stack reports it."""
    if isinstance(error, _IN_VAIN):
        return BackendError(f"{who}: no answer in time")
    return BackendError(f"{who}: {getattr(error, 'strerror', None) or error}")


def _secret_of_account(*, make: bool) -> bytes:
    try:
        return user_secret("peers", make=make).encode()
    except (OSError, BackendError) as error:
        raise BackendError(f"{error}; {_NO_SECRET}") from error


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
