"""A Redis server, plain or with TLS, that ends with its context."""

from __future__ import annotations

import contextlib
import datetime
import ipaddress
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import hiredis
from needs import needs
from patience import HANG, wait_until

from servers.ports import free_port
from servers.stopping import stopped

_TICK = 0.02
#: Settings of a server that writes nothing to the disk.
IN_MEMORY = ("--save", "", "--appendonly", "no")


def redis_server() -> str:
    """The program. Without it the test is skipped."""
    program = shutil.which("redis-server") or shutil.which("valkey-server")
    needs("redis-server", program)
    return program


@attrs.define
class RedisServer:
    """A server process in a folder of its own, which has its log, configuration and Unix socket."""

    folder: Path
    port: int  #: on the loopback; 0: it listens at its Unix socket alone
    settings: Sequence[str] = ()  #: words of its command line
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
        words = (*self.settings, *ports, "--bind", "127.0.0.1", "--unixsocket", self.socket, "--dir", self.folder)
        with open(self.folder / "log", "ab") as log:
            command = [redis_server(), *map(str, words)]
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        wait_until(self._answers, f"{self.folder}/log says why redis-server does not answer")

    def kill(self) -> None:
        """End it at once. May be called twice."""
        if self.process is not None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
            self.process.wait()
            self.socket.unlink(missing_ok=True)

    def stopped(self) -> contextlib.AbstractContextManager[None]:
        """It does nothing until the end of the context, and its connections stay open."""
        return stopped(self.process.pid)

    def ask(self, *words: object) -> Any:
        """The answer to a command; a hiredis.ReplyError if it is one."""
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(HANG)
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


@contextlib.contextmanager
def one_server(folder: Path, *settings: str, tcp: bool = False, **options: Any) -> Iterator[RedisServer]:
    """A server at its Unix socket, or with ``tcp`` at a port too."""
    server = RedisServer(folder, free_port() if tcp else 0, (*IN_MEMORY, *settings), **options)
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
