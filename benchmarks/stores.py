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
from kvtier_core.errors import BackendError
from kvtier_remote.memory import probe

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


_LENDS = """
import sys
from mooncake.store import MooncakeDistributedStore
client = MooncakeDistributedStore()
print(client.setup("127.0.0.1", "P2PHANDSHAKE", int(sys.argv[2]), 16 << 20, "tcp", "", sys.argv[1]), flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def mooncake(place: Path, nbytes: int) -> Iterator[str | None]:
    """The address of a Mooncake master with so many bytes of memory; None where Mooncake cannot be loaded."""
    if subprocess.run([sys.executable, "-c", "import mooncake.store"], stderr=subprocess.DEVNULL).returncode:
        progress("no Mooncake here: mooncake is not measured")
        yield None
        return
    with socket.create_server(("127.0.0.1", 0)) as free, socket.create_server(("127.0.0.1", 0)) as other:
        port, metrics = free.getsockname()[1], other.getsockname()[1]
    address = f"127.0.0.1:{port}"
    words = ("--rpc_address=127.0.0.1", f"--rpc_port={port}", "--metrics_host=127.0.0.1", f"--metrics_port={metrics}")
    short = ("--put_start_discard_timeout_sec=1", "--put_start_release_timeout_sec=2")
    lends = [sys.executable, "-c", _LENDS, address, str(nbytes)]
    with open(place / "log", "wb") as log, contextlib.ExitStack() as processes:
        for command in ([sys.executable, "-m", "mooncake.cli", *words, *short], lends):
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log)
            processes.enter_context(process)
            processes.callback(process.kill)
            if command is not lends:
                _wait_for(port)
        must(process.stdout is not None and process.stdout.readline() == b"0\n")
        yield address


def _wait_for(port: int) -> None:
    while True:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
            return
        time.sleep(0.01)


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
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as server:
        try:
            while not _answers(path):
                must(server.poll() is None)
                time.sleep(0.05)
            yield Served(path, server)
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait(60)


def _answers(path: Path) -> bool:
    try:
        probe(path)
    except BackendError:
        return False
    return True


def memory(nbytes: int) -> list[dict[str, str]]:
    """The tiers of such a server, and of what is compared to it."""
    return [{"type": "cpu", "capacity": f"{nbytes >> 10}KiB", "huge_pages": "off"}]


def cpu_seconds(process: subprocess.Popen) -> float:
    """Of a process that runs, with all its threads."""
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
