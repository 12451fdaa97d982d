"""`kvtier serve` in a process of its own."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from patience import HANG, wait_until

from kvtier_core.errors import BackendError
from kvtier_remote.memory import probe

KVTIER = Path(sys.executable).with_name("kvtier")


@contextlib.contextmanager
def kvtier_serve(file: Path, socket: Path, end: int = signal.SIGTERM) -> Iterator[subprocess.Popen]:
    """A server with this configuration, which answers engines at ``socket`` and gets the signal ``end`` at the end."""
    with subprocess.Popen([KVTIER, "serve", "--config", file, "--socket", socket], stdout=subprocess.DEVNULL) as server:
        try:
            wait_until(lambda: server.poll() is not None or _answers(socket), "the server does not answer")
            assert server.returncode is None, "the server has ended"
            yield server
        finally:
            server.send_signal(end)
            server.wait(HANG)


def _answers(socket: Path) -> bool:
    try:
        probe(socket)
    except BackendError:
        return False
    return True
