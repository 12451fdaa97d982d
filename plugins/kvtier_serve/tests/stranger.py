"""What another account of this machine gets at listening sockets: JSON from stdin, and the answers as JSON.

python stranger.py USER
"""

from __future__ import annotations

import json
import os
import socket
import sys

#: The words that the protocols of kvtier begin with.
WORDS = [b"kvtier:\n" + bytes(8), b'{"status": 1}\n', b"\n"]


def main() -> None:
    doors = json.load(sys.stdin)
    os.setgroups([])
    os.setgid(int(sys.argv[1]))
    os.setuid(int(sys.argv[1]))
    status = b"GET /status HTTP/1.1\r\nHost: localhost\r\n\r\n"
    told = {
        f"{path} {word!r}": said(socket.AF_UNIX, path, word) for path in doors["paths"] for word in (WORDS[0], status)
    }
    for port in doors["ports"]:
        for word in WORDS:
            told[f"{port} {word!r}"] = said(socket.AF_INET, ("127.0.0.1", port), word)
        for method, path in doors["routes"]:
            asked = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\n{{}}".encode()
            told[f"{port} {method} {path}"] = said(socket.AF_INET, ("127.0.0.1", port), asked)
    json.dump(told, sys.stdout)


def said(family: int, address: object, word: bytes) -> str:
    """All that is answered to this word, or why nothing is."""
    with socket.socket(family) as door:
        try:
            door.connect(address)
            door.sendall(word)
            if b"HTTP" not in word:
                door.shutdown(socket.SHUT_WR)
            return b"".join(iter(lambda: door.recv(1 << 16), b"")).decode("latin-1")
        except OSError as error:
            return type(error).__name__


if __name__ == "__main__":
    main()
