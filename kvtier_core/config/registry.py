"""The installed plugins: their offers, and which of them are broken and why."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable, Mapping
from typing import Any

import attrs

from kvtier_core.builtin import plugin as builtin
from kvtier_core.config.examine import Offer, examine
from kvtier_core.config.scalars import Unavailable, guess
from kvtier_core.errors import KvtierError
from kvtier_core.work.io_pool import Outcome, run

logger = logging.getLogger("kvtier")

#: The offers of packages that are not tiers, and the extra of each.
_EXTRAS = {
    ("eviction policy", name): "policies" for name in ["arc", "fifo", "lfu", "lru2", "mru", "s3fifo", "tournament"]
}
_EXTRAS |= {("serializer", name): "lossy" for name in ["cachegen", "fp8", "int8", "kivi"]}
_EXTRAS |= {("observer", "jsonl"): "observers", ("observer", "opentelemetry"): "otel"}
_EXTRAS |= {("observer", "prometheus"): "prometheus", ("observer", "recording"): "simulate"}


@attrs.frozen
class Broken:
    """An installed plugin that cannot be used."""

    plugin: str  #: ``distribution:entry point``
    version: str
    why: str
    error: BaseException | None = attrs.field(default=None, eq=False, repr=False)  #: what it raised

    def __str__(self) -> str:
        return f"{f'{self.plugin} {self.version}'.rstrip()}: {self.why}"

    def may_offer(self, name: str) -> bool:
        """Might it have offered this name? True for its own, its distribution's, and a full name of this plugin."""
        distribution, _, entry = self.plugin.partition(":")
        return name in (entry, distribution, distribution.removeprefix("kvtier-")) or name.endswith(f"@{self.plugin}")


class Registry:
    """All offers of all plugins, by kind and name. No result depends on the order of plugins."""

    def __init__(self, version: str = "") -> None:
        """Begin with the core's own plugin, of this ``version``."""
        self.broken: list[Broken] = []
        self._offers: list[Offer] = []
        self._add("kvtier:builtin", version, Outcome(builtin))

    @classmethod
    def discover(cls) -> Registry:
        """A registry of the core's own plugin and all installed ones. A broken plugin does not affect the others."""
        from kvtier_core.config import versions  # its import takes a tenth of a second, which `of` does not need

        own = versions.own_version()
        registry = cls(own)
        for dist, entry in sorted(versions.entry_points(), key=lambda each: (str(each[0].name), each[1].name)):
            loaded = run(functools.partial(versions.load, dist, entry, own))
            registry._add(f"{dist.name}:{entry.name}", dist.version, loaded)
        return registry

    @classmethod
    def of(cls, *plugins: Any) -> Registry:
        """A registry of the core's own plugin and these modules or objects."""
        registry = cls()
        for plugin in plugins:
            registry._add(getattr(plugin, "__name__", type(plugin).__name__), "", Outcome(plugin))
        return registry

    def offers(self) -> list[Offer]:
        """Everything that working plugins offer, by kind and name."""
        return sorted(self._offers, key=lambda offer: (offer.kind, offer.name, offer.plugin))

    def plugins(self) -> Mapping[type, str]:
        """For each Config class the plugin that offers it: ``distribution:entry point version``."""
        return {offer.config: f"{offer.plugin} {offer.version}".rstrip() for offer in self.offers()}

    def clashes(self) -> list[str]:
        """A sentence for each name and alias that more than one plugin offers."""
        wanted = sorted({(offer.kind, name) for offer in self._offers for name in offer.names})
        found = [(name, self._find(kind, name)) for kind, name in wanted]
        clashes = [_clash(name, offers) for name, offers in found if len(offers) > 1]
        return [f"{clash.why}; {clash.hint}" for clash in clashes]

    def lacking(self, offer: Offer) -> list[str]:
        """The libraries that an offer needs and that are not installed, by the names in an index."""
        from kvtier_core.config import versions

        distribution = offer.plugin.partition(":")[0]
        extra = _EXTRAS.get((offer.kind, offer.name), offer.name)
        return run(lambda: versions.lacking(distribution, extra)).value or []

    def log_problems(self) -> None:
        """Log a warning for each broken plugin and each clash, including those that no YAML file names."""
        for broken in self.broken:
            logger.warning("kvtier: plugin failed to load, ignored: %s", broken)
        for clash in self.clashes():
            logger.warning("kvtier: %s", clash)

    def choose(self, kind: str, name: str) -> type | Unavailable:
        """The Config class of this name, alias or full name; or the reason why there is none."""
        found = self._find(kind, name)
        if len(found) == 1:
            return found[0].config
        if found:
            return _clash(name, found)
        for broken in self.broken:
            if broken.may_offer(name):
                return Unavailable(f"{kind} {name!r} may be installed, but a plugin is broken: {broken}")
        have = sorted({offer.name for offer in self._offers if offer.kind == kind})
        way_out = guess(name, have)
        if extra := name if kind == "tier" and _is_extra(name) else _EXTRAS.get((kind, name)):
            way_out = f"pip install 'kvtier[{extra}]'"
        elif not way_out and self.broken:
            way_out = f"failed to load: {', '.join(sorted(broken.plugin for broken in self.broken))}"
        return Unavailable(f"no {kind} {name!r} is installed (have: {', '.join(have) or 'none'})", way_out)

    def _find(self, kind: str, name: str) -> list[Offer]:
        return [offer for offer in self._offers if offer.kind == kind and name in offer.names]

    def _add(self, plugin: str, version: str, loaded: Outcome) -> None:
        outcome = run(lambda: examine(plugin, version, loaded.value)) if loaded.error is None else loaded
        error = outcome.error
        if error is not None:
            why = str(error) if isinstance(error, KvtierError) else f"{type(error).__name__}: {error}"
            self.broken.append(Broken(plugin, version, " ".join(why.split()), error))
            return
        self._offers += outcome.value


def _clash(name: str, offers: Iterable[Offer]) -> Unavailable:
    offers = sorted(offers, key=lambda offer: offer.plugin)
    by = [offer.plugin if name == offer.name else f"{offer.plugin} (an alias of '{offer.name}')" for offer in offers]
    ways_out = " or ".join(f"'{offer.full_name}'" for offer in offers)
    return Unavailable(f"{offers[0].kind} '{name}' is offered by {' and by '.join(by)}", f"write {ways_out}")


def _is_extra(name: str) -> bool:
    """Does `pip install 'kvtier[name]'` install a plugin `kvtier-name`? Read from kvtier's own metadata."""
    from importlib import metadata

    from packaging.requirements import Requirement

    required = map(Requirement, run(lambda: metadata.requires("kvtier")).value or ())
    brought = [each.marker for each in required if each.name == f"kvtier-{name}" and each.marker]
    return any(marker.evaluate({"extra": name}) for marker in brought)
