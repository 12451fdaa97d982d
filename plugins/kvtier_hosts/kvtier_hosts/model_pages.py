"""The pages of one model, for hosts whose keys contain its name but nothing of its content."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs

from kvtier_core.config.model import NAMED, IdentityConfig, StackConfig
from kvtier_core.errors import ConfigError, Problem
from kvtier_core.identity import weights
from kvtier_core.types import Namespace
from kvtier_core.work.io_pool import run, run_aside
from kvtier_hosts.pages import PageStore, Result

logger = logging.getLogger("kvtier")

#: Seconds between two checks whether the files of the weights have changed. An engine takes longer to load others.
_TICK = 1.0


#: Called with the store of pages, or with None if they have none.
_Begin = Callable[[PageStore | None], None]


@attrs.frozen
class Page:
    """The form of a host's pages."""

    layout: str  #: everything on which the meaning of its bytes depends
    nbytes: int


class ModelPages:
    """A `PageStore` for the pages of one model, open once its weights are known and a page was seen.

    All pages are alike: a page unlike the first one is refused. When the files of the weights change, it is closed for
    good: which weights later pages belong to is unknown. Any thread may call any method; only `close` waits.
    """

    def __init__(
        self,
        config: StackConfig,
        model: str,
        folder: Path,
        facts: Mapping[str, object],
        *,
        replica: int = 0,
        replicas: int = 1,
        told: Callable[[str], None] = lambda call: None,
    ):
        """``folder`` has the weights of the engines that use this name, ``facts`` what else is not in the host's keys.

        ``replica``, ``replicas`` and ``told`` are those of `PageStore`. Raises ConfigError if there are no weights.
        """
        self._config, self._model, self._folder = config, model, folder
        self._facts = {**facts, "model": model}
        self._options: dict[str, Any] = {"replica": replica, "replicas": replicas, "told": told}
        self._wake = threading.Event()
        self._decided = threading.Event()  # there is a store, or there will never be one
        self._lock = threading.Lock()  # of all below
        self._page: Page | None = None
        self._store: PageStore | None = None
        self._waiting: list[_Begin] | None = []  # None: no call waits any more
        self._refused: set[Page] = set()
        self._ended = ""  # why nothing is served any more
        found = run(self._state)
        if found.error is not None or found.value == ():
            why = f"cannot read the weights of {model}: {found.error or f'none in {folder}'}"
            raise ConfigError([Problem("models", f"$.{model}", why, f"or set identity: {{weights: {NAMED}…}}")])
        self._before = found.value
        run_aside(self._serve, "model")

    @property
    def ended(self) -> str:
        """Why this model is no longer served; empty while it is, or will be."""
        return self._ended

    @property
    def is_open(self) -> bool:
        """Is it served?"""
        return self._store is not None and not self._ended

    def when_open(self, page: Page | None, begin: _Begin) -> None:
        """Call ``begin``, now or on another thread, once such pages have a store; with None after ``load_wait``.

        The form of the first page decides; None stands for that form. Only calls within ``load_wait`` of it wait.
        """
        with self._lock:
            if self._page is None and page is not None:
                self._page = page
                self._wake.set()
                run_aside(self._wait_for_opening, "opening")
            asked = page or self._page
            if asked and asked == self._page and self._waiting is not None:
                self._waiting.append(begin)
                return
            store = self._store if asked == self._page and not self._ended else None
            if asked and self._page and asked not in (self._page, *self._refused):
                self._refused.add(asked)
                logger.warning(
                    "kvtier: %s has pages of several kinds; only the first is stored: %s, not %s",
                    *(self._model, self._page.layout, asked.layout),
                )
        begin(store)

    def _wait_for_opening(self) -> None:
        self._decided.wait(self._config.load_wait)
        with self._lock:
            waiting, self._waiting = self._waiting, None
            store = None if self._ended else self._store
        for begin in waiting or ():
            begin(store)

    def poll(self) -> list[Result]:
        """As `PageStore.poll`."""
        store = self._store
        return store.poll() if store else []

    def close(self) -> None:
        """Let writes under way finish for a few seconds, then close every tier."""
        self._end("it is closed")
        if self._store:
            self._store.close()

    def _end(self, why: str) -> None:
        with self._lock:
            self._ended = self._ended or why
        self._decided.set()
        self._wake.set()

    # -- the model's thread ------------------------------------------------------------------------

    def _serve(self) -> None:
        outcome = run(self._open_and_watch)
        if outcome.error is not None:
            self._end(f"{type(outcome.error).__name__}: {outcome.error}")
            logger.error("kvtier: %s is no longer served: %s", self._model, self._ended)
        if self._store:
            self._store.close()

    def _open_and_watch(self) -> None:
        facts = {**self._facts, "weights": self._weights()}
        while not self._ended:
            if self._state() != self._before:
                raise OSError(f"the files in {self._folder} have changed; restart the host with its engines")
            if self._page and not self._store:
                facts |= {"page": self._page.layout}
                store = PageStore(self._config, Namespace.of(facts), self._page.nbytes, **self._options)
                with self._lock:
                    self._store = store
                self._decided.set()
            self._wake.wait(_TICK)
            self._wake.clear()

    def _state(self) -> object:
        """A value that changes whenever a file of the weights does. Raises OSError."""
        return None if self._config.identity.named else weights.state(weights.loadable(self._folder))

    def _weights(self) -> str:
        """A fact. Raises OSError and ValueError."""
        asked = self._config.identity
        if asked.named:
            logger.warning(
                "kvtier: the weights of %s are assumed to be %s; this is not checked", self._model, asked.weights
            )
            return asked.weights
        return fact_of_weights(self._folder, asked)


def fact_of_weights(folder: Path, asked: IdentityConfig) -> str:
    """Reads all files of the weights, unless their digest is cached. Raises OSError and ValueError."""
    digest = weights.digest(folder, sampled=asked.weights == "sampled")
    if digest is None:
        raise ValueError(f"no weights in {folder}")
    return f"sampled {digest}" if asked.weights == "sampled" else digest
