"""The addresses of the peers: from settings, a file that may change, and names that are resolved again."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable

from kvtier_peers.settings import Address, PeersSettings
from kvtier_peers.threads import started

logger = logging.getLogger("kvtier")

#: Seconds after which names are resolved, and the file is read, again.
_AGAIN = 5.0


class Roster:
    """No call waits for it: it is renewed on its own thread, and empty until that has happened once.

    What cannot be resolved or read keeps its last addresses: peers are not gone because a name server is.

    All methods may be called on any thread.
    """

    def __init__(self, config: PeersSettings, renewed: Callable[[], object]):
        """``renewed`` is called on that thread when the addresses have been renewed."""
        self._config = config
        self._renewed = renewed
        self._addresses: frozenset[Address] = frozenset()
        self._listed: list[str] = []  # in the file
        self._resolved: dict[str, frozenset[Address]] = {}  # of the settings and the file
        self._renewing = threading.Lock()
        self._due = 0.0
        self._trouble = ""

    def addresses(self) -> frozenset[Address]:
        """The addresses as they are known now."""
        if time.monotonic() >= self._due and self._renewing.acquire(blocking=False):
            self._due = time.monotonic() + _AGAIN
            if not started(self._renew, "peers-roster"):
                self._renewing.release()
        return self._addresses

    def _renew(self) -> None:
        try:
            troubles: list[str] = []
            entries = [*self._config.peers, *self._in_file(troubles)]
            self._resolved = {entry: self._resolve(entry, troubles) for entry in entries}
            self._addresses = frozenset().union(*self._resolved.values())
            if (trouble := "; ".join(troubles)) != self._trouble:
                self._trouble = trouble
                if trouble:
                    logger.warning("kvtier: peers: %s", trouble)
            self._renewed()
        finally:
            self._renewing.release()

    def _resolve(self, entry: str, troubles: list[str]) -> frozenset[Address]:
        try:
            host, port = Address.of(entry)
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            return frozenset(Address(str(at[0]), int(at[1])) for *_, at in found)
        except (OSError, ValueError) as error:
            troubles.append(f"{entry}: {getattr(error, 'strerror', None) or error}")
            return self._resolved.get(entry, frozenset())

    def _in_file(self, troubles: list[str]) -> list[str]:
        if self._config.file is None:
            return []
        try:
            lines = self._config.file.read_text("utf-8").splitlines()
            listed = [line for each in lines if (line := each.partition("#")[0].strip())]
            if not listed:
                raise ValueError("it does not name any peers")
            self._listed = listed
        except (OSError, ValueError) as error:
            troubles.append(f"{self._config.file}: {getattr(error, 'strerror', None) or error}")
        return self._listed
