"""Calls plugins, and turns their errors into ConfigErrors."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, TypeVar

import attrs

from kvtier_core.errors import BackendError, ConfigError, Problem
from kvtier_core.work.io_pool import run

logger = logging.getLogger("kvtier")

T = TypeVar("T")


@attrs.frozen
class PluginCall:
    """Calls to one plugin. Whatever it raises or returns, the caller gets the right type or a ConfigError."""

    plugin: str
    what: str  #: what is opened: ``tier disk``
    path: str  #: of the setting that chose the plugin
    problem: Callable[[str, str, str], Problem]  #: made from a path, why, and a hint
    verb: str = "open"

    def returns(self, expected: type[T], work: Callable[[], Any]) -> T:
        """Call the plugin and return the result. Raises ConfigError if it is not of the expected type."""
        value = self.ask(work)
        if not isinstance(value, expected):
            found = "None" if value is None else f"a value of type {type(value).__name__}"
            raise self.failed(f"returned {found}, expected {expected.__name__}")
        return value

    def ask(self, work: Callable[[], T]) -> T:
        """Call the plugin and return the result. Errors that plugins may raise become problems with the same text."""
        outcome = run(work)
        if (error := outcome.error) is None:
            value: T = outcome.value
            return value
        if isinstance(error, ConfigError):  # its `$` is the setting that chose this plugin
            problems = [(self.path + each.path.removeprefix("$"), each.why, each.hint) for each in error.problems]
            raise ConfigError([self.problem(*each) for each in problems]) from error
        if isinstance(error, BackendError | ImportError):
            raise ConfigError([self.problem(self.path, str(error), "")]) from error
        failed = self.failed(f"{type(error).__name__}: {error}")
        logger.debug("kvtier: %s", failed, exc_info=error)
        raise failed from error

    def failed(self, why: str) -> ConfigError:
        """The error for a plugin that violates the interface."""
        why = f"plugin {self.plugin} cannot {self.verb} {self.what}: {why}"
        return ConfigError([self.problem(self.path, why, "")])
