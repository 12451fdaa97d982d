"""The addresses of the peers: of the settings, of a file that may change, and of names that are resolved again."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator

from kvtier_core.transfer.io_pool import run_aside
from kvtier_peers.settings import Address, PeersSettings

logger = logging.getLogger("kvtier")

#: Seconds after which names are resolved, and the file is read, again.
_AGAIN = 5.0


class Roster:
    """Nobody waits for it: it is renewed on a thread of its own, and empty until that has happened once.

    All methods may be called on any thread.
    """

    def __init__(self, config: PeersSettings, renewed: Callable[[], object]):
        """``renewed`` is called on that thread when the addresses are known anew."""
        self._config = config
        self._renewed = renewed
        self._addresses: frozenset[Address] = frozenset()
        self._renewing = threading.Lock()
        self._due = 0.0
        self._trouble = ""

    def addresses(self) -> frozenset[Address]:
        """The addresses as they are known now."""
        if time.monotonic() >= self._due and self._renewing.acquire(blocking=False):
            self._due = time.monotonic() + _AGAIN
            run_aside(self._renew, "peers-roster")
        return self._addresses

    def _renew(self) -> None:
        try:
            troubles: list[str] = []
            self._addresses = frozenset(self._found(troubles))
            if (trouble := "; ".join(troubles)) != self._trouble:
                self._trouble = trouble
                if trouble:
                    logger.warning("kvtier: peers: %s", trouble)
            self._renewed()
        finally:
            self._renewing.release()

    def _found(self, troubles: list[str]) -> Iterator[Address]:
        for each in [*self._config.peers, *self._in_file(troubles)]:
            try:
                host, port = Address.of(each)
                for *_, found in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
                    yield Address(str(found[0]), int(found[1]))
            except (OSError, ValueError) as error:
                troubles.append(f"{each}: {getattr(error, 'strerror', None) or error}")

    def _in_file(self, troubles: list[str]) -> list[str]:
        if self._config.file is None:
            return []
        try:
            lines = self._config.file.read_text("utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            troubles.append(f"{self._config.file}: {getattr(error, 'strerror', None) or error}")
            return []
        return [line for each in lines if (line := each.partition("#")[0].strip())]
