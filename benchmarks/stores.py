"""Stores and servers that engines share, on this machine, for as long as they are measured."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.bare import must
from benchmarks.measure import progress

KVTIER = Path(sys.executable).with_name("kvtier")


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


class Served(NamedTuple):
    """Where a `kvtier serve` is reached."""

    path: Path  #: its socket
    process: subprocess.Popen


@contextlib.contextmanager
def kvtier_server(place: Path, nbytes: int) -> Iterator[Served]:
    """A server of so many bytes of memory."""
    file, path = place / "kvtier.yaml", place / "s"
    file.write_text(json.dumps({"version": 1, "tiers": memory(nbytes)}))
    command: list[str | Path] = [KVTIER, "serve", "--config", file, "--socket", path]
    with subprocess.Popen(command, stdout=-1, stderr=-3, text=True) as server:
        try:
            must(any(line.startswith("engines write") for line in server.stdout or ()))
            yield Served(path, server)
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait(60)


def memory(nbytes: int) -> list[dict[str, str]]:
    """The tiers of such a server, and of what is compared to it."""
    return [{"type": "cpu", "capacity": f"{nbytes >> 10}KiB", "huge_pages": "off"}]


def cpu_seconds(process: subprocess.Popen) -> float:
    """Of a process that runs, with all its threads."""
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
