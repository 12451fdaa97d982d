"""An object store that costs as little as one in Python can: bytes in memory, a thread a connection, nothing checked.

``python -m benchmarks.s3_server`` prints its port. Every bucket is there. Not for tests: it believes everything.
"""

from __future__ import annotations

import itertools
import re
import socket
import threading
from urllib.parse import parse_qs, urlsplit

_RANGE = re.compile(rb"bytes=(\d+)-(\d+)")
_ANSWER = (
    b'HTTP/1.1 %b\r\nETag: "%032x"\r\nLast-Modified: Tue, 01 Oct 2024 00:00:00 GMT\r\n'
    b"Date: Tue, 01 Oct 2024 00:00:00 GMT\r\nContent-Length: %d\r\n"
)


class _Store:
    """Objects by path, each a list of parts."""

    def __init__(self) -> None:
        self.objects: dict[str, list[bytearray]] = {}
        self.uploads: dict[str, dict[int, bytearray]] = {}
        self.numbers = itertools.count(1)


class _Connection:
    def __init__(self, store: _Store, peer: socket.socket):
        self._store = store
        self._peer = peer
        self._received = b""

    def serve(self) -> None:
        self._peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with self._peer:
            while (head := self._head()) is not None:
                first, *lines = head.split(b"\r\n")
                method, target, _ = first.decode().split(" ")
                pairs = (line.partition(b":") for line in lines)
                headers = {name.lower(): value.strip() for name, _, value in pairs}
                url = urlsplit(target)
                self._answer(method, url.path, parse_qs(url.query, keep_blank_values=True), headers)

    def _head(self) -> bytes | None:
        while b"\r\n\r\n" not in self._received:
            more = self._peer.recv(1 << 16)
            if not more:
                return None
            self._received += more
        head, _, self._received = self._received.partition(b"\r\n\r\n")
        return head

    def _body(self, nbytes: int) -> bytearray:
        body = bytearray(nbytes)
        view, count = memoryview(body), min(len(self._received), nbytes)
        view[:count] = self._received[:count]
        self._received = self._received[count:]
        while count < nbytes:
            count += self._peer.recv_into(view[count:])
        return body

    def _answer(self, method: str, path: str, query: dict, headers: dict) -> None:
        store = self._store
        if b"expect" in headers:
            self._peer.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        body = self._body(int(headers.get(b"content-length", 0)))
        if method == "PUT" and "partNumber" in query:
            store.uploads[query["uploadId"][0]][int(query["partNumber"][0])] = body
        elif method == "PUT":
            store.objects[path] = [body]
        elif method == "DELETE":
            store.objects.pop(path, None)
        elif method == "POST" and "uploads" in query:
            upload = str(next(store.numbers))
            store.uploads[upload] = {}
            self._say(b"200 OK", f"<R><Bucket>b</Bucket><Key>k</Key><UploadId>{upload}</UploadId></R>".encode())
            return
        elif method == "POST":
            store.objects[path] = [part for _, part in sorted(store.uploads.pop(query["uploadId"][0]).items())]
            self._say(b"200 OK", b"<R><Location>l</Location><Bucket>b</Bucket><Key>k</Key><ETag>e</ETag></R>")
            return
        else:
            self._show(path, headers, silent=method == "HEAD")
            return
        self._say(b"200 OK")

    def _show(self, path: str, headers: dict, silent: bool) -> None:
        parts = self._store.objects.get(path)
        if parts is None:
            status = b"200 OK" if path.rstrip("/").count("/") == 1 else b"404 Not Found"
            self._say(status, b"" if silent else b"<Error><Code>NoSuchKey</Code></Error>")
            return
        total = sum(map(len, parts))
        asked = _RANGE.fullmatch(headers.get(b"range", b""))
        begin, end = (int(asked[1]), min(int(asked[2]) + 1, total)) if asked else (0, total)
        more = b"Content-Range: bytes %d-%d/%d\r\n" % (begin, end - 1, total) if asked else b""
        self._peer.sendall(_ANSWER % (b"206 Partial Content" if asked else b"200 OK", 1, end - begin) + more + b"\r\n")
        offset = 0
        for part in [] if silent else parts:
            first, last = max(begin - offset, 0), min(end - offset, len(part))
            if first < last:
                self._peer.sendall(memoryview(part)[first:last])
            offset += len(part)

    def _say(self, status: bytes, body: bytes = b"") -> None:
        self._peer.sendall(_ANSWER % (status, 1, len(body)) + b"\r\n" + body)


def main() -> None:
    store, listener = _Store(), socket.create_server(("127.0.0.1", 0))
    print(listener.getsockname()[1], flush=True)
    while True:
        peer, _ = listener.accept()
        threading.Thread(target=_Connection(store, peer).serve, daemon=True).start()


if __name__ == "__main__":
    main()
