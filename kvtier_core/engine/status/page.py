"""What is told of a running engine: a snapshot each second, why recent requests hit or missed, where chunks are."""

from __future__ import annotations

import hashlib
import itertools
import logging
import os
import re
import secrets
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from kvtier_core.config.model import StackConfig
from kvtier_core.engine.request_view import KVIdentity, RequestView
from kvtier_core.engine.scheduler.event_log import EventLog
from kvtier_core.engine.scheduler.requests import Requests, RequestState
from kvtier_core.engine.scheduler.savings import Savings, TierSavings
from kvtier_core.engine.status.server import Answer, Server
from kvtier_core.engine.worker_reports import runtime_folder
from kvtier_core.stack.interface import Stack
from kvtier_core.storekit.owner_socket import sweep
from kvtier_core.transfer.io_pool import run

logger = logging.getLogger("kvtier")

#: Seconds between two snapshots.
_EVERY = 1.0
#: Hit lines that are remembered; a request that is matched again, because its load failed, has one more.
_REMEMBERED = 4096
#: The sockets of the engines of this user, by the process.
PATTERN = "status-*.sock"
#: Tenants that are counted apart. The one with the fewest tokens makes room for a new one, and joins the others.
_APART = 64
OTHERS = "others"
_numbers = itertools.count(1)


def socket_path(setting: str) -> Path:
    """Where the socket of this engine is. Raises OSError if there is no folder for it."""
    if setting != "auto":
        return Path(setting).expanduser()
    folder = runtime_folder()
    sweep(folder, PATTERN)
    return folder / f"status-{os.getpid()}-{next(_numbers)}.sock"


