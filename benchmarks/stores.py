"""Stores that engines share, on this machine, for as long as they are measured."""

from __future__ import annotations

import contextlib
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.bare import must
from benchmarks.measure import progress


class RedisPlaces(NamedTuple):
    """Where a server is reached."""

    path: Path  #: its Unix socket
    port: int  #: on the loopback
    process: subprocess.Popen

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """It does nothing until the end of the context, and its connections stay open."""
        self.process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.process.send_signal(signal.SIGCONT)


@contextlib.contextmanager
def redis(place: Path) -> Iterator[RedisPlaces | None]:
    """A server that keeps nothing on the disk; None where there is none to start."""
    program = shutil.which("redis-server") or shutil.which("valkey-server")
    if program is None:
        progress("no redis-server here: redis is not measured")
        yield None
        return
    path = place / "redis.sock"
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    words = ("--port", port, "--bind", "127.0.0.1", "--unixsocket", path, "--dir", place, "--save", "")
    server = subprocess.Popen([program, *map(str, words)], stdout=subprocess.DEVNULL)
    try:
        while not path.exists():
            must(server.poll() is None)
            time.sleep(0.01)
        yield RedisPlaces(path, port, server)
    finally:
        server.kill()
        server.wait()


@contextlib.contextmanager
def shared_tiers(place: Path) -> Iterator[dict[str, dict[str, Any]]]:
    """The settings of a tier on each kind of shared store, by what a table calls it."""
    with redis(place) as server:
        tiers = {"a shared folder": {"type": "disk", "shared": True, "path": str(place / "shared"), "min_free": "0B"}}
        if server is not None:
            tiers["redis"] = {"type": "redis", "url": f"redis://127.0.0.1:{server.port}"}
        yield tiers
