"""Which plugins there are, what they offer, and what is broken and why. The only file that knows pluggy's manager."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import pluggy

from kvtier_core import hookspecs
from kvtier_core.builtin import plugin as builtin
from kvtier_core.config.decode import Unavailable, guess, settings
from kvtier_core.errors import ContractError, KvtierError
from kvtier_core.interfaces import ArenaConfig, BackendConfig, EvictionConfig, SerializerConfig, TokenDatabaseConfig
from kvtier_core.transfer.io_pool import run
from kvtier_core.types import Event

log = logging.getLogger(__name__)

#: What `pip install 'kvtier[…]'` can bring.
_EXTRAS = ("cpu", "disk", "gds", "redis", "s3")


@attrs.frozen
class Kind:
    """Of what plugins offer."""

    hook: str
    families: tuple[type, ...]
    core_keys: frozenset[str] = frozenset({"type"})  #: stand in the same mapping, so no config may have them


_TIER_KEYS = frozenset({"type", "capacity", "eviction", "serializer", "threads", "inflight", "store_after"})
KINDS = {
    "backend": Kind("kvtier_backends", (ArenaConfig, BackendConfig), _TIER_KEYS),
    "eviction policy": Kind("kvtier_eviction_policies", (EvictionConfig,)),
    "token database": Kind("kvtier_token_databases", (TokenDatabaseConfig,)),
    "serializer": Kind("kvtier_serializers", (SerializerConfig,)),
}


@attrs.frozen
class Offer:
    kind: str
    name: str
    plugin: str  #: ``distribution:entry point``
    version: str
    config: type

    @property
    def names(self) -> tuple[str, ...]:
        """All names by which a user may choose it, its own first."""
        return self.name, *getattr(self.config, "aliases", ())


@attrs.frozen
class Broken:
    """A plugin that is installed and cannot be used."""

    plugin: str
    version: str
    why: str

    def __str__(self) -> str:
        return f"{self.plugin} {self.version}: {self.why}"


class Registry:
    """What all plugins offer, by kind and name. No result depends on the order of plugins."""

    def __init__(self, version: str = "") -> None:
        self.broken: list[Broken] = []
        self._offers: list[Offer] = []
        self._observers: list[tuple[str, pluggy.HookCaller]] = []
        self._add("kvtier:builtin", version, lambda: builtin)

    @classmethod
    def discover(cls) -> Registry:
        """The core's own plugin and all that are installed. A broken one hides no other."""
        from importlib import metadata  # a tenth of a second that `of` need not wait for

        entries = metadata.entry_points(group=hookspecs.GROUP)
        own = [found.version for found in metadata.distributions(name="kvtier")]
        registry = cls(*own[:1])
        for entry in sorted(entries, key=lambda entry: (str(entry.dist.name), entry.name)):
            registry._add(f"{entry.dist.name}:{entry.name}", entry.dist.version, entry.load)
        return registry

    @classmethod
    def of(cls, *plugins: Any) -> Registry:
        """The core's own plugin and these modules or objects."""
        registry = cls()
        for plugin in plugins:
            registry._add(getattr(plugin, "__name__", type(plugin).__name__), "", lambda plugin=plugin: plugin)
        return registry

    def offers(self) -> list[Offer]:
        return sorted(self._offers, key=lambda offer: (offer.kind, offer.name, offer.plugin))

    def clashes(self) -> list[str]:
        """Names that nobody can have, because more than one plugin offers them."""
        wanted = sorted({(offer.kind, offer.name) for offer in self._offers})
        return [_clash(kind, name, found) for kind, name in wanted if len(found := self._find(kind, name)) > 1]

    def choose(self, kind: str, name: str) -> type | Unavailable:
        """The config class of this name, or why it cannot be had."""
        found = self._find(kind, name)
        if len(found) == 1:
            return found[0].config
        if found:
            return Unavailable(_clash(kind, name, found), "uninstall all but one")
        for broken in self.broken:
            if name and name in broken.plugin:
                return Unavailable(f"{kind} {name!r} may be installed, but a plugin is broken: {broken}")
        have = sorted({offer.name for offer in self._offers if offer.kind == kind})
        way_out = f"pip install 'kvtier[{name}]'" if kind == "backend" and name in _EXTRAS else guess(name, have)
        return Unavailable(f"no {kind} {name!r} is installed (have: {', '.join(have)})", way_out)

    def observe(self, events: Sequence[Event]) -> None:
        """Tell the observers. One that raises is logged and never called again."""
        for plugin, hook in list(self._observers):
            error = run(lambda hook=hook: hook(events=events)).error
            if error is not None:
                log.error("%s: kvtier_observe raised and is not called again", plugin, exc_info=error)
                self._observers.remove((plugin, hook))

    def _find(self, kind: str, name: str) -> list[Offer]:
        return [offer for offer in self._offers if offer.kind == kind and name in offer.names]

    def _add(self, plugin: str, version: str, load: Callable[[], Any]) -> None:
        outcome = run(lambda: _examine(plugin, version, load()))
        error = outcome.error
        if error is not None:
            why = str(error) if isinstance(error, KvtierError) else f"{type(error).__name__}: {error}"
            self.broken.append(Broken(plugin, version, " ".join(why.split())))
            return
        offers, hook = outcome.value
        self._offers += offers
        if hook.kvtier_observe.get_hookimpls():
            self._observers.append((plugin, hook.kvtier_observe))


def _examine(plugin: str, version: str, implementation: Any) -> tuple[list[Offer], pluggy.HookRelay]:
    """All that a plugin offers, or an exception."""
    # A manager for each plugin: what one gets wrong reaches no other, and it is known who offers what.
    manager = pluggy.PluginManager("kvtier")
    manager.add_hookspecs(hookspecs)
    manager.register(implementation, plugin)
    manager.check_pending()
    offers = [
        Offer(kind, _name_of(config, KINDS[kind]), plugin, version, config)
        for kind in KINDS
        for configs in getattr(manager.hook, KINDS[kind].hook)()
        for config in configs
    ]
    names = [(offer.kind, offer.name) for offer in offers]
    for kind, name in names:
        if names.count((kind, name)) > 1:
            raise ContractError(f"offers {kind} '{name}' twice")
    return offers, manager.hook


def _name_of(config: Any, kind: Kind) -> str:
    """What users call it. Raises ContractError for what is no config, or has a field that no user could set."""
    families = " or ".join(family.__name__ for family in kind.families)
    if not (inspect.isclass(config) and issubclass(config, kind.families)):
        raise ContractError(f"{kind.hook} offers {config!r}, which is no {families} class")
    if "__attrs_attrs__" not in vars(config) or inspect.isabstract(config):
        raise ContractError(f"{config.__name__} is abstract, or not an attrs class of its own")
    name = getattr(config, "type", None)
    if not (isinstance(name, str) and name):
        raise ContractError(f"{config.__name__} does not name itself in 'type'")
    if taken := kind.core_keys & settings(config).keys():
        raise ContractError(f"{config.__name__} has a field '{min(taken)}', a key of the core's own")
    return name


def _clash(kind: str, name: str, offers: Sequence[Offer]) -> str:
    return f"{kind} '{name}' is offered by {' and by '.join(sorted(offer.plugin for offer in offers))}"