class StatusPage:
    """Tells of one engine from `open` to `close`, and nothing before. The owner's thread calls every method.

    What fails here is logged once, and nothing more is told; the engine does not notice.
    """

    def __init__(
        self,
        manager: Stack,
        requests: Requests,
        events: EventLog,
        savings: Savings,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._manager = manager
        self._requests = requests
        self._events = events
        self._savings = savings
        self._clock = clock
        self._server: Server | None = None
        self._about: Mapping[str, Any] = {}
        self._next = 0.0
        self._tokens = 0  # of requests that were looked up
        self._tenants = Tenants()
        # Read on the server's thread: both are replaced, or grow by one value, in one step of the interpreter.
        self._snapshot: Mapping[str, Any] = {}
        self._recent: deque[Mapping[str, Any]] = deque(maxlen=_REMEMBERED)

    def open(self, config: StackConfig, about: Mapping[str, Any]) -> None:
        """Open the socket that the configuration asks for. ``about`` is told with every snapshot."""
        if config.status == "off":
            return
        self._about = {"pid": os.getpid(), **about}
        self._publish()
        opened = run(lambda: Server(socket_path(config.status), self._answer))
        if opened.error is not None:
            logger.warning(
                "kvtier: status: %s: no socket can be opened, so that kvtier status finds no engine: %s; name another "
                "place for it, status: PATH",
                config.status,
                opened.error,
            )
            return
        self._server = opened.value
        logger.info("kvtier: status at %s", self._server.path)

    def note(self, state: RequestState, tokens: int, why: str) -> None:
        """The hit line of a request is being logged: so many tokens are loaded."""
        if self._server is None:
            return
        view = state.view
        tiers = dict(state.sources if tokens else {})
        told = {"tokens": view.tokens, "loaded": tokens, "engine_had": state.computed, "tiers": tiers, "why": why}
        self._recent.append({"request": view.request_id, "at": time.time(), "waited": state.waited, **told})

    def recent(self, count: int) -> Sequence[Mapping[str, Any]]:
        """What became of the last requests, oldest first. Any thread may call this."""
        return list(self._recent)[-count:]

    def count(self, state: RequestState, hit: int) -> None:
        """It is known what became of a request's tokens: so many were loaded."""
        if self._server is None:
            return
        tokens = state.view.tokens
        self._tokens += tokens
        if isinstance(state.view.identity, KVIdentity):
            self._tenants.count(state.view.identity.salt, tokens, tokens - state.computed, hit)

    def step(self) -> None:
        """Publish a snapshot if it is time, or if no request is left, and answer what only the owner can."""
        if self._server is None:
            return
        is_due = self._clock() >= self._next or not self._requests
        error = run(self._publish_and_answer if is_due else self._answer_questions).error
        if error is not None:
            logger.warning("kvtier: status: disabled until the engine restarts: %s: %s", type(error).__name__, error)
            self.close()

    def close(self) -> None:
        """Close the socket. May be called twice."""
        server, self._server = self._server, None
        if server is not None:
            server.close()

    # -- on the owner's thread -----------------------------------------------------------------------

    def _publish_and_answer(self) -> None:
        self._publish()
        self._answer_questions()

    def _publish(self) -> None:
        self._next = self._clock() + _EVERY
        self._snapshot = {
            **self._about,
            "at": time.time(),
            "requests": {"running": len(self._requests), "tokens": self._tokens},
            "tiers": [
                {
                    **attrs.asdict(usage),
                    "events": self._events.stats.totals(usage.tier),
                    "tokens": self._events.stats.tokens(usage.tier),
                    "savings": attrs.asdict(self._savings.by_tier.get(usage.tier, TierSavings())),
                }
                for usage in self._manager.usage()
            ],
            "tenants": self._tenants.describe(),
        }

    def _answer_questions(self) -> None:
        while (question := self._server.take()) is not None:
            client, asked = question
            answered = run(lambda asked=asked: self._where(asked))
            self._server.reply(client, answered.value or {"error": f"this prompt cannot be named: {answered.error}"})

    def _where(self, asked: Answer) -> Answer:
        """Where the chunks of a prompt are now."""
        tokens = asked["prompt"]
        view = RequestView("explained", tokens, len(tokens), KVIdentity())
        path = self._requests.keys(RequestState(view, 0.0, ""), len(tokens))
        places = self._manager.whereabouts(path)
        return {
            "tokens": len(tokens),
            "chunk_tokens": self._requests.chunk_tokens,
            "cold": self._about.get("cold", ""),
            "chunks": [{"key": key.hex(), **attrs.asdict(place)} for key, place in zip(path, places, strict=True)],
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
            case {"prompt": list(tokens)} if all(isinstance(token, int) for token in tokens):
                return None
        return {"error": "expected one of: status, request, requests, prompt"}

    def _explain(self, request_id: str) -> Answer:
        """vLLM appends digits to the ids that clients know."""
        known = list(self._recent)
        whole = re.compile(rf"(?:cmpl-|chatcmpl-)?{re.escape(request_id)}(?:-.*)?")
        exact = [told for told in known if told["request"] == request_id]
        found = exact or [told for told in known if whole.fullmatch(told["request"])]
        return {"found": found, "remembered": _REMEMBERED}


@attrs.define
class _Counts:
    requests: int = 0
    tokens: int = 0
    queried: int = 0
    loaded: int = 0

    def add(self, more: _Counts) -> None:
        self.requests += more.requests
        self.tokens += more.tokens
        self.queried += more.queried
        self.loaded += more.loaded


class Tenants:
    """What requests of one ``cache_salt`` and adapter asked and loaded.

    Counted by a keyed digest: who sees it cannot try out which salt it is of, so that none is told.
    """

    def __init__(self) -> None:
        self._key = secrets.token_bytes(32)
        self._counts: dict[str, _Counts] = {}

    def count(self, salt: bytes, tokens: int, queried: int, loaded: int) -> None:
        """A request had so many tokens, of which the engine lacked some, and some of these were loaded."""
        tenant = hashlib.blake2b(salt, digest_size=4, key=self._key).hexdigest() if salt else "-"
        if tenant not in self._counts and len(self._counts) >= _APART:
            apart = [name for name in self._counts if name != OTHERS]
            least = min(apart, key=lambda name: self._counts[name].tokens)
            self._counts.setdefault(OTHERS, _Counts()).add(self._counts.pop(least))
        self._counts.setdefault(tenant, _Counts()).add(_Counts(1, tokens, queried, loaded))

    def describe(self) -> Sequence[Mapping[str, str | int]]:
        """Those with the most tokens first. One without a salt is ``-``."""
        ordered = sorted(self._counts.items(), key=lambda item: -item[1].tokens)
        return [{"tenant": name, **attrs.asdict(counts)} for name, counts in ordered]
