"""The status of a running engine: a snapshot each second, why recent requests hit or missed, where chunks are."""

from __future__ import annotations

import functools
import hashlib
import itertools
import logging
import os
import secrets
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from kvtier_core.outside import BEGINNING, Printable, printable
from kvtier_core.storekit.owner_socket import sweep
from kvtier_core.storekit.user_folders import runtime_folder
from kvtier_core.telemetry.readings import Readings
from kvtier_core.telemetry.status_server import Answer, Server
from kvtier_core.types import Usage
from kvtier_core.work.io_pool import run

logger = logging.getLogger("kvtier")

#: Seconds between two snapshots.
_EVERY = 1.0
#: Number of hit lines that are remembered; a request that is matched again, because its load failed, has one more.
_REMEMBERED = 4096
#: The sockets of this user's engines, by process.
PATTERN = "status-*.sock"
#: Number of tenants counted apart. The one with the fewest tokens makes room for a new one, and joins the others.
_APART = 64
OTHERS = "others"
_PREFIXES = ("", "cmpl-", "chatcmpl-")
_numbers = itertools.count(1)


def socket_path(setting: str, *, trial: bool = False) -> Path:
    """The path of this engine's socket. Raises OSError if there is no folder for it. A ``trial`` changes nothing."""
    if setting != "auto":
        return Path(setting).expanduser()
    folder = runtime_folder(trial=trial)
    if not trial:
        sweep(folder, PATTERN)
    return folder / f"status-{os.getpid()}-{next(_numbers)}.sock"


def sources(told: Mapping[str, Any]) -> str:
    """Where the tokens of a request came from, for people, with the tiers or the reason for none; see `note`."""
    loaded, own, why = told["loaded"], told["engine_had"], f" ({told['why']})"
    words = [f"{own} from the engine's own cache"] if own else []
    words += [f"{loaded} from kvtier{why if loaded else ''}"]
    words += [f"{told['tokens'] - own - loaded} computed{'' if loaded else why}"]
    return ", ".join(words)


