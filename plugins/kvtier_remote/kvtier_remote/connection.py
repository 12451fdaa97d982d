"""One end of a connection between a server and a process of an engine. Only `wait` blocks."""

from __future__ import annotations

import contextlib
import os
import select
import socket
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path

from kvtier_core.forks import ProcessBound
from kvtier_core.storekit.owner_socket import credentials, stranger
from kvtier_remote.protocol import HEADER, LONGEST, PREAMBLE, Header, ProtocolError, check_preamble

#: Bytes received at a time.
_PIECE = 1 << 18
#: The most bytes that wait to be sent; a process that leaves more of them untaken has failed. A message counts for more
#: than its own: so much memory it takes besides.
_MOST_UNSENT, _BESIDES = 64 << 20, 512
_SO_PEERPIDFD = 77  # Linux 6.5; not in Python's socket


class Closed(ProtocolError):
    """The other side has closed the connection."""


class Silent(ProtocolError):
    """The other side does not answer."""


class Connection(ProcessBound):
    """Messages over a Unix socket. Each method but `close` raises ProtocolError if the connection is unusable."""

    def __init__(self, sock: socket.socket, files: int = 0):
        """``files`` is the number of open files that may come with a message; the kernel closes others unread."""
        sock.setblocking(False)
        self._socket, self._files = sock, files
        self._received = bytearray()
        self._unsent: deque[tuple[memoryview, Sequence[int]]] = deque()
        self._unsent_nbytes = 0
        self._greeted = False
        self.descriptors: list[int] = []  #: open files that came with a message; whoever takes them closes them
        self._send(PREAMBLE)

    def fileno(self) -> int:
        """The descriptor of the socket."""
        return self._socket.fileno()

    @property
    def unsent(self) -> int:
        """About the bytes of memory of the messages that the other side has not taken yet."""
        return self._unsent_nbytes + len(self._unsent) * _BESIDES

    def send(self, header: Header, body: bytes, descriptors: Sequence[int] = ()) -> None:
        """Send a message, with copies of open files, or as much of it as the other side takes now."""
        self._send(HEADER.pack(*header) + body, descriptors)

    def _send(self, message: bytes, descriptors: Sequence[int] = ()) -> None:
        self._unsent.append((memoryview(message), descriptors))
        self._unsent_nbytes += len(message)
        if len(self._unsent) == 1:
            self.flush()
        if self.unsent > _MOST_UNSENT:
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
            with contextlib.suppress(Closed):
                self.fill()
            self._greet()  # it may have closed because its release differs
            raise Closed(error.strerror or str(error)) from error

    def receive(self) -> Iterator[tuple[Header, bytes]]:
        """The whole messages that have arrived."""
        self.fill()
        while (message := self._take()) is not None:
            yield message

    def next(self) -> tuple[Header, bytes] | None:
        """The next whole message that has arrived; None if there is none."""
        if not self.has_message:
            self.fill()
        return self._take()

    @property
    def has_message(self) -> bool:
        """Has a whole message been received that was not taken yet? Raises ProtocolError if it is longer than any."""
        return self._end() > 0

    def _end(self) -> int:
        """The end of the first message, if it is whole; else 0."""
        self._greet()
        if not self._greeted or len(self._received) < HEADER.size:
            return 0
        (nbytes, *_) = HEADER.unpack_from(self._received)
        if nbytes > LONGEST:
            raise ProtocolError(f"a message of {nbytes} bytes is longer than any")
        end = HEADER.size + nbytes
        return end if len(self._received) >= end else 0

    def _take(self) -> tuple[Header, bytes] | None:
        if not (end := self._end()):
            return None
        header, body = Header(*HEADER.unpack_from(self._received)), bytes(self._received[HEADER.size : end])
        del self._received[:end]
        return header, body

    def _greet(self) -> None:
        """Take the preamble of the other side."""
        if not self._greeted and len(self._received) >= len(PREAMBLE):
            check_preamble(bytes(self._received[: len(PREAMBLE)]))
            del self._received[: len(PREAMBLE)]
            self._greeted = True

    def fill(self) -> None:
        """Receive what has arrived, without parsing it."""
        if len(self._received) > HEADER.size + LONGEST:
            raise ProtocolError("it sends more while it waits for an answer")
        try:
            piece, descriptors, _, _ = socket.recv_fds(self._socket, _PIECE, self._files)
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


def connect(path: Path, files: int = 0) -> Connection:
    """Connect to the server at this path; ``files`` as in `Connection`.

    Raises ProtocolError if none listens, or if it is another user's.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        sock.connect(str(path))
        if whose := stranger(sock):
            raise ProtocolError(f"{whose} answers there; engines and server run as the same user")
        return Connection(sock, files)
    except BlockingIOError as error:
        sock.close()
        raise Silent("it accepts no connection") from error
    except (OSError, ProtocolError) as error:
        sock.close()
        raise ProtocolError(getattr(error, "strerror", None) or str(error)) from error


def wait_for_end(descriptor: int) -> None:
    """Return when one side has closed the connection with this descriptor."""
    poll = select.poll()
    poll.register(descriptor, 0)
    poll.poll()


def peer_process(sock: socket.socket) -> int:
    """A descriptor that becomes readable when the process at the other end has ended. Raises OSError."""
    with contextlib.suppress(OSError):
        return sock.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    # An older kernel. Had the process ended and another got its number, the other end would be closed by now.
    process = os.pidfd_open(credentials(sock)[0])
    poll = select.poll()
    poll.register(sock, 0)
    if any(event & (select.POLLHUP | select.POLLERR) for _, event in poll.poll(0)):
        os.close(process)
        raise ProcessLookupError("it has ended")
    return process
