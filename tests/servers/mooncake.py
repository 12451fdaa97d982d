"""A Mooncake master, and clients that lend it memory, which end with their context."""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
from needs import needs
from patience import HANG, wait_until

from servers.ports import free_port
from servers.stopping import stopped

ROOM = 64 << 20  #: that a client lends where a test needs little
#: So that nothing that a test leaves behind is kept for minutes: leases, writes that never end, clients that are gone.
_SHORT = ("--default_kv_lease_ttl=4s", "--put_start_discard_timeout_sec=1", "--put_start_release_timeout_sec=3")
_SHORT = (*_SHORT, "--client_ttl=3")
#: A client. It connects again and again, because a master may listen before it answers.
_CLIENT = """
import ast, os, sys
from mooncake.store import MooncakeDistributedStore
master, lent, calls = sys.argv[1:]
while (client := MooncakeDistributedStore()).setup("127.0.0.1", "P2PHANDSHAKE", int(lent), 16 << 20, "tcp", "", master):
    print("no client of", master, "yet", file=sys.stderr)
"""
_LENDS = f"""{_CLIENT}
print(client.get_hostname(), flush=True)
sys.stdin.read()
"""
#: Another client than a tier's: the results of calls, each a name and arguments.
_ASKS = f"""{_CLIENT}
print([getattr(client, call)(*words) for call, *words in ast.literal_eval(calls)], flush=True)
os._exit(0)
"""


def mooncake_master() -> str:
    """The program. Without it, or what it loads, the test is skipped."""
    found = importlib.util.find_spec("mooncake")
    needs("Mooncake", found, "pip install mooncake-transfer-engine-non-cuda")
    loaded = subprocess.run([sys.executable, "-c", "import mooncake.store"], capture_output=True)
    needs("libibverbs1", not loaded.returncode)
    return str(Path(found.origin).parent / "mooncake_master")


@attrs.define
class Process:
    """A process of Mooncake."""

    process: subprocess.Popen | None = None

    def kill(self) -> None:
        """End it at once. May be called twice."""
        if self.process is not None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
            self.process.wait()

    def stopped(self) -> contextlib.AbstractContextManager[None]:
        """It does nothing until the end of the context, and its connections stay open."""
        return stopped(self.process.pid)


@attrs.define
class Owner(Process):
    """A client that lends memory to the store."""

    name: str = ""  #: as `preferred_segment` takes it


@attrs.define
class Master(Process):
    """A master on the loopback."""

    log: Path = attrs.field(kw_only=True)
    port: int = attrs.field(factory=free_port)

    @property
    def address(self) -> str:
        """As `MooncakeConfig.master` takes it."""
        return f"127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start it, perhaps again, with nothing in it, and wait until it listens."""
        listens = ("--rpc_address=127.0.0.1", f"--rpc_port={self.port}", "--metrics_host=127.0.0.1")
        command = [sys.executable, "-m", "mooncake.cli", *listens, f"--metrics_port={free_port()}", *_SHORT]
        mooncake_master()
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        wait_until(self._listens, f"{self.log} says why mooncake_master does not listen")

    @contextlib.contextmanager
    def owner(self, nbytes: int) -> Iterator[Owner]:
        """A client that lends ``nbytes`` of memory until the end of the context, and is then killed."""
        command = [sys.executable, "-c", _LENDS, self.address, str(nbytes), ""]
        with open(self.log, "ab") as log:
            owner = Owner(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log))
        try:
            owner.name = owner.process.stdout.readline().decode().strip()
            assert owner.name, f"{self.log} says why a client cannot lend memory"
            yield owner
        finally:
            owner.kill()
            owner.process.stdin.close()
            owner.process.stdout.close()

    def ask(self, *calls: Sequence[Any]) -> list[Any]:
        """The results of calls of Mooncake's client, each a name and arguments."""
        command = [sys.executable, "-c", _ASKS, self.address, "0", repr(calls)]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=HANG)
        return ast.literal_eval(done.stdout.splitlines()[-1])

    def _listens(self) -> bool:
        assert self.process.poll() is None, f"mooncake_master ended: {self.log.read_text()[-2000:]}"
        try:
            socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
        except OSError:
            return False
        return True


@contextlib.contextmanager
def one_master(folder: Path) -> Iterator[Master]:
    """A master without any memory."""
    folder.mkdir(exist_ok=True)
    master = Master(log=folder / "log")
    try:
        master.start()
        yield master
    finally:
        master.kill()
