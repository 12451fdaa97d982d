"""A running server reads its files again, and takes what can change while engines use it."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import attrs
from msgspec import Struct

from kvtier_core.config.model import ArenaTierConfig, StackConfig, StoreTierConfig
from kvtier_core.work.io_pool import run, run_aside
from kvtier_serve.programs import Programs
from kvtier_serve.quotas import QuotaBook, Quotas
from kvtier_serve.spaces import Spaces
from kvtier_serve.tenants import UNBOUNDED

logger = logging.getLogger("kvtier")

Tier = ArenaTierConfig | StoreTierConfig
#: Has the owner's thread do something.
Ask = Callable[[Callable[[], Any]], Future[Any]]


class Reloaded(Struct):
    """What is in force now, and what would be after a restart."""

    changed: list[str]
    needs_restart: list[str]


@attrs.frozen
class Files:
    """The contents of the server's files, all of them valid."""

    config: StackConfig
    quotas: Quotas


class Reload:
    """Reads the files of a server again."""

    def __init__(self, spaces: Spaces, quotas: QuotaBook, programs: Programs, config: Callable[[], StackConfig]):
        """``config()`` reads the file with the tiers; it raises ConfigError."""
        self._spaces = spaces
        self._quotas = quotas
        self._programs = programs
        self._config = config

    def read(self) -> Files:
        """The contents of the files. Any thread may call this. Raises ConfigError; then nothing must be changed."""
        return Files(self._config(), self._quotas.read())

    def apply(self, files: Files) -> Reloaded:
        """Take what can change. The owner's thread calls this. Raises ConfigError if something is impossible."""
        before, now = self._spaces.config, files.config
        taken: list[str] = []
        waits: list[str] = []
        for name, old, new, possible in _differences(before, now):
            (taken if possible else waits).append(f"{name}: {old} -> {new}")
        self._quotas.must_suit(files.quotas)
        self._spaces.adjust(_merged(before, now))
        taken += _different_quotas(self._quotas.now, files.quotas)
        self._quotas.apply(files.quotas)
        taken += self._programs.adjust(now.programs)
        return Reloaded(taken, waits)

    def on_signal(self, ask: Ask) -> None:
        """Reload, and log the outcome. Does not wait; a signal handler may call this."""
        run_aside(lambda: self._reload_and_log(ask), "reload")

    def _reload_and_log(self, ask: Ask) -> None:
        outcome = run(lambda: ask(functools.partial(self.apply, self.read())).result())
        if outcome.error is not None:
            logger.error("kvtier: operator SIGHUP: nothing was reloaded: %s", outcome.error)
        else:
            done = outcome.value
            logger.info(
                "kvtier: operator SIGHUP: reload: changed %s, needs_restart %s", done.changed, done.needs_restart
            )


def _differences(before: StackConfig, now: StackConfig) -> Iterator[tuple[str, Any, Any, bool]]:
    """Each setting that differs: its path, what it was and is, and whether it can change while the server runs."""
    if not _same_tiers(before, now):
        yield "$.tiers", [tier.name for tier in before.tiers], [tier.name for tier in now.tiers], False
        return
    for old, new in zip(before.tiers, now.tiers, strict=True):
        for name, was, becomes in _different_fields(old, new, but=("config", "source")):
            yield f"{new.source.path}.{name}", was, becomes, name in _changeable(old)
        for name, was, becomes in _different_fields(old.config, new.config):
            yield f"{new.source.path}.{name}", was, becomes, False


def _same_tiers(before: StackConfig, now: StackConfig) -> bool:
    kinds = [[(type(tier), tier.name, type(tier.config)) for tier in each.tiers] for each in (before, now)]
    return kinds[0] == kinds[1]


def _different_fields(old: Any, new: Any, but: tuple[str, ...] = ()) -> Iterator[tuple[str, Any, Any]]:
    for field in attrs.fields(type(old)):
        was, becomes = getattr(old, field.name), getattr(new, field.name)
        if field.name not in but and was != becomes:
            yield field.name, was, becomes


def _changeable(tier: Tier) -> tuple[str, ...]:
    """The settings of a tier that `StoreTier.adjust` changes."""
    if isinstance(tier, ArenaTierConfig):
        return ()
    return ("capacity", "inflight") if tier.resizable else ("inflight",)


def _merged(before: StackConfig, now: StackConfig) -> StackConfig:
    """The former configuration, with what can change as it is now."""
    if not _same_tiers(before, now):
        return before
    pairs = zip(before.tiers, now.tiers, strict=True)
    tiers = (attrs.evolve(old, **{name: getattr(new, name) for name in _changeable(old)}) for old, new in pairs)
    return attrs.evolve(before, tiers=tuple(tiers))


def _different_quotas(before: Quotas, now: Quotas) -> list[str]:
    told = [] if before.each_tenant == now.each_tenant else ["the quota of each tenant"]
    for kind in ("models", "tenants"):
        old, new = getattr(before, kind), getattr(now, kind)
        told += [
            f"the quota of {kind[:-1]} {name}"
            for name in sorted({*old, *new})
            if old.get(name, UNBOUNDED) != new.get(name, UNBOUNDED)
        ]
    return told
