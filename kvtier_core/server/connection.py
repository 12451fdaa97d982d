"""One end of a connection between a server and a process of an engine. Only `wait` blocks."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path

from kvtier_core.forks import ProcessBound
from kvtier_core.server.protocol import HEADER, LONGEST, PREAMBLE, Header, ProtocolError, check_preamble

#: Bytes that are received at a time.
_PIECE = 1 << 18
#: Bytes that wait to be sent; a process that takes so few of them has failed.
_MOST_UNSENT = 64 << 20
_SO_PEERPIDFD = 77  # Linux 6.5; not in Python's socket
_CREDENTIALS = struct.Struct("iII")


class Closed(ProtocolError):
    """The other side has closed the connection."""


class Connection(ProcessBound):
    """Messages over a Unix socket. Each method but `close` raises ProtocolError if the connection is unusable."""

    def __init__(self, sock: socket.socket):
        sock.setblocking(False)
        self._socket = sock
        self._received = bytearray()
        self._unsent: deque[tuple[memoryview, Sequence[int]]] = deque()
        self._unsent_nbytes = 0
        self._greeted = False
        self.descriptors: list[int] = []  #: open files that came with a message; who takes them closes them
        self._send(PREAMBLE)

    def fileno(self) -> int:
        """Of the socket."""
        return self._socket.fileno()

    @property
    def has_unsent(self) -> bool:
        """Are there bytes that the other side has not taken yet?"""
        return bool(self._unsent)

    def send(self, header: Header, body: bytes, descriptors: Sequence[int] = ()) -> None:
        """Send a message, with copies of open files, or as much of it as the other side takes now."""
        self._send(HEADER.pack(*header) + body, descriptors)

    def _send(self, message: bytes, descriptors: Sequence[int] = ()) -> None:
        self._unsent.append((memoryview(message), descriptors))
        self._unsent_nbytes += len(message)
        if len(self._unsent) == 1:
            self.flush()
        if self._unsent_nbytes > _MOST_UNSENT:
            raise ProtocolError("it takes no messages")

    def flush(self) -> None:
        """Send as much of what waits as the other side takes."""
        try:
            while self._unsent:
                message, descriptors = self._unsent[0]
                sent = (
                    socket.send_fds(self._socket, [message], list(descriptors))
                    if descriptors
                    else self._socket.send(message)
                )
                self._unsent_nbytes -= sent
                if sent < len(message):
                    self._unsent[0] = message[sent:], ()
                else:
                    self._unsent.popleft()
        except BlockingIOError:
            return
        except OSError as error:
            raise Closed(error.strerror or str(error)) from error

    def receive(self) -> Iterator[tuple[Header, bytes]]:
        """The whole messages that are here."""
        self._fill()
        if not self._greeted and len(self._received) >= len(PREAMBLE):
            check_preamble(bytes(self._received[: len(PREAMBLE)]))
            del self._received[: len(PREAMBLE)]
            self._greeted = True
        begin = 0
        try:
            while self._greeted and len(self._received) - begin >= HEADER.size:
                header = Header(*HEADER.unpack_from(self._received, begin))
                if header.nbytes > LONGEST:
                    raise ProtocolError(f"a message of {header.nbytes} bytes is longer than any")
                end = begin + HEADER.size + header.nbytes
                if len(self._received) < end:
                    break
                body = bytes(self._received[begin + HEADER.size : end])
                begin = end
                yield header, body
        finally:
            del self._received[:begin]

    def _fill(self) -> None:
        try:
            piece, descriptors, _, _ = socket.recv_fds(self._socket, _PIECE, 16)
        except BlockingIOError:
            return
        except OSError as error:
            raise Closed(error.strerror or str(error)) from error
        self.descriptors += descriptors
        if not piece:
            raise Closed("it has hung up")
        self._received += piece

    def wait(self, seconds: float) -> None:
        """Return when something was received, or after ``seconds``; meanwhile send what waits."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN | (select.POLLOUT if self._unsent else 0))
        if poll.poll(seconds * 1e3) and self._unsent:
            self.flush()

    def close(self) -> None:
        """May be called twice."""
        with contextlib.suppress(OSError):  # it is closed, or the other side has done so
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        for each in self.descriptors:
            os.close(each)
        self.descriptors = []


def connect(path: Path) -> Connection:
    """Connect to the server at this path. Raises ProtocolError if none listens, or if it is another user's."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        sock.connect(str(path))
        pid, user, _ = credentials(sock)
        if user != os.getuid():
            raise ProtocolError(f"process {pid} of user {user} answers there; engines and server run as the same user")
        return Connection(sock)
    except (OSError, ProtocolError) as error:
        sock.close()
        raise ProtocolError(getattr(error, "strerror", None) or str(error)) from error


def wait_for_end(descriptor: int) -> None:
    """Return when one side has closed the connection with this descriptor."""
    poll = select.poll()
    poll.register(descriptor, 0)
    poll.poll()


def credentials(sock: socket.socket) -> tuple[int, int, int]:
    """Process, user and group at the other end, as the kernel knows them."""
    return _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))


def peer_process(sock: socket.socket) -> int:
    """A descriptor that becomes readable when the process at the other end has ended. Raises OSError."""
    with contextlib.suppress(OSError):
        return sock.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    # An older kernel. Had the process ended and another one got its number, the other end would be closed by now.
    process = os.pidfd_open(credentials(sock)[0])
    poll = select.poll()
    poll.register(sock, 0)
    if any(event & (select.POLLHUP | select.POLLERR) for _, event in poll.poll(0)):
        os.close(process)
        raise ProcessLookupError("it has ended")
    return process
