"""Finds the offers of one plugin, or its faults. The only file that uses pluggy's manager."""

from __future__ import annotations

import inspect
import re
from typing import Any

import attrs
import pluggy

from kvtier_core import hookspecs
from kvtier_core.config.decode import KINDS, Kind, settings
from kvtier_core.config.model import Config
from kvtier_core.errors import ContractError
from kvtier_core.interfaces import ArenaConfig, EvictionConfig
from kvtier_core.work.io_pool import run

_NAME = re.compile(r"\w[\w.-]*", re.ASCII)
_HOOKS = [name for name in vars(hookspecs) if name.startswith("kvtier_")]


@attrs.frozen
class Offer:
    """A Config class that a plugin offers."""

    kind: str  #: one of KINDS
    name: str  #: its ``type``
    plugin: str  #: ``distribution:entry point``
    version: str
    config: type[Config]

    @property
    def aliases(self) -> tuple[str, ...]:
        """Other short names; only eviction policies have some."""
        return self.config.aliases if issubclass(self.config, EvictionConfig) else ()

    @property
    def full_name(self) -> str:
        """The name that no other offer of this kind has: ``disk@kvtier-disk:disk``."""
        return f"{self.name}@{self.plugin}"

    @property
    def names(self) -> tuple[str, ...]:
        """All names by which a user may choose it, its own first."""
        return self.name, *self.aliases, self.full_name

    @property
    def role(self) -> str:
        """Its kind in words; for a tier, whether it is an arena or a store tier."""
        if self.kind != "tier":
            return self.kind
        return "arena" if issubclass(self.config, ArenaConfig) else "store tier"


def examine(plugin: str, version: str, implementation: Any) -> list[Offer]:
    """The offers of a plugin.

    Raises ContractError, or any exception of pluggy or the plugin, if anything is wrong: then the plugin is not used.
    """
    # A manager for each plugin: an error of one does not affect others, and it is known which plugin offers what.
    manager = pluggy.PluginManager("kvtier")
    manager.add_hookspecs(hookspecs)
    manager.register(implementation, plugin)
    _must_be_marked(manager, implementation)
    offers = [
        Offer(kind, _name_of(config, described), plugin, version, config)
        for kind, described in KINDS.items()
        for config in _answer(getattr(manager.hook, described.hook))
    ]
    names = [(offer.kind, name) for offer in offers for name in offer.names]
    for kind, name in names:
        if names.count((kind, name)) > 1:
            raise ContractError(f"offers {kind} '{name}' twice")
    return offers


def _must_be_marked(manager: pluggy.PluginManager, implementation: Any) -> None:
    """Raise ContractError for a hook without @hookimpl, which pluggy would silently ignore, and for an unknown one."""
    called = getattr(implementation, "__name__", type(implementation).__name__)
    for caller in manager.get_hookcallers(implementation) or ():
        if not caller.has_spec():
            raise ContractError(f"{called} implements {caller.name}, which is not a hook; hooks: {', '.join(_HOOKS)}")
    for hook in _HOOKS:
        if callable(getattr(implementation, hook, None)) and not manager.parse_hookimpl_opts(implementation, hook):
            raise ContractError(f"{called} defines {hook} without @hookimpl: it is never called")
    if not manager.get_hookcallers(implementation):
        raise ContractError(f"{called} implements none of the hooks: {', '.join(_HOOKS)}")


def _answer(hook: pluggy.HookCaller) -> list[Any]:
    """The result of a plugin's hook, as a list; empty if it does not implement the hook."""
    if not hook.get_hookimpls():
        return []
    called = run(hook)
    if called.error is not None:
        raise ContractError(f"{hook.name} raised {_described(called.error)}")
    if not called.value:  # pluggy leaves None out
        raise ContractError(f"{hook.name} returned None, expected a list of Config classes")
    (result,) = called.value
    if inspect.isclass(result):
        raise ContractError(f"{hook.name} returned a class, expected a list; write `return [{result.__name__}]`")
    listed = run(lambda: list(result))
    if isinstance(listed.error, TypeError) and not hasattr(result, "__iter__"):
        raise ContractError(f"{hook.name} returned {result!r}, expected a list of Config classes")
    if listed.error is not None:
        raise ContractError(f"{hook.name} raised {_described(listed.error)}")
    offered: list[Any] = listed.value
    return offered


def _described(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _name_of(config: Any, kind: Kind) -> str:
    """The name that users write. Raises ContractError for a class that no user could choose or configure."""
    families = " or ".join(family.__name__ for family in kind.families)
    if not (inspect.isclass(config) and issubclass(config, kind.families)):
        raise ContractError(f"{kind.hook} offers {config!r}, not a subclass of {families}")
    if "__attrs_attrs__" not in vars(config):
        raise ContractError(f"{config.__name__} is not itself an attrs class; decorate it with @attrs.frozen")
    if inspect.isabstract(config):
        raise ContractError(f"{config.__name__} is abstract; missing: {', '.join(sorted(config.__abstractmethods__))}")
    name = getattr(config, "type", None)
    if not (isinstance(name, str) and name):
        raise ContractError(f"{config.__name__} does not set 'type'")
    if not _NAME.fullmatch(name):
        raise ContractError(
            f"{config.__name__} has type {name!r}; a name may contain letters, digits, '-', '_' and '.'"
        )
    if issubclass(config, EvictionConfig):
        aliases = config.aliases
        if not isinstance(aliases, tuple) or not all(isinstance(alias, str) and alias for alias in aliases):
            raise ContractError(f"{config.__name__} has aliases {aliases!r}, expected a tuple of names")
    if taken := kind.core_keys & settings(config).keys():
        raise ContractError(f"{config.__name__} has a field '{min(taken)}', which is reserved for the core")
    return name