class StatusPage:
    """The status of one engine, from `open` to `close`. The owner's thread calls every method.

    A failure here is logged once and disables the page; the engine does not notice.
    """

    def __init__(
        self,
        readings: Readings,
        usage: Callable[[], Sequence[Usage]],
        why_not: Callable[[Answer], str],
        owner: Callable[[Answer], Answer],
        clock: Callable[[], float] = time.monotonic,
    ):
        """``readings`` and ``usage()`` are of the stack; ``owner(question)`` answers what only the owner can.

        ``why_not(question)`` refuses it before, on the server's thread, or is empty. ``clock`` returns seconds.
        """
        self._readings = readings
        self._usage = usage
        self._why_not = why_not
        self._owner = owner
        self._clock = clock
        self._server: Server | None = None
        self._about: Mapping[str, Any] = {}
        self._next = 0.0
        self._tokens = 0  # of requests that were looked up
        self._tenants = Tenants()
        # Read on the server's thread: both are replaced, or grow by one value, in one step of the interpreter.
        self._snapshot: Mapping[str, Any] = {}
        self._recent: deque[Mapping[str, Any]] = deque(maxlen=_REMEMBERED)

    def open(
        self, setting: str, about: Mapping[str, Any], warn: Callable[[str], object], *, trial: bool = False
    ) -> None:
        """Open the socket that the configuration's ``status`` names. ``about`` is part of every snapshot.

        ``warn`` is told why that failed. In a ``trial`` nobody can connect to it.
        """
        if setting == "off":
            return
        self._about = {"pid": os.getpid(), **about}
        self._publish()
        opened = run(lambda: Server(socket_path(setting, trial=trial), self._answer, trial=trial))
        if opened.error is not None:
            warn(
                f"status: {setting}: cannot open a socket, so kvtier status cannot find this engine: {opened.error}; "
                "set another path, status: PATH"
            )
            return
        self._server = opened.value
        logger.info("kvtier: status at %s, for kvtier status and kvtier top", self._server.path)

    def note(self, request: Printable, **told: Any) -> None:
        """Remember the hit line of a request, which is being logged."""
        if self._server is not None:
            self._recent.append({"request": request, "at": time.time(), **told})

    def recent(self, count: int) -> Sequence[Mapping[str, Any]]:
        """The hit lines of the last requests, oldest first. Any thread may call this."""
        return list(self._recent)[-count:]

    def count(self, salt: bytes | None, tokens: int, queried: int, loaded: int) -> None:
        """Count a request: its tokens, those that the engine lacked, and those that were loaded.

        With None as its ``salt`` it belongs to no tenant.
        """
        if self._server is not None:
            self._tokens += tokens
            if salt is not None:
                self._tenants.count(salt, tokens, queried, loaded)

    def step(self) -> None:
        """Publish a snapshot if it is time, or if no request is left, and answer what only the owner can."""
        server = self._server
        if server is None:
            return
        error = run(lambda: self._publish_and_answer(server)).error
        if error is not None:
            logger.warning("kvtier: status: disabled until the engine restarts: %s: %s", type(error).__name__, error)
            self.close()

    def close(self) -> None:
        """Close the socket. May be called twice."""
        server, self._server = self._server, None
        if server is not None:
            server.close()

    # -- on the owner's thread -----------------------------------------------------------------------

    def _publish_and_answer(self, server: Server) -> None:
        if self._clock() >= self._next or not self._readings.requests:
            self._publish()
        while (question := server.take()) is not None:
            client, asked = question
            found = run(functools.partial(self._owner, asked))
            server.reply(client, found.value or {"error": f"this prompt cannot be named: {found.error}"})

    def _publish(self) -> None:
        self._next = self._clock() + _EVERY
        self._snapshot = {
            **self._about,
            "at": time.time(),
            "requests": {"running": self._readings.requests, "tokens": self._tokens},
            "tiers": [{**attrs.asdict(each), **self._readings.of(each.tier).describe()} for each in self._usage()],
            "tenants": self._tenants.describe(),
        }

    # -- on the server's thread ----------------------------------------------------------------------

    def _answer(self, asked: Answer) -> Answer | None:
        match asked:
            case {"status": _}:
                return self._snapshot
            case {"request": str(request_id)}:
                return self._explain(request_id)
            case {"requests": int(count)} if count > 0:
                return {"found": self.recent(count)}
        why = self._why_not(asked)
        return {"error": why} if why else None

    def _explain(self, request_id: str) -> Answer:
        """The hit lines of a request. vLLM puts a prefix before the ids that clients know, and digits after them."""
        known = list(self._recent)
        exact = [told for told in known if told["request"] == printable(request_id)]
        ids = [f"{prefix}{request_id}" for prefix in _PREFIXES]
        whole, begin = set(map(printable, ids)), tuple(printable(f"{each}-")[:BEGINNING] for each in ids)
        found = exact or [told for told in known if told["request"] in whole or told["request"].startswith(begin)]
        return {"found": found, "remembered": _REMEMBERED}


class Tenants:
    """The tokens that requests of one ``cache_salt`` and adapter asked for and loaded.

    Counted by a keyed digest, so that a reader cannot test which salt a name belongs to.
    """

    def __init__(self) -> None:
        self._key = secrets.token_bytes(32)
        self._counts: dict[str, Counter[str]] = {}

    def count(self, salt: bytes, tokens: int, queried: int, loaded: int) -> None:
        """Count a request: its tokens, those that the engine lacked, and those that were loaded."""
        tenant = hashlib.blake2b(salt, digest_size=4, key=self._key).hexdigest() if salt else "-"
        if tenant not in self._counts and len(self._counts) >= _APART:
            apart = [name for name in self._counts if name != OTHERS]
            least = min(apart, key=lambda name: self._counts[name]["tokens"])
            self._counts.setdefault(OTHERS, Counter()).update(self._counts.pop(least))
        more = {"requests": 1, "tokens": tokens, "queried": queried, "loaded": loaded}
        self._counts.setdefault(tenant, Counter()).update(more)

    def describe(self) -> Sequence[Mapping[str, str | int]]:
        """The tenants, those with the most tokens first. The one without a salt is ``-``."""
        ordered = sorted(self._counts.items(), key=lambda item: -item[1]["tokens"])
        return [{"tenant": name, **counts} for name, counts in ordered]
