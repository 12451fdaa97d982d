"""Redis servers: one, with TLS, a cluster, and one with sentinels. Each ends with its context."""

from __future__ import annotations

import contextlib
import datetime
import ipaddress
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import hiredis
import pytest

_PATIENCE = 30.0  # seconds for a server to start, or for a cluster to agree
_TICK = 0.02


def redis_server() -> str:
    """The program. Skips the test without it, and fails it where `KVTIER_CI` is set."""
    program = shutil.which("redis-server") or shutil.which("valkey-server")
    if program is None:
        why = "no redis-server: install the package redis-server, or valkey-server"
        (pytest.fail if os.environ.get("KVTIER_CI") else pytest.skip)(why)
    return program


@attrs.define
class RedisServer:
    """A server process in a folder of its own, which has its log, configuration and Unix socket."""

    folder: Path
    port: int  #: on the loopback; 0: it listens at its Unix socket alone
    settings: Sequence[str]
    password: str = ""  #: by which `ask` logs in
    tls: bool = False
    process: subprocess.Popen | None = None

    @property
    def socket(self) -> Path:
        """Its Unix socket."""
        return self.folder / "redis.sock"

    @property
    def url(self) -> str:
        """As `RedisConfig.url` takes it."""
        scheme = "rediss" if self.tls else "redis"
        return f"{scheme}://127.0.0.1:{self.port}" if self.port else f"unix://{self.socket}"

    def start(self) -> None:
        """Start it, perhaps again, and wait until it answers."""
        self.folder.mkdir(exist_ok=True)
        ports = ("--port", "0", "--tls-port", self.port) if self.tls else ("--port", self.port)
        words = (*ports, "--bind", "127.0.0.1", "--unixsocket", self.socket, "--dir", self.folder, "--save", "")
        with open(self.folder / "log", "ab") as log:
            self.process = subprocess.Popen(
                [redis_server(), *map(str, words), *self.settings], stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        wait_until(lambda: self._answers(), f"{self.folder}/log says why redis-server does not answer")

    def kill(self) -> None:
        """End it at once. May be called twice."""
        if self.process is not None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
            self.process.wait()
            self.socket.unlink(missing_ok=True)

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """It does nothing until the end of the context, and its connections stay open."""
        self.process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.process.send_signal(signal.SIGCONT)

    def ask(self, *words: object) -> Any:
        """The answer to a command; a hiredis.ReplyError if it is one."""
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(_PATIENCE)
            connection.connect(str(self.socket))
            reader = hiredis.Reader(encoding="utf-8", errors="surrogateescape")
            commands = [("AUTH", self.password)] if self.password else []
            for command in [*commands, words]:
                connection.sendall(hiredis.pack_command(tuple(map(_word, command))))
                while (answer := reader.gets()) is False:
                    received = connection.recv(1 << 16)
                    if not received:
                        raise ConnectionResetError("the server closed the connection")
                    reader.feed(received)
        return answer

    def _answers(self) -> bool:
        if self.process.poll() is not None:
            raise AssertionError(f"redis-server ended: {(self.folder / 'log').read_text()[-2000:]}")
        try:
            return not isinstance(self.ask("PING"), Exception) or not self.password
        except OSError:
            return False


def _word(word: object) -> bytes | str:
    return word if isinstance(word, bytes) else str(word)


def wait_until(condition: Any, otherwise: str) -> None:
    """Look again and again until it holds. Fails with the sentence ``otherwise`` when that takes too long."""
    deadline = time.monotonic() + _PATIENCE
    while not condition():
        assert time.monotonic() < deadline, otherwise
        time.sleep(_TICK)


def free_port(beside: int = 0) -> int:
    """A port of the loopback that nobody uses; nor the one ``beside`` numbers above, which a cluster needs."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port = first.getsockname()[1]
            if not beside:
                return port
            with contextlib.suppress(OSError, OverflowError):
                second.bind(("127.0.0.1", port + beside))
                return port


@contextlib.contextmanager
def one_server(folder: Path, *settings: str, tcp: bool = False, **options: Any) -> Iterator[RedisServer]:
    """A server at its Unix socket, or with ``tcp`` at a port too."""
    server = RedisServer(folder, free_port() if tcp else 0, settings, **options)
    try:
        server.start()
        yield server
    finally:
        server.kill()


@contextlib.contextmanager
def tls_server(folder: Path) -> Iterator[RedisServer]:
    """A server that speaks TLS with a certificate of its own making, ``ca.pem`` in its folder."""
    folder.mkdir(exist_ok=True)
    make_certificate(folder)
    files = ("--tls-cert-file", f"{folder}/ca.pem", "--tls-key-file", f"{folder}/key.pem")
    settings = (*files, "--tls-ca-cert-file", f"{folder}/ca.pem", "--tls-auth-clients", "no")
    with one_server(folder, *settings, tcp=True, tls=True) as server:
        yield server


def make_certificate(folder: Path) -> None:
    """``ca.pem`` and ``key.pem``: a certificate for 127.0.0.1 that is its own authority."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "kvtier test")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), True)
        .sign(key, hashes.SHA256())
    )
    (folder / "ca.pem").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    (folder / "key.pem").write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )


@contextlib.contextmanager
def cluster(folder: Path, nodes: int = 3, replicas: int = 0) -> Iterator[list[RedisServer]]:
    """Masters that divide the slots, then ``replicas`` of the first ones, all in agreement."""
    folder.mkdir(exist_ok=True)
    settings = ("--cluster-enabled", "yes", "--cluster-node-timeout", "1000", "--appendonly", "no")
    settings = (*settings, "--repl-diskless-sync-delay", "0", "--repl-ping-replica-period", "1")
    with contextlib.ExitStack() as stack:
        servers = []
        for number in range(nodes + replicas):
            bus = ("--cluster-port", str(free_port()), "--cluster-require-full-coverage", "no")
            server = RedisServer(folder / str(number), free_port(), (*settings, *bus))
            stack.callback(server.kill)
            server.start()
            servers.append(server)
        _introduce(servers, nodes)
        yield servers


def _introduce(servers: Sequence[RedisServer], nodes: int) -> None:
    for number, server in enumerate(servers[:nodes]):
        first, last = 16384 * number // nodes, 16384 * (number + 1) // nodes - 1
        server.ask("CLUSTER", "ADDSLOTSRANGE", first, last)
        server.ask("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
    for server in servers[1:]:
        bus = server.settings[server.settings.index("--cluster-port") + 1]
        servers[0].ask("CLUSTER", "MEET", "127.0.0.1", server.port, bus)
    wait_until(lambda: all(_knows(each, len(servers)) for each in servers), "the nodes do not find each other")
    for number, replica in enumerate(servers[nodes:]):
        replica.ask("CLUSTER", "REPLICATE", servers[number].ask("CLUSTER", "MYID"))
        wait_until(lambda each=replica: "master_link_status:up" in each.ask("INFO", "replication"), "no replication")
    wait_until(lambda: all(_agrees(each, len(servers)) for each in servers), "the cluster does not come up")


def _knows(server: RedisServer, count: int) -> bool:
    return f"cluster_known_nodes:{count}\r" in server.ask("CLUSTER", "INFO")


def _agrees(server: RedisServer, count: int) -> bool:
    slots = server.ask("CLUSTER", "SLOTS")
    listed = {node[2] for each in slots for node in each[2:]}
    return "cluster_state:ok" in server.ask("CLUSTER", "INFO") and len(listed) == count


@attrs.frozen
class Sentinel:
    """A master, its replica, and sentinels that watch them."""

    master: RedisServer
    replica: RedisServer
    sentinels: Sequence[RedisServer]

    @property
    def addresses(self) -> tuple[str, ...]:
        """As `RedisConfig.sentinels` takes them."""
        return tuple(f"127.0.0.1:{each.port}" for each in self.sentinels)

    def named(self) -> int:
        """The port of the server that the first sentinel calls the master."""
        return int(self.sentinels[0].ask("SENTINEL", "GET-MASTER-ADDR-BY-NAME", "kv")[1])


@contextlib.contextmanager
def sentinels(folder: Path, count: int = 3) -> Iterator[Sentinel]:
    """A master and a replica of the service ``kv``, and sentinels that notice within a second when it is gone."""
    folder.mkdir(exist_ok=True)
    with contextlib.ExitStack() as stack:
        at_once = ("--repl-diskless-sync-delay", "0")
        master = stack.enter_context(one_server(folder / "master", *at_once, tcp=True))
        follows = ("--replicaof", f"127.0.0.1 {master.port}")
        replica = stack.enter_context(one_server(folder / "replica", *at_once, *follows, tcp=True))
        watching = []
        for number in range(count):
            place = folder / f"sentinel{number}"
            place.mkdir()
            file = place / "sentinel.conf"
            file.write_text(
                f"sentinel monitor kv 127.0.0.1 {master.port} 2\n"
                "sentinel down-after-milliseconds kv 500\nsentinel failover-timeout kv 5000\n"
            )
            sentinel = RedisServer(place, free_port(), ("--sentinel",))
            sentinel.settings = ()
            watching.append(sentinel)
            stack.callback(sentinel.kill)
            _start_sentinel(sentinel, file)
        found = Sentinel(master, replica, watching)
        wait_until(lambda: all(_sees_all(each, count) for each in watching), "the sentinels do not find each other")
        yield found


def _start_sentinel(server: RedisServer, file: Path) -> None:
    words = ("--sentinel", "--port", server.port, "--bind", "127.0.0.1", "--unixsocket", server.socket)
    with open(server.folder / "log", "ab") as log:
        command = [redis_server(), str(file), *map(str, words), "--dir", str(server.folder)]
        server.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    wait_until(lambda: server._answers(), f"{server.folder}/log says why the sentinel does not answer")


def _sees_all(sentinel: RedisServer, count: int) -> bool:
    told = sentinel.ask("SENTINEL", "MASTER", "kv")
    facts = dict(zip(told[::2], told[1::2], strict=True))
    return facts["num-other-sentinels"] == str(count - 1) and facts["num-slaves"] == "1"
